"""What of a model is spread over several processes, and which of them its blocks wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from magcache import compat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["blocks_communicate", "groups_of", "whole"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all its elements: a DTensor's are gathered, by all ranks that hold some."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def blocks_communicate(module: nn.Module) -> bool:
    """Whether a rank that skips the blocks would leave others waiting inside them."""
    return any(True for _ in groups_of(module))


def groups_of(module: nn.Module) -> Iterator[tuple[ProcessGroup, bool]]:
    """The groups in which the module's blocks communicate, and whether tokens are split there."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    tokens = compat.context_group(module)
    if tokens is not None:
        yield tokens, True
    for mesh, dim in dict.fromkeys(_sharded(module)):
        yield mesh.get_group(dim), False


def _sharded(module: nn.Module) -> Iterator[tuple[Any, int]]:
    """Device meshes and their dimensions over which weights are sharded, not merely copied."""
    for weight in module.parameters():
        mesh = getattr(weight, "device_mesh", None)
        for dim, placement in enumerate(getattr(weight, "placements", ())):
            if not placement.is_replicate() and mesh is not None and mesh.size(dim) > 1:
                yield mesh, dim
