"""The block stack as a unit: walk it and take the residual, or step over it and add one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from magcache import compat
from magcache.crossing import Crossing, MagCacheBlockHook, MagCacheHeadHook
from magcache.errors import CannotCacheError
from magcache.learning import learn_route
from magcache.outputs import output_tensors, replace_output
from magcache.residual import ResidualMisfitError, ResidualParts
from magcache.route import OUTPUT, Exit, Route
from magcache.standin import (
    Call,
    Kind,
    StandingIn,
    is_block_list,
    parts_of,
    place_of,
    stepped_over,
    walked,
)
from magcache.strategy import MagCacheStrategy

__all__ = [
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


class _Passage:
    """A route's stand-ins, made once and put up for each call."""

    def __init__(
        self, module: nn.Module, lists: tuple[str, ...], route: Route, strategy: MagCacheStrategy
    ) -> None:
        self.lists = lists
        self.route = route
        self.crossing = Crossing(strategy, measured=route.measured)
        offsets: dict[Exit, int] = {}
        for exit in route.exits:
            offsets[exit] = sum(len(e.arguments) for e in offsets)
        self.at_output = [(exit, at) for exit, at in offsets.items() if exit.child == OUTPUT]

        children = dict.fromkeys(exit.child for exit in route.exits if exit.child != OUTPUT)
        self.tails = {
            child: MagCacheBlockHook(
                module.get_submodule(child),
                child,
                tuple((e, offsets[e]) for e in route.exits if e.child == child),
                self.crossing,
            )
            for child in children
        }
        over = {name: stepped_over(module.get_submodule(name)) for name in lists}
        walk = {} if route.measured else self._with_heads(module)
        self.over = StandingIn(module, {**self.tails, **over})
        self.walk = StandingIn(module, {**self.tails, **walk})
        heads = {f"{name}.{key}": h.inner for (name, key), h in self.crossing.heads.items()}
        own = {name: module.get_submodule(name) for name in (*lists, *children)}
        places = [(*place_of(module, path), part) for path, part in {**own, **heads}.items()]
        self.stands_for = [(parent._modules, key, part) for parent, key, part in places]
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
        for children, key, child in self.stands_for:
            if children.get(key) is not child:
                return False
        return all(compat.context_hooks(block) == hooks for block, hooks in self.split_at)

    def run(self, stand_ins: StandingIn, forward: Forward, call: Call) -> Any:
        self.crossing.calls.clear()
        with stand_ins:
            output = forward(*call.args, **call.kwargs)
        for exit, offset in self.at_output:
            tensors: dict[Any, Any] = dict(output_tensors(output))
            if self.crossing.cross(exit, offset, tensors):
                output = replace_output(output, tensors)
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
            passage.crossing.residual = None

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
