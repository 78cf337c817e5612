"""Plans for a budget, against every plan there is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reuse import path_of, reuse_of

from magcache import Budget, ConfigError, Frontier
from magcache.frontier import frontier, pieced
from magcache.reuse import RULES, Reuse

Mask = tuple[bool, ...]


def cost_of(mask: Mask, reuse: Reuse, weights: np.ndarray, breaks: tuple[int, ...] = ()) -> float:
    """Summed squared errors of a mask, step by step."""
    held: list[int] = []
    cost = 0.0
    for step, computed in enumerate(mask):
        if step in breaks:
            held = []
        if computed:
            held = [*held, step][-reuse.most :]
        else:
            cost += float(reuse.errors(np.array([held]), np.array([step]))[0] * weights[step] ** 2)
    return cost


def longest_skip(mask: Mask) -> int:
    return max((len(list(g)) for skipped, g in itertools.groupby(mask) if not skipped), default=0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Reuse, np.ndarray, dict[str, int]]:
    steps = draw(st.integers(1, 9))
    path = path_of(draw(st.integers(0, 1000)), steps)
    reuse = reuse_of(path, draw(st.sampled_from(sorted(RULES))), draw(st.integers(1, 3)))
    weights = np.random.default_rng(steps).random(steps) + 0.1
    limits = {
        "max_skip_steps": draw(st.integers(0, 4)),
        "first": draw(st.integers(1, 3)),
        "last": draw(st.integers(0, 2)),
    }
    return reuse, weights, limits


@settings(deadline=None, max_examples=60)
@given(problems(), st.sets(st.integers(1, 8), max_size=2))
def test_every_plan_is_the_best_of_all(
    problem: tuple[Reuse, np.ndarray, dict[str, int]], breaks: set[int]
) -> None:
    reuse, weights, limits = problem
    steps = len(weights)
    own_breaks = tuple(b for b in breaks if b < steps)
    best: dict[int, float] = {}
    for mask in itertools.product([False, True], repeat=steps):
        fixed = [*range(limits["first"]), *range(steps - limits["last"], steps), *own_breaks]
        allowed = all(mask[i] for i in fixed if 0 <= i < steps)
        if allowed and longest_skip(mask) <= limits["max_skip_steps"]:
            cost = cost_of(mask, reuse, weights, own_breaks)
            best[sum(mask)] = min(cost, best.get(sum(mask), math.inf))
    found = frontier(reuse, weights, breaks=own_breaks, **limits)
    assert found.counts == tuple(sorted(best))
    for count, error in zip(found.counts, found.errors, strict=True):
        assert error == pytest.approx(math.sqrt(best[count]), rel=1e-6, abs=1e-9)
        plan = found.plan(count)
        assert plan.computed_steps == count
        assert cost_of(plan.computed, reuse, weights, own_breaks) == pytest.approx(
            best[count], rel=1e-6, abs=1e-9
        )
        assert math.hypot(*plan.errors) == pytest.approx(error, rel=1e-6, abs=1e-9)


def smooth_frontier(steps: int = 20, wanted: range | None = None) -> Frontier:
    reuse = reuse_of(path_of(3, steps), "fitted")
    return frontier(reuse, np.full(steps, 1 / steps), max_skip_steps=4, wanted=wanted)


def test_more_computed_steps_are_never_worse_on_a_smooth_path() -> None:
    found = smooth_frontier()
    assert list(found.errors) == sorted(found.errors, reverse=True)
    assert found.errors[-1] == 0
    assert found.points[-1] == (1.0, 0.0)


def test_looking_at_fewer_plans_gives_the_same_ones() -> None:
    every, some = smooth_frontier(), smooth_frontier(wanted=range(6, 10))
    assert some.counts == (6, 7, 8, 9)
    assert [some.plan(c) for c in some.counts] == [every.plan(c) for c in some.counts]


def test_numbers_that_cannot_be_give_the_nearest_above() -> None:
    assert smooth_frontier(wanted=range(1, 3)).counts == (4,)
    reuse = reuse_of(path_of(3, 20), "fitted")
    kept = frontier(reuse, np.ones(20), max_skip_steps=4, first=8, wanted=range(3, 4))
    assert kept.counts == (10,)
    assert str(kept.plan(3)).startswith("C" * 8)


def test_no_more_plans_than_needed_are_looked_at() -> None:
    every = smooth_frontier()
    goal = every.errors[every.counts.index(9)]
    reuse = reuse_of(path_of(3, 20), "fitted")
    some = frontier(reuse, np.full(20, 1 / 20), max_skip_steps=4, enough=goal * 1.0001)
    assert some.counts == every.counts[: every.counts.index(9) + 1]
    assert some.within(goal * 1.0001) == every.within(goal * 1.0001)


def test_pieces_make_one_frontier() -> None:
    calm = smooth_frontier(wanted=range(10, 21))
    lively = frontier(
        replace(reuse_of(path_of(3, 20), "fitted"), damping=1.0),
        np.full(20, 1 / 20),
        max_skip_steps=4,
        wanted=range(4, 10),
    )
    both = pieced([lively, calm])
    assert both.counts == tuple(range(4, 21))
    assert both.errors == lively.errors + calm.errors
    for count in both.counts:
        of = calm if count >= 10 else lively
        assert both.plan(count) == of.plan(count)
        assert both.error_of(of.plan(count).computed) == pytest.approx(
            of.errors[of.counts.index(count)]
        )


def test_any_plan_has_a_predicted_error() -> None:
    found = smooth_frontier()
    for count, error in zip(found.counts, found.errors, strict=True):
        assert found.error_of(found.plan(count).computed) == pytest.approx(error)
    uniform = [step % 2 == 0 for step in range(20)]
    assert found.error_of(uniform) >= found.errors[found.counts.index(10)]
    for wrong in ([True] * 19, [False] + [True] * 19, []):
        with pytest.raises(ConfigError, match="expected 20 steps"):
            found.error_of(wrong)


def test_within_takes_the_fewest_steps_that_do() -> None:
    found = smooth_frontier()
    for count, error in zip(found.counts, found.errors, strict=True):
        assert found.within(error).computed_steps <= count
        plan = found.within(error * 0.999)
        assert math.hypot(*plan.errors) <= error
    assert found.within(0.0).computed_steps == 20
    assert found.within(math.inf).computed_steps == min(found.counts)


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({}, "none of them"),
        ({"speedup": 2.0, "quality": "fast"}, "speedup and quality"),
        ({"speedup": 0.5}, "speedup"),
        ({"speedup": math.nan}, "speedup"),
        ({"speedup": True}, "speedup"),
        ({"max_error": -1.0}, "max_error"),
        ({"quality": "best"}, "high, balanced, fast"),
        ({"speedup": 2.0, "max_residuals": 4}, "max_residuals"),
        ({"speedup": 2.0, "max_residuals": 0}, "max_residuals"),
        ({"speedup": 2.0, "first_steps": 0}, "first_steps"),
        ({"speedup": 2.0, "max_skip_steps": -1}, "max_skip_steps"),
        ({"speedup": 2.0, "max_skip_steps": 1.5}, "max_skip_steps"),
        ({"speedup": 2.0, "reuse": "magic"}, "reuse"),
    ],
)
def test_a_budget_refuses_nonsense(given_: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Budget(**given_)  # type: ignore[arg-type]


def test_a_budget_from_a_mapping_refuses_unknown_keys() -> None:
    assert Budget.from_dict({"speedup": 2.0}) == Budget(speedup=2.0)
    with pytest.raises(ConfigError, match="speed_up"):
        Budget.from_dict({"speed_up": 2.0})


@given(st.integers(1, 60), st.floats(1, 8))
def test_the_speedup_is_reached_where_it_can_be(steps: int, speedup: float) -> None:
    computed = Budget(speedup=speedup).computed_steps(steps)
    assert computed is not None
    assert steps / computed >= speedup - 1e-6 or computed == 1
