"""What an entry of the zoo is: a small random transformer and the calls to make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from packaging.version import Version
from torch import Tensor, nn

__all__ = [
    "ENTRIES",
    "Args",
    "Made",
    "entry",
    "grid",
    "half",
    "made",
    "normal",
    "ones",
    "positions",
    "with_inputs",
]

Args = tuple[tuple[Any, ...], dict[str, Any]]
# A model and, by seed, the arguments of a call. Each call gets containers of its own: some models
# empty the lists that they are given.
Made = tuple[Any, Callable[[int], Args]]

ENTRIES: dict[str, Callable[[], Made]] = {}


def entry(
    model_class: str, variant: str = "", since: str = "0"
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Note a function as the maker of this class's small model, or of a variant of it.

    A variant is a configuration or a kind of call that takes another way through the forward.
    Passed over where the installed diffusers lacks the class, or is older than `since`, the oldest
    release that the entry was tried with.
    """

    def note(make: Callable[[], Made]) -> Callable[[], Made]:
        if hasattr(diffusers, model_class) and Version(diffusers.__version__) >= Version(since):
            ENTRIES[f"{model_class} {variant}".rstrip()] = make
        return make

    return note


def with_inputs(base: Made, **more: Callable[[int], Any]) -> Made:
    """The same model, called with more arguments: each is made from the seed."""
    model, call = base

    def inputs(seed: int) -> Args:
        args, kwargs = call(seed)
        return args, {**kwargs, **{name: make(seed) for name, make in more.items()}}

    return model, inputs


def made(model: nn.Module, inputs: Callable[[int], dict[str, Any]]) -> Made:
    """The usual entry: weights made random, arguments all named."""
    return randomised(model), lambda seed: ((), inputs(seed))


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every weight random and of a size that makes each block count, zero-initialised ones too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise / max(1, math.prod(weight.shape[1:])) ** 0.5)
            else:
                scale = 1.0 if "norm" in name and "weight" in name else 0.0
                weight.copy_(scale + 0.2 * noise)
    return module.eval().requires_grad_(False)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ones(*shape: int) -> Tensor:
    """A mask that keeps everything."""
    return torch.ones(shape, dtype=torch.int64)


def half(batch: int = 1) -> Tensor:
    """The timestep in the middle, for models that take it from 0 to 1."""
    return torch.full((batch,), 0.5)


def grid(size: int, axes: int = 3) -> Tensor:
    """Position ids of a square picture: the last two used axes are row and column."""
    ids = torch.zeros(size, size, axes)
    ids[..., 1] += torch.arange(size)[:, None]
    ids[..., 2] += torch.arange(size)[None, :]
    return ids.reshape(-1, axes)


def positions(text: int, size: int) -> Tensor:
    """Position ids of text tokens and then of a square picture, [tokens, 3]."""
    along = torch.arange(text).float()[:, None].expand(-1, 3)
    return torch.cat([along, text + grid(size)])


def middle() -> Tensor:
    """The timestep in the middle, for models that take it from 0 to 1000."""
    return torch.tensor([500])
