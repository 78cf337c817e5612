"""Notices a run that reuses worse than calibration predicts.

At a computed step the residuals at hand say what a skip would have given there; how far that is off
tells whether this prompt behaves like those of the calibration. (The magnitude ratio itself does
not tell: docs/figures.md has how either goes with the error of the picture.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from magcache.planner import Schedule
from magcache.residual import ResidualParts
from magcache.reuse import Reuse
from magcache.sketch import Sketcher

__all__ = ["DriftGuard"]

# A reuse error above this many times the predicted one is drift.
_LIMIT = 2.0


@dataclass(frozen=True)
class _Reading:
    """A squared relative error on its way to the CPU, and the predicted one."""

    error: torch.Tensor
    arrived: torch.cuda.Event | None
    predicted: float


class DriftGuard:
    """Watches one transformer's streams over a run.

    Nothing waits for the device: errors are copied in the background and read at a later call.
    """

    def __init__(self) -> None:
        self.drifted = False
        self._sketcher = Sketcher()
        self._sketches: dict[str, dict[int, torch.Tensor]] = {}
        self._readings: list[_Reading] = []

    def clear(self) -> None:
        """Forget the run."""
        self.drifted = False
        self._sketches.clear()
        self._readings.clear()

    def computed(
        self, stream: str, schedule: Schedule, own: Reuse, step: int, parts: ResidualParts
    ) -> None:
        """A step was computed: compare it with what reuse would have made of the ones before.

        own: what calibration knows of this stream alone.
        """
        now = self._sketcher.sketch(parts.tensors)
        known = self._sketches.setdefault(stream, {})
        before = [(s, sketch) for s, sketch in known.items() if sketch.shape == now.shape]
        if before:
            steps, sketches = zip(*before, strict=True)
            coefficients = schedule.coefficients(steps, step)
            made = sum(c * sketch for c, sketch in zip(coefficients, sketches, strict=True))
            error = (now - made).square().sum() / now.square().sum().clamp_min(1e-30)
            self._readings.append(_sent(error, own.relative_error(steps, step, coefficients)))
        known[step] = now
        for old in list(known)[: -own.most]:
            del known[old]

    def look(self) -> bool:
        """Whether the run has drifted, as far as is known by now."""
        waiting = []
        for reading in self._readings:
            if reading.arrived is not None and not _is_there(reading.arrived):
                waiting.append(reading)
            elif math.sqrt(float(reading.error)) > _LIMIT * math.sqrt(reading.predicted):
                self.drifted = True
        self._readings = waiting
        return self.drifted


def _is_there(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _sent(error: torch.Tensor, predicted: float) -> _Reading:
    if error.device.type != "cuda":
        return _Reading(error, None, predicted)
    pinned = torch.empty((), dtype=error.dtype, pin_memory=True)
    pinned.copy_(error, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return _Reading(pinned, arrived, predicted)
