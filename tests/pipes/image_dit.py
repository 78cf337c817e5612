"""DiT, PixArt, Hunyuan-DiT and Sana: one stack, CFG as one batch of two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pipes.parts import (
    NEGATIVE,
    VOCABULARY,
    WIDTH,
    autoencoder,
    flow,
    gemma2,
    image,
    picture_entry,
    randomised,
    t5,
    tokenizer,
)
from typing import Any

import diffusers
import transformers as hf
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    HeunDiscreteScheduler,
    SCMScheduler,
)

BAD = {"negative_prompt": NEGATIVE}
HEADS = {"attention_head_dim": 8, "num_attention_heads": 2}


def square(size: int) -> dict[str, int]:
    return {"height": size, "width": size}


# DiT.


def _dit() -> dict[str, Any]:
    model = diffusers.DiTTransformer2DModel(
        **HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    return {
        "scheduler": DDIMScheduler(),
        "vae": autoencoder(4),
        "transformer": randomised(model),
    }


picture_entry("DiTPipeline", _dit, class_labels=[3, 7], output_type="np")


# PixArt.


def _pixart(
    scheduler: Callable[[], Any] = DPMSolverMultistepScheduler, **settings: Any
) -> dict[str, Any]:
    model = diffusers.PixArtTransformer2DModel(
        **HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        use_additional_conditions=False,
    )
    return {
        "scheduler": scheduler(),
        "vae": autoencoder(4),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
        "transformer": randomised(model),
        **settings,
    }


_PIXART = {**BAD, **square(8), "clean_caption": False, "use_resolution_binning": False}
picture_entry("PixArtAlphaPipeline", _pixart, **_PIXART)
TIMES = [999, 900, 750, 600, 450, 300, 150, 50]
picture_entry("PixArtAlphaPipeline", _pixart, ("0",), "timesteps", timesteps=TIMES, **_PIXART)
picture_entry(
    "PixArtAlphaPipeline", partial(_pixart, HeunDiscreteScheduler), ("0",), "heun", **_PIXART
)
picture_entry("PixArtSigmaPipeline", _pixart, num_images_per_prompt=2, **_PIXART)
_single = partial(_pixart, DPMSolverSinglestepScheduler)
picture_entry("PixArtSigmaPipeline", _single, ("0",), "DPM++ 2S", **_PIXART)
_pag = partial(_pixart, pag_applied_layers=["blocks.1"])
picture_entry("PixArtSigmaPAGPipeline", _pag, **_PIXART)


# Hunyuan-DiT.


def _bert() -> Any:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return randomised(hf.BertModel(config))


_HUNYUAN = {
    **HEADS,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 16,
    "mlp_ratio": 2.0,
    "cross_attention_dim": WIDTH,
    "cross_attention_dim_t5": WIDTH,
    "pooled_projection_dim": WIDTH,
}


def _hunyuan(net: bool = False, **settings: Any) -> dict[str, Any]:
    parts = {
        "scheduler": DDIMScheduler(),
        "vae": autoencoder(4, levels=4),
        "text_encoder": _bert(),
        "tokenizer": tokenizer(77),
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(256),
        "transformer": randomised(diffusers.HunyuanDiT2DModel(**_HUNYUAN, num_layers=4)),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
        **settings,
    }
    if net:
        model = diffusers.HunyuanDiT2DControlNetModel(**_HUNYUAN, transformer_num_layers=4)
        parts["controlnet"] = randomised(model, seed=1)
    return parts


_CALL = {**BAD, **square(64), "use_resolution_binning": False}
picture_entry("HunyuanDiTPipeline", _hunyuan, **_CALL)
picture_entry("HunyuanDiTPAGPipeline", partial(_hunyuan, pag_applied_layers=["blocks.1"]), **_CALL)
_net = partial(_hunyuan, net=True)
picture_entry("HunyuanDiTControlNetPipeline", _net, control_image=partial(image, 64), **_CALL)


# Sana.

_SANA = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": WIDTH,
    "sample_size": 4,
}


def _sana_vae() -> Any:
    return randomised(
        diffusers.AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_out_channels=(4,) * 4,
            decoder_block_out_channels=(4,) * 4,
            encoder_layers_per_block=(1,) * 4,
            decoder_layers_per_block=(1,) * 4,
            encoder_qkv_multiscales=((),) * 4,
            decoder_qkv_multiscales=((),) * 4,
            downsample_block_type="conv",
            upsample_block_type="interpolate",
        )
    )


def _sana(sprint: bool = False, net: bool = False, **settings: Any) -> dict[str, Any]:
    config = dict(_SANA)
    if sprint:
        config |= {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
    parts = {
        "scheduler": SCMScheduler() if sprint else flow(),
        "vae": _sana_vae(),
        "text_encoder": gemma2(),
        "tokenizer": tokenizer(),
        "transformer": randomised(diffusers.SanaTransformer2DModel(**config)),
        **settings,
    }
    if net:
        model = diffusers.SanaControlNetModel(**{**_SANA, "num_layers": 1})
        parts["controlnet"] = randomised(model, seed=1)
    return parts


_TEXT = {
    "complex_human_instruction": None,
    "use_resolution_binning": False,
    "max_sequence_length": 16,
    **square(32),
}
_SPRINT = {**_TEXT, "intermediate_timesteps": None}
_PICTURE = {"image": partial(image, 32), "strength": 0.6}
_sprint = partial(_sana, sprint=True)
picture_entry("SanaPipeline", _sana, **BAD, **_TEXT)
picture_entry("SanaPipeline", _sana, ("0",), "timesteps", timesteps=TIMES, **BAD, **_TEXT)
picture_entry(
    "SanaPAGPipeline", partial(_sana, pag_applied_layers=["transformer_blocks.1"]), **BAD, **_TEXT
)
_net = partial(_sana, net=True)
picture_entry("SanaControlNetPipeline", _net, control_image=partial(image, 32), **BAD, **_TEXT)
picture_entry("SanaSprintPipeline", _sprint, **_SPRINT)
picture_entry("SanaSprintImg2ImgPipeline", _sprint, **_PICTURE, **_SPRINT)
