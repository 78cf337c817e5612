"""A class-conditional pipeline like diffusers' DiTPipeline, but in pixels: without a VAE."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline, DiTTransformer2DModel, ImagePipelineOutput, SchedulerMixin
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor


class ClassPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Draws pictures of a class by predicting noise.

    Guidance is one batched call a step: the classes' half first, the null class's second. The
    scheduler may be any that takes predicted noise (DDIM, DPM-Solver++, UniPC, Euler, ...).
    """

    model_cpu_offload_seq = "transformer"

    def __init__(self, transformer: DiTTransformer2DModel, scheduler: SchedulerMixin) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        # There is no VAE: a latent is a pixel.
        self.image_processor = VaeImageProcessor(vae_scale_factor=1)
        self._guidance_scale = 1.0

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1

    @property
    def null_class(self) -> int:
        """The label that means no class: diffusers keeps it behind the last one."""
        return int(self.transformer.config.num_embeds_ada_norm)

    def check_labels(self, labels: list[int]) -> None:
        """Raises where a label is not the number of a class."""
        if not labels:
            raise ValueError("`class_labels` is an empty list.")
        for label in labels:
            if isinstance(label, bool) or not isinstance(label, int):
                raise TypeError(f"`class_labels` has {label!r}, which is not an integer.")
            if not 0 <= label <= self.null_class:
                raise ValueError(f"`class_labels` has {label}, not in 0 to {self.null_class}.")

    def prepare_latents(
        self,
        pictures: int,
        generator: torch.Generator | list[torch.Generator] | None,
        latents: Tensor | None,
    ) -> Tensor:
        """Noise `[pictures, 3, size, size]` at the level at which the scheduler starts."""
        config, dtype = self.transformer.config, self.transformer.dtype
        device = self._execution_device
        shape = (pictures, config.in_channels, config.sample_size, config.sample_size)
        if latents is None:
            if isinstance(generator, list) and len(generator) != pictures:
                raise ValueError(f"{len(generator)} generators for {pictures} pictures.")
            latents = randn_tensor(shape, generator=generator, device=device, dtype=dtype)
        elif latents.shape != shape:
            raise ValueError(f"`latents` has the shape {tuple(latents.shape)}, not {shape}.")
        noise: Tensor = latents.to(device=device, dtype=dtype) * self.scheduler.init_noise_sigma
        return noise

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | list[int],
        num_inference_steps: int = 28,
        guidance_scale: float = 3.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pt",
        return_dict: bool = False,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draws one picture a label.

        Args:
            class_labels: Numbers of the classes; `dit.class_names()` tells what they show.
            num_inference_steps: Steps from noise to picture.
            guidance_scale: How much the class counts; 1 and less mean no guidance.
            generator: Makes the noise repeatable.
            latents: Standard normal noise to start from, `[pictures, 3, size, size]`.
            output_type: "pil", "np", "pt" (floats `[pictures, 3, size, size]` in [0, 1]) or
                "latent" (the same in about [-1, 1], not clipped).
            return_dict: Whether to return an `ImagePipelineOutput` rather than a tuple.
        """
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"`output_type` {output_type!r} is none of pil, np, pt and latent.")
        self._guidance_scale = guidance_scale
        labels = [class_labels] if isinstance(class_labels, int) else list(class_labels)
        self.check_labels(labels)
        null = [self.null_class] * len(labels) if self.do_classifier_free_guidance else []
        rows = torch.tensor(labels + null, device=self._execution_device)

        self.scheduler.set_timesteps(num_inference_steps, device=self._execution_device)
        latents = self.prepare_latents(len(labels), generator, latents)
        for t in self.progress_bar(self.scheduler.timesteps):
            noise = self._noise(self.scheduler.scale_model_input(latents, t), t, rows)
            latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]

        images = latents
        if output_type != "latent":
            images = self.image_processor.postprocess(latents, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _noise(self, inputs: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        """Predicted noise `[pictures, 3, size, size]`; `rows` has a label a row of the batch."""
        if self.do_classifier_free_guidance:
            inputs = torch.cat([inputs, inputs])
        noise: Tensor = self.transformer(
            inputs, timestep=t.expand(len(inputs)), class_labels=rows, return_dict=False
        )[0]
        if self.do_classifier_free_guidance:
            conditional, unconditional = noise.chunk(2)
            noise = unconditional + self.guidance_scale * (conditional - unconditional)
        return noise
