"""A small picture of a residual, enough to tell how well residuals of a run predict one another.

A sketch is linear in the residual, so the sketch of a combination is the combination of sketches,
and lengths survive within a few percent (Johnson and Lindenstrauss). It is taken from a fixed
sample of tokens in float32: 16 KB a step, whatever the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Sketcher", "principal"]

Array = npt.NDArray[np.float64]

_TOKENS = 64
_CHANNELS = 64
# Directions that are kept of a run: a run's residuals lie along a smooth path.
_DIRECTIONS = 20


class Sketcher:
    """Sketches residuals of one model; the projections are made once per width and device."""

    def __init__(self) -> None:
        self._projections: dict[tuple[int, torch.device], torch.Tensor] = {}

    def sketch(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One float32 vector, whose squared length is the residual's mean square per element.

        parts: a residual's tensors, [..., hidden] each. Stays on their device: nothing waits.
        """
        return torch.cat([self._part(part) for part in parts]) / math.sqrt(len(parts))

    def scale(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Standard deviation over the hidden dimension of values past the stack, mean over tokens.

        The norm before the output divides by it, so it tells how much an error of the residual
        moves the output.
        """
        return torch.stack([_sample(value).std(dim=-1, correction=0).mean() for value in values])[0]

    def _part(self, part: torch.Tensor) -> torch.Tensor:
        rows = _sample(part)
        width = rows.shape[-1]
        if width > _CHANNELS:
            rows = rows @ self._projection(width, rows.device)
        return rows.flatten() / math.sqrt(len(rows) * width)

    def _projection(self, width: int, device: torch.device) -> torch.Tensor:
        if (width, device) not in self._projections:
            random = torch.Generator().manual_seed(width)
            made = torch.randn(width, _CHANNELS, generator=random) / math.sqrt(_CHANNELS)
            self._projections[width, device] = made.to(device)
        return self._projections[width, device]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to 64 tokens, evenly spaced, [tokens, hidden] in float32."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    if len(rows) > _TOKENS:
        rows = rows[torch.arange(_TOKENS, device=rows.device) * len(rows) // _TOKENS]
    return rows.float()


def principal(vectors: Array) -> Array:
    """Coordinates [steps, at most 20] along the principal directions of vectors [steps, any].

    Inner products between steps are kept, but for what lies off those directions.
    """
    left, lengths, _ = np.linalg.svd(vectors, full_matrices=False)
    return np.asarray((left * lengths)[:, :_DIRECTIONS])
