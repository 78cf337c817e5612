"""The models that quality is measured on: two families, so that nothing is tuned to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from dit import load_class_pipeline
from solvers import SecondOrderFlowScheduler

from magcache.demo import load_demo_pipeline, prompts

__all__ = ["FAMILIES", "Family", "noise"]


@dataclass(frozen=True)
class Family:
    """A model: how to load and call it, what it can draw, and what may solve its equation.

    `calls` is the number of transformer calls a guided step makes.
    """

    name: str
    load: Callable[[], Any]
    things: tuple[Any, ...]
    size: int
    calls: int
    solvers: Callable[[float], dict[str, Any]]

    def chosen(self, count: int, offset: int = 0) -> list[Any]:
        """Things evenly spread over all that the model can draw."""
        total = len(self.things)
        return [self.things[(i * total // count + offset) % total] for i in range(count)]

    def draw(
        self, pipe: Any, things: list[Any], start: torch.Tensor, steps: int, guidance: float
    ) -> torch.Tensor:
        """Pictures [n, 3, size, size] in [0, 1]."""
        pictures: torch.Tensor = pipe(
            things,
            num_inference_steps=steps,
            guidance_scale=guidance,
            latents=start,
            output_type="pt",
            return_dict=False,
        )[0]
        return pictures


def noise(family: Family, seeds: range) -> torch.Tensor:
    """One start per picture, the same for every method."""
    shape = (1, 3, family.size, family.size)
    return torch.cat(
        [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
    )


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _flow_solvers(shift: float) -> dict[str, Any]:
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    return {
        "Euler": FlowMatchEulerDiscreteScheduler(shift=shift),
        "AB2": SecondOrderFlowScheduler(shift=shift),
        "DPM++ 2M": DPMSolverMultistepScheduler(**flow),
        "UniPC": UniPCMultistepScheduler(**flow),
    }


def _noise_solvers(_: float) -> dict[str, Any]:
    config = dict(load_class_pipeline().scheduler.config)
    return {
        "DDIM": DDIMScheduler.from_config(config),
        "DPM++ 2M": DPMSolverMultistepScheduler.from_config(config),
        "UniPC": UniPCMultistepScheduler.from_config(config),
    }


FAMILIES = {
    "demo": Family(
        "demo", lambda: _quiet(load_demo_pipeline()), tuple(prompts()), 48, 2, _flow_solvers
    ),
    "dit": Family(
        "dit", lambda: _quiet(load_class_pipeline()), tuple(range(66)), 32, 1, _noise_solvers
    ),
}
