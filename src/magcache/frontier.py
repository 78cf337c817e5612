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

__all__ = ["Frontier", "frontier", "pieced"]

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
    wanted: range | None = None,
    enough: float = 0.0,
) -> Frontier:
    """The best plan for every number of computed steps, or for those that are `wanted`.

    If none of those can be, then for the nearest one above.

    weights: how far an error of each step's residual moves the final sample, [steps].
    first, last: so many steps at either end are always computed. breaks: steps at which no residual
    is at hand although one was computed before; they are computed. enough: no number above
    the first wanted one with so small a predicted error is looked at, which saves time.
    """
    steps = len(weights)
    wanted = range(1, steps + 1) if wanted is None else wanted
    forced = np.zeros(steps, dtype=bool)
    forced[:first] = True
    forced[steps - last :] = True

    def errors(held: Steps, step: Steps) -> Array:
        error = reuse.errors(held, step) * weights[step] ** 2
        return np.where(forced[step], np.inf, error)

    starts = sorted({0, *(b for b in breaks if 0 < b < steps)})
    goal = enough**2 if len(starts) == 1 else 0.0
    parts = [
        _Paths(errors, begin, end, max_skip_steps + 1, reuse.most, wanted, goal)
        for begin, end in zip(starts, [*starts[1:], steps], strict=True)
    ]
    costs, split = _joined(parts)
    counts = tuple(sorted(costs.keys() & set(wanted)) or sorted(costs)[-1:])

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


def pieced(pieces: Sequence[Frontier]) -> Frontier:
    """One frontier of several of the same run, each of which knows about other counts."""
    errors = {n: e for piece in pieces for n, e in zip(piece.counts, piece.errors, strict=True)}
    owner = {count: piece for piece in pieces for count in piece.counts}
    counts = tuple(sorted(owner))
    return Frontier(
        pieces[0].steps,
        counts,
        tuple(errors[count] for count in counts),
        lambda count: owner[count]._mask(count),
        lambda mask: owner.get(sum(mask), pieces[-1])._step_errors(mask),
    )


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
    [d3, d2, j]: step j is the newest computed one, the one before it is d2 steps back, and the one
    before that d3 further; 0 means that there is none.
    """

    def __init__(
        self,
        errors: Errors,
        begin: int,
        end: int,
        gap: int,
        most: int,
        looked_at: range,
        enough: float,
    ) -> None:
        self.size = end - begin
        gap = min(gap, self.size)
        self._gaps = _gap_costs(errors, begin, self.size, gap, min(most, 3))
        # What the steps after j cost if they are all skipped, for the last places of j.
        tail = np.arange(1, gap + 1)
        self._tail_costs = self._gaps[:, tail, :, self.size - tail].transpose(1, 2, 0)
        value = np.full((gap + 1, gap + 1, self.size), np.inf)
        value[0, 0, 0] = 0.0
        self._values = [value]
        self._sums = np.empty_like(self._gaps)
        self.costs: dict[int, float] = {}
        self._ends: dict[int, tuple[int, int, int]] = {}
        for count in range(1, self.size + 1):
            self._end(count)
            reached = count in looked_at and self.costs.get(count, math.inf) <= enough
            if self.costs and (reached or count >= looked_at.stop - 1):
                break
            self._values.append(self._advanced(self._values[-1]))

    def mask(self, count: int) -> Mask:
        """The best plan with so many computed steps."""
        back, older, newest = self._ends[count]
        mask = [False] * self.size
        mask[newest] = True
        for value in reversed(self._values[: count - 1]):
            newest -= back
            mask[newest] = True
            costs = value[:, older, newest] + self._gaps[:, back, older, newest]
            back, older = older, int(costs.argmin())
        return tuple(mask)

    def _advanced(self, value: Array) -> Array:
        """Least costs with one more computed step: the oldest step in sight falls out of it."""
        # [g, d2, j]: g steps on from j, whatever d3 was. Least over the first axis: whole rows.
        costs = np.add(value[:, None], self._gaps, out=self._sums).min(0)
        after = np.full(value.shape, np.inf)
        for g in range(1, len(costs)):
            after[:, g, g:] = costs[g, :, : self.size - g]
        return after

    def _end(self, count: int) -> None:
        """Note the best way to end with so many: the steps after the newest one are skipped."""
        gap = self._tail_costs.shape[-1]
        total = self._values[-1][:, :, : -gap - 1 : -1] + self._tail_costs
        older, back, after = np.unravel_index(int(total.argmin()), total.shape)
        cost = float(total[older, back, after])
        if cost < math.inf:
            self.costs[count] = cost
            self._ends[count] = (int(back), int(older), self.size - 1 - int(after))


def _gap_costs(errors: Errors, begin: int, size: int, gap: int, history: int) -> Array:
    """costs[d3, g, d2, j]: summed errors of the steps j+1 .. j+g-1, skipped after step j.

    Errors are told from the newest `history` residuals there are, 1 to 3.
    """
    older, back, newest = np.indices((gap + 1, gap + 1, size)).reshape(3, -1)
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
        summed[:] = summed[:, :1]
    if history < 2:
        summed[:] = summed[:, :, :1]
    return np.ascontiguousarray(summed.transpose(1, 0, 2, 3))
