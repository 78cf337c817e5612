"""Real diffusers pipelines with tiny random parts, and one home-made for odd loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxImg2ImgPipeline,
    FluxPipeline,
    PixArtSigmaPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
)
from models import WIDTH, Injected, dit, flux, normal, pixart, qwen, randomised, sd3, wan
from torch import Tensor

Draw = Callable[..., Tensor]


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flow(shift: float = 3.0) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=shift)


def autoencoder(channels: int) -> Any:
    return randomised(
        AutoencoderKL(
            block_out_channels=(4,),
            norm_num_groups=1,
            latent_channels=channels,
            shift_factor=0.0,
            scaling_factor=1.0,
        )
    )


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flux_parts(seed: int) -> dict[str, Any]:
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return {
        **dict.fromkeys(names),
        "scheduler": flow(),
        "vae": autoencoder(1),
        "transformer": flux(seed=seed),
    }


def flux_pipeline(seed: int = 0) -> Any:
    return quiet(FluxPipeline(**flux_parts(seed)))


def flux_img2img(seed: int = 0) -> Any:
    return quiet(FluxImg2ImgPipeline(**flux_parts(seed)))


def flux_prompt(seed: int, guided: bool = True) -> dict[str, Any]:
    prompt = {
        "prompt_embeds": normal(seed + 100, 1, 3, 8),
        "pooled_prompt_embeds": normal(seed + 101, 1, 8),
    }
    if guided:
        prompt["negative_prompt_embeds"] = normal(102, 1, 3, 8)
        prompt["negative_pooled_prompt_embeds"] = normal(103, 1, 8)
    return {**prompt, "true_cfg_scale": 2.0 if guided else 1.0}


def draw_flux(pipe: Any, steps: int, seed: int = 0, size: int = 8, **kwargs: Any) -> Tensor:
    guided = kwargs.pop("guided", True)
    return pipe(  # type: ignore[no-any-return]
        **{**flux_prompt(seed, guided), **kwargs},
        height=size,
        width=size,
        num_inference_steps=steps,
        generator=rng(seed),
        output_type="latent",
    ).images


def draw_img2img(
    pipe: Any, steps: int, seed: int = 0, size: int = 8, strength: float = 1.0, **kwargs: Any
) -> Tensor:
    image = normal(seed + 200, 1, 3, size, size).clamp(-1, 1) / 2 + 0.5
    return draw_flux(pipe, steps, seed, size, image=image, strength=strength, **kwargs)


def sd3_pipeline(seed: int = 0) -> Any:
    names = [f"{kind}{n}" for kind in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")]
    parts = {"transformer": sd3(seed=seed), "scheduler": flow(), "vae": autoencoder(4)}
    return quiet(StableDiffusion3Pipeline(**dict.fromkeys(names), **parts))


def sd3_heun() -> Any:
    pipe = sd3_pipeline()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler(shift=3.0)
    return pipe


def draw_sd3(pipe: Any, steps: int, seed: int = 0, size: int = 8, **kwargs: Any) -> Tensor:
    arguments = {
        "prompt_embeds": normal(seed + 100, 1, 3, 8),
        "negative_prompt_embeds": normal(102, 1, 3, 8),
        "pooled_prompt_embeds": normal(seed + 101, 1, 8),
        "negative_pooled_prompt_embeds": normal(103, 1, 8),
        "guidance_scale": 3.0,
        "height": size,
        "width": size,
        **kwargs,
    }
    return pipe(  # type: ignore[no-any-return]
        **arguments, num_inference_steps=steps, generator=rng(seed), output_type="latent"
    ).images


def wan_pipeline(seed: int = 0, experts: int = 2, boundary: float | None = 0.75) -> Any:
    return quiet(
        WanPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=None,
            scheduler=flow(1.0),
            transformer=wan(2, seed=seed),
            transformer_2=wan(2, seed=seed + 1) if experts == 2 else None,
            boundary_ratio=boundary if experts == 2 else None,
        )
    )


def wan_single() -> Any:
    return wan_pipeline(experts=1)


def draw_wan(pipe: Any, steps: int, seed: int = 0, size: int = 32, **kwargs: Any) -> Tensor:
    arguments = {
        "prompt_embeds": normal(seed + 100, 1, 3, 8),
        "negative_prompt_embeds": normal(102, 1, 3, 8),
        "guidance_scale": 2.0,
        **kwargs,
    }
    return pipe(  # type: ignore[no-any-return]
        **arguments,
        height=size,
        width=size,
        num_frames=5,
        num_inference_steps=steps,
        generator=rng(seed),
        output_type="latent",
    ).frames


def qwen_pipeline(seed: int = 0) -> Any:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return quiet(QwenImagePipeline(**parts, scheduler=flow(), transformer=qwen(seed)))


def draw_qwen(pipe: Any, steps: int, seed: int = 0, size: int = 64, **kwargs: Any) -> Tensor:
    mask = torch.ones(1, 3, dtype=torch.int64)
    arguments = {
        "prompt_embeds": normal(seed + 100, 1, 3, 8),
        "prompt_embeds_mask": mask,
        "negative_prompt_embeds": normal(102, 1, 3, 8),
        "negative_prompt_embeds_mask": mask,
        "true_cfg_scale": 2.0,
        **kwargs,
    }
    return pipe(  # type: ignore[no-any-return]
        **arguments,
        height=size,
        width=size,
        num_inference_steps=steps,
        generator=rng(seed),
        output_type="latent",
    ).images


def pixart_pipeline() -> Any:
    scheduler = DPMSolverMultistepScheduler()
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return quiet(PixArtSigmaPipeline(**parts, scheduler=scheduler, transformer=pixart()))


def draw_pixart(pipe: Any, steps: int, seed: int = 0, size: int = 64, **kwargs: Any) -> Tensor:
    mask = torch.ones(1, 3)
    arguments = {
        "prompt_embeds": normal(seed + 100, 1, 3, 8),
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": normal(102, 1, 3, 8),
        "negative_prompt_attention_mask": mask,
        "guidance_scale": 2.0,
        **kwargs,
    }
    return pipe(  # type: ignore[no-any-return]
        negative_prompt=None,
        **arguments,
        height=size,
        width=size,
        use_resolution_binning=False,
        num_inference_steps=steps,
        generator=rng(seed),
        output_type="latent",
    ).images


def dit_ddim() -> Any:
    return quiet(DiTPipeline(transformer=dit(), vae=autoencoder(4), scheduler=DDIMScheduler()))


def dit_dpm() -> Any:
    scheduler = DPMSolverMultistepScheduler()
    return quiet(DiTPipeline(transformer=dit(8), vae=autoencoder(4), scheduler=scheduler))


def draw_dit(pipe: Any, steps: int, seed: int = 0, size: int = 0, **kwargs: Any) -> Tensor:
    del size  # fixed by the model
    return pipe(  # type: ignore[no-any-return]
        class_labels=[seed],
        num_inference_steps=steps,
        generator=rng(seed),
        output_type="pt",
        **{"guidance_scale": 2.0, **kwargs},
    ).images


class OddPipeline(DiffusionPipeline):
    """A loop of its own over a plain transformer, with no cache contexts.

    guided: whether the unconditional pass is made, by step. before_step is told of each step and
    may return a size and dtype to go on with, or raise.
    """

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        steps: int,
        seed: int = 0,
        size: int = 4,
        guided: Callable[[int], bool] = lambda step: True,
        before_step: Callable[[int], Any] = lambda step: None,
        uncond_first: bool = False,
        prompt: str | None = None,
    ) -> Tensor:
        seed += len(prompt or "")
        prompts = [odd_prompt(seed), odd_prompt(-1)]
        latents = normal(seed, 1, size * size, 4)
        self.scheduler.set_timesteps(steps)
        with self.progress_bar(total=steps) as bar:
            for step, t in enumerate(self.scheduler.timesteps):
                change = before_step(step)
                if change is not None:
                    latents = change(latents)
                calls = prompts if guided(step) else prompts[:1]
                order = reversed(list(enumerate(calls))) if uncond_first else enumerate(calls)
                made = {}
                for index, call in order:
                    timestep = t.expand(1) / 1000
                    made[index] = self.transformer(latents, timestep=timestep, injected=call)
                prediction = sum(w * made[i] for i, w in zip(made, self.weights(made), strict=True))
                latents = self.scheduler.step(prediction, t, latents, return_dict=False)[0]
                bar.update()
        return latents

    @staticmethod
    def weights(made: dict[int, Tensor]) -> list[float]:
        return [(3.0, -2.0)[i] if len(made) == 2 else 1.0 for i in made]


def odd_prompt(seed: int) -> Tensor:
    return normal(seed + 1000, 3, 1, 1, WIDTH)


def odd_pipeline(seed: int = 0) -> Any:
    return quiet(OddPipeline(randomised(Injected(), seed), flow()))


def odd_reference(
    pipe: Any,
    rows: Sequence[str],
    seed: int = 0,
    size: int = 4,
    residuals: list[list[Tensor | None]] | None = None,
) -> Tensor:
    """What `OddPipeline` draws if each stream's steps are computed or skipped as its row says.

    A cache of the test's own: nothing of magcache runs. With `residuals`, collects each stream's.
    """
    model, scheduler = pipe.transformer, type(pipe.scheduler).from_config(pipe.scheduler.config)
    prompts = [odd_prompt(seed), odd_prompt(-1)]
    kept: list[Any] = [None, None]
    latents = normal(seed, 1, size * size, 4)
    scheduler.set_timesteps(len(rows[0]))
    with torch.no_grad():
        for step, t in enumerate(scheduler.timesteps):
            made = {}
            for i, row in enumerate(rows):
                x = entered = model.embed(latents) + t / 1000
                if row[step] == "C":
                    for block, injected in zip(model.blocks, prompts[i], strict=True):
                        x = block(x) + injected
                    kept[i] = x - entered
                elif row[step] == ".":
                    x = entered + kept[i]
                else:
                    continue
                if residuals is not None:
                    residuals[i].append(kept[i])
                made[i] = model.head(model.norm(x))
            weights = OddPipeline.weights(made)
            prediction = sum(w * made[i] for i, w in zip(made, weights, strict=True))
            latents = scheduler.step(prediction, t, latents, return_dict=False)[0]
    return latents


def draw_odd(pipe: Any, steps: int, seed: int = 0, size: int = 4, **kwargs: Any) -> Tensor:
    return pipe(steps, seed, size, **kwargs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Rig:
    """A pipeline, how to draw with it, and the streams of a run; `other` is another size."""

    name: str
    build: Callable[[], Any]
    draw: Draw
    streams: tuple[str, ...]
    size: int = 8
    other: int = 16
    evaluations: Callable[[int], int] = field(default=lambda steps: steps)

    def __str__(self) -> str:
        return self.name


BOTH = ("cond", "uncond")
FLUX = Rig("flux", flux_pipeline, draw_flux, BOTH)
IMG2IMG = Rig("flux_img2img", flux_img2img, draw_img2img, ("0", "1"))
SD3 = Rig("sd3", sd3_pipeline, draw_sd3, ("0",))
HEUN = Rig("sd3_heun", sd3_heun, draw_sd3, ("0",), evaluations=lambda steps: 2 * steps - 1)
WAN = Rig("wan", wan_single, draw_wan, BOTH, 32, 48)
QWEN = Rig("qwen", qwen_pipeline, draw_qwen, BOTH, 64, 96)
PIXART = Rig("pixart", pixart_pipeline, draw_pixart, ("0",), 64, 96)
DIT = Rig("dit_ddim", dit_ddim, draw_dit, ("0",))
DIT_DPM = Rig("dit_dpm", dit_dpm, draw_dit, ("0",))
ODD = Rig("odd", odd_pipeline, draw_odd, ("0", "1"), 4, 6)
RIGS = (FLUX, IMG2IMG, SD3, HEUN, WAN, QWEN, PIXART, DIT, DIT_DPM, ODD)
