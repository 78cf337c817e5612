"""Solvers for flow models that make fewer steps go further than diffusers' default."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

__all__ = ["EvenFlowScheduler", "EvenSecondOrderFlowScheduler", "SecondOrderFlowScheduler"]


class SecondOrderFlowScheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Adams and Bashforth's second-order rule: each step extrapolates from the last two velocities.

    One call of the model a step, as Euler's rule; the first step is Euler's.
    """

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        self._before: tuple[torch.Tensor, float] | None = None
        super().set_timesteps(*args, **kwargs)

    def step(
        self, model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, **kwargs: Any
    ) -> Any:
        if self.step_index is None:
            self._init_step_index(timestep)
        index = self.step_index
        stride = float(self.sigmas[index + 1] - self.sigmas[index])
        velocity = model_output
        if self._before is not None:
            before, last_stride = self._before
            velocity = model_output + 0.5 * stride / last_stride * (model_output - before)
        self._before = (model_output, stride)
        return super().step(velocity, timestep, sample, **kwargs)


class EvenFlowScheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Euler's rule over sigmas from 1 to 1/N.

    The default ones end at 0.001, so that the last step does next to nothing: of few steps, that is
    a loss.
    """

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        sigmas = torch.linspace(1, 1 / num_inference_steps, num_inference_steps).tolist()
        super().set_timesteps(sigmas=sigmas, device=device)


class EvenSecondOrderFlowScheduler(EvenFlowScheduler, SecondOrderFlowScheduler):
    """The second-order rule over sigmas from 1 to 1/N."""
