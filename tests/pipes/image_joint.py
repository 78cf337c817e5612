"""Lumina, CogView, AuraFlow, HiDream: each with a text model of its own."""

from __future__ import annotations

from functools import partial
from pipes.parts import (
    NEGATIVE,
    WIDTH,
    autoencoder,
    clip_text,
    flow,
    flow_heun,
    gemma2,
    glm,
    image,
    llama,
    picture_entry,
    randomised,
    t5,
    tokenizer,
    umt5,
)
from typing import Any

import diffusers
from diffusers import CogVideoXDDIMScheduler

BAD = {"negative_prompt": NEGATIVE}
HEADS = {"attention_head_dim": 8, "num_attention_heads": 2}
ONE, TWO, NAMED = ("0",), ("0", "1"), ("cond", "uncond")
SHORT = {"max_sequence_length": 16}


def square(size: int) -> dict[str, int]:
    return {"height": size, "width": size}


def _parts(
    model: Any, text: Any, channels: int = 4, levels: int = 1, **more: Any
) -> dict[str, Any]:
    return {
        "scheduler": flow(),
        "vae": autoencoder(channels, levels),
        "text_encoder": text,
        "tokenizer": tokenizer(256),
        "transformer": randomised(model),
        **more,
    }


# Lumina: its pipelines take the autoencoder to shrink by 8.


def _lumina() -> dict[str, Any]:
    model = diffusers.LuminaNextDiT2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        learn_sigma=True,
        cross_attention_dim=WIDTH,
    )
    return _parts(model, gemma2(), levels=4)


def _lumina2() -> dict[str, Any]:
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(300, 16, 16),
        cap_feat_dim=WIDTH,
    )
    return _parts(model, gemma2(), levels=4)


picture_entry("LuminaPipeline", _lumina, ONE, clean_caption=False, **BAD, **SHORT, **square(64))
# Room for the system prompt.
_LUMINA2 = {**BAD, "max_sequence_length": 64, **square(64)}
picture_entry("Lumina2Pipeline", _lumina2, TWO, **_LUMINA2)


# CogView.


def _cogview3() -> dict[str, Any]:
    model = diffusers.CogView3PlusTransformer2DModel(
        **HEADS,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
    )
    return _parts(model, t5(), levels=4, scheduler=CogVideoXDDIMScheduler())


def _cogview4(channels: int = 4) -> dict[str, Any]:
    model = diffusers.CogView4Transformer2DModel(
        **HEADS,
        patch_size=2,
        in_channels=channels,
        out_channels=4,
        num_layers=2,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=4,
        sample_size=8,
        rope_axes_dim=(4, 4),
    )
    return _parts(model, glm(), levels=4)


_COG = {**BAD, **square(64)}
picture_entry("CogView3PlusPipeline", _cogview3, ONE, **_COG, **SHORT)
picture_entry("CogView4Pipeline", _cogview4, NAMED, **_COG)
picture_entry("CogView4Pipeline", _cogview4, NAMED, "two pictures", num_images_per_prompt=2, **_COG)
_control = partial(_cogview4, 8)
picture_entry("CogView4ControlPipeline", _control, TWO, control_image=partial(image, 64), **_COG)


# AuraFlow.


def _aura(scheduler: Any = flow) -> dict[str, Any]:
    model = diffusers.AuraFlowTransformer2DModel(
        **HEADS,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=16,
        pos_embed_max_size=16,
    )
    return _parts(model, umt5(), scheduler=scheduler())


_AURA = {**BAD, **SHORT, **square(8)}
SIGMAS = [1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.05]
picture_entry("AuraFlowPipeline", _aura, ONE, **_AURA)
picture_entry("AuraFlowPipeline", _aura, ONE, "sigmas", sigmas=SIGMAS, **_AURA)
picture_entry("AuraFlowPipeline", partial(_aura, flow_heun), ONE, "heun", **_AURA)


# HiDream.


def _hidream() -> dict[str, Any]:
    model = diffusers.HiDreamImageTransformer2DModel(
        **HEADS,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=2,
        caption_channels=[WIDTH, WIDTH],
        text_emb_dim=2 * WIDTH,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=[0, 1, 1],
    )
    return _parts(
        model,
        clip_text(projected=True, max_length=128),
        tokenizer=tokenizer(128),
        text_encoder_2=clip_text(projected=True, max_length=128),
        tokenizer_2=tokenizer(128),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(128),
        text_encoder_4=llama(),
        tokenizer_4=tokenizer(128),
    )


# It brings every picture to the area of its default size.
_DEFAULT = {"default_sample_size": 8}
picture_entry("HiDreamImagePipeline", _hidream, ONE, "", _DEFAULT, **BAD, **SHORT, **square(8))
