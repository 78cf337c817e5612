"""Cosmos: the first, the second, 2.5 and 3."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import NEGATIVE, PROMPT, VOCABULARY, flow, image, quiet, rng, tokenizer
from pipes.video_parts import LATENTS, guided, unipc, video, wan_vae
from typing import Any

from diffusers import (
    AutoencoderKLCosmos,
    Cosmos2_5_PredictBasePipeline,
    Cosmos2TextToImagePipeline,
    Cosmos2VideoToWorldPipeline,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    CosmosTextToWorldPipeline,
    CosmosTransformer3DModel,
    CosmosVideoToWorldPipeline,
    EDMEulerScheduler,
)
from models import randomised

ORDER = {"transformer": ("0", "1")}

CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "mlp_ratio": 1,
    "text_embed_dim": 8,
    "adaln_lora_dim": 4,
    "max_size": (8, 8, 8),
    "encoder_hidden_states_channels": 8,
    # The padding mask is resized with torchvision.
    "concat_padding_mask": False,
}


class NoGuard:
    """In the place of the safety checker, whose models come from the hub; lets all pass."""

    def to(self, device: Any) -> NoGuard:
        return self

    def check_text_safety(self, text: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def cosmos(kind: Any, scheduler: Any, vae: Any = None, channels: int = 4) -> Any:
    transformer = CosmosTransformer3DModel(**{**CONFIG, "in_channels": channels})
    return quiet(
        kind(
            text_encoder=None,
            tokenizer=None,
            vae=vae or wan_vae(),
            scheduler=scheduler,
            transformer=randomised(transformer),
            safety_checker=NoGuard(),
        )
    )


def edm() -> Any:
    return EDMEulerScheduler(sigma_min=0.002, sigma_max=80, final_sigmas_type="sigma_min")


def vae_1() -> Any:
    return randomised(
        AutoencoderKLCosmos(
            latent_channels=4,
            encoder_block_out_channels=(4, 4, 4, 4),
            decode_block_out_channels=(4, 4, 4, 4),
            attention_resolutions=(8,),
            resolution=32,
            num_layers=1,
            latents_mean=[0.0] * 64,
            latents_std=[1.0] * 64,
        )
    )


def omni() -> Any:
    transformer = Cosmos3OmniTransformer(
        head_dim=8,
        hidden_size=16,
        intermediate_size=16,
        latent_channel=4,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        patch_latent_dim=16,
        vocab_size=VOCABULARY,
        rope_axes_dim=(2, 1, 1),
    )
    return quiet(
        Cosmos3OmniPipeline(
            transformer=randomised(transformer),
            text_tokenizer=tokenizer(256),
            vae=wan_vae(),
            scheduler=unipc(),
            enable_safety_checker=False,
        )
    )


def call(frames: int | None = 5, **more: Any) -> dict[str, Any]:
    return {
        **guided(),
        **LATENTS,
        "height": 32,
        "width": 32,
        **({} if frames is None else {"num_frames": frames}),
        "guidance_scale": 3.0,
        "generator": rng(),
        **more,
    }


entry(
    name="CosmosTextToWorldPipeline",
    build=lambda: cosmos(CosmosTextToWorldPipeline, edm(), vae_1()),
    call=lambda: call(9),
    streams=ORDER,
)
entry(
    name="CosmosVideoToWorldPipeline",
    build=lambda: cosmos(CosmosVideoToWorldPipeline, edm(), vae_1(), 5),
    call=lambda: call(9, image=image(32)),
    streams=ORDER,
)
entry(
    name="Cosmos2TextToImagePipeline",
    build=lambda: cosmos(Cosmos2TextToImagePipeline, flow(1.0, use_karras_sigmas=True)),
    call=lambda: call(None),
    streams=ORDER,
)
entry(
    name="Cosmos2VideoToWorldPipeline",
    build=lambda: cosmos(
        Cosmos2VideoToWorldPipeline, flow(1.0, use_karras_sigmas=True), channels=5
    ),
    call=lambda: call(image=image(32)),
    streams=ORDER,
)
entry(
    name="Cosmos2_5_PredictBasePipeline",
    build=lambda: cosmos(Cosmos2_5_PredictBasePipeline, unipc(), channels=5),
    call=lambda: call(9, video=video(5)),
    streams=ORDER,
)
entry(
    name="Cosmos3OmniPipeline",
    build=omni,
    call=lambda: {
        **LATENTS,
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        "num_frames": 5,
        "height": 32,
        "width": 32,
        "guidance_scale": 3.0,
        "enable_safety_check": False,
        "generator": rng(),
    },
    streams={"transformer": ("cond", "uncond")},
)
