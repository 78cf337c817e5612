"""How a residual is kept between the steps: as it is, in host memory, or in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from magcache.residual import Form, ResidualParts

__all__ = ["STORAGES", "Storage", "Stored", "store"]

Storage = Literal["device", "host", "bfloat16", "float8"]
STORAGES: tuple[Storage, ...] = get_args(Storage)

_FLOAT8 = torch.float8_e4m3fn

# Takes the tensors that were kept for one of the residual's, and gives that back.
Unpack = Callable[..., torch.Tensor]
Packed = tuple[tuple[torch.Tensor, ...], Unpack]


@dataclass(frozen=True)
class Stored:
    """A residual as it is kept: `tensors` take the memory, each `unpack` reads some of them.

    Without `unpack`, they are the residual's own.
    """

    tensors: tuple[torch.Tensor, ...]
    unpack: tuple[tuple[int, Unpack], ...]
    form: Form

    def load(self) -> ResidualParts:
        """The residual again: shapes, dtypes and devices as before it was stored."""
        tensors = self.tensors
        if self.unpack:
            kept = iter(self.tensors)
            loaded = [unpack(*(next(kept) for _ in range(count))) for count, unpack in self.unpack]
            tensors = tuple(loaded)
        return ResidualParts(tensors, self.form.dtypes, self.form.kind)


def store(parts: ResidualParts, storage: Storage) -> Stored:
    """Keep a residual.

    "device" keeps the tensors themselves; "host" a copy in pinned memory, both ways without
    waiting for the device; "bfloat16" rounds to 8 significant bits; "float8" to e4m3, 4 significant
    bits, with a float32 scale for each token (each row along the last dimension).
    """
    if storage == "device":
        return Stored(parts.tensors, (), parts.form)
    packed = [_PACK[storage](tensor) for tensor in parts.tensors]
    tensors = tuple(tensor for kept, _ in packed for tensor in kept)
    unpack = tuple((len(kept), unpack) for kept, unpack in packed)
    return Stored(tensors, unpack, parts.form)


def _as_it_is(tensor: torch.Tensor) -> Packed:
    return (tensor,), lambda kept: kept


def _on_host(tensor: torch.Tensor) -> Packed:
    if tensor.device.type == "cpu":
        return _as_it_is(tensor)
    device = tensor.device
    # Both copies are queued on the stream that computes, so neither can overtake the other.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return (host,), lambda kept: kept.to(device, non_blocking=True)


def _in_bfloat16(tensor: torch.Tensor) -> Packed:
    if tensor.element_size() <= 2:
        return _as_it_is(tensor)
    dtype = tensor.dtype
    return (tensor.to(torch.bfloat16),), lambda kept: kept.to(dtype)


def _in_float8(tensor: torch.Tensor) -> Packed:
    if tensor.numel() == 0 or tensor.ndim == 0:
        return _as_it_is(tensor)
    dtype, wide = tensor.dtype, tensor.float()
    largest = torch.finfo(_FLOAT8).max
    # A token of zeros has no scale, and a denormal one divides to infinity.
    smallest = torch.finfo(torch.float32).tiny
    scale = (wide.abs().amax(-1, keepdim=True) / largest).clamp_(min=smallest)
    # The division's rounding may land past the largest number, which e4m3 turns into NaN.
    rounded = (wide / scale).clamp_(-largest, largest).to(_FLOAT8)
    return (rounded, scale), lambda kept, scale: (kept.float() * scale).to(dtype)


_PACK: dict[Storage, Callable[[torch.Tensor], Packed]] = {
    "host": _on_host,
    "bfloat16": _in_bfloat16,
    "float8": _in_float8,
}
