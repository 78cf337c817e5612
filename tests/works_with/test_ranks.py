"""Several processes, one picture: real gloo ranks on the CPU, started and timed out by the test.

What each rank does is in `ranks_worker.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_worker as worker
from models import normal
from ranks_worker import Launcher

from magcache import MagCacheStrategy, MagnitudeCurve, StreamCurve
from magcache.calibration import Measurement, Measurements, average, pooled, run_curve
from magcache.clock import Timeline
from magcache.sketch import Sketcher

BOTH = ("parallel first", "cache first")


@pytest.fixture(scope="module")
def launch() -> Launcher:
    return Launcher()


def assert_as_one_process(results: list[Any]) -> None:
    assert all(results)
    for seen in zip(*results, strict=True):
        for what, off, planned, row, off_plain in seen:
            assert off < 1e-5, (what, off)
            assert planned, (what, row)
            assert off_plain < 1e-5, (what, off_plain)
            assert "." in row[0]
        assert len({str(row) for _, _, _, row, _ in seen}) == 1


@pytest.mark.parametrize(
    ("spread", "world", "models", "orders"),
    [
        (worker.ulysses, 2, ("flux", "wan", "qwen"), BOTH),
        (worker.ulysses_anything, 2, ("wan",), (*BOTH, "after a run")),
        (worker.ring, 2, ("flux", "wan"), BOTH),
        (worker.unified, 4, ("wan",), BOTH),
    ],
    ids=["ulysses", "ulysses_anything", "ring", "unified"],
)
def test_context_parallelism_draws_as_one_process(
    launch: Launcher, spread: Any, world: int, models: Any, orders: Any, tmp_path: Path
) -> None:
    results = launch(world, tmp_path, worker.spread_and_cached, spread, models, orders)
    assert_as_one_process(results)


@pytest.mark.parametrize(
    ("spread", "world"),
    [(worker.tensor_parallel, 2), (worker.fsdp, 2), (worker.hsdp, 4)],
    ids=["tensor_parallel", "fsdp", "hsdp"],
)
def test_sharded_weights_draw_as_one_process(
    launch: Launcher, spread: Any, world: int, tmp_path: Path
) -> None:
    results = launch(world, tmp_path, worker.spread_and_cached, spread, ("flux",), BOTH)
    assert_as_one_process(results)


@pytest.mark.parametrize(
    ("spread", "skipped"),
    [(worker.ulysses, 1), (worker.tensor_parallel, 0), (worker.fsdp, 0)],
    ids=["ulysses", "tensor_parallel", "fsdp"],
)
def test_no_step_communicates_more_than_the_model(
    launch: Launcher, spread: Any, skipped: int, tmp_path: Path
) -> None:
    for plain, cached, row, first, said in launch(2, tmp_path, worker.collectives, spread):
        assert min(plain) > skipped
        for before, after, what in zip(plain, cached, row, strict=True):
            # Context parallelism gathers the output.
            assert after == (before if what == "C" else skipped)
        # Agreed once, before the first run.
        assert first == said == 1


def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [*command, worker.__file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=90,
        check=True,
        capture_output=True,
    )
    rows = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert rows[0] == rows[1]
    assert "." in rows[0]


def assert_same_curve(found: Any, expected: Any, off: float = 1e-4) -> None:
    assert list(found) == list(expected)
    for name, stream in found.items():
        other = expected[name]
        for key in ("places", "ratios", "token_std", "cosine_distance", "scale", "prompt_spread"):
            np.testing.assert_allclose(stream[key], other[key], atol=off, err_msg=key)
        inner, others = (np.array(s["path"]) @ np.array(s["path"]).T for s in (stream, other))
        np.testing.assert_allclose(inner, others, atol=off)


def mean_of(curves: list[Any]) -> Any:
    streams = {
        name: average([StreamCurve(**curve[name]) for curve in curves]).model_dump()
        for name in curves[0]
    }
    assert max(max(stream["prompt_spread"]) for stream in streams.values()) > 1e-3
    return streams


@pytest.mark.parametrize(
    "spread", [worker.ulysses, worker.tensor_parallel], ids=lambda way: way.__name__
)
def test_ranks_of_one_picture_measure_what_one_process_does(
    launch: Launcher, spread: Any, tmp_path: Path
) -> None:
    results = launch(2, tmp_path, worker.first_runs, spread, False, str(tmp_path / "alone"))
    for result in results:
        assert result["curve"] == results[0]["curve"]
        assert_same_curve(result["curve"], result["alone"][0])
        assert_measured_once_and_kept(result)
        assert result["again"] == results[0]["again"]


def assert_measured_once_and_kept(result: Any) -> None:
    assert set(result["first"][0]) == {"C"}
    assert "." in result["again"][0][0]
    assert result["same fingerprint"]
    # Whole, and where one process looks for it.
    assert result["files"] == [result["file"]]
    assert not [line for line in result["lines"] if "have changed" in line]


@pytest.mark.parametrize(
    ("spread", "world"), [(worker.fsdp, 2), (worker.hsdp, 4)], ids=["fsdp", "hsdp"]
)
def test_ranks_that_shard_weights_average_their_prompts(
    launch: Launcher, spread: Any, world: int, tmp_path: Path
) -> None:
    results = launch(world, tmp_path, worker.first_runs, spread, True, str(tmp_path / "alone"))
    for rank, result in enumerate(results):
        # Copies of an HSDP model do not wait for each other, so they do not average either.
        together = range(rank // 2 * 2, rank // 2 * 2 + 2)
        assert_same_curve(result["curve"], mean_of([result["alone"][i] for i in together]))
        assert all(results[i]["curve"] == result["curve"] for i in together)
        assert all(results[i]["again"] == result["again"] for i in together)
        assert_measured_once_and_kept(result)


def test_guidance_split_over_ranks_has_a_curve_of_both_passes(
    launch: Launcher, tmp_path: Path
) -> None:
    results = launch(2, tmp_path, worker.split_guidance, str(tmp_path / "curves"))
    for result in results:
        assert result["curve"] == results[0]["curve"]
        assert list(result["curve"]) == ["cond", "uncond"]
        assert_same_curve(result["curve"], result["alone"])
        # One plan for both, as in one process.
        assert result["row"] * 2 == result["plan"]
        assert "." in result["row"][0]
        assert result["off"] < 1e-4


def test_ranks_that_are_asked_to_average_over_prompts_of_their_own(
    launch: Launcher, tmp_path: Path
) -> None:
    for result in launch(2, tmp_path, worker.many_prompts, str(tmp_path / "alone")):
        assert_same_curve(result["curve"], mean_of(result["alone"]))
        assert result["saved"] == result["curve"]
        assert result["prompts"] == ["0", "1", "2"]
        assert result["runs"] == 3


def test_parts_of_the_tokens_pool_to_the_whole() -> None:
    strategy, sketcher = MagCacheStrategy(), Sketcher()
    timeline = Timeline((0.0, 0.5), (1.0, 0.5), (0.5, 0.5))
    residuals = [normal(seed, 1, 8, 6) for seed in (0, 1)]

    def curve(tokens: slice) -> MagnitudeCurve:
        before, now = ((r[:, tokens],) for r in residuals)
        taken = [
            Measurement(0, None, sketcher.sketch(before), sketcher.scale(before)),
            Measurement(
                1,
                strategy.compute_calibration_metrics(now, before),
                sketcher.sketch(now),
                sketcher.scale(now),
            ),
        ]
        return run_curve({"0": Measurements(timeline, taken)}, {})

    parts = pooled([curve(slice(3)), curve(slice(3, None))], [3, 5])
    whole = curve(slice(None)).model_dump()["streams"]
    assert_same_curve(parts.model_dump()["streams"], whole, 1e-6)


def test_a_rank_that_dies_is_named_in_time(launch: Launcher, tmp_path: Path) -> None:
    (said, seconds), _ = launch(2, tmp_path, worker.one_dies, timeout=3, dead=(1,))
    assert "rank 0 has waited 0:00:03 for rank 1 while averaging a calibration run" in said
    assert seconds < 10


def test_the_host_of_the_store_dies(launch: Launcher, tmp_path: Path) -> None:
    _, said = launch(2, tmp_path, worker.host_dies, timeout=3, dead=(0,))
    assert "lost the store that the processes met at" in said


def test_a_run_that_one_rank_aborts_counts_on_none(launch: Launcher, tmp_path: Path) -> None:
    (first, lines), (second, others) = launch(2, tmp_path, worker.one_aborts)
    assert [curve for _, curve in first] == [curve for _, curve in second]
    (broken, nothing), (_, curve), (cached, _) = second
    assert broken == ["CCCC----"] * 2
    assert nothing is None
    assert min(map(len, curve.values())) > 0
    assert cached == first[2][0]
    assert "." in cached[0]
    assert [line for line in lines if "calibration run of rank 1 was aborted" in line] == lines[:1]
    assert len(lines) == 1
    assert not others


def test_calibrating_fails_on_every_rank_if_it_does_on_one(
    launch: Launcher, tmp_path: Path
) -> None:
    others, own = launch(2, tmp_path, worker.one_fails_to_calibrate)
    assert own[0] == "BrokenError"
    assert others[0] == "RanksError"
    assert "another rank failed" in others[1]
    # At once, not after the timeout; and nothing is left on.
    assert max(others[2], own[2]) < 10
    assert others[3]
    assert own[3]


@pytest.mark.parametrize("asked", [True, False])
def test_ranks_with_other_settings_are_refused(
    launch: Launcher, asked: bool, tmp_path: Path
) -> None:
    for said, left_on in launch(2, tmp_path, worker.other_settings, asked):
        assert "rank 1 has other settings than rank 0 (threshold)" in said
        assert not left_on


def test_ranks_use_a_curve_that_only_one_of_them_finds(launch: Launcher, tmp_path: Path) -> None:
    results = launch(2, tmp_path, worker.one_knows, str(tmp_path / "alone"))
    assert results[0] == results[1]
    assert "." in results[0][0][0]


def test_a_rank_without_a_cache_is_named_in_time(launch: Launcher, tmp_path: Path) -> None:
    results = launch(2, tmp_path, worker.one_has_no_cache, timeout=3)
    assert results[0][0] == "RanksError"
    assert "waited 0:00:03 for rank 1 while agreeing" in results[0][1]
    # The model's own collective gives up as well.
    assert results[1][0] != "RanksError"


def test_ranks_that_share_nothing_wait_for_nobody(launch: Launcher, tmp_path: Path) -> None:
    first, second = launch(2, tmp_path, worker.on_their_own)
    assert "." in first[0]
    assert not second


def test_the_drift_guard_is_off_where_ranks_would_differ(launch: Launcher, tmp_path: Path) -> None:
    results = launch(2, tmp_path, worker.guarded)
    for row, planned, lines, off in results:
        assert row == results[0][0]
        assert "." in row[0]
        assert planned
        assert off
        assert len([line for line in lines if "drift guard is off" in line]) == 1


def test_other_weights_are_noticed_under_fsdp(launch: Launcher, tmp_path: Path) -> None:
    for before, said, after, then in launch(2, tmp_path, worker.other_weights):
        assert "." in before[0]
        assert not [line for line in said if "have changed" in line]
        assert set(after[0]) == {"C"}
        assert "its weights have changed" in then[0]


def test_many_ranks_write_one_file(launch: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "shared" / "curve.json"
    launch(4, tmp_path, worker.many_writers, str(path))
    assert [file.name for file in path.parent.iterdir()] == ["curve.json"]


def test_hidden_states_that_are_distributed_tensors(launch: Launcher, tmp_path: Path) -> None:
    for off, as_alone, plan, alone, curve in launch(2, tmp_path, worker.distributed_activations):
        assert off < 1e-5
        assert as_alone
        assert "." in plan[0]
        assert_same_curve(curve, alone)
