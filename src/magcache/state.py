"""One stream's state within a run, and how the streams of a model are told apart."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import count

import torch

from magcache.clock import Moment, Timeline
from magcache.planner import Schedule
from magcache.planning import Plan
from magcache.residual import ResidualParts, combined
from magcache.standin import Call, Key, Kind
from magcache.storage import Storage, Stored, store

__all__ = ["MagCacheState", "Streams"]

# Not called at this step, in a stream's row.
_NO_CALL = "-"

Carried = Callable[[Call], dict[str, Key]]

# More streams than any pipeline has: a step that never ends is a clock that does not move.
_MOST_STREAMS = 16


@dataclass
class MagCacheState:
    """What one stream knows while a run is on: its plan, its residual, and what was done so far.

    A stream is one chain of denoising calls. `order` numbers the streams of a model by their first
    call. `held` are the last computed residuals with their steps, the newest last: the only tensors
    kept.
    """

    stream: str
    order: int
    timeline: Timeline
    schedule: Schedule | None
    held: list[tuple[int, Stored]] = field(default_factory=list)
    last_computed: int | None = None
    tightened: bool = False
    breaks: set[int] = field(default_factory=set)
    happened: list[str] = field(default_factory=list)
    planned: str = ""
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.happened = [_NO_CALL] * self.timeline.steps
        self.planned = str(self.plan) if self.plan else "C" * self.timeline.steps

    @property
    def plan(self) -> Plan | None:
        """Which steps are computed; None while calibrating."""
        return self.schedule.plan if self.schedule else None

    def residual_of(self, step: int) -> ResidualParts | None:
        """What the skipped `step` adds, made of the residuals held; None if none is."""
        if not self.held:
            return None
        assert self.schedule is not None
        steps = tuple([at for at, _ in self.held])
        residuals = [stored.load() for _, stored in self.held]
        return combined(residuals, self.schedule.coefficients(steps, step))

    def make_room(self) -> None:
        """Let go of the oldest residual if the next one takes its place."""
        most = self.schedule.reuse.most if self.schedule else 2
        del self.held[: max(0, len(self.held) - most + 1)]

    def hold(self, step: int, residual: ResidualParts, storage: Storage) -> None:
        """Keep the residual of `step`, and of the others those that can be added up with it."""
        newest = store(residual, storage)
        self.held = [(at, kept) for at, kept in self.held if kept.form == newest.form]
        self.held.append((step, newest))

    @property
    def residual(self) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """The last computed residual: one tensor, or a tuple (hidden, encoder)."""
        if not self.held:
            return None
        tensors = self.held[-1][1].load().tensors
        return tensors[0] if len(tensors) == 1 else tensors

    def stale(self, step: int) -> bool:
        """Whether the residual at hand is older than the one that the plan skips `step` with.

        So it is when a stream was not called at a step that the plan computes (guidance that is
        off for a while).
        """
        assert self.plan is not None
        planned = self.plan.sources[step]
        return self.last_computed is None or planned is None or self.last_computed < planned

    def note(self, step: int, *, computed: bool) -> None:
        """Write down what was done at `step`."""
        self.happened[step] = "C" if computed else "."
        if computed:
            self.last_computed = step

    @property
    def row(self) -> str:
        """What happened so far: C computed, . skipped, - not called."""
        return "".join(self.happened)


@dataclass
class _Carried:
    """The tensors that a stream's last call carried, and which of them the call before did too."""

    kind: Kind
    keys: dict[str, Key]
    last: dict[str, weakref.ref[torch.Tensor]]
    stable: set[str]

    def again(self, call: Call) -> bool:
        """Whether a call is like the last one and carries all that it carried."""
        if self.kind != call.kind:
            return False
        for name, ref in self.last.items():
            if ref() is not call[self.keys[name]]:
                return False
        self.stable.update(self.last)
        return True

    def same(self, tensors: dict[str, torch.Tensor]) -> set[str]:
        return {k for k, ref in self.last.items() if k in tensors and ref() is tensors[k]}

    def contradicts(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the call lacks what this stream has carried more than once."""
        return not self.stable <= self.same(tensors)


class Streams:
    """Tells a model's streams apart, step by step.

    By the cache context's name where the pipeline sets one. Else by the call's place among those of
    its step, corrected by what the calls carry: a prompt's tensors are the same objects at every
    step, so a call that carries another stream's is that stream, also on steps where guidance is
    off and calls are missing. A call that carries others in their place is a new stream.
    """

    def __init__(self) -> None:
        self._step: tuple[int, int] | None = None
        self._called: set[str] = set()
        self._carried: dict[str, _Carried] = {}

    def clear(self) -> None:
        """Forget everything: the run has ended."""
        self._step = None
        self._called.clear()
        self._carried.clear()

    def repeats(self, moment: Moment, context: str | None) -> bool:
        """Whether the context's stream has been called at this step already."""
        return context in self._called and (moment.run, moment.step) == self._step

    def name(self, moment: Moment, context: str | None, call: Call, carried: Carried) -> str | None:
        """The stream of this call, or None where a step has more calls than can be.

        `carried` tells where it has tensors that could be a prompt's: not the sample nor the
        timestep.
        """
        step = (moment.run, moment.step)
        if step != self._step:
            self._step = step
            self._called.clear()
        if len(self._called) >= _MOST_STREAMS:
            return None
        if context is None:
            name = self._next(call) or self._by_call(call, carried(call))
        else:
            name = _first_free(context, self._called)
        self._called.add(name)
        return name

    def _next(self, call: Call) -> str | None:
        """The first stream that this step lacks, if all of the call fits it: none fits better."""
        for name, carried in self._carried.items():
            if name not in self._called:
                return name if carried.again(call) else None
        return None

    def _by_call(self, call: Call, keys: dict[str, Key]) -> str:
        kind = call.kind
        tensors = {name: call[key] for name, key in keys.items()}
        free = {n: c for n, c in self._carried.items() if n not in self._called}
        # A call of another kind (a pass that only fills a cache, say) is likely another stream.
        fitting = {
            n: (c.kind == kind, len(c.same(tensors)))
            for n, c in free.items()
            if not c.contradicts(tensors)
        }
        last = {k: weakref.ref(v) for k, v in tensors.items()}
        if not fitting:
            name = _first_free("", self._carried)
            self._carried[name] = _Carried(kind, keys, last, set())
            return name
        # The first of the best: streams stand in the order of their first calls.
        name = max(fitting, key=lambda n: fitting[n])
        self._carried[name] = _Carried(kind, keys, last, self._carried[name].same(tensors))
        return name


def _first_free(name: str, taken: Container[str]) -> str:
    """`name`, or the first of name#2, name#3, ... (0, 1, ... for no name) that is not taken."""
    candidates = (f"{name}#{i + 1}" if name and i else name or str(i) for i in count())
    return next(candidate for candidate in candidates if candidate not in taken)
