"""Other ways through some forwards: injections between blocks, modes, optional streams."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from zoo import image, image_joint, other, video, video_joint
from zoo.base import Made, entry, half, made, middle, normal, with_inputs


def samples(count: int, width: int = 16, tokens: int = 16) -> Any:
    """What a ControlNet hands over: one tensor a block, or fewer."""
    return lambda seed: [normal(seed + 20 + i, 1, tokens, width) for i in range(count)]


# Tensors added between blocks.


@entry("FluxTransformer2DModel", "controlnet")
def flux_controlnet() -> Made:
    return with_inputs(
        image_joint.flux(),
        controlnet_block_samples=samples(2),
        controlnet_single_block_samples=samples(1),
    )


@entry("ChromaTransformer2DModel", "controlnet")
def chroma_controlnet() -> Made:
    return with_inputs(
        image_joint.chroma(),
        controlnet_block_samples=samples(2),
        controlnet_single_block_samples=samples(2),
    )


@entry("BriaTransformer2DModel", "controlnet")
def bria_controlnet() -> Made:
    return with_inputs(image_joint.bria(), controlnet_block_samples=samples(2))


@entry("FluxTransformer2DModel", "image prompt")
def flux_ip_adapter() -> Made:
    """The model takes the image's embedding out of the caller's dictionary and puts another in."""
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, call = image_joint.flux()
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(16, 16, num_tokens=(2,), scale=[1.0]))
    model.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(8, 16, 2)])
    return with_inputs(
        made(model, lambda s: call(s)[1]),
        joint_attention_kwargs=lambda s: {"ip_adapter_image_embeds": [normal(s + 5, 1, 1, 8)]},
    )


@entry("QwenImageTransformer2DModel", "controlnet")
def qwen_controlnet() -> Made:
    return with_inputs(image_joint.qwen(), controlnet_block_samples=samples(1))


@entry("SD3Transformer2DModel", "controlnet")
def sd3_controlnet() -> Made:
    return with_inputs(image_joint.sd3(), block_controlnet_hidden_states=samples(2))


@entry("SD3Transformer2DModel", "skip layers")
def sd3_skip_layers() -> Made:
    return with_inputs(image_joint.sd3(), skip_layers=lambda _: [1])


@entry("SanaTransformer2DModel", "controlnet")
def sana_controlnet() -> Made:
    return with_inputs(image.sana(), controlnet_block_samples=samples(1, tokens=64))


@entry("SanaVideoTransformer3DModel", "controlnet")
def sana_video_controlnet() -> Made:
    return with_inputs(video.sana_video(), controlnet_block_samples=samples(1, width=24, tokens=8))


@entry("HunyuanDiT2DModel", "controlnet")
def hunyuan_dit_controlnet() -> Made:
    """The model pops each tensor off the list, and raises if any is left over."""
    return with_inputs(image.hunyuan_dit(), controlnet_block_samples=samples(2))


@entry("ZImageTransformer2DModel", "controlnet", since="0.39")
def z_image_controlnet() -> Made:
    return with_inputs(
        image.z_image(), controlnet_block_samples=lambda s: {0: normal(s + 20, 1, 64, 16)}
    )


@entry("CosmosTransformer3DModel", "controlnet", since="0.39")
def cosmos_controlnet() -> Made:
    model = diffusers.CosmosTransformer3DModel(**COSMOS, controlnet_block_every_n=1)
    return with_inputs(
        made(model, video.video), block_controlnet_hidden_states=samples(2, width=24, tokens=8)
    )


COSMOS = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "text_embed_dim": 8,
    "adaln_lora_dim": 4,
    "max_size": (4, 8, 8),
    "concat_padding_mask": False,
}


# Optional streams and conditions.


@entry("CosmosTransformer3DModel", "image context", since="0.39")
def cosmos_image_context() -> Made:
    model = diffusers.CosmosTransformer3DModel(
        **COSMOS, img_context_dim_in=6, img_context_num_tokens=2, img_context_dim_out=24
    )
    return with_inputs(
        made(model, video.video),
        encoder_hidden_states=lambda s: (normal(s, 1, 3, 8), normal(s + 1, 1, 2, 6)),
    )


@entry("Cosmos3OmniTransformer", "silent")
def cosmos3_silent() -> Made:
    model, call = other.cosmos3()

    def inputs(seed: int) -> Any:
        kwargs = {k: v for k, v in call(seed)[1].items() if not k.startswith("sound")}
        cut = {"position_ids": torch.arange(7)[None].expand(3, 7), "sequence_length": 7}
        return (), {**kwargs, **cut}

    return model, inputs


@entry("Kandinsky6Transformer3DModel", "silent")
def kandinsky6_silent() -> Made:
    return with_inputs(video_joint.kandinsky6(), audio_hidden_states=lambda _: None)


@entry("Flux3Transformer2DModel", "without condition")
def flux3_plain() -> Made:
    nothing = {n: lambda _: None for n in ("image_cond_hidden_states", "image_cond_ids")}
    return with_inputs(image_joint.flux3(), **nothing)


@entry("MotifVideoTransformer3DModel", "without decoder")
def motif_plain() -> Made:
    model = diffusers.MotifVideoTransformer3DModel(
        **video_joint.HEADS,
        **video_joint.CHANNELS,
        num_layers=2,
        num_single_layers=2,
        text_embed_dim=8,
        rope_axes_dim=(4, 2, 2),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
        image_embed_dim=6,
    )
    base = made(model, lambda s: {**video_joint.video(s), **video_joint.text_and_mask(s)})
    return with_inputs(base, image_embeds=lambda s: normal(s + 3, 1, 2, 6))


@entry("WanTransformer3DModel", "image, time per token")
def wan_image() -> Made:
    model = diffusers.WanTransformer3DModel(**video.WAN, image_dim=8, added_kv_proj_dim=24)
    return with_inputs(
        made(model, video.video),
        encoder_hidden_states_image=lambda s: normal(s + 2, 1, 3, 8),
        timestep=lambda _: torch.full((1, 8), 500.0),
    )


@entry("SkyReelsV2Transformer3DModel", "diffusion forcing")
def skyreels_forcing() -> Made:
    model = diffusers.SkyReelsV2Transformer3DModel(
        **video.WAN, inject_sample_info=True, num_frame_per_block=2
    )
    return with_inputs(
        made(model, video.video),
        timestep=lambda _: torch.full((1, 2), 500),
        enable_diffusion_forcing=lambda _: True,
        fps=lambda _: [1],
    )


@entry("HunyuanVideoTransformer3DModel", "token replace")
def hunyuan_token_replace() -> Made:
    model = diffusers.HunyuanVideoTransformer3DModel(
        **video_joint.HUNYUAN,
        num_single_layers=2,
        pooled_projection_dim=8,
        image_condition_type="token_replace",
    )
    return made(model, video_joint.hunyuan_inputs)


@entry("LatteTransformer3DModel", "without temporal attention")
def latte_spatial() -> Made:
    return with_inputs(video.latte(), enable_temporal_attentions=lambda _: False)


@entry("LTX2VideoTransformer3DModel", "perturbed, prompt modulated")
def ltx2_perturbed() -> Made:
    model = diffusers.LTX2VideoTransformer3DModel(
        **video_joint.LTX2,
        perturbed_attn=True,
        cross_attn_mod=True,
        audio_cross_attn_mod=True,
        gated_attn=True,
        audio_gated_attn=True,
    )
    _, call = video_joint.ltx2()
    return with_inputs(
        made(model, lambda s: call(s)[1]),
        sigma=lambda _: half(),
        spatio_temporal_guidance_blocks=lambda _: [1],
    )


@entry("LTX2VideoTransformer3DModel", "isolated")
def ltx2_isolated() -> Made:
    return with_inputs(video_joint.ltx2(), isolate_modalities=lambda _: True)


@entry("CogVideoXTransformer3DModel", "1.5")
def cogvideox_15() -> Made:
    model = diffusers.CogVideoXTransformer3DModel(
        **video_joint.COG,
        patch_size_t=2,
        ofs_embed_dim=8,
        use_rotary_positional_embeddings=True,
        patch_bias=False,
    )
    rotary = (torch.ones(4, 8), torch.zeros(4, 8))
    return with_inputs(
        made(model, video_joint.cog_inputs),
        image_rotary_emb=lambda _: rotary,
        ofs=lambda _: torch.tensor([2.0]),
    )


@entry("QwenImageTransformer2DModel", "edit, zero time", since="0.39")
def qwen_edit() -> Made:
    config = {**image_joint.HEADS, "patch_size": 2, "in_channels": 16, "out_channels": 4}
    model = diffusers.QwenImageTransformer2DModel(
        **config, num_layers=2, joint_attention_dim=8, axes_dims_rope=(4, 2, 2), zero_cond_t=True
    )
    _, call = image_joint.qwen()
    return with_inputs(
        made(model, lambda s: call(s)[1]),
        img_shapes=lambda _: [[(1, 2, 4), (1, 2, 4)]],
    )


@entry("SanaWMTransformer3DModel", "camera")
def sana_wm_camera() -> Made:
    # A pose (4 x 4) and focal lengths and centres (4) for each frame.
    pose = torch.cat([torch.eye(4).flatten(), torch.tensor([1.0, 1.0, 0.5, 0.5])])
    return with_inputs(
        video.sana_wm(),
        camera_conditions=lambda s: (pose + 0.01 * normal(s + 5, 2, 20))[None],
        chunk_plucker=lambda s: normal(s + 6, 1, 6, 2, 4, 4),
    )


@entry("Lumina2Transformer2DModel", "prompts of two lengths")
def lumina2_batch() -> Made:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    return with_inputs(
        image.lumina2(),
        hidden_states=lambda s: normal(s, 2, 4, 8, 8),
        encoder_hidden_states=lambda s: normal(s + 1, 2, 3, 8),
        timestep=lambda _: half(2),
        encoder_attention_mask=lambda _: mask,
    )


@entry("ZImageTransformer2DModel", "batch of sizes")
def z_image_sizes() -> Made:
    return with_inputs(
        image.z_image(),
        x=lambda s: [normal(s, 4, 1, 8, 8), normal(s + 1, 4, 1, 4, 8)],
        t=lambda _: half(2),
        cap_feats=lambda s: [normal(s + 2, 3, 8), normal(s + 3, 5, 8)],
    )


@entry("Flux2Transformer2DModel", "cached reference", since="0.39")
def flux2_cached() -> Made:
    """The reference's keys and values come from the first step; here they are made up."""
    from diffusers.models.transformers import transformer_flux2 as flux2

    model, call = image_joint.flux2()
    for block in model.transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVParallelSelfAttnProcessor())
    given = {**call(0)[1], "kv_cache_mode": "extract", "num_ref_tokens": 4, "return_dict": False}
    with torch.no_grad():
        _, kv_cache = model(**given)
    return with_inputs((model, call), kv_cache=lambda _: kv_cache, kv_cache_mode=lambda _: "cached")


@entry("QwenImage21Transformer2DModel", "cached prefix")
def qwen21_cached() -> Made:
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    model, call = image.qwen21()
    kv_cache = QwenImage21KVCache(2)
    with torch.no_grad():
        model(**call(0)[1], kv_cache=kv_cache, kv_cache_mode="extract")
    return with_inputs((model, call), kv_cache=lambda _: kv_cache, kv_cache_mode=lambda _: "cached")


@entry("GlmImageTransformer2DModel", "cached reference")
def glm_cached() -> Made:
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    base = image_joint.glm_image()
    kv_caches = GlmImageKVCache(2)
    kv_caches.set_mode("write")
    with torch.no_grad():
        base[0](**base[1](1)[1], kv_caches=kv_caches)
    kv_caches.next_sample()
    kv_caches.set_mode("read")
    return with_inputs(base, kv_caches=lambda _: kv_caches)


@entry("RFD4ProteinaTransformer", "once")
def proteina_once() -> Made:
    return with_inputs(other.proteina(), recycle_depth=lambda _: 0)


@entry("Transformer2DModel", "patches")
def transformer_2d_patches() -> Made:
    model = diffusers.Transformer2DModel(
        **image.HEADS,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=10,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": normal(s, 1, 4, 8, 8),
            "timestep": middle(),
            "class_labels": torch.tensor([3]),
        },
    )


@entry("Transformer2DModel", "codes")
def transformer_2d_codes() -> Made:
    model = diffusers.Transformer2DModel(
        **image.HEADS,
        num_layers=2,
        sample_size=4,
        num_vector_embeds=9,
        norm_type="ada_norm",
        num_embeds_ada_norm=10,
        cross_attention_dim=8,
    )
    return made(
        model,
        lambda s: {
            "hidden_states": torch.arange(16)[None] % 9,
            "encoder_hidden_states": normal(s + 1, 1, 3, 8),
            "timestep": torch.tensor(5),
        },
    )
