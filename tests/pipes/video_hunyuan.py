"""HunyuanVideo and its kin."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import flow, image, quiet, rng
from pipes.video_parts import LATENTS, guided, hunyuan_vae, siglip, siglip_processor
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from models import normal, randomised

ORDER = {"transformer": ("0", "1")}

SMALL = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 8,
    "rope_axes_dim": (2, 2, 4),
}
FIRST = {**SMALL, "out_channels": 4, "num_single_layers": 2, "pooled_projection_dim": 8}


def hunyuan(channels: int = 4, condition: str | None = None) -> Any:
    config = {"in_channels": channels, "image_condition_type": condition}
    return randomised(HunyuanVideoTransformer3DModel(**FIRST, **config))


def framepack() -> Any:
    return randomised(
        HunyuanVideoFramepackTransformer3DModel(
            **FIRST,
            in_channels=4,
            has_image_proj=True,
            image_proj_dim=8,
            has_clean_x_embedder=True,
        )
    )


def first(kind: Any, transformer: Any, **more: Any) -> Any:
    parts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return quiet(
        kind(**parts, vae=hunyuan_vae(), scheduler=flow(), transformer=transformer, **more)
    )


def call(frames: int = 5, **more: Any) -> dict[str, Any]:
    return {
        **guided(mask="prompt_attention_mask"),
        **LATENTS,
        "pooled_prompt_embeds": normal(104, 1, 8),
        "negative_pooled_prompt_embeds": normal(105, 1, 8),
        "true_cfg_scale": 3.0,
        "height": 32,
        "width": 32,
        "num_frames": frames,
        "generator": rng(),
        **more,
    }


def second(kind: Any, task: str, guider: Any = None, **more: Any) -> Any:
    transformer = HunyuanVideo15Transformer3DModel(
        **SMALL,
        in_channels=9,
        out_channels=4,
        text_embed_2_dim=8,
        image_embed_dim=8,
        target_size=32,
        task_type=task,
    )
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    parts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = kind(
        **parts,
        vae=randomised(vae),
        scheduler=flow(),
        transformer=randomised(transformer),
        guider=guider or ClassifierFreeGuidance(guidance_scale=3.0),
        **more,
    )
    # Tokens that stand for the picture: as many as the encoder makes.
    pipe.vision_num_semantic_tokens = 4
    return quiet(pipe)


def second_call(**more: Any) -> dict[str, Any]:
    embeds = guided(mask="prompt_embeds_mask")
    two = {f"{name}_2": tensor.flip(1) for name, tensor in embeds.items()}
    return {**embeds, **two, **LATENTS, "num_frames": 5, "generator": rng(), **more}


entry(
    name="HunyuanVideoPipeline",
    build=lambda: first(HunyuanVideoPipeline, hunyuan()),
    call=call,
    streams={"transformer": ("cond", "uncond")},
)
entry(
    name="HunyuanVideoPipeline own sigmas",
    build=lambda: first(HunyuanVideoPipeline, hunyuan()),
    call=lambda: call(sigmas=[1.0, 0.95, 0.9, 0.8, 0.65, 0.45, 0.25, 0.1]),
    streams={"transformer": ("cond", "uncond")},
)
entry(
    name="HunyuanVideoImageToVideoPipeline",
    build=lambda: first(
        HunyuanVideoImageToVideoPipeline, hunyuan(9, "latent_concat"), image_processor=None
    ),
    call=lambda: call(image=image(32)),
    streams=ORDER,
)
entry(
    name="HunyuanVideoImageToVideoPipeline token_replace",
    build=lambda: first(
        HunyuanVideoImageToVideoPipeline, hunyuan(4, "token_replace"), image_processor=None
    ),
    call=lambda: call(image=image(32)),
    streams=ORDER,
)
entry(
    name="HunyuanSkyreelsImageToVideoPipeline",
    build=lambda: first(HunyuanSkyreelsImageToVideoPipeline, hunyuan(8)),
    call=lambda: call(image=image(32)),
    streams=ORDER,
)
entry(
    name="HunyuanVideoFramepackPipeline",
    build=lambda: first(
        HunyuanVideoFramepackPipeline,
        framepack(),
        image_encoder=siglip(),
        feature_extractor=siglip_processor(),
    ),
    call=lambda: call(9, image=image(32), latent_window_size=2),
    streams=ORDER,
    note="two windows of frames: two runs in one call",
)
entry(
    name="HunyuanVideo15Pipeline",
    build=lambda: second(HunyuanVideo15Pipeline, "t2v"),
    call=lambda: second_call(height=32, width=32),
    streams={"transformer": ("pred_cond", "pred_uncond")},
)
entry(
    name="HunyuanVideo15Pipeline guided in the middle",
    build=lambda: second(
        HunyuanVideo15Pipeline,
        "t2v",
        ClassifierFreeGuidance(guidance_scale=3.0, start=0.2, stop=0.9),
    ),
    call=lambda: second_call(height=32, width=32),
    streams={"transformer": ("pred_cond", "pred_uncond")},
)
entry(
    name="HunyuanVideo15ImageToVideoPipeline",
    build=lambda: second(
        HunyuanVideo15ImageToVideoPipeline,
        "i2v",
        image_encoder=siglip(),
        feature_extractor=siglip_processor(),
    ),
    call=lambda: second_call(image=image(32)),
    streams={"transformer": ("pred_cond", "pred_uncond")},
)
