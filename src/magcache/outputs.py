"""The tensors inside whatever a transformer's forward returns."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["output_tensors", "replace_output"]

Key = int | str


def output_tensors(output: Any) -> dict[Key, torch.Tensor]:
    """Floating-point tensors of a forward's output by index, key, or 0 for a bare tensor.

    A tuple's, list's or mapping's own members only (diffusers' outputs are mappings).
    """
    if isinstance(output, torch.Tensor):
        return {0: output}
    pairs = output.items() if isinstance(output, dict) else enumerate(output)
    return {k: v for k, v in pairs if isinstance(v, torch.Tensor) and v.is_floating_point()}


def replace_output(output: Any, values: dict[Key, torch.Tensor]) -> Any:
    """The same container with some of its tensors replaced; the other members pass through."""
    if isinstance(output, torch.Tensor):
        return values.get(0, output)
    if isinstance(output, dict):
        return type(output)(**{**output, **values})
    members = [values.get(i, member) for i, member in enumerate(output)]
    return tuple(members) if isinstance(output, tuple) else members
