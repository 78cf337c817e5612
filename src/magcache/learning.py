"""Learns a model's route from one call, by trying.

The model is run once with its blocks and, on the same inputs, with the stack stepped over. Past the
stack, the first values that differ are where a residual belongs; with those put right the rest must
come out as it did with the blocks. So nothing needs to be known of the model's class: fused
streams, values injected between blocks (ControlNet, VACE) and code between the last block and the
norm are all part of what is compared. Costs four stepped-over passes, once per kind of call.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from magcache import compat
from magcache.errors import CannotCacheError
from magcache.outputs import output_tensors
from magcache.route import OUTPUT, VIEWS, Exit, Key, Route, Source, Split
from magcache.standin import Call, StandingIn, Watched, parts_of, stepped_over, walked

__all__ = ["Learned", "learn_route"]

logger = logging.getLogger("magcache")

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Learned:
    """What one call taught: its output, the lists that make up the stack, the route, the residual.

    `values` and `bases` are the exits' arguments as computed and as stepped over, in the route's
    order. The route is None where the stack leaves no trace in the output (blocks that are all
    zero): such a call teaches nothing.
    """

    output: Any
    lists: tuple[str, ...]
    route: Route | None
    values: tuple[torch.Tensor, ...]
    bases: tuple[torch.Tensor, ...]


def learn_route(module: nn.Module, lists: tuple[str, ...], forward: Forward, call: Call) -> Learned:
    """Run `forward` on `call` and learn the route of its kind.

    `lists` are candidates: one that the forward does not loop over (it calls a member by index) is
    no part of the stack. Raises `CannotCacheError` where none is left, or where the model does not
    run with the stack stepped over.
    """
    before = call.copied()
    trace = _Trace()
    with StandingIn(module, _watching(module, lists, trace)):
        output = forward(*call.args, **call.kwargs)
    eaten = tuple(
        (key, len(call[key])) for key in call.lists() if len(call[key]) < len(before[key])
    )
    unwatched = Route((), eaten)
    lesson = _Lesson(module, lists, forward, unwatched.stepped(before), trace)

    looped = tuple(name for name in lists if name in trace.walked and name not in lesson.dry.walked)
    if not looped:
        raise CannotCacheError(
            f"{type(module).__name__} does not loop over {' and '.join(lists)} in its forward; "
            "register a MagCacheStrategy that names its block classes"
        )
    if looped != lists:
        trace.entries = {n: entry for n, entry in trace.entries.items() if n in looped}
        lesson = _Lesson(module, looped, forward, unwatched.stepped(before), trace)

    replayed = lesson.replay()
    computed, stepped = output_tensors(output), output_tensors(replayed)
    lesson.put_right(OUTPUT, 0, 0, computed, stepped)
    exits = lesson.with_sure_sources()
    route = replace(unwatched, exits=exits) if exits else None
    return Learned(output, looped, route, tuple(lesson.values), tuple(lesson.bases))


@dataclass
class _Entry:
    """A list's first block call: its tensors, and copies from before the block could write."""

    block: str
    tensors: dict[Key, torch.Tensor]
    copies: dict[Key, torch.Tensor]


@dataclass
class _Trace:
    """What one watched pass met."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    # Calls of children since the last block: (child, number of the call) -> arguments.
    past_stack: dict[tuple[str, int], Call] = field(default_factory=dict)
    # Calls of children before the first block.
    before: Counter[str] = field(default_factory=Counter)
    # Lists with a block that was called.
    walked: set[str] = field(default_factory=set)


def _watching(
    module: nn.Module, lists: tuple[str, ...], trace: _Trace, *, over: bool = False
) -> dict[str, nn.Module]:
    """Stand-ins that note every block of the lists and every other child that can be called."""

    def on_block(name: str, key: str) -> Callable[[Call], Call]:
        def report(call: Call) -> Call:
            if not trace.entries:
                trace.before = Counter(trace.calls)
            if name not in trace.entries:
                tensors = call.tensors()
                copies = {k: tensor.clone() for k, tensor in tensors.items()}
                trace.entries[name] = _Entry(key, tensors, copies)
            trace.walked.add(name)
            trace.past_stack.clear()
            return call

        return report

    def on_child(name: str) -> Callable[[Call], Call]:
        def report(call: Call) -> Call:
            trace.past_stack[name, trace.calls[name]] = call
            trace.calls[name] += 1
            return call

        return report

    parts: dict[str, nn.Module] = {}
    for name in lists:
        blocks = module.get_submodule(name)
        watched = {
            key: Watched(block, on_block(name, key)) for key, block in blocks.named_children()
        }
        parts[name] = (stepped_over if over else walked)(blocks, watched)
    for name, part in parts_of(module):
        if name not in lists and not isinstance(part, nn.ModuleList):
            parts[name] = Watched(part, on_child(name))
    return parts


class _Lesson:
    """The stepped-over passes of one call, and what they show.

    `call` is as the model expects it with the stack stepped over, `trace` what the pass with the
    blocks met. Fills `exits`, `values` and `bases`.
    """

    def __init__(
        self, module: nn.Module, lists: tuple[str, ...], forward: Forward, call: Call, trace: _Trace
    ) -> None:
        self.module = module
        self.lists = lists
        self.forward = forward
        self.call = call
        self.trace = trace
        self.exits: list[Exit] = []
        self.values: list[torch.Tensor] = []
        self.bases: list[torch.Tensor] = []
        # Whether two equal passes differ: kernels that add in another order each time.
        self.noisy = False
        # What context parallelism splits at the first block, and the calls past the stack that take
        # it: (child, number of the call when stepped over) -> arguments.
        self.enters = list(_entering_splits(module, trace))
        self.splits: dict[tuple[str, int], dict[Key, Split]] = {}
        self.dry = _Trace()
        self._step_over(call, _watching(module, lists, self.dry, over=True))

    def replay(self) -> Any:
        """Step over the stack, put right one by one what differs past it; returns the output."""
        seen: Counter[str] = Counter()

        def on_child(name: str) -> Callable[[Call], Call]:
            def report(stepped: Call) -> Call:
                skipped = seen[name]
                seen[name] += 1
                if not self.exits:
                    again = self.dry.past_stack[name, skipped].tensors()
                    self.noisy |= any(
                        not torch.equal(tensor.nan_to_num(), again[key].nan_to_num())
                        for key, tensor in stepped.tensors().items()
                    )
                # Counted from the end, the calls of both passes are the same ones.
                number = skipped + self.trace.calls[name] - self.dry.calls[name]
                if (name, number) not in self.trace.past_stack:
                    return stepped
                computed = self.trace.past_stack[name, number].tensors()
                return stepped.replaced(
                    self.put_right(name, number, skipped, computed, stepped.tensors())
                )

            return report

        names = {child for child, _ in self.trace.past_stack}
        return self._step_over(self.call, self._watched(names, on_child))

    def put_right(
        self,
        child: str,
        number: int,
        skipped: int,
        computed: dict[Key, torch.Tensor],
        stepped: dict[Key, torch.Tensor],
    ) -> dict[Key, torch.Tensor]:
        """Note an exit where the two differ; returns the computed values to go on with."""
        differing = [
            k for k, value in computed.items() if k in stepped and not self._same(value, stepped[k])
        ]
        if not differing:
            return {}
        # (hidden, encoder): the one order of residual tuples.
        arguments = tuple(sorted(differing, key=lambda key: str(key).startswith("encoder")))
        known = self.splits.get((child, skipped), {})
        splits = tuple(known.get(key) for key in arguments)
        pairs = zip(arguments, splits, strict=True)
        sources = tuple(self._source(stepped[key], split) for key, split in pairs)
        dtypes = tuple(stepped[key].dtype for key in arguments)
        self.exits.append(Exit(child, number, skipped, arguments, sources, dtypes, splits))
        self.values += [computed[key] for key in arguments]
        self.bases += [stepped[key] for key in arguments]
        return {key: computed[key] for key in arguments}

    def with_sure_sources(self) -> tuple[Exit, ...]:
        """The exits with only those sources that hold for other inputs as well.

        A base may equal what entered by chance: a ControlNet that starts later adds zeros before.
        """
        try:
            return self._with_sources_of(self.call.shaken())
        except Exception as error:
            # Not every model takes inputs that are a little off; then nothing is sure.
            logger.debug("%s: bases are measured (%s)", type(self.module).__name__, error)
            return tuple(replace(e, sources=(None,) * len(e.sources)) for e in self.exits)

    def _with_sources_of(self, shaken: Call) -> tuple[Exit, ...]:
        at_exit: dict[tuple[str, int], dict[Key, torch.Tensor]] = {}
        seen: Counter[str] = Counter()

        def on_child(name: str) -> Callable[[Call], Call]:
            def report(call: Call) -> Call:
                at_exit[name, seen[name]] = call.tensors()
                seen[name] += 1
                return call

            return report

        names = {exit.child for exit in self.exits if exit.child != OUTPUT}
        output = self._step_over(shaken, self._watched(names, on_child))
        at_exit[OUTPUT, 0] = output_tensors(output)
        sources = {source for exit in self.exits for source in exit.sources if source is not None}
        entered = {source: self._entering(shaken, source) for source in sources}

        def sure(exit: Exit, key: Key, source: Source | None, split: Split | None) -> Source | None:
            base = at_exit.get((exit.child, exit.skipped), {}).get(key)
            enters = entered.get(source) if source is not None else None
            if source is None or base is None or enters is None:
                return None
            expected = source.base(enters, base)
            expected = expected if split is None else split(expected)
            return source if self._same(expected.to(base.dtype), base) else None

        def surely(exit: Exit) -> Exit:
            members = zip(exit.arguments, exit.sources, exit.splits, strict=True)
            return replace(exit, sources=tuple(sure(exit, *member) for member in members))

        return tuple(map(surely, self.exits))

    def _step_over(self, call: Call, parts: Mapping[str, nn.Module]) -> Any:
        over = {name: stepped_over(self.module.get_submodule(name)) for name in self.lists}
        call = call.copied()
        parts = self._splitting(parts) if self.enters else parts
        try:
            with StandingIn(self.module, {**over, **parts}):
                return self.forward(*call.args, **call.kwargs)
        except Exception as error:
            raise CannotCacheError(
                f"{type(self.module).__name__} does not run with {' and '.join(self.lists)} "
                f"stepped over ({type(error).__name__}: {error}); it needs a MagCacheStrategy of "
                "its own"
            ) from error

    def _splitting(self, parts: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """`parts`, handed what a walked first block would have split for this rank."""
        seen: Counter[str] = Counter()

        def on_child(name: str) -> Callable[[Call], Call]:
            def report(call: Call) -> Call:
                at = name, seen[name]
                seen[name] += 1
                if seen[name] <= self.trace.before[name]:
                    return call
                tensors = call.tensors()
                if at not in self.splits:
                    # The first pass is given what the blocks were; later ones may not be.
                    self.splits[at] = {
                        key: split
                        for key, value in tensors.items()
                        for copy, split in self.enters
                        if self._same(copy.to(value.dtype), value)
                    }
                return call.replaced({k: split(tensors[k]) for k, split in self.splits[at].items()})

            return report

        children = {
            name: child
            for name, child in parts_of(self.module)
            if name not in self.trace.entries and not isinstance(child, nn.ModuleList)
        }
        return {
            **parts,
            **{n: Watched(parts.get(n, child), on_child(n)) for n, child in children.items()},
        }

    def _entering(self, call: Call, source: Source) -> torch.Tensor | None:
        """What a call hands to the source's block, with the lists before it stepped over."""
        entered: dict[Key, torch.Tensor] = {}

        def report(call: Call) -> Call:
            entered.update(call.tensors())
            raise _EnteredError

        blocks = self.module.get_submodule(source.blocks)
        stop = {source.block: Watched(blocks.get_submodule(source.block), report)}
        # Lists walked later stay: a loop over two at once ends with the shorter.
        order = list(self.trace.entries)
        former = order[: order.index(source.blocks)]
        parts = {name: stepped_over(self.module.get_submodule(name)) for name in former}
        parts[source.blocks] = walked(blocks, stop)
        call = call.copied()
        with contextlib.suppress(_EnteredError), StandingIn(self.module, parts):
            self.forward(*call.args, **call.kwargs)
        return entered.get(source.argument)

    def _watched(
        self, names: set[str], on_child: Callable[[str], Callable[[Call], Call]]
    ) -> dict[str, nn.Module]:
        return {name: Watched(self.module.get_submodule(name), on_child(name)) for name in names}

    def _source(self, base: torch.Tensor, split: Split | None) -> Source | None:
        """The argument of a first block that `base` is, up to dtype, view and split."""
        for view, take in VIEWS.items():
            for name, entry in self.trace.entries.items():
                for key, copy in entry.copies.items():
                    entered = copy
                    if split is not None:
                        if view != "whole" or not any(copy is known for known, _ in self.enters):
                            continue
                        entered = split(copy)
                    if view == "reshaped" and entered.numel() != base.numel():
                        continue
                    if view.endswith("tokens") and not (entered.ndim == base.ndim > 1):
                        continue
                    if self._same(take(entered, base.shape).to(base.dtype), base):
                        clone = not self._same(entry.tensors[key], copy)
                        return Source(name, entry.block, key, view, clone)
        return None

    def _same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Equal bit for bit, or nearly so where kernels are noisy."""
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        a, b = a.nan_to_num(), b.to(a.device).nan_to_num()
        if torch.equal(a, b):
            return True
        tolerance = 1e-5 if torch.finfo(a.dtype).eps < 1e-6 else 1e-2
        return self.noisy and bool((a - b).norm() <= tolerance * b.norm())


def _entering_splits(module: nn.Module, trace: _Trace) -> Iterator[tuple[torch.Tensor, Split]]:
    """What entered the stack, where context parallelism splits it at the first block, and how."""
    for name, entry in trace.entries.items():
        block = module.get_submodule(name).get_submodule(entry.block)
        splits = compat.context_splits(block)
        arguments = list(inspect.signature(type(block).forward).parameters)[1:] if splits else []
        for key, copy in entry.copies.items():
            argument = arguments[key] if isinstance(key, int) and arguments else key
            if argument in splits:
                yield copy, splits[argument]


class _EnteredError(Exception):
    """Ends a pass at the first block."""
