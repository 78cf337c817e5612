"""The block stack as a unit: walk it and take the residual, or step over it and add one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from magcache import compat
from magcache.errors import CannotCacheError
from magcache.learning import learn_route
from magcache.outputs import output_tensors, replace_output
from magcache.residual import ResidualMisfitError, ResidualParts
from magcache.route import OUTPUT, Exit, Route, Source
from magcache.standin import (
    Call,
    Kind,
    StandIn,
    StandingIn,
    is_block_list,
    parts_of,
    place_of,
    stepped_over,
    walked,
)
from magcache.strategy import MagCacheStrategy

__all__ = [
    "MagCacheBlockHook",
    "MagCacheHeadHook",
    "Stack",
    "Walked",
    "find_block_lists",
]

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Walked:
    """A computed call: its output, its residual, and the values past the stack that it is part of.

    `parts` is None where the stack adds nothing that can be seen in the output.
    """

    output: Any
    parts: ResidualParts | None
    values: tuple[torch.Tensor, ...] = ()


def find_block_lists(module: nn.Module, strategy: MagCacheStrategy) -> tuple[str, ...]:
    """Names of the direct children that make up the stack, or an error that says what was found."""
    wanted = tuple(strategy.block_classes) or (nn.Module,)
    lists = [
        name
        for name, part in parts_of(module)
        if is_block_list(part) and any(isinstance(block, wanted) for block in part.children())
    ]
    if not lists:
        children = ", ".join(f"{n} ({type(c).__name__})" for n, c in module.named_children())
        raise CannotCacheError(
            f"{type(module).__name__} has no list of transformer blocks among its direct children "
            f"({children or 'none'}); magcache caches transformers whose forward walks such a "
            "list."
        )
    return tuple(lists)


class MagCacheHeadHook(StandIn):
    """Stands at the first block of a computed step and notes what enters the stack."""

    def __init__(self, block: nn.Module, sources: tuple[Source, ...]) -> None:
        super().__init__(block)
        self.sources = sources
        self.entered: dict[Source, torch.Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs)
        for source in self.sources:
            tensor = call[source.argument]
            self.entered[source] = tensor.clone() if source.clone else tensor
        return self.inner(*args, **kwargs)


@dataclass
class _Crossing:
    """What passes between the stand-ins of one forward pass.

    `residual` is set on a skipped step and added at the exits. Else the exits note their `values`,
    or turn them into residual `parts` at once where the `heads` know what entered the stack.
    `replay` is set on the stepped-over pass that measures the bases of `values`. `calls` counts
    those of each tail, by its name, in the pass that is on.
    """

    heads: dict[tuple[str, str], MagCacheHeadHook] = field(default_factory=dict)
    residual: ResidualParts | None = None
    replay: bool = False
    values: list[torch.Tensor] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    measured: bool = False
    calls: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        self.residual = None
        self.replay = False
        self.values, self.parts, self.dtypes = [], [], []
        for head in self.heads.values():
            head.entered.clear()


def _cross(
    exit: Exit, offset: int, values: dict[Any, Any], crossing: _Crossing, strategy: MagCacheStrategy
) -> dict[Any, torch.Tensor]:
    """Pass one exit; returns the values to go on with. `offset` is its place in the residual."""
    arguments = [values[key] for key in exit.arguments]
    if crossing.residual is not None or crossing.replay:
        arguments = exit.split(arguments)
    if crossing.residual is not None:
        added = _add(exit, arguments, crossing.residual, offset, strategy)
        return dict(zip(exit.arguments, added, strict=True))
    if crossing.replay:
        computed = crossing.values[offset : offset + len(arguments)]
        pairs = zip(computed, arguments, strict=True)
        crossing.parts += [strategy.compute_residual(value, base) for value, base in pairs]
        return dict(zip(exit.arguments, computed, strict=True))
    crossing.dtypes += [argument.dtype for argument in arguments]
    crossing.values += arguments
    if crossing.measured:
        return {}
    bases = []
    for argument, source in zip(arguments, exit.sources, strict=True):
        assert source is not None
        entered = crossing.heads[source.blocks, source.block].entered[source]
        bases.append(source.base(entered, argument))
    for argument, base in zip(arguments, exit.split(bases), strict=True):
        crossing.parts.append(strategy.compute_residual(argument, base))
    return {}


def _add(
    exit: Exit,
    arguments: list[torch.Tensor],
    residual: ResidualParts,
    offset: int,
    strategy: MagCacheStrategy,
) -> tuple[torch.Tensor, ...]:
    parts = residual.tensors[offset : offset + len(arguments)]
    dtypes = residual.dtypes[offset : offset + len(arguments)]
    onto = []
    for argument, part, dtype, own in zip(arguments, parts, exit.dtypes, dtypes, strict=True):
        if argument.shape != part.shape or argument.dtype != dtype:
            raise ResidualMisfitError(
                f"residual of {tuple(part.shape)} onto {dtype}, "
                f"hidden states of {tuple(argument.shape)} in {argument.dtype}"
            )
        # Offloading and device maps may have moved the hidden states since.
        part = part if part.device == argument.device else part.to(argument.device)
        onto.append((argument if dtype == own else argument.to(own), part))
    if len(onto) == 2:
        (hidden, added), (encoder, encoder_added) = onto
        return strategy.apply_residual_tuple(hidden, encoder, (added, encoder_added))
    return tuple(strategy.apply_residual(argument, part) for argument, part in onto)


class MagCacheBlockHook(StandIn):
    """Stands past the last block, at the child that takes the stack's output on (the tail).

    On a computed step it takes the residual, on a skipped one it adds it, once.
    """

    def __init__(
        self,
        inner: nn.Module,
        name: str,
        exits: tuple[tuple[Exit, int], ...],
        crossing: _Crossing,
        strategy: MagCacheStrategy,
    ) -> None:
        super().__init__(inner)
        self.name = name
        self.exits = exits
        self.crossing = crossing
        self.strategy = strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs)
        crossing = self.crossing
        over = crossing.residual is not None or crossing.replay
        number = crossing.calls.get(self.name, 0)
        crossing.calls[self.name] = number + 1
        for exit, offset in self.exits:
            if number == (exit.skipped if over else exit.walked):
                values = {key: call[key] for key in exit.arguments}
                call = call.replaced(_cross(exit, offset, values, crossing, self.strategy))
        return self.inner(*call.args, **call.kwargs)


class _Passage:
    """A route's stand-ins, made once and put up for each call."""

    def __init__(
        self, module: nn.Module, lists: tuple[str, ...], route: Route, strategy: MagCacheStrategy
    ) -> None:
        self.lists = lists
        self.route = route
        self.strategy = strategy
        self.crossing = _Crossing(measured=route.measured)
        offsets: dict[Exit, int] = {}
        for exit in route.exits:
            offsets[exit] = sum(len(e.arguments) for e in offsets)
        self.offsets = offsets

        children = dict.fromkeys(exit.child for exit in route.exits if exit.child != OUTPUT)
        self.tails = {
            child: MagCacheBlockHook(
                module.get_submodule(child),
                child,
                tuple((e, offsets[e]) for e in route.exits if e.child == child),
                self.crossing,
                strategy,
            )
            for child in children
        }
        over = {name: stepped_over(module.get_submodule(name)) for name in lists}
        walk = {} if route.measured else self._with_heads(module)
        self.over = StandingIn(module, {**self.tails, **over})
        self.walk = StandingIn(module, {**self.tails, **walk})
        heads = {f"{name}.{key}": h.inner for (name, key), h in self.crossing.heads.items()}
        own = {name: module.get_submodule(name) for name in (*lists, *children)}
        self.stands_for = [
            (*place_of(module, path), part) for path, part in {**own, **heads}.items()
        ]
        firsts = [next(module.get_submodule(name).children()) for name in lists]
        self.split_at = [(block, compat.context_hooks(block)) for block in firsts]

    def _with_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        lists: dict[str, nn.Module] = {}
        sources = {source for exit in self.route.exits for source in exit.sources if source}
        for name in {source.blocks for source in sources}:
            blocks = module.get_submodule(name)
            for key in {source.block for source in sources if source.blocks == name}:
                own = tuple(s for s in sources if (s.blocks, s.block) == (name, key))
                self.crossing.heads[name, key] = MagCacheHeadHook(blocks.get_submodule(key), own)
            heads = {k: hook for (n, k), hook in self.crossing.heads.items() if n == name}
            lists[name] = walked(blocks, heads)
        return lists

    def still_stands(self) -> bool:
        """Whether the modules that this was made for are in their places, and split as then."""
        return all(
            parent._modules.get(key) is child for parent, key, child in self.stands_for
        ) and all(compat.context_hooks(block) == hooks for block, hooks in self.split_at)

    def run(self, stand_ins: StandingIn, forward: Forward, call: Call) -> Any:
        self.crossing.calls.clear()
        with stand_ins:
            output = forward(*call.args, **call.kwargs)
        for exit, offset in self.offsets.items():
            if exit.child == OUTPUT:
                tensors: dict[Any, Any] = dict(output_tensors(output))
                values = _cross(exit, offset, tensors, self.crossing, self.strategy)
                output = replace_output(output, values) if values else output
        return output


class Stack:
    """The lists of blocks of one transformer, walked or stepped over as a unit.

    Routes are learned at the first call of each kind (a kind is which arguments are given).
    """

    def __init__(
        self, module: nn.Module, lists: tuple[str, ...], strategy: MagCacheStrategy
    ) -> None:
        self.module = module
        self.lists = lists
        self.strategy = strategy
        # The forward as it is when nothing is compiled: learning is no part of a graph.
        self.eager: Forward | None = None
        self._passages: dict[Kind, _Passage] = {}

    @property
    def walked_lists(self) -> tuple[str, ...]:
        """The lists that calls so far have looped over, of the candidates."""
        known = {name for passage in self._passages.values() for name in passage.lists}
        return tuple(name for name in self.lists if name in known)

    def walk(self, forward: Forward, call: Call) -> Walked:
        """Compute the call."""
        passage = self._passage(call)
        if passage is None:
            return self._learn(forward, call)
        crossing = passage.crossing
        try:
            output = passage.run(passage.walk, forward, call)
            if crossing.measured:
                crossing.replay = True
                eager = self.eager or forward
                passage.run(passage.over, eager, passage.route.stepped(call))
            elif self.eager not in (None, forward):
                # The next call of a graph may overwrite what it returned (CUDA graphs do).
                crossing.parts = [part.clone() for part in crossing.parts]
            parts = ResidualParts(tuple(crossing.parts), tuple(crossing.dtypes), call.kind)
            return Walked(output, parts, tuple(crossing.values))
        finally:
            crossing.clear()

    def step_over(self, forward: Forward, call: Call, residual: ResidualParts) -> Any:
        """Skip the call's blocks and add `residual`, or raise `ResidualMisfitError`."""
        passage = self._passage(call)
        if passage is None or residual.kind != call.kind:
            raise ResidualMisfitError("the call gives other arguments than the computed one did")
        passage.crossing.residual = residual
        try:
            return passage.run(passage.over, forward, passage.route.stepped(call))
        finally:
            passage.crossing.clear()

    def _passage(self, call: Call) -> _Passage | None:
        passage = self._passages.get(call.kind)
        return passage if passage is not None and passage.still_stands() else None

    def _learn(self, forward: Forward, call: Call) -> Walked:
        learned = learn_route(self.module, self.lists, self.eager or forward, call)
        if learned.route is None:
            return Walked(learned.output, None)
        passage = _Passage(self.module, learned.lists, learned.route, self.strategy)
        self._passages[call.kind] = passage
        pairs = zip(learned.values, learned.bases, strict=True)
        parts = tuple(self.strategy.compute_residual(value, base) for value, base in pairs)
        dtypes = tuple(value.dtype for value in learned.values)
        residual = ResidualParts(parts, dtypes, call.kind)
        return Walked(learned.output, residual, tuple(learned.values))
