"""A computed step's residual, and combinations of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from magcache.standin import Kind

__all__ = ["Form", "ResidualMisfitError", "ResidualParts", "combined"]


class Form(NamedTuple):
    """What two residuals must have in common to be added up."""

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    kind: Kind


class ResidualParts(NamedTuple):
    """A residual, the dtypes of the values it was taken from, and the kind of call it is of."""

    tensors: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    kind: Kind

    @property
    def form(self) -> Form:
        return Form(tuple([tensor.shape for tensor in self.tensors]), self.dtypes, self.kind)


class ResidualMisfitError(Exception):
    """A residual does not fit where it should be added; the call must be computed."""


def combined(residuals: Sequence[ResidualParts], coefficients: Sequence[float]) -> ResidualParts:
    """The sum of residuals of one form, each times its coefficient, on the newest's device.

    Half precision is added up in float32: coefficients of opposite signs would amplify rounding.
    """
    newest = residuals[-1]
    if len(residuals) == 1 and coefficients[0] == 1:
        return newest
    tensors = tuple(
        _sum([r.tensors[i].to(part.device) for r in residuals], coefficients)
        for i, part in enumerate(newest.tensors)
    )
    return newest._replace(tensors=tensors)


def _sum(parts: Sequence[torch.Tensor], coefficients: Sequence[float]) -> torch.Tensor:
    total = parts[-1].float() * coefficients[-1]
    for part, coefficient in zip(parts[:-1], coefficients[:-1], strict=True):
        if coefficient:
            total.add_(part, alpha=coefficient)
    return total
