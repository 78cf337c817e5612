"""Pipelines that are put together from blocks."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import autoencoder, flow, image, quiet, rng
from pipes.video_cosmos import omni
from pipes.video_hunyuan import second, second_call
from pipes.video_ltx import ltx, ltx2
from pipes.video_more import helios
from pipes.video_parts import (
    clip_processor,
    clip_vision,
    guided,
    siglip,
    siglip_processor,
    unipc,
    wan_vae,
)
from typing import Any

import torch
from diffusers import (
    ClassifierFreeGuidance,
    Cosmos3OmniBlocks,
    Flux2AutoBlocks,
    FluxAutoBlocks,
    FluxKontextAutoBlocks,
    HeliosAutoBlocks,
    HeliosPipeline,
    HeliosPyramidAutoBlocks,
    HeliosPyramidPipeline,
    HunyuanVideo15AutoBlocks,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    LTX2AutoBlocks,
    LTX2Guidance,
    LTX2Pipeline,
    LTXAutoBlocks,
    LTXPipeline,
    QwenImageAutoBlocks,
    StableDiffusion3AutoBlocks,
    Wan22Blocks,
    Wan22Image2VideoBlocks,
    Wan22VaceBlocks,
    WanBlocks,
    WanImage2VideoAutoBlocks,
    WanVACETransformer3DModel,
)
from models import WAN, flux, flux2, normal, qwen, randomised, sd3, wan

ORDER = {"transformer": ("0", "1")}
GUIDER = {"transformer": ("pred_cond", "pred_uncond")}


def modular(blocks: Any, **components: Any) -> Any:
    """A pipeline of these blocks, without those that encode prompts or decode latents."""
    for name in ("text_encoder", "decode"):
        blocks.sub_blocks.pop(name, None)
    hush(blocks)
    pipe = blocks.init_pipeline()
    pipe.update_components(**components)
    return pipe


def hush(blocks: Any) -> None:
    """No progress bars, however deep the loop's block lies."""
    for block in (blocks.sub_blocks or {}).values():
        if hasattr(block, "set_progress_bar_config"):
            quiet(block)
        hush(block)


def cfg() -> Any:
    return ClassifierFreeGuidance(guidance_scale=3.0)


def call(**more: Any) -> dict[str, Any]:
    return {"height": 32, "width": 32, "generator": rng(), "output": "latents", **more}


def like(pipe: Any, blocks: Any, *names: str, **more: Any) -> Any:
    """A modular pipeline of the parts that an ordinary one has."""
    parts = {name: pipe.components[name] for name in ("transformer", "scheduler", *names)}
    return modular(blocks, **{**parts, "guider": cfg(), **more})


# Wan's blocks draw latents of 16 channels, whatever the model.
SIXTEEN = {"in_channels": 16, "out_channels": 16}
SEEN = {**SIXTEEN, "in_channels": 36}


def wan_parts(**config: Any) -> dict[str, Any]:
    return {"transformer": wan(2, **config), "scheduler": unipc(), "guider": cfg()}


def experts(second_expert: Any, **config: Any) -> dict[str, Any]:
    more = {"transformer_2": second_expert, "guider_2": cfg(), "boundary_ratio": 0.7}
    return {**wan_parts(**config), **more}


def vace(seed: int) -> Any:
    config = {**WAN, **SIXTEEN, "num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 96}
    return randomised(WanVACETransformer3DModel(**config), seed)


def wan_call(**more: Any) -> dict[str, Any]:
    return call(**guided(), num_frames=5, **more)


entry(
    name="WanModularPipeline",
    build=lambda: modular(WanBlocks(), **wan_parts(**SIXTEEN)),
    call=wan_call,
    streams=ORDER,
)
entry(
    name="WanImage2VideoModularPipeline",
    build=lambda: modular(
        WanImage2VideoAutoBlocks(),
        **wan_parts(**SEEN, image_dim=8, added_kv_proj_dim=24),
        vae=wan_vae(16),
        image_encoder=clip_vision(),
        image_processor=clip_processor(),
    ),
    call=lambda: wan_call(image=image(32)),
    streams=ORDER,
)
entry(
    name="Wan22ModularPipeline",
    build=lambda: modular(Wan22Blocks(), **experts(wan(2, seed=1, **SIXTEEN), **SIXTEEN)),
    call=wan_call,
    streams={**ORDER, "transformer_2": ("0", "1")},
)
entry(
    name="Wan22Image2VideoModularPipeline",
    build=lambda: modular(
        Wan22Image2VideoBlocks(), **experts(wan(2, seed=1, **SEEN), **SEEN), vae=wan_vae(16)
    ),
    call=lambda: wan_call(image=image(32)),
    streams={**ORDER, "transformer_2": ("0", "1")},
)
entry(
    name="Wan22VaceModularPipeline",
    build=lambda: modular(
        Wan22VaceBlocks(),
        **{**experts(vace(1)), "transformer": vace(0)},
        vae=wan_vae(16),
    ),
    call=wan_call,
    streams={**ORDER, "transformer_2": ("0", "1")},
)
entry(
    name="FluxModularPipeline",
    build=lambda: modular(FluxAutoBlocks(), transformer=flux(), scheduler=flow()),
    call=lambda: call(prompt_embeds=normal(100, 1, 3, 8), pooled_prompt_embeds=normal(101, 1, 8)),
    streams={"transformer": ("0",)},
)
entry(
    name="FluxKontextModularPipeline",
    build=lambda: modular(
        FluxKontextAutoBlocks(),
        transformer=flux(channels=16),
        scheduler=flow(),
        vae=autoencoder(4, 4),
    ),
    call=lambda: call(
        image=image(32),
        _auto_resize=False,
        max_area=1024,
        prompt_embeds=normal(100, 1, 3, 8),
        pooled_prompt_embeds=normal(101, 1, 8),
    ),
    streams={"transformer": ("0",)},
)
entry(
    name="Flux2ModularPipeline",
    build=lambda: modular(Flux2AutoBlocks(), transformer=flux2(), scheduler=flow()),
    call=lambda: call(prompt_embeds=normal(100, 1, 3, 8)),
    streams={"transformer": ("0",)},
)
entry(
    name="StableDiffusion3ModularPipeline",
    build=lambda: modular(
        StableDiffusion3AutoBlocks(), transformer=sd3(), scheduler=flow(), guider=cfg()
    ),
    call=lambda: call(
        **guided(),
        pooled_prompt_embeds=normal(104, 1, 8),
        negative_pooled_prompt_embeds=normal(105, 1, 8),
    ),
    streams=ORDER,
)
entry(
    name="QwenImageModularPipeline",
    build=lambda: modular(
        QwenImageAutoBlocks(), transformer=qwen(), scheduler=flow(), guider=cfg()
    ),
    call=lambda: call(**guided(mask="prompt_embeds_mask")),
    streams=ORDER,
)
entry(
    name="LTXModularPipeline",
    build=lambda: like(ltx(LTXPipeline), LTXAutoBlocks()),
    call=lambda: call(
        **guided(tokens=4, mask="prompt_attention_mask"), height=64, width=64, num_frames=9
    ),
    streams=GUIDER,
)
entry(
    name="HunyuanVideo15ModularPipeline",
    build=lambda: like(second(HunyuanVideo15Pipeline, "t2v"), HunyuanVideo15AutoBlocks(), "vae"),
    call=lambda: call(**second_call(), batch_size=1),
    streams=GUIDER,
)
entry(
    name="HeliosModularPipeline",
    build=lambda: like(
        helios(HeliosPipeline, stages=1, stage_range=[0, 1]), HeliosAutoBlocks(), "vae"
    ),
    call=lambda: call(
        **guided(), num_frames=5, history_sizes=[4, 2, 1], num_latent_frames_per_chunk=2
    ),
    streams=GUIDER,
)
entry(
    name="HeliosPyramidModularPipeline",
    build=lambda: like(
        helios(HeliosPyramidPipeline, stages=2, stage_range=[0, 0.5, 1], gamma=0.25),
        HeliosPyramidAutoBlocks(),
        "vae",
    ),
    call=lambda: call(
        **guided(),
        num_frames=5,
        history_sizes=[4, 2, 1],
        num_latent_frames_per_chunk=2,
        pyramid_num_inference_steps_list=[8, 8],
    ),
    streams=GUIDER,
    argument="max_sequence_length",
)
entry(
    name="HunyuanVideo15ModularPipeline image",
    build=lambda: like(
        second(
            HunyuanVideo15ImageToVideoPipeline,
            "i2v",
            image_encoder=siglip(),
            feature_extractor=siglip_processor(),
        ),
        HunyuanVideo15AutoBlocks(),
        "vae",
        "image_encoder",
        "feature_extractor",
    ),
    call=lambda: call(**second_call(), batch_size=1, image=image(32)),
    streams=GUIDER,
)
entry(
    name="StableDiffusion3ModularPipeline image",
    build=lambda: modular(
        StableDiffusion3AutoBlocks(),
        transformer=sd3(),
        scheduler=flow(),
        guider=cfg(),
        vae=autoencoder(4, 4),
    ),
    call=lambda: call(
        **guided(),
        pooled_prompt_embeds=normal(104, 1, 8),
        negative_pooled_prompt_embeds=normal(105, 1, 8),
        image=image(32),
        strength=0.75,
    ),
    streams=ORDER,
    expected_steps=lambda steps: int(0.75 * steps),
)
entry(
    name="LTX2ModularPipeline",
    build=lambda: like(
        ltx2(LTX2Pipeline),
        LTX2AutoBlocks(),
        "vae",
        "audio_vae",
        guider=LTX2Guidance(guidance_scale=3.0),
        audio_guider=LTX2Guidance(guidance_scale=3.0),
    ),
    call=lambda: call(
        connector_prompt_embeds=normal(100, 1, 4, 8),
        connector_audio_prompt_embeds=normal(101, 1, 4, 8),
        connector_attention_mask=torch.ones(1, 4, dtype=torch.int64),
        negative_connector_prompt_embeds=normal(102, 1, 4, 8),
        negative_connector_audio_prompt_embeds=normal(103, 1, 4, 8),
        negative_connector_attention_mask=torch.ones(1, 4, dtype=torch.int64),
        batch_size=1,
        dtype=torch.float32,
        height=64,
        width=64,
        num_frames=9,
        frame_rate=8,
    ),
    streams=GUIDER,
)
entry(
    name="Cosmos3OmniModularPipeline",
    build=lambda: modular(
        Cosmos3OmniBlocks(),
        **{name: omni().components[name] for name in ("transformer", "scheduler", "vae")},
    ),
    call=lambda: call(
        cond_input_ids=[1, 2, 3],
        uncond_input_ids=[4, 5],
        num_frames=5,
        guidance_scale=3.0,
    ),
    streams={"transformer": ("cond", "uncond")},
)
