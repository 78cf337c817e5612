"""Magnitude curves: what they keep, how they are resampled, and what they refuse."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from test_plan import FLUX, TABLES

from magcache import CurveError, MagnitudeCurve, StreamCurve

positive = st.floats(0.1, 10)
finite = st.floats(-1e6, 1e6)


@st.composite
def stream_curves(draw: st.DrawFn) -> StreamCurve:
    ratios = draw(st.lists(positive, min_size=1, max_size=12))
    row = st.lists(finite, min_size=len(ratios), max_size=len(ratios))
    extras = ("token_std", "cosine_distance", "prompt_spread")
    return StreamCurve(
        places=draw(row), ratios=ratios, **{n: draw(row) for n in extras if draw(st.booleans())}
    )


plain_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
curves = st.builds(
    MagnitudeCurve,
    axis=st.sampled_from(["noise", "fraction"]),
    streams=st.dictionaries(st.text(max_size=8), stream_curves(), min_size=1, max_size=3),
    provenance=st.dictionaries(st.text(), plain_json, max_size=3),
)


@given(curves)
def test_json_round_trip(tmp_path_factory: pytest.TempPathFactory, curve: MagnitudeCurve) -> None:
    path = tmp_path_factory.mktemp("curve") / "deep" / "curve.json"
    assert curve.save(path) == path
    again = MagnitudeCurve.load(path)
    assert again == curve
    assert list(again.streams) == list(curve.streams)
    assert json.loads(path.read_text(encoding="utf-8"))["format"] == "magcache-curve-1"
    assert [p.name for p in path.parent.iterdir()] == ["curve.json"]


def test_saving_again_replaces(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    MagnitudeCurve.from_ratios([1, 2, 3]).save(path)
    MagnitudeCurve.from_ratios([1, 2]).save(path)
    assert MagnitudeCurve.load(path).stream().ratios == (1, 2)


VALID = MagnitudeCurve.from_ratios([1.0, 1.1, 1.2]).model_dump_json()


@pytest.mark.parametrize(
    "text",
    [
        "",
        VALID[: len(VALID) // 2],
        VALID[:-1],
        "[1.0, 1.1]",
        "null",
        "{}",
        '{"threshold": 0.1}',
        VALID.replace("magcache-curve-1", "magcache-curve-9"),
        VALID.replace('"fraction"', '"steps"'),
        VALID.replace("1.1", "NaN"),
        VALID.replace("1.1", "-1.1"),
        VALID.replace("1.1", "0"),
        VALID.replace("1.1", "null"),
        VALID.replace("1.1", '"1.1x"'),
        VALID.replace("1.1,", ""),
        VALID.replace('"axis"', '"surplus":1,"axis"'),
        json.dumps({**json.loads(VALID), "streams": {}}),
        "\x00\x01",
    ],
)
def test_half_written_or_foreign_file_is_a_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CurveError, match=r"curve\.json: not a magcache curve \(.+\); delete it"):
        MagnitudeCurve.load(path)


def test_bytes_that_are_no_text_are_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(CurveError, match="not a magcache curve"):
        MagnitudeCurve.load(path)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CurveError, match=r"none\.json: no such file"):
        MagnitudeCurve.load(tmp_path / "none.json")


@pytest.mark.parametrize("ratios", [[], [1, math.nan], [1, math.inf], [1, 0], [1, -1]], ids=str)
def test_bad_ratios_are_refused(ratios: list[float]) -> None:
    with pytest.raises(CurveError, match="ratios"):
        MagnitudeCurve.from_ratios(ratios)


def test_an_interleaved_list_of_one_leaves_a_stream_empty_and_is_refused() -> None:
    with pytest.raises(CurveError, match="empty"):
        MagnitudeCurve.from_ratios([1.0], layout="cfg_interleaved")


@pytest.mark.parametrize(
    "bad",
    [
        {"places": (0.0,), "ratios": (1.0, 1.0)},
        {"places": (0.0, math.nan), "ratios": (1.0, 1.0)},
        {"places": (0.0, 0.5), "ratios": (1.0, 1.0), "token_std": (0.0,)},
        {"places": (0.0, 0.5), "ratios": (1.0, 1.0), "surplus": 1},
        {"places": (0.0, 0.5), "ratios": ((1.0,), (1.0,))},
    ],
    ids=str,
)
def test_a_stream_whose_rows_do_not_fit_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StreamCurve(**bad)


def test_curves_cannot_be_changed() -> None:
    curve = MagnitudeCurve.from_ratios(FLUX)
    with pytest.raises(ValidationError, match="frozen"):
        curve.axis = "noise"


# Resampling.


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_same_step_count_is_served_verbatim(table: dict[str, Any]) -> None:
    curve = MagnitudeCurve.from_ratios(table["ratios"], layout=table["layout"])
    assert len(curve.streams) == (1 if table["layout"] == "single" else 2)
    for offset, (name, stream) in enumerate(curve.streams.items()):
        served = curve.ratios(curve.places(len(stream.ratios), name), name)
        assert served == tuple(table["ratios"][offset :: len(curve.streams)])


@pytest.mark.parametrize("steps", [10, 20, 28, 56, 100])
@pytest.mark.parametrize("share", [0.5, 0.25, 0.75])
def test_product_over_a_span_does_not_depend_on_the_step_count(steps: int, share: float) -> None:
    curve = MagnitudeCurve.from_ratios(FLUX)
    places = curve.places(steps)
    served = np.cumprod(curve.ratios(places))
    product = np.interp(share, places, np.log(served))
    # Index 28 * share is whole: what was measured, without interpolation.
    measured = sum(map(math.log, FLUX[: int(28 * share) + 1]))
    assert product == pytest.approx(measured, abs=1e-9 if steps * share % 1 == 0 else 0.02)


def test_flux_at_10_and_56_steps_reaches_the_length_measured_at_28() -> None:
    """Nearest-index resampling gives products of 1.005 and 1.97 for a measured 1.40."""
    curve = MagnitudeCurve.from_ratios(FLUX)
    until = {28: 26, 56: 52, 14: 13}  # the same place, 13/14
    products = {n: math.prod(curve.ratios(curve.places(n))[: i + 1]) for n, i in until.items()}
    assert products[56] == pytest.approx(products[28])
    assert products[14] == pytest.approx(products[28])
    assert math.prod(curve.ratios(curve.places(28))) == pytest.approx(1.40, abs=0.01)


@given(ratios=st.lists(positive, min_size=2, max_size=30), steps=st.integers(1, 60))
def test_resampled_ratios_begin_at_one_and_stay_within_what_was_measured(
    ratios: list[float], steps: int
) -> None:
    curve = MagnitudeCurve.from_ratios([1.0, *ratios])
    served = curve.ratios(curve.places(steps))
    assert len(served) == steps
    assert served[0] == 1
    lengths, known = np.log(np.cumprod(served)), curve.stream().log_magnitude
    assert min(known) - 1e-6 <= lengths.min()
    assert lengths.max() <= max(known) + 1e-6


def sigmas(steps: int, shift: float) -> list[float]:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    return [float(t) / 1000 for t in scheduler.timesteps]


def length(level: float) -> float:
    """Magnitude of a made-up model's residual at a noise level."""
    return math.exp(math.sin(4 * level) + level)


def noise_curve(levels: list[float]) -> MagnitudeCurve:
    ratios = [1.0, *(length(b) / length(a) for a, b in pairwise(levels))]
    return MagnitudeCurve(
        axis="noise", streams={"all": StreamCurve(places=tuple(levels), ratios=tuple(ratios))}
    )


@pytest.mark.parametrize("steps", [7, 20, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
def test_another_shift_and_step_count_are_served_from_noise_levels(
    steps: int, shift: float
) -> None:
    curve = noise_curve(sigmas(100, 2.0))
    served = curve.ratios(levels := sigmas(steps, shift))
    wanted = noise_curve(levels).stream().ratios
    assert served == pytest.approx(wanted, rel=0.03)


def test_a_late_start_is_served_from_its_noise_level() -> None:
    curve = noise_curve(sigmas(28, 3.0))
    late = sigmas(28, 3.0)[12:]
    served = curve.ratios(late)
    assert served[0] == 1
    assert served[1:] == pytest.approx(curve.stream().ratios[13:])


def test_the_measured_grid_is_served_verbatim_through_float32() -> None:
    levels = sigmas(28, 3.0)
    curve = noise_curve(levels)
    assert curve.ratios([float(np.float32(level)) for level in levels]) == curve.stream().ratios
    assert curve.ratios(curve.places(28)) == curve.stream().ratios


def test_rising_and_falling_places_are_served_alike() -> None:
    falling = noise_curve([1.0, 0.75, 0.5, 0.25])
    served = falling.ratios([0.875, 0.5, 0.25])
    assert served[2] == pytest.approx(falling.stream().ratios[3])


def test_outside_the_measured_range_the_length_is_constant() -> None:
    curve = noise_curve([0.8, 0.5, 0.3])
    assert curve.ratios([1.0, 0.9, 0.8, 0.3, 0.1])[1:3] == pytest.approx((1, 1))
    assert curve.ratios([1.0, 0.9, 0.8, 0.3, 0.1])[4] == pytest.approx(1)


def test_stream_by_name_then_by_order_then_the_last() -> None:
    curve = MagnitudeCurve.from_ratios([1, 1, 2, 3], layout="cfg_interleaved")
    assert curve.stream("uncond", 0).ratios == (1, 3)
    assert curve.stream("0", 0).ratios == (1, 2)
    assert curve.stream("1", 1).ratios == (1, 3)
    assert curve.stream("x", 7).ratios == (1, 3)


def path_curve(places: list[float], path: list[tuple[float, ...]]) -> StreamCurve:
    ones = (1.0,) * len(places)
    return StreamCurve(places=tuple(places), ratios=ones, scale=ones, path=tuple(path))


def test_a_path_is_served_as_measured_and_smoothly_between() -> None:
    places = np.linspace(1, 0, 21)
    path = [(float(np.sin(3 * p)), float(p**2)) for p in places]
    curve = path_curve(places.tolist(), path)
    assert np.allclose(curve.path_at(places), path)
    between = np.linspace(0.97, 0.03, 50)
    true = np.stack([np.sin(3 * between), between**2], axis=1)
    assert np.abs(curve.path_at(between) - true).max() < 2e-4
    assert np.allclose(curve.path_at([1.5, -0.5]), [path[0], path[-1]])


def test_second_evaluations_at_a_place_have_a_path_of_their_own() -> None:
    places = [1.0, 0.5, 0.5, 0.0, 0.0]
    curve = path_curve(places, [(0.0,), (1.0,), (10.0,), (2.0,), (20.0,)])
    assert curve.path_at(places).ravel().tolist() == [0, 1, 10, 2, 20]
    assert curve.path_at([0.25, 0.25]).ravel().tolist() == pytest.approx([1.5, 15], abs=0.1)
    # A sampler with one evaluation a place is served from the first ones.
    assert curve.path_at([1.0, 0.5, 0.0]).ravel().tolist() == [0, 1, 2]


def test_a_path_needs_as_many_rows_as_there_are_ratios() -> None:
    with pytest.raises(ValueError, match="path has 1 entries"):
        StreamCurve(places=(1.0, 0.5), ratios=(1.0, 1.0), path=((1.0,),))
    with pytest.raises(ValueError, match="finite"):
        StreamCurve(places=(1.0,), ratios=(1.0,), path=((float("nan"),),))
