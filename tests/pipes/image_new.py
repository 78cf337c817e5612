"""PRX, GLM-Image, Nucleus, Krea 2, Ernie-Image, Ideogram 4, JoyImage and Bria Fibo 2."""

from __future__ import annotations

from functools import partial
from pipes.image_flux import flux2_vae
from pipes.image_qwen import qwen_vae
from pipes.parts import (
    NEGATIVE,
    WIDTH,
    VisionProcessor,
    autoencoder,
    flow,
    image,
    llama,
    normal,
    picture_entry,
    qwen2_vl,
    randomised,
    t5,
    tokenizer,
)
from typing import Any

import diffusers
import torch
from torch.nn import functional

BAD = {"negative_prompt": NEGATIVE}
HEADS = {"attention_head_dim": 8, "num_attention_heads": 2}
SQUARE = {"height": 8, "width": 8}
LARGE = {"height": 64, "width": 64}
ONE, TWO, NAMED = ("0",), ("0", "1"), ("cond", "uncond")


def _parts(model: Any, text: Any, **more: Any) -> dict[str, Any]:
    return {
        "scheduler": flow(),
        "vae": autoencoder(4),
        "text_encoder": text,
        "tokenizer": tokenizer(256),
        "transformer": randomised(model),
        **more,
    }


# PRX.


def _prx(channels: int = 4) -> dict[str, Any]:
    model = diffusers.PRXTransformer2DModel(
        in_channels=channels,
        patch_size=2,
        context_in_dim=WIDTH,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=2,
        axes_dim=[4, 4],
    )
    return _parts(model, t5(), default_sample_size=8)


def _prx_pixel() -> dict[str, Any]:
    parts = {**_prx(3), "prompt_max_tokens": 16}
    del parts["vae"]
    return parts


# Given prompts as text, they want the package ftfy.
_PRX = {
    "prompt": None,
    "prompt_embeds": lambda: normal(1, 1, 6, WIDTH),
    "negative_prompt_embeds": lambda: normal(2, 1, 6, WIDTH),
    "prompt_attention_mask": lambda: torch.ones(1, 6, dtype=torch.bool),
    "negative_prompt_attention_mask": lambda: torch.ones(1, 6, dtype=torch.bool),
    "use_resolution_binning": False,
    **SQUARE,
}
picture_entry("PRXPipeline", _prx, ONE, **_PRX)
picture_entry("PRXPixelPipeline", _prx_pixel, ONE, **_PRX)


# GLM-Image, with the language model's picture tokens given.


def _glm() -> dict[str, Any]:
    model = diffusers.GlmImageTransformer2DModel(
        **HEADS,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=32,
    )
    vae = autoencoder(4, 4, latents_mean=[0.1] * 4, latents_std=[1.5] * 4)
    return _parts(model, t5(), vae=vae, processor=None, vision_language_encoder=None)


_PRIOR = {"prior_token_ids": lambda: torch.arange(16)[None]}
picture_entry("GlmImagePipeline", _glm, TWO, prompt='the word "cat"', **_PRIOR, **LARGE)


# Nucleus.


def _nucleus() -> dict[str, Any]:
    model = diffusers.NucleusMoEImageTransformer2DModel(
        **HEADS,
        patch_size=2,
        in_channels=8,
        out_channels=2,
        num_layers=3,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 2, 2),
        mlp_ratio=12.0,
        num_experts=2,
        moe_intermediate_dim=8,
        capacity_factors=[1.0] * 3,
        dense_moe_strategy="leave_first_block_dense",
    )
    parts = _parts(model, qwen2_vl(layers=3), vae=qwen_vae(), processor=VisionProcessor())
    del parts["tokenizer"]
    return parts


picture_entry("NucleusMoEImagePipeline", _nucleus, TWO, return_index=-2, **BAD, **SQUARE)


# Krea 2.


def _krea() -> dict[str, Any]:
    model = diffusers.Krea2Transformer2DModel(
        **HEADS,
        in_channels=8,
        num_layers=2,
        num_key_value_heads=1,
        intermediate_size=16,
        timestep_embed_dim=8,
        text_hidden_dim=WIDTH,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    return _parts(model, qwen2_vl(), vae=qwen_vae(), text_encoder_select_layers=(1, 2))


picture_entry("Krea2Pipeline", _krea, TWO, max_sequence_length=32, **BAD, **SQUARE)


# Ernie-Image.


def _ernie() -> dict[str, Any]:
    model = diffusers.ErnieImageTransformer2DModel(
        hidden_size=16,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=16,
        in_channels=4,
        out_channels=4,
        patch_size=1,
        text_in_dim=WIDTH,
        rope_axes_dim=(4, 2, 2),
    )
    return _parts(model, llama(), vae=flux2_vae(1))


picture_entry("ErnieImagePipeline", _ernie, ONE, use_pe=False, **BAD, **SQUARE)


# Ideogram 4: a second model for the unconditional pass.


def _ideogram() -> dict[str, Any]:
    def model(seed: int) -> Any:
        made = diffusers.Ideogram4Transformer2DModel(
            **HEADS,
            in_channels=4,
            num_layers=2,
            intermediate_size=16,
            adaln_dim=8,
            llm_features_dim=13 * WIDTH,
            mrope_section=(2, 1, 1),
        )
        return randomised(made, seed)

    return _parts(
        model(0),
        qwen2_vl(layers=36).model,
        vae=flux2_vae(1),
        unconditional_transformer=model(1),
    )


picture_entry(
    "Ideogram4Pipeline",
    _ideogram,
    {"transformer": ONE, "unconditional_transformer": ONE},
    max_sequence_length=32,
    guidance_scale=3.0,
    guidance_schedule=None,
    **SQUARE,
)


# JoyImage makes every picture large.


class Pooling(diffusers.AutoencoderKLWan):
    """Makes a picture small before it encodes it."""

    side = 64

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        pooled = functional.avg_pool3d(x, (1, self.side, self.side))
        return super().encode(pooled, return_dict)


def _joy(kind: str) -> dict[str, Any]:
    model = getattr(diffusers, kind)(
        patch_size=[1, 2, 2],
        in_channels=4,
        hidden_size=16,
        num_attention_heads=2,
        text_dim=WIDTH,
        mlp_width_ratio=2.0,
        num_layers=2,
        rope_dim_list=[4, 2, 2],
    )
    vae = Pooling(
        base_dim=4,
        z_dim=4,
        dim_mult=[1],
        num_res_blocks=1,
        temperal_downsample=[],
        latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4,
        scale_factor_spatial=Pooling.side,
    )
    return _parts(model, qwen2_vl(), vae=randomised(vae), processor=VisionProcessor())


_joy_edit = partial(_joy, "JoyImageEditTransformer3DModel")
_joy_plus = partial(_joy, "JoyImageEditPlusTransformer3DModel")
_IMAGE = {"image": partial(image, 64)}
picture_entry("JoyImageEditPipeline", _joy_edit, TWO, **_IMAGE, **BAD, **LARGE)
_IMAGES = {"images": lambda: [image(256)]}
picture_entry("JoyImageEditPlusPipeline", _joy_plus, ONE, **_IMAGES, **BAD, height=256, width=256)


# Bria Fibo 2, its text given as embeddings of several layers.


def _fibo2() -> dict[str, Any]:
    model = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        patch_size=2,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=WIDTH,
        injection_layer_ids=(1, 2),
        perceiver_num_layers=1,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=4,
        gist_min_text_len=4,
        gist_max_text_len=16,
        axes_dims=(8, 4, 4),
        axes_lens=(256, 32, 32),
    )
    parts = _parts(model, None, vae=flux2_vae(1), processor=None)
    parts["scheduler"] = flow(use_dynamic_shifting=True)
    del parts["tokenizer"]
    return parts


_FIBO2 = {
    "prompt": None,
    "prompt_embeds": lambda: normal(1, 1, 3, 6, WIDTH),
    "negative_prompt_embeds": lambda: normal(2, 1, 3, 6, WIDTH),
    **SQUARE,
}
picture_entry("BriaFibo2Pipeline", _fibo2, TWO, **_FIBO2)
