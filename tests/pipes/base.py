"""What the sweep needs of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["ENTRIES", "Entry", "entry", "outputs"]


@dataclass(frozen=True)
class Entry:
    """How to build and call a pipeline of one class.

    build: a new pipeline with the same random weights each time (seed inside).
    call: its keyword arguments for a run of `steps` steps; made anew for each run, seeded.
    streams: names of the streams that a run has, by transformer component.
    argument: the call's argument that takes the number of steps.
    """

    name: str
    build: Callable[[], Any]
    call: Callable[[], dict[str, Any]]
    streams: dict[str, tuple[str, ...]]
    argument: str = "num_inference_steps"
    note: str = ""
    # Calls that the pipeline makes outside its denoising loop.
    plain_calls: int = 0
    # Denoising steps that are made when `steps` are asked for (strength < 1, say).
    expected_steps: Callable[[int], int] = field(default=lambda steps: steps)


ENTRIES: dict[str, Entry] = {}


def entry(**kwargs: Any) -> None:
    """Register an entry."""
    made = Entry(**kwargs)
    assert made.name not in ENTRIES, made.name
    ENTRIES[made.name] = made


def outputs(result: Any) -> list[torch.Tensor]:
    """All tensors in what a pipeline returned."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        return [t for value in result.values() for t in outputs(value)]
    if isinstance(result, list | tuple):
        return [t for value in result for t in outputs(value)]
    if hasattr(result, "shape"):
        return [torch.as_tensor(result)]
    return []
