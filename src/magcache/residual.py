"""A computed step's residual, and combinations of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from magcache.standin import Kind

__all__ = ["ResidualMisfitError", "ResidualParts", "combined"]


@dataclass(frozen=True)
class ResidualParts:
    """A residual, the dtypes of the values it was taken from, and the kind of call it is of."""

    tensors: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    kind: Kind

    def like(self, other: ResidualParts) -> bool:
        """Whether the two can be added up."""
        shapes = [t.shape for t in self.tensors]
        return (
            shapes == [t.shape for t in other.tensors]
            and self.dtypes == other.dtypes
            and self.kind == other.kind
        )


class ResidualMisfitError(Exception):
    """A residual does not fit where it should be added; the call must be computed."""


def combined(residuals: Sequence[ResidualParts], coefficients: Sequence[float]) -> ResidualParts:
    """The sum of residuals that are alike, each times its coefficient, on the newest's device.

    Half precision is added up in float32: coefficients of opposite signs would amplify rounding.
    """
    newest = residuals[-1]
    if len(residuals) == 1 and coefficients[0] == 1:
        return newest
    tensors = tuple(
        _sum([r.tensors[i].to(part.device) for r in residuals], coefficients)
        for i, part in enumerate(newest.tensors)
    )
    return replace(newest, tensors=tensors)


def _sum(parts: Sequence[torch.Tensor], coefficients: Sequence[float]) -> torch.Tensor:
    total = parts[-1].float() * coefficients[-1]
    for part, coefficient in zip(parts[:-1], coefficients[:-1], strict=True):
        if coefficient:
            total.add_(part, alpha=coefficient)
    return total
