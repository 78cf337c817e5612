"""A second-order solver for flow models, of the kind that makes fewer steps go further."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

__all__ = ["SecondOrderFlowScheduler"]


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
