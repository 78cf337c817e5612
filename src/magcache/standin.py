"""What stands in a transformer's place for blocks and lists during one call.

Nothing here is installed for longer than a forward pass, and no block is changed: a stand-in takes
a child's place in the parent's `_modules`, hands calls and attributes on, and leaves again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Call", "StandIn", "is_block_list", "standing_in", "stepped_over", "walked"]

Key = int | str


class Call:
    """One call's arguments, addressed by position or name."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    def tensors(self) -> dict[Key, torch.Tensor]:
        """The arguments that are floating-point tensors."""
        pairs: list[tuple[Key, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return {k: v for k, v in pairs if isinstance(v, torch.Tensor) and v.is_floating_point()}

    def __getitem__(self, key: Key) -> Any:
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def replaced(self, values: Mapping[Key, Any]) -> Call:
        args = tuple(values.get(i, value) for i, value in enumerate(self.args))
        return Call(args, {k: values.get(k, value) for k, value in self.kwargs.items()})


class StandIn(nn.Module):
    """Takes a module's calls, and its attributes where it has none of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class _SteppedOver:
    """A list of blocks that a loop finds empty, while an index still finds the true blocks.

    Models read settings off a block past the loop (DiT takes its embedding from block 0).
    """

    _modules: dict[str, nn.Module]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else list(self._modules.values())[index]


class _Walked:
    """A list of blocks in which stand-ins take the place of some of them."""

    _modules: dict[str, nn.Module]
    stand_ins: Mapping[str, StandIn]

    def _members(self) -> list[nn.Module]:
        return [self.stand_ins.get(key, block) for key, block in self._modules.items()]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._members())

    def __getitem__(self, index: Any) -> Any:
        members = self._members()[index]
        return nn.ModuleList(members) if isinstance(members, list) else members


class _SteppedOverList(_SteppedOver, nn.ModuleList):  # type: ignore[misc]
    pass


class _SteppedOverSequential(_SteppedOver, nn.Sequential):  # type: ignore[misc]
    pass


class _WalkedList(_Walked, nn.ModuleList):  # type: ignore[misc]
    pass


class _WalkedSequential(_Walked, nn.Sequential):  # type: ignore[misc]
    pass


def is_block_list(module: nn.Module | None) -> bool:
    """Whether this child may be a list of blocks: a non-empty list whose members have parts.

    Lists of bare layers (projections, norms) are not: a block has modules inside.
    """
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 0
        and all(any(True for _ in block.children()) for block in module)
        and (isinstance(module, nn.ModuleList) or len({type(block) for block in module}) == 1)
    )


def stepped_over(blocks: nn.Module) -> nn.Module:
    """A view of `blocks` that loops find empty."""
    view = _SteppedOverSequential() if isinstance(blocks, nn.Sequential) else _SteppedOverList()
    view._modules = blocks._modules  # type: ignore[assignment]
    return view


def walked(blocks: nn.Module, stand_ins: Mapping[str, StandIn]) -> nn.Module:
    """A view of `blocks` with stand-ins at the given keys."""
    view: Any = _WalkedSequential() if isinstance(blocks, nn.Sequential) else _WalkedList()
    view._modules = blocks._modules
    view.__dict__["stand_ins"] = stand_ins
    return view  # type: ignore[no-any-return]


@contextmanager
def standing_in(module: nn.Module, children: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put `children` in the place of the module's own of these names, and put those back after."""
    own = {name: module._modules[name] for name in children}
    module._modules.update(children)
    try:
        yield
    finally:
        module._modules.update(own)


class Watched(StandIn):
    """Reports each call before it is made."""

    def __init__(self, inner: nn.Module, report: Callable[[Call], Call]) -> None:
        super().__init__(inner)
        self.__dict__["report"] = report

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.report(Call(args, kwargs))
        return self.inner(*call.args, **call.kwargs)
