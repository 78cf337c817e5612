"""What stands in a transformer's place for blocks and lists during one call.

Nothing here is installed for longer than a forward pass, and no block is changed: a stand-in takes
a child's place in the parent's `_modules`, hands calls and attributes on, and leaves again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

__all__ = [
    "Call",
    "Key",
    "Kind",
    "StandIn",
    "StandingIn",
    "Watched",
    "is_block_list",
    "parts_of",
    "place_of",
    "stepped_over",
    "walked",
]

Key = int | str
_FLAGS = (str, bool)
Kind = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]


class Call:
    """One call's arguments, addressed by position or name."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self._kind: Kind | None = None

    @property
    def kind(self) -> Kind:
        """What a route may depend on: the arguments given, tensors' dtypes, modes and flags."""
        if self._kind is None:
            args = tuple([_sort(v) for v in self.args]) if self.args else ()
            named = [(k, _sort(v)) for k, v in self.kwargs.items() if v is not None]
            self._kind = args, tuple(named)
        return self._kind

    def tensors(self) -> dict[Key, torch.Tensor]:
        """The arguments that are floating-point tensors."""
        pairs: list[tuple[Key, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return {k: v for k, v in pairs if isinstance(v, torch.Tensor) and v.is_floating_point()}

    def __getitem__(self, key: Key) -> Any:
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def __setitem__(self, key: Key, value: Any) -> None:
        if isinstance(key, int):
            self.args = (*self.args[:key], value, *self.args[key + 1 :])
        else:
            self.kwargs[key] = value

    def lists(self) -> list[Key]:
        """The arguments that are lists."""
        pairs: list[tuple[Key, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return [key for key, value in pairs if type(value) is list]

    def copied(self) -> Call:
        """The same call with lists and dictionaries of its own: forwards take things out."""
        args = tuple(_copied(value) for value in self.args)
        return Call(args, {key: _copied(value) for key, value in self.kwargs.items()})

    def shaken(self) -> Call:
        """The same call with every floating-point tensor, nested ones too, changed a little."""
        noise = torch.Generator().manual_seed(0)
        return Call(_shaken(self.args, noise), _shaken(self.kwargs, noise))

    def replaced(self, values: Mapping[Key, Any]) -> Call:
        """The same call with some of the arguments given anew."""
        if not values:
            return self
        call = Call(self.args, dict(self.kwargs))
        for key, value in values.items():
            call[key] = value
        return call


def _sort(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype
    return value if isinstance(value, _FLAGS) else type(value)


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict) else value


def _shaken(value: Any, noise: torch.Generator) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        change = torch.rand(value.shape, generator=noise).to(value.device, value.dtype)
        return value + 0.1 * change
    if isinstance(value, dict):
        return {key: _shaken(member, noise) for key, member in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_shaken(member, noise) for member in value)
    return value


class StandIn(nn.Module):
    """Takes a module's calls, and its attributes where it has none of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        # Beside the module table: found at once there, by a search of all tables here.
        self.__dict__["inner"] = inner
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
    stand_ins: Mapping[str, StandIn]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else _members(self)[index]


class _Walked:
    """A list of blocks in which stand-ins take the place of some of them."""

    _modules: dict[str, nn.Module]
    stand_ins: Mapping[str, StandIn]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(_members(self))

    def __getitem__(self, index: Any) -> Any:
        members = _members(self)[index]
        return nn.ModuleList(members) if isinstance(members, list) else members


def _members(view: _SteppedOver | _Walked) -> list[nn.Module]:
    return [view.stand_ins.get(key, block) for key, block in view._modules.items()]


class _SteppedOverList(_SteppedOver, nn.ModuleList):  # type: ignore[misc]
    pass


class _SteppedOverSequential(_SteppedOver, nn.Sequential):  # type: ignore[misc]
    pass


class _WalkedList(_Walked, nn.ModuleList):  # type: ignore[misc]
    pass


class _WalkedSequential(_Walked, nn.Sequential):  # type: ignore[misc]
    pass


def is_block_list(module: nn.Module) -> bool:
    """Whether this may be a list of blocks: its members can be called and have modules inside.

    Lists of bare layers (projections, norms) are not.
    """
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 0
        and all(can_be_called(block) and any(True for _ in block.children()) for block in module)
        and (isinstance(module, nn.ModuleList) or len({type(block) for block in module}) == 1)
    )


def can_be_called(module: nn.Module) -> bool:
    """Whether the module has a forward; lists and dictionaries of modules have none."""
    return type(module).forward is not nn.Module.forward


def parts_of(module: nn.Module, at: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children that a forward can use, by path: block lists, and modules that can be called.

    Looks into containers that cannot be called themselves (a ModuleDict of lists, say).
    """
    for name, child in module.named_children():
        path = f"{at}{name}"
        if is_block_list(child) or can_be_called(child):
            yield path, child
        else:
            yield from parts_of(child, f"{path}.")


def stepped_over(blocks: nn.Module, stand_ins: Mapping[str, StandIn] = MappingProxyType({})) -> Any:
    """A view of `blocks` that loops find empty; an index finds `stand_ins` or the true blocks."""
    view: Any = (
        _SteppedOverSequential() if isinstance(blocks, nn.Sequential) else _SteppedOverList()
    )
    return _view(view, blocks, stand_ins)


def walked(blocks: nn.Module, stand_ins: Mapping[str, StandIn]) -> Any:
    """A view of `blocks` with stand-ins at the given keys."""
    kind = _WalkedSequential if isinstance(blocks, nn.Sequential) else _WalkedList
    return _view(kind(), blocks, stand_ins)


def _view(view: Any, blocks: nn.Module, stand_ins: Mapping[str, StandIn]) -> Any:
    view._modules = blocks._modules
    view.__dict__["stand_ins"] = stand_ins
    return view


def place_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The parent and the key of what is at a path (`blocks`, `mode_blocks.image`)."""
    parent, _, key = path.rpartition(".")
    return (module.get_submodule(parent) if parent else module), key


class StandingIn:
    """Puts `parts` in the places of the module's own at these paths, and puts those back after."""

    def __init__(self, module: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        places = [(*place_of(module, path), part) for path, part in parts.items()]
        self.places = [(parent._modules, key, part) for parent, key, part in places]
        self.own: list[nn.Module | None] = []

    def __enter__(self) -> None:
        self.own = [table[key] for table, key, _ in self.places]
        for table, key, part in self.places:
            table[key] = part

    def __exit__(self, *error: object) -> None:
        for (table, key, _), former in zip(self.places, self.own, strict=True):
            table[key] = former


class Watched(StandIn):
    """Reports each call before it is made."""

    def __init__(self, inner: nn.Module, report: Callable[[Call], Call]) -> None:
        super().__init__(inner)
        self.__dict__["report"] = report

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.report(Call(args, kwargs))
        return self.inner(*call.args, **call.kwargs)
