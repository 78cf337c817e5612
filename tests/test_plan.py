"""The greedy rule, against its plainest form and by its properties."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import magcache
from magcache import ConfigError, CurveError, MagCacheConfig, MagnitudeCurve, Plan
from magcache.planning import greedy_plan, retained_steps

TABLES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "mag_ratios.json").read_text(encoding="utf-8")
)
FLUX = TABLES["upstream/flux-dev"]["ratios"]
SETTINGS = [
    (0.06, 3, 0.2),
    (0.12, 4, 0.2),
    (0.24, 5, 0.1),
    (0.02, 1, 0.0),
    (1.0, 100, 0.5),
    (0.12, 0, 0.2),
    (0.0, 3, 0.2),
    (0.06, 3, 1.0),
]


def plain_rule(
    ratios: list[float], steps: int, threshold: float, most: int, retention: float
) -> str:
    """SPEC section 2, sentence by sentence."""
    retained = math.floor(retention * steps + 0.5)
    residual, ratio, error, run, row = False, 1.0, 0.0, 0, ""
    for i in range(steps):
        if i < retained:
            residual, row = True, row + "C"
            continue
        ratio *= ratios[i] if i < len(ratios) else 1
        run += 1
        error += abs(1 - ratio)
        if residual and error <= threshold and run <= most and threshold != 0:
            row += "."
        else:
            residual, ratio, error, run, row = True, 1.0, 0.0, 0, row + "C"
    return row


def row(ratios: list[float], steps: int, threshold: float, most: int, retention: float) -> str:
    plan = greedy_plan(
        ratios, steps, threshold=threshold, max_skip_steps=most, retention_ratio=retention
    )
    return str(plan)


def streams(table: dict[str, Any]) -> list[list[float]]:
    ratios = table["ratios"]
    return [ratios] if table["layout"] == "single" else [ratios[0::2], ratios[1::2]]


def test_there_are_115_tables_in_both_layouts() -> None:
    assert len(TABLES) == 115
    assert sum(len(streams(t)) for t in TABLES.values()) == 170


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_greedy_plan_is_the_plain_rule_on_every_table(setting: tuple[float, int, float]) -> None:
    seen = set()
    for name, table in TABLES.items():
        for ratios in streams(table):
            for steps in (len(ratios), len(ratios) + 5, 7):
                wanted = plain_rule(ratios, steps, *setting)
                assert row(ratios, steps, *setting) == wanted, (name, steps)
                seen.add(wanted)
    assert len(seen) >= (3 if 0 in setting[:2] or setting[2] == 1 else 10)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_public_plan_splits_interleaved_tables(setting: tuple[float, int, float]) -> None:
    config = MagCacheConfig(*setting)
    for table in TABLES.values():
        curve = MagnitudeCurve.from_ratios(table["ratios"], layout=table["layout"])
        for name, ratios in zip(curve.streams, streams(table), strict=True):
            plan = magcache.plan(curve, config, steps=len(ratios), stream=name)
            assert str(plan) == plain_rule(ratios, len(ratios), *setting)


@pytest.mark.parametrize(
    ("setting", "skipped"), [((0.06, 3, 0.2), 14), ((0.12, 4, 0.2), 16), ((0.24, 5, 0.1), 20)]
)
def test_reference_figures_of_flux(setting: tuple[float, int, float], skipped: int) -> None:
    plan = magcache.plan(FLUX, MagCacheConfig(*setting))
    assert plan.skipped_steps == str(plan).count(".") == skipped
    assert plan.computed_steps == 28 - skipped
    assert plan.speedup == pytest.approx(28 / (28 - skipped))


def test_default_settings_are_the_mild_ones() -> None:
    assert str(magcache.plan(FLUX)) == plain_rule(FLUX, 28, 0.06, 3, 0.2)


@pytest.mark.parametrize(
    ("ratio", "steps", "retained"),
    [(0.2, 28, 6), (0.1, 28, 3), (0.5, 1, 1), (0.49, 1, 0), (0, 9, 0), (1, 9, 9), (0.25, 10, 3)],
)
def test_retained_steps_round_half_up(ratio: float, steps: int, retained: int) -> None:
    assert retained_steps(ratio, steps) == retained


def test_accumulation_by_hand() -> None:
    plan = greedy_plan(
        [1, 0.9, 0.9, 1.0, 1.2], 5, threshold=0.3, max_skip_steps=9, retention_ratio=0.2
    )
    # 1: error .1; 2: ratio .81, error .29; 3: ratio .81, error .48 > .3; 4: 1.2, error .2.
    assert str(plan) == "C..C."
    assert plan.ratios == pytest.approx((1, 0.9, 0.81, 0.81, 1.2))
    assert plan.errors == pytest.approx((0, 0.1, 0.29, 0.48, 0.2))


def test_an_error_equal_to_the_threshold_is_skipped() -> None:
    assert row([1, 1.5], 2, 0.5, 1, 0) == "C."
    assert row([1, 1.5], 2, 0.4999, 1, 0) == "CC"


def test_past_the_end_a_ratio_counts_as_one() -> None:
    assert row([1.0, 1.0], 6, 0.01, 9, 0) == "C....."
    assert row([], 3, 0.01, 9, 0) == "C.."


def test_speedup_of_an_empty_plan_is_none() -> None:
    assert Plan((), (), ()).speedup == 1


ratio_lists = st.lists(st.floats(0.3, 3), min_size=1, max_size=60)
settings = st.fixed_dictionaries(
    {
        "threshold": st.floats(0, 2),
        "max_skip_steps": st.integers(0, 8),
        "retention_ratio": st.floats(0, 1),
    }
)
step_counts = st.integers(1, 70)


@given(ratio_lists, step_counts, settings)
def test_equals_the_plain_rule(ratios: list[float], steps: int, setting: dict[str, Any]) -> None:
    plan = greedy_plan(ratios, steps, **setting)
    by_position = (setting[k] for k in ("threshold", "max_skip_steps", "retention_ratio"))
    assert str(plan) == plain_rule(ratios, steps, *by_position)


@given(ratio_lists, step_counts, settings)
def test_first_and_retained_steps_are_computed_and_runs_are_short(
    ratios: list[float], steps: int, setting: dict[str, Any]
) -> None:
    plan = greedy_plan(ratios, steps, **setting)
    assert plan.steps == len(plan.ratios) == len(plan.errors) == steps
    assert plan.computed[0]
    retained = retained_steps(setting["retention_ratio"], steps)
    assert all(plan.computed[:retained])
    assert set(plan.errors[:retained]) <= {0.0}
    assert max(map(len, str(plan).split("C"))) <= setting["max_skip_steps"]
    for computed, error in zip(plan.computed, plan.errors, strict=True):
        assert computed or error <= setting["threshold"]
    assert plan.computed_steps + plan.skipped_steps == steps
    assert 1 <= plan.speedup <= setting["max_skip_steps"] + 1


@given(ratio_lists, step_counts, settings)
def test_threshold_zero_never_skips(
    ratios: list[float], steps: int, setting: dict[str, Any]
) -> None:
    for values in (ratios, [1.0] * steps):
        assert all(greedy_plan(values, steps, **{**setting, "threshold": 0}).computed)


@given(ratio_lists, step_counts, settings, st.integers(0, 69), st.floats(0.3, 3))
def test_a_decision_knows_nothing_of_later_ratios(
    ratios: list[float], steps: int, setting: dict[str, Any], at: int, other: float
) -> None:
    changed = [*ratios[:at], *(other for _ in ratios[at:])]
    first, second = (greedy_plan(values, steps, **setting) for values in (ratios, changed))
    assert first.computed[:at] == second.computed[:at]


@given(ratio_lists, step_counts, settings, st.sets(st.integers(0, 69), max_size=5))
def test_a_break_is_computed_and_the_rule_starts_anew_there(
    ratios: list[float], steps: int, setting: dict[str, Any], breaks: set[int]
) -> None:
    plan = greedy_plan(ratios, steps, **setting, breaks=breaks)
    retained = retained_steps(setting["retention_ratio"], steps)
    assert all(plan.computed[step] for step in breaks if step < steps)
    padded = (ratios + [1.0] * steps)[:steps]
    starts = sorted(b for b in breaks if retained <= b < steps)
    for start, end in zip(starts, [*starts[1:], steps], strict=False):
        anew = greedy_plan(padded[start:], end - start, **{**setting, "retention_ratio": 0})
        assert str(plan)[start:end] == str(anew)


@given(ratio_lists, step_counts, settings, st.sets(st.integers(0, 69)), st.integers(0, 69))
def test_a_break_changes_nothing_before_it(
    ratios: list[float], steps: int, setting: dict[str, Any], breaks: set[int], late: int
) -> None:
    early = {b for b in breaks if b < late}
    plan = greedy_plan(ratios, steps, **setting, breaks=early)
    online = greedy_plan(ratios, steps, **setting, breaks={*early, late})
    assert plan.computed[:late] == online.computed[:late]
    if (
        late < steps
        and plan.computed[late]
        and late >= retained_steps(setting["retention_ratio"], steps)
    ):
        # What was computed anyway may break at no price.
        assert plan.computed == online.computed


def test_public_plan_takes_ratios_curves_and_noise_levels() -> None:
    config = MagCacheConfig(0.12, 4, 0.2)
    by_list = magcache.plan(FLUX, config)
    assert by_list == magcache.plan(MagnitudeCurve.from_ratios(FLUX), config)
    levels = tuple(1 - i / 28 for i in range(28))
    curve = MagnitudeCurve(axis="noise", streams={"all": {"places": levels, "ratios": FLUX}})
    assert magcache.plan(curve, config, sigmas=levels) == by_list
    assert magcache.plan(curve, config, steps=28) == by_list
    assert magcache.plan(curve, config, sigmas=levels[10:]).steps == 18


def test_public_plan_refuses_what_it_cannot_do() -> None:
    curve = MagnitudeCurve.from_ratios(FLUX)
    with pytest.raises(CurveError, match=r"no stream 'cond'.*all"):
        magcache.plan(curve, stream="cond")
    with pytest.raises(CurveError, match="not noise levels"):
        magcache.plan(curve, sigmas=[1.0, 0.5])
    with pytest.raises(CurveError, match="steps is 0"):
        magcache.plan(curve, steps=0)
    with pytest.raises(ConfigError, match="no preset is called 'nonsense'"):
        magcache.plan("nonsense")
    with pytest.raises(CurveError, match="positive"):
        magcache.plan([1.0, math.nan])
