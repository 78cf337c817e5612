"""Pipelines that are neither image, video nor audio, and those put together from blocks."""

from __future__ import annotations

from pipes import other_minimax, other_modular  # noqa: F401 - they register their own
from pipes.base import entry
from pipes.parts import NEGATIVE, PROMPT, clip_text, image, quiet, rng, tokenizer
from pipes.video_parts import clip_processor, clip_vision
from typing import Any

import transformers as hf
from diffusers import (
    HeunDiscreteScheduler,
    KandinskyPriorPipeline,
    KandinskyV22PriorEmb2EmbPipeline,
    KandinskyV22PriorPipeline,
    PriorTransformer,
    ShapEImg2ImgPipeline,
    ShapEPipeline,
    UnCLIPScheduler,
)
from models import normal, randomised

ONE = {"prior": ("0",)}


def shap_e(kind: Any, **encoders: Any) -> Any:
    prior = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=4,
        num_embeddings=4,
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        encoder_hid_proj_type=None,
        added_emb_type=None,
        time_embed_dim=32,
        embedding_proj_dim=8,
        clip_embed_dim=8,
    )
    scheduler = HeunDiscreteScheduler(
        beta_schedule="exp", prediction_type="sample", use_karras_sigmas=True
    )
    parts = {"prior": randomised(prior), "scheduler": scheduler, "shap_e_renderer": None}
    return quiet(kind(**parts, **encoders))


def seen() -> Any:
    config = hf.CLIPVisionConfig(
        hidden_size=8,
        projection_dim=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    return randomised(hf.CLIPVisionModelWithProjection(config))


def prior(kind: Any) -> Any:
    made = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=8,
        num_embeddings=32,
        additional_embeddings=4,
    )
    scheduler = UnCLIPScheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0
    )
    return quiet(
        kind(
            prior=randomised(made),
            image_encoder=seen(),
            text_encoder=clip_text(projected=True),
            tokenizer=tokenizer(32),
            scheduler=scheduler,
            image_processor=clip_processor(),
        )
    )


def said(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "guidance_scale": 3.0, "generator": rng(), **more}


entry(
    name="ShapEPipeline",
    build=lambda: shap_e(
        ShapEPipeline, text_encoder=clip_text(projected=True), tokenizer=tokenizer(32)
    ),
    call=lambda: said(output_type="latent"),
    streams=ONE,
)
entry(
    name="ShapEImg2ImgPipeline",
    build=lambda: shap_e(
        ShapEImg2ImgPipeline, image_encoder=clip_vision(), image_processor=clip_processor()
    ),
    call=lambda: {
        "image": image(8),
        "guidance_scale": 3.0,
        "generator": rng(),
        "output_type": "latent",
    },
    streams=ONE,
)
for kind in (KandinskyPriorPipeline, KandinskyV22PriorPipeline):
    entry(
        name=kind.__name__,
        build=lambda kind=kind: prior(kind),
        call=lambda: said(negative_prompt=NEGATIVE),
        streams=ONE,
    )
entry(
    name="KandinskyV22PriorEmb2EmbPipeline",
    build=lambda: prior(KandinskyV22PriorEmb2EmbPipeline),
    call=lambda: said(image=normal(4, 1, 8), strength=0.75),
    streams=ONE,
    expected_steps=lambda steps: int(0.75 * steps),
)
