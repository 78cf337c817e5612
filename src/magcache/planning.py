"""Which steps to compute: pure functions of ratios and settings (paper Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Plan", "greedy_plan", "retained_steps"]


@dataclass(frozen=True)
class Plan:
    """Which steps of one stream are computed, and what the rule saw at each of them.

    All three tuples have one entry a step. On retained steps, which the rule never judges,
    `ratios` and `errors` are 1 and 0. Printed, a plan is a row of `C` (computed) and `.` (skipped).
    """

    computed: tuple[bool, ...]
    ratios: tuple[float, ...]
    errors: tuple[float, ...]

    @cached_property
    def sources(self) -> tuple[int | None, ...]:
        """For each step the last one before it that is computed, or None."""
        last: int | None = None
        sources: list[int | None] = []
        for step, computed in enumerate(self.computed):
            sources.append(last)
            last = step if computed else last
        return tuple(sources)

    @property
    def steps(self) -> int:
        return len(self.computed)

    @property
    def computed_steps(self) -> int:
        return sum(self.computed)

    @property
    def skipped_steps(self) -> int:
        return self.steps - self.computed_steps

    @property
    def speedup(self) -> float:
        """Upper bound of the speed-up: steps over computed steps, as if a skip cost nothing."""
        return self.steps / self.computed_steps if self.computed_steps else 1.0

    def __str__(self) -> str:
        return "".join("C" if computed else "." for computed in self.computed)


def retained_steps(retention_ratio: float, steps: int) -> int:
    """Number of first steps that are always computed."""
    return math.floor(retention_ratio * steps + 0.5)


def greedy_plan(
    ratios: Sequence[float],
    steps: int,
    *,
    threshold: float,
    max_skip_steps: int,
    retention_ratio: float,
    breaks: Collection[int] = (),
) -> Plan:
    """Skip while the accumulated error stays under the threshold (paper Alg. 1).

    `ratios[i]` is the mean over tokens of |residual_i| / |residual_(i-1)|; past its end a ratio
    counts as 1. `breaks` are steps at which no residual is at hand although one was computed
    before (another expert took over, say): they are computed, and the rule starts anew there.
    """
    retained = retained_steps(retention_ratio, steps)
    accumulated_ratio, error, run = 1.0, 0.0, 0
    has_residual = False
    computed: list[bool] = []
    seen_ratios: list[float] = []
    errors: list[float] = []
    for step in range(steps):
        seen_ratio, seen_error, skip = 1.0, 0.0, False
        has_residual = has_residual and step not in breaks
        if step >= retained:
            accumulated_ratio *= ratios[step] if step < len(ratios) else 1.0
            run += 1
            error += abs(1.0 - accumulated_ratio)
            seen_ratio, seen_error = accumulated_ratio, error
            # A threshold of 0 never skips, not even where every ratio is exactly 1.
            skip = has_residual and threshold > 0 and error <= threshold and run <= max_skip_steps
            if not skip:
                accumulated_ratio, error, run = 1.0, 0.0, 0
        has_residual = True
        computed.append(not skip)
        seen_ratios.append(seen_ratio)
        errors.append(seen_error)
    return Plan(tuple(computed), tuple(seen_ratios), tuple(errors))
