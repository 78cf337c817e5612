"""The tensors inside whatever a transformer's forward returns."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Path", "output_tensors", "replace_output"]

# Indices and keys that lead to a tensor; () is an output that is a tensor itself.
Path = tuple[int | str, ...]


def output_tensors(output: Any, at: Path = ()) -> dict[Path, torch.Tensor]:
    """Floating-point tensors of a forward's output, to any depth of tuples, lists and mappings."""
    if isinstance(output, torch.Tensor):
        return {at: output} if output.is_floating_point() else {}
    found: dict[Path, torch.Tensor] = {}
    for key, member in _members(output):
        found.update(output_tensors(member, (*at, key)))
    return found


def replace_output(output: Any, values: dict[Path, torch.Tensor], at: Path = ()) -> Any:
    """The same containers with some of the tensors replaced; all else passes through."""
    if at in values:
        return values[at]
    members = {key: replace_output(member, values, (*at, key)) for key, member in _members(output)}
    if isinstance(output, dict):
        return type(output)(**{**output, **members})
    if isinstance(output, list | tuple):
        made = members.values()
        # A named tuple takes its members one by one.
        return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)
    return output


def _members(output: Any) -> list[tuple[int | str, Any]]:
    if isinstance(output, dict):
        return list(output.items())
    return list(enumerate(output)) if isinstance(output, list | tuple) else []
