"""CogVideoX and others whose prompts are one batch: ConsisID, Mochi, Allegro, Latte."""

from __future__ import annotations

from pipes.base import entry
from pipes.parts import autoencoder, flow, image, quiet, rng
from pipes.video_parts import LATENTS, guided, video
from typing import Any

from diffusers import (
    AllegroPipeline,
    AllegroTransformer3DModel,
    AutoencoderKLAllegro,
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    CogVideoXVideoToVideoPipeline,
    ConsisIDPipeline,
    ConsisIDTransformer3DModel,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
)
from diffusers.utils import is_opencv_available
from models import normal, randomised

BATCHED = {"transformer": ("cond_uncond",)}
ONE = {"transformer": ("0",)}
SIZE = {"height": 16, "width": 16}
NO_TEXT = dict.fromkeys(("text_encoder", "tokenizer"))

COG = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 8,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "max_text_seq_length": 3,
    "use_rotary_positional_embeddings": True,
}


def cog_vae() -> Any:
    return randomised(
        AutoencoderKLCogVideoX(
            block_out_channels=(4, 4, 4, 4),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=1,
        )
    )


def cog(kind: Any, channels: int = 4, scheduler: Any = CogVideoXDDIMScheduler) -> Any:
    transformer = randomised(CogVideoXTransformer3DModel(**COG, in_channels=channels))
    parts = {"vae": cog_vae(), "scheduler": scheduler(), "transformer": transformer}
    return quiet(kind(**NO_TEXT, **parts))


def consisid() -> Any:
    transformer = ConsisIDTransformer3DModel(
        **COG,
        in_channels=8,
        is_train_face=True,
        cross_attn_interval=1,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
        LFE_id_dim=8,
        LFE_vit_dim=8,
        LFE_depth=2,
        LFE_dim_head=4,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=2,
        LFE_output_dim=21,
        LFE_ff_mult=1,
        LFE_num_scale=1,
    )
    parts = {"vae": cog_vae(), "scheduler": CogVideoXDPMScheduler()}
    return quiet(ConsisIDPipeline(**NO_TEXT, **parts, transformer=randomised(transformer)))


def call(**more: Any) -> dict[str, Any]:
    return {
        **guided(),
        **SIZE,
        **LATENTS,
        "guidance_scale": 3.0,
        "generator": rng(),
        **more,
    }


def masked(mask: str = "prompt_attention_mask", **more: Any) -> dict[str, Any]:
    return call(**guided(mask=mask), **more)


def mochi() -> Any:
    transformer = MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=8,
        in_channels=4,
        text_embed_dim=8,
        time_embed_dim=8,
        max_sequence_length=3,
    )
    parts = {"vae": None, "scheduler": flow(), "transformer": randomised(transformer)}
    return quiet(MochiPipeline(**NO_TEXT, **parts))


def allegro() -> Any:
    transformer = AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        num_layers=2,
        cross_attention_dim=48,
        sample_height=2,
        sample_width=2,
        sample_frames=2,
        caption_channels=8,
    )
    vae = AutoencoderKLAllegro(
        block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=1, sample_size=16
    )
    scheduler = EulerAncestralDiscreteScheduler()
    parts = {"vae": randomised(vae), "scheduler": scheduler}
    return quiet(AllegroPipeline(**NO_TEXT, **parts, transformer=randomised(transformer)))


def latte(scheduler: Any) -> Any:
    transformer = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=16,
        sample_size=8,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=8,
        video_length=2,
    )
    parts = {"vae": autoencoder(4, 2), "scheduler": scheduler()}
    return quiet(LattePipeline(**NO_TEXT, **parts, transformer=randomised(transformer)))


for name, scheduler in {"": CogVideoXDDIMScheduler, " dpm": CogVideoXDPMScheduler}.items():
    entry(
        name=f"CogVideoXPipeline{name}",
        build=lambda scheduler=scheduler: cog(CogVideoXPipeline, scheduler=scheduler),
        call=lambda: call(num_frames=5),
        streams=BATCHED,
    )
entry(
    name="CogVideoXImageToVideoPipeline",
    build=lambda: cog(CogVideoXImageToVideoPipeline, 8),
    call=lambda: call(num_frames=5, image=image(16)),
    streams=BATCHED,
)
entry(
    name="CogVideoXVideoToVideoPipeline",
    build=lambda: cog(CogVideoXVideoToVideoPipeline),
    call=lambda: call(video=video(5, 16), strength=0.75),
    streams=BATCHED,
    expected_steps=lambda steps: int(0.75 * steps),
)
entry(
    name="CogVideoXFunControlPipeline",
    build=lambda: cog(CogVideoXFunControlPipeline, 8),
    call=lambda: call(control_video=video(5, 16)),
    streams=BATCHED,
)
if is_opencv_available():
    entry(
        name="ConsisIDPipeline",
        build=consisid,
        call=lambda: call(
            num_frames=5,
            image=image(16),
            id_vit_hidden=[normal(5, 1, 2, 8)],
            id_cond=normal(6, 1, 8),
        ),
        streams=ONE,
        note="needs OpenCV",
    )
entry(name="MochiPipeline", build=mochi, call=lambda: masked(num_frames=7), streams=BATCHED)
entry(
    name="AllegroPipeline",
    build=allegro,
    call=lambda: masked(num_frames=8, negative_prompt=None),
    streams=ONE,
)
for name, scheduler in {
    "": DDIMScheduler,
    " heun": HeunDiscreteScheduler,
    " dpm++": DPMSolverMultistepScheduler,
}.items():
    entry(
        name=f"LattePipeline{name}",
        build=lambda scheduler=scheduler: latte(scheduler),
        call=lambda: call(negative_prompt=None, video_length=2),
        streams=ONE,
    )
