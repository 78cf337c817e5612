"""What the benchmark compares with: solvers reach one picture, and peers leave nothing behind."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from magcache import presets
from magcache.metrics import psnr

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
if not BENCHMARKS.is_dir():
    # The source distribution has the tests, but not the benchmarks.
    pytest.skip("no benchmarks beside these tests", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))
families = pytest.importorskip("families")
peers = pytest.importorskip("peers")

STEPS = 8
DEMO = families.FAMILIES["demo"]
# cache-dit has an environment of its own: where it is missing, its two peers are too.
ON_DEMO = [peer for peer in peers.PEERS if "demo" in peer.families]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return DEMO.load()


def draw(pipe: Any, steps: int = STEPS) -> torch.Tensor:
    start = families.noise(DEMO, range(1000, 1001))
    pictures: torch.Tensor = DEMO.draw(pipe, DEMO.chosen(1), start, steps, 3.0)
    return pictures


def test_solvers_reach_the_picture_of_euler(pipe: Any) -> None:
    """All solve one equation from one noise, so more steps bring them together."""
    own = pipe.scheduler
    apart: dict[str, list[float]] = {}
    for steps in (5, 16):
        pictures = {}
        for name, solver in DEMO.solvers(1.0).items():
            pipe.scheduler = solver
            pictures[name] = draw(pipe, steps)
        euler = pictures.pop("Euler")
        for name, picture in pictures.items():
            apart.setdefault(name, []).append(float(psnr(picture, euler)))
    pipe.scheduler = own
    for name, (coarse, fine) in apart.items():
        assert fine > max(coarse, 18), (name, coarse, fine)


@pytest.mark.parametrize("peer", ON_DEMO, ids=lambda peer: peer.name)
def test_peers_skip_and_leave_nothing(pipe: Any, peer: Any) -> None:
    with peers.Work(pipe.transformer.transformer_blocks) as whole:
        plain = draw(pipe)
    curve = presets.load("demo-emoji")
    setting = peers.Setting(DEMO, STEPS, curve, peer.values[-1], lambda moved: moved)
    with (
        peer.apply(pipe, setting) as cached,
        peers.Work(cached.transformer.transformer_blocks) as work,
    ):
        pictures = draw(cached)
    assert work.done < whole.done
    assert psnr(pictures, plain) > 8
    assert torch.equal(draw(pipe), plain)


def test_a_cache_takes_the_memory_of_the_residuals_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two streams under guidance; nothing is left after a run, nor after one that raises."""
    memory = pytest.importorskip("memory")
    monkeypatch.setattr(memory, "STEPS", 12)
    rows = memory.measure(1)
    kept = {row["config"]: row["extra_residuals"] for row in rows}
    assert kept.pop("budget, 3 residuals, float8") < 3
    assert list(kept.values()) == pytest.approx([2, 2, 4, 6], abs=0.05)
    for row in rows:
        assert row["left_bytes"] <= 0
        assert row["left_after_exception_bytes"] <= 0


def test_allocations_are_counted_at_their_peak_and_at_the_end() -> None:
    memory = pytest.importorskip("memory")
    kept = []

    def run() -> None:
        passing = torch.zeros(3 << 18)
        kept.append(torch.zeros(1 << 18))
        del passing

    peak, left = memory.allocated(run)
    assert (peak, left) == (4 << 20, 1 << 20)


def test_the_speed_bench_skips_every_second_step_with_every_cache() -> None:
    """The first block cache computes its first block at each step."""
    speed = pytest.importorskip("speed")
    shape = speed.SHAPES[0]
    with torch.no_grad():
        whole = speed.Variant("plain eager", shape, 2, "eager").work()
        shares = {
            name: speed.Variant(name, shape, 2, "eager", put).work() / whole
            for name, put in speed.CACHES.items()
            if name != "cache-dit"
        }
    assert shares["magcache"] == shares["diffusers MagCache"] == 0.5
    assert 0.5 < shares["FirstBlockCache"] < 1
