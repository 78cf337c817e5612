"""The best plan for every number of computed steps, found exactly, by shortest path.

A state is the last computed step and how far back the ones before it are; going on to the next
computed step costs the errors of the steps that are skipped in between. Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from magcache.errors import ConfigError
from magcache.planning import Plan
from magcache.reuse import Reuse

__all__ = ["Frontier", "frontier"]

Array = npt.NDArray[np.float64]
Steps = npt.NDArray[np.intp]
Errors = Callable[[Steps, Steps], Array]
Mask = tuple[bool, ...]


@dataclass(frozen=True)
class Frontier:
    """Best plans of one run, for each number of computed steps there can be (`counts`).

    `errors` are their predicted errors: the root of the summed squares of the skipped steps'
    errors, each times its step's weight; about the root mean square error of the final sample.
    """

    steps: int
    counts: tuple[int, ...]
    errors: tuple[float, ...]
    _mask: Callable[[int], Mask] = field(repr=False)
    _step_errors: Callable[[Mask], tuple[float, ...]] = field(repr=False)

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(bound of the speed-up, predicted error) of every plan, fastest first."""
        speedups = (self.steps / count for count in self.counts)
        return tuple(zip(speedups, self.errors, strict=True))

    def plan(self, computed: int) -> Plan:
        """The best plan with so many computed steps, or with the nearest number there can be."""
        count = min(self.counts, key=lambda known: abs(known - computed))
        mask = self._mask(count)
        return Plan(mask, (1.0,) * self.steps, self._step_errors(mask))

    def error_of(self, computed: Sequence[bool]) -> float:
        """Predicted error of any plan: one boolean a step, True where it is computed."""
        if len(computed) != self.steps or not any(computed[:1]):
            raise ConfigError(
                f"found a plan of {len(computed)} steps, its first one "
                f"{'computed' if any(computed[:1]) else 'not computed'}; expected {self.steps} "
                "steps, the first one computed"
            )
        return math.hypot(*self._step_errors(tuple(computed)))

    def within(self, max_error: float) -> Plan:
        """The plan with the fewest computed steps whose predicted error is no more than this."""
        pairs = zip(self.counts, self.errors, strict=True)
        return self.plan(next((c for c, error in pairs if error <= max_error), self.steps))


def frontier(
    reuse: Reuse,
    weights: Array,
    *,
    max_skip_steps: int,
    first: int = 1,
    last: int = 0,
    breaks: Collection[int] = (),
    up_to: int | None = None,
) -> Frontier:
    """The best plan for every number of computed steps.

    weights: how far an error of each step's residual moves the final sample, [steps].
    first, last: so many steps at either end are always computed. breaks: steps at which no residual
    is at hand although one was computed before; they are computed. up_to: no number of computed
    steps above this is looked at, which saves time.
    """
    steps = len(weights)
    most_computed = steps if up_to is None else max(up_to, -(-steps // (max_skip_steps + 1)))
    forced = np.zeros(steps, dtype=bool)
    forced[:first] = True
    forced[steps - last :] = True

    def errors(held: Steps, step: Steps) -> Array:
        error = reuse.errors(held, step) * weights[step] ** 2
        return np.where(forced[step], np.inf, error)

    starts = sorted({0, *(b for b in breaks if 0 < b < steps)})
    parts = [
        _Paths(errors, begin, end, min(max_skip_steps + 1, end - begin), reuse.most, most_computed)
        for begin, end in zip(starts, [*starts[1:], steps], strict=True)
    ]
    costs, split = _joined(parts)
    counts = tuple(sorted(costs))

    def mask(count: int) -> Mask:
        shares = zip(parts, split[count], strict=True)
        return tuple(computed for part, share in shares for computed in part.mask(share))

    def step_errors(mask: Mask) -> tuple[float, ...]:
        found = np.zeros(steps)
        held: list[int] = []
        cases: dict[int, list[tuple[int, list[int]]]] = {}
        for step, computed in enumerate(mask):
            held = [] if step in starts else held
            if computed:
                held = [*held, step][-reuse.most :]
            else:
                cases.setdefault(len(held), []).append((step, held))
        for alike in cases.values():
            skipped, at = zip(*alike, strict=True)
            found[list(skipped)] = errors(np.array(at), np.array(skipped))
        return tuple(np.sqrt(found).tolist())

    roots = tuple(math.sqrt(costs[count]) for count in counts)
    return Frontier(steps, counts, roots, mask, step_errors)


def _joined(parts: list[_Paths]) -> tuple[dict[int, float], dict[int, tuple[int, ...]]]:
    """Least cost by number of computed steps in all parts, and each part's share of them."""
    costs: dict[int, float] = {0: 0.0}
    split: dict[int, tuple[int, ...]] = {0: ()}
    for part in parts:
        longer: dict[int, float] = {}
        shares: dict[int, tuple[int, ...]] = {}
        for count, cost in costs.items():
            for more, own in part.costs.items():
                if cost + own < longer.get(count + more, math.inf):
                    longer[count + more] = cost + own
                    shares[count + more] = (*split[count], more)
        costs, split = longer, shares
    return costs, split


class _Paths:
    """Shortest paths through the steps from `begin` to `end`, by number of computed steps.

    `gap` is the longest way from one computed step to the next. Arrays over states have the shape
    [d2, d3, j]: step j is the newest computed one, the one before it is d2 steps back, and the one
    before that d3 further; 0 means that there is none.
    """

    def __init__(
        self, errors: Errors, begin: int, end: int, gap: int, most: int, most_computed: int
    ) -> None:
        self.size = end - begin
        self._gaps = _gap_costs(errors, begin, self.size, gap, min(most, 3))
        value = np.full(self._gaps.shape[1:], np.inf)
        value[0, 0, 0] = 0.0
        self._values = [value]
        self.costs: dict[int, float] = {}
        self._ends: dict[int, tuple[int, int, int]] = {}
        for count in range(1, min(self.size, most_computed) + 1):
            self._end(count)
            self._values.append(self._advanced(self._values[-1]))

    def mask(self, count: int) -> Mask:
        """The best plan with so many computed steps."""
        back, older, newest = self._ends[count]
        mask = [False] * self.size
        mask[newest] = True
        for value in reversed(self._values[: count - 1]):
            newest -= back
            mask[newest] = True
            costs = value[older, :, newest] + self._gaps[back, older, :, newest]
            back, older = older, int(costs.argmin())
        return tuple(mask)

    def _advanced(self, value: Array) -> Array:
        """Least costs with one more computed step: the oldest step in sight falls out of it."""
        # [g, d2, j]: g steps on from j, whatever d3 was.
        costs = (value + self._gaps).min(2)
        after = np.full(value.shape, np.inf)
        for g in range(1, len(costs)):
            after[g, :, g:] = costs[g, :, : self.size - g]
        return after

    def _end(self, count: int) -> None:
        """Note the best way to end with so many: the steps after the newest one are skipped."""
        value = self._values[-1]
        for g in range(1, len(self._gaps)):
            total = value[:, :, self.size - g] + self._gaps[g, :, :, self.size - g]
            back, older = np.unravel_index(int(total.argmin()), total.shape)
            cost = float(total[back, older])
            if cost < self.costs.get(count, math.inf):
                self.costs[count] = cost
                self._ends[count] = (int(back), int(older), self.size - g)


def _gap_costs(errors: Errors, begin: int, size: int, gap: int, history: int) -> Array:
    """costs[g, d2, d3, j]: summed errors of the steps j+1 .. j+g-1, skipped after step j.

    Errors are told from the newest `history` residuals there are, 1 to 3.
    """
    back, older, newest = np.indices((gap + 1, gap + 1, size)).reshape(3, -1)
    ages = np.stack([np.zeros_like(back), back, back + older])
    reachable = ages[2] <= newest
    held_count = np.minimum(1 + (back > 0) + ((back > 0) & (older > 0)), history)
    # Where the rule does not look so far back, one case stands for all.
    seen = reachable & ((held_count > 2) | (older == 0)) & ((held_count > 1) | (back == 0))
    costs = np.zeros((gap + 1, len(newest)))
    ahead = np.arange(2, gap + 1)[:, None] - 1
    fits = seen & (newest + ahead < size)
    for count in range(1, history + 1):
        which_gap, which = np.nonzero(fits & (held_count == count))
        held = (newest - ages[:count])[::-1, which].T
        costs[2 + which_gap, which] = errors(begin + held, begin + newest[which] + 1 + which_gap)
    summed: Array = costs.cumsum(0).reshape(gap + 1, gap + 1, gap + 1, size)
    if history < 3:
        summed[:] = summed[:, :, :1]
    if history < 2:
        summed[:] = summed[:, :1]
    return summed
