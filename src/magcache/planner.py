"""The plan of each run: by the greedy rule, or the best one for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from magcache.budget import Budget
from magcache.clock import Timeline
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.frontier import Frontier, frontier, pieced
from magcache.planning import Plan, greedy_plan
from magcache.reuse import Reuse, damping_for

__all__ = ["Planner", "RunPath", "Schedule"]

Array = npt.NDArray[np.float64]

# Runs of as many different lengths and schedules are remembered.
_REMEMBERED = 16

# Guidance multiplies what the passes do not share. Measured: the final sample's error grows with
# its power 2/3 (1, 3 and 7 tried), and is about the predicted one at this guidance.
_MEASURED_GUIDANCE = 3.0


@dataclass(frozen=True)
class Schedule:
    """A stream's plan for a run, and how its skipped steps reuse residuals."""

    plan: Plan
    reuse: Reuse
    _known: dict[tuple[tuple[int, ...], int], tuple[float, ...]] = field(
        default_factory=dict, repr=False
    )

    def coefficients(self, held: tuple[int, ...], step: int) -> tuple[float, ...]:
        """With which numbers the residuals of the steps `held` make that of `step`."""
        if (held, step) not in self._known:
            self._known[held, step] = self.reuse.coefficients(held, step)
        return self._known[held, step]

    def tightened(self, after: int) -> Schedule:
        """The same up to step `after`; from there on, no two steps in a row are skipped."""
        computed = list(self.plan.computed)
        for step in range(after + 1, len(computed)):
            computed[step] = computed[step] or not computed[step - 1]
        return replace(self, plan=replace(self.plan, computed=tuple(computed)))

    def computing(self, steps: set[int]) -> Schedule:
        """The same, but for some steps that are computed."""
        computed = tuple(c or i in steps for i, c in enumerate(self.plan.computed))
        return replace(self, plan=replace(self.plan, computed=computed))


class Planner:
    """Plans the runs of one transformer, and remembers the plans.

    Under guidance the streams are decided together, or apart by `config.streams`. Together means
    one plan for all: the first stream's for the greedy rule, and that with the least error summed
    over the streams for a budget.
    """

    def __init__(self, config: MagCacheConfig, curve: MagnitudeCurve) -> None:
        self.config = config
        self.curve = curve
        self._known: dict[tuple[object, ...], Schedule] = {}

    def schedule(
        self, timeline: Timeline, stream: str, order: int, start: int, breaks: set[int]
    ) -> Schedule:
        """The schedule of a stream.

        start: the first step at which the transformer is called in this run. breaks: steps at which
        the stream had no residual to reuse; they are computed.
        """
        if self.config.streams == "joint":
            stream, order = next(iter(self.curve.streams)), 0
        key = (timeline, stream, order, start, frozenset(breaks))
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            make = self._greedy if self.config.budget is None else self._planned
            self._known[key] = make(timeline, stream, order, start, breaks)
        return self._known[key]

    def _greedy(
        self, timeline: Timeline, stream: str, order: int, start: int, breaks: set[int]
    ) -> Schedule:
        places = self._places(timeline, stream)
        plan = greedy_plan(
            self.curve.stream(stream, order).at(places),
            timeline.steps,
            threshold=self.config.threshold,
            max_skip_steps=self.config.max_skip_steps,
            retention_ratio=self.config.retention_ratio,
            breaks=breaks | ({start} if start else set()),
        )
        return Schedule(plan, Reuse("as_is", np.zeros((0, 0)), np.asarray(places), 1))

    def _planned(
        self, timeline: Timeline, stream: str, order: int, start: int, breaks: set[int]
    ) -> Schedule:
        assert self.config.budget is not None
        joint = self.config.streams == "joint"
        places = np.asarray(self._places(timeline, stream))
        names = list(self.curve.streams) if joint else [stream]
        known = _known_steps(self.curve, names, places, start)
        path = RunPath(self.curve, self.config.budget, timeline, places, known, names, order)
        part = self.config.budget.choose(path.frontier())
        begin, end = known.start, known.stop
        plan = Plan(
            (True,) * begin + part.computed + (True,) * (timeline.steps - end),
            (1.0,) * timeline.steps,
            (0.0,) * begin + part.errors + (0.0,) * (timeline.steps - end),
        )
        return Schedule(plan, path.reuse(part.computed_steps)).computing(breaks)

    def _places(self, timeline: Timeline, stream: str) -> tuple[float, ...]:
        if self.curve.axis == "fraction":
            return timeline.fractions
        return timeline.levels or self.curve.places(timeline.steps, stream)

    def own_reuse(self, timeline: Timeline, stream: str, order: int) -> Reuse:
        """What is known of reusing this stream's residuals alone."""
        budget = self.config.budget
        assert budget is not None
        places = np.asarray(self._places(timeline, stream))
        path = self.curve.stream(stream, order).path_at(places)
        return Reuse(budget.reuse, path @ path.T, places, budget.max_residuals)


class RunPath:
    """A run's residuals, as the curve knows them: which plans there are, and how they reuse."""

    def __init__(
        self,
        curve: MagnitudeCurve,
        budget: Budget,
        timeline: Timeline,
        places: Array,
        known: slice,
        names: Sequence[str],
        order: int = 0,
    ) -> None:
        """places: of every step, on the curve's axis. known: the steps that may be skipped.

        names: streams whose errors are summed.
        """
        streams = [curve.stream(name, order) for name in names]
        path = np.concatenate([stream.path_at(places) for stream in streams], axis=1)
        path /= np.sqrt(len(streams))
        scale = np.mean([stream.scale_at(places) for stream in streams], axis=0)
        self.budget = budget
        self.guidance = timeline.guidance
        self.known = known
        self.places = places
        self.inner = path @ path.T
        self.weights = np.asarray(timeline.strides) / np.maximum(scale, 1e-30)
        if self.guidance is not None:
            self.weights *= (max(1.0, self.guidance) / _MEASURED_GUIDANCE) ** (2 / 3)

    def frontier(self) -> Frontier:
        """The best plans of the steps that may be skipped, as far as the budget asks for them."""
        steps = len(self.places[self.known])
        wanted = self.budget.computed_steps(steps)
        fewest = -(-steps // (self.budget.max_skip_steps + 1))
        counts = range(fewest, steps + 1) if wanted is None else [max(fewest, wanted)]
        pieces: list[Frontier] = []
        for damping, alike in groupby(counts, self._damping):
            pieces.append(self._frontier(list(alike), damping))
            if pieces[-1].errors[-1] <= self.budget.most_error:
                break
        return pieced(pieces)

    def reuse(self, computed: int) -> Reuse:
        """How the whole run's skipped steps reuse, if so many of the known ones are computed."""
        return self._reuse(slice(None), self._damping(computed))

    def _reuse(self, part: slice, damping: float) -> Reuse:
        budget, inner = self.budget, self.inner[part, part]
        return Reuse(budget.reuse, inner, self.places[part], budget.max_residuals, damping)

    def _frontier(self, counts: Sequence[int], damping: float) -> Frontier:
        return frontier(
            self._reuse(self.known, damping),
            self.weights[self.known],
            max_skip_steps=self.budget.max_skip_steps,
            first=self.budget.first_steps,
            last=self.budget.last_steps,
            wanted=range(counts[0], counts[-1] + 1),
            enough=self.budget.most_error,
        )

    def _damping(self, computed: int) -> float:
        places = self.places[self.known]
        steps = max(1, len(places) - 1)
        covered = abs(float(places[0] - places[-1])) * len(places) / steps
        return damping_for(covered / max(1, computed), self.guidance)


def _known_steps(curve: MagnitudeCurve, names: list[str], places: Array, start: int) -> slice:
    """The steps from `start` on that lie where the curve was measured, half a step beyond allowed.

    An expert's curve covers its part of the noise scale only.
    """
    measured = np.concatenate([curve.stream(name).places for name in names])
    slack = np.abs(np.diff(np.unique(measured))).max(initial=0.0)
    inside = (places >= measured.min() - slack) & (places <= measured.max() + slack)
    inside[:start] = False
    steps = np.flatnonzero(inside)
    return slice(int(steps[0]), int(steps[-1]) + 1) if len(steps) else slice(start, start + 1)
