"""The demo's pipeline, written like diffusers' own: it draws in pixels, without a VAE."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ImagePipelineOutput,
    SD3Transformer2DModel,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from magcache.demo.text_encoder import EmojiTextEncoder

Embeds: TypeAlias = tuple[Tensor, Tensor]


class EmojiPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Draws small emoji-like pictures from a few words.

    Guidance is sequential: each step calls the transformer for the prompt first and, if
    `guidance_scale` is above 1, for the empty prompt second.
    """

    model_cpu_offload_seq = "text_encoder->transformer"
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        text_encoder: EmojiTextEncoder,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, text_encoder=text_encoder, scheduler=scheduler
        )
        # There is no VAE: a latent is a pixel.
        self.image_processor = VaeImageProcessor(vae_scale_factor=1)
        self._guidance_scale = 1.0
        self._num_timesteps = 0
        self._interrupt = False

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    def check_inputs(
        self,
        prompt: str | list[str],
        output_type: str,
        callback_on_step_end_tensor_inputs: Sequence[str],
    ) -> None:
        """Raises where the arguments of a call make no sense."""
        is_list = isinstance(prompt, list) and all(isinstance(text, str) for text in prompt)
        if not (isinstance(prompt, str) or is_list):
            raise TypeError(f"`prompt` has to be a string or a list of strings, not {prompt!r}.")
        if prompt == []:
            raise ValueError("`prompt` is an empty list.")
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"`output_type` {output_type!r} is none of pil, np, pt and latent.")
        unknown = set(callback_on_step_end_tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(
                f"`callback_on_step_end_tensor_inputs` has {sorted(unknown)}, "
                f"known are {self._callback_tensor_inputs}."
            )

    def encode_prompt(
        self, prompts: list[str], num_images_per_prompt: int, device: torch.device
    ) -> Embeds:
        """Token embeddings and pooled embeddings, one row a picture."""
        input_ids = self.text_encoder.tokenize(prompts).to(device)
        tokens, pooled = self.text_encoder(input_ids)
        return (
            tokens.repeat_interleave(num_images_per_prompt, dim=0),
            pooled.repeat_interleave(num_images_per_prompt, dim=0),
        )

    def prepare_latents(
        self,
        batch_size: int,
        generator: torch.Generator | list[torch.Generator] | None,
        latents: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """The noise to start from."""
        config = self.transformer.config
        shape = (batch_size, config.in_channels, config.sample_size, config.sample_size)
        if latents is not None:
            if latents.shape != shape:
                raise ValueError(f"`latents` has the shape {tuple(latents.shape)}, not {shape}.")
            return latents.to(device=device, dtype=dtype)
        if isinstance(generator, list) and len(generator) != batch_size:
            raise ValueError(f"{len(generator)} generators for a batch of {batch_size} pictures.")
        noise: Tensor = randn_tensor(shape, generator=generator, device=device, dtype=dtype)
        return noise

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        num_inference_steps: int = 28,
        guidance_scale: float = 3.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        num_images_per_prompt: int = 1,
        output_type: str = "pil",
        return_dict: bool = True,
        sigmas: list[float] | None = None,
        callback_on_step_end: Callable[
            ["EmojiPipeline", int, Tensor, dict[str, Any]], dict[str, Any]
        ]
        | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draws pictures.

        Args:
            prompt: What to draw, or one prompt a picture; `magcache.demo.prompts()` lists them.
            num_inference_steps: Steps from noise to picture.
            guidance_scale: How much the prompt counts; 1 and less mean no guidance.
            generator: Makes the noise repeatable.
            latents: Noise to start from, `[pictures, 3, size, size]`.
            num_images_per_prompt: Pictures of each prompt.
            output_type: "pil", "np", "pt" (floats `[pictures, 3, size, size]` in [0, 1]) or
                "latent" (the same in about [-1, 1], not clipped).
            return_dict: Whether to return an `ImagePipelineOutput` rather than a tuple.
            sigmas: Own noise levels, from 1 downwards, in place of `num_inference_steps`.
            callback_on_step_end: Called as in diffusers' pipelines after every step.
            callback_on_step_end_tensor_inputs: Names of the tensors that the callback gets.
        """
        self.check_inputs(prompt, output_type, callback_on_step_end_tensor_inputs)
        self._guidance_scale = guidance_scale
        self._interrupt = False
        prompts = [prompt] if isinstance(prompt, str) else prompt
        batch_size = len(prompts) * num_images_per_prompt
        device = self._execution_device

        embeds = self.encode_prompt(prompts, num_images_per_prompt, device)
        null_embeds = self.encode_prompt([""], batch_size, device)
        latents = self.prepare_latents(batch_size, generator, latents, device, embeds[0].dtype)
        if sigmas is None:
            self.scheduler.set_timesteps(num_inference_steps, device=device)
        else:
            self.scheduler.set_timesteps(sigmas=sigmas, device=device)
        timesteps = self.scheduler.timesteps
        self._num_timesteps = len(timesteps)

        with self.progress_bar(total=len(timesteps)) as progress_bar:
            for i, t in enumerate(timesteps):
                if self.interrupt:
                    continue
                velocity = self._velocity(latents, t, embeds)
                if self.do_classifier_free_guidance:
                    unguided = self._velocity(latents, t, null_embeds)
                    velocity = unguided + guidance_scale * (velocity - unguided)
                latents = self.scheduler.step(velocity, t, latents, return_dict=False)[0]
                if callback_on_step_end is not None:
                    chosen = {"latents": latents} if callback_on_step_end_tensor_inputs else {}
                    latents = callback_on_step_end(self, i, t, chosen).pop("latents", latents)
                progress_bar.update()

        images = latents
        if output_type != "latent":
            images = self.image_processor.postprocess(latents, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _velocity(self, latents: Tensor, timestep: Tensor, embeds: Embeds) -> Tensor:
        tokens, pooled = embeds
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=timestep.expand(latents.shape[0]),
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return velocity
