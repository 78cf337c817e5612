"""What caching costs in quality: ours beside fewer steps and every other cache there is.

Each scenario (a model, a number of steps, a schedule, a guidance) is drawn plainly and by each
method from the same noise, with prompts and seeds that calibration has not seen. Quality is
measured against the plain pipeline's own picture of the same seed, and against the fine solution
(200 steps). Computed share is counted in multiplications of the blocks' linear layers, so that
caches which run a part of the blocks are counted alike.

`python quality.py NAME ...` runs scenarios by name (all of them by default) and writes
results/quality/NAME.json; several processes may run different ones at the same time.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES, Family, noise
from peers import PEERS, Setting, Work, fit_tea_cache

import magcache
from magcache import Budget, MagCacheConfig, MagnitudeCurve, presets
from magcache.budget import QUALITIES
from magcache.machine import machine
from magcache.metrics import Spread, psnr, ssim

RESULTS = Path(__file__).parent / "results/quality"
BUILD = Path(__file__).parent.parent / "build"
FINE_STEPS = 200
PICTURES = 24
CALIBRATION = 16
SPEEDUPS = (1.3, 1.5, 2.0, 2.5, 3.0, 4.0)
COMPARED = (1.5, 2.0, 3.0)
logger = logging.getLogger("quality")


@dataclass(frozen=True)
class Scenario:
    """What is drawn, and which methods are tried. `sampler` None is the family's own."""

    family: str
    steps: int
    shift: float = 1.0
    guidance: float = 3.0
    sampler: str | None = None
    speedups: tuple[float, ...] = SPEEDUPS
    rules: bool = True
    # How many settings of each peer are tried.
    peers: int = 0
    # Also with a curve measured in this very scenario, beside the family's own.
    calibrate_here: bool = False


SCENARIOS = {
    "demo-20": Scenario("demo", 20, peers=2),
    "demo-28": Scenario("demo", 28, peers=4),
    "demo-50": Scenario("demo", 50, peers=2),
    "demo-28-shift3": Scenario("demo", 28, shift=3.0, peers=2, calibrate_here=True),
    "demo-8": Scenario("demo", 8, speedups=(1.3, 1.6, 2.0, 2.7)),
    "demo-28-cfg1": Scenario("demo", 28, guidance=1.0, speedups=COMPARED, calibrate_here=True),
    "demo-28-cfg7": Scenario("demo", 28, guidance=7.0, speedups=COMPARED, calibrate_here=True),
    "demo-28-dpm": Scenario(
        "demo", 28, sampler="DPM++ 2M", speedups=COMPARED, rules=False, calibrate_here=True
    ),
    "dit-28": Scenario("dit", 28, peers=4),
    "dit-50": Scenario("dit", 50, peers=2),
    "dit-28-cfg1": Scenario("dit", 28, guidance=1.0, speedups=COMPARED, calibrate_here=True),
    "dit-28-dpm": Scenario(
        "dit", 28, sampler="DPM++ 2M", speedups=COMPARED, rules=False, calibrate_here=True
    ),
}

Picture = torch.Tensor
Configured = tuple[str, str, MagCacheConfig]


class Bench:
    """One scenario's pipeline, noise, references and rows."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.family: Family = FAMILIES[scenario.family]
        self.pipe = self.family.load()
        solvers = self.family.solvers(scenario.shift)
        self.pipe.scheduler = solvers[scenario.sampler or next(iter(solvers))]
        measured = self.family.chosen(CALIBRATION)
        unseen = [thing for thing in self.family.things if thing not in measured]
        self.things = [unseen[i * len(unseen) // PICTURES] for i in range(PICTURES)]
        self.start = noise(self.family, range(1000, 1000 + PICTURES))
        self.curve = family_curve(self.family)
        self.failed: dict[str, str] = {}
        self.fine = self._fine()
        with _work(self.pipe) as work:
            self.plain = self.draw(self.pipe, scenario.steps)
        self.whole = work.done
        self.rows = [self._row("plain", "", 1.0, self.plain)]

    def draw(self, pipe: Any, steps: int) -> Picture:
        return self.family.draw(pipe, self.things, self.start, steps, self.scenario.guidance)

    def add(self, method: str, setting: str, share: float, pictures: Picture, **more: Any) -> None:
        self.rows.append({**self._row(method, setting, share, pictures), **more})
        logger.info(
            "%-32s %-18s share %.3f  %.2f dB", method, setting, share, self.rows[-1]["psnr"]["mean"]
        )

    def cached(self, method: str, setting: str, config: MagCacheConfig) -> None:
        """A row of ours."""
        with (
            magcache.enable(self.pipe, config),
            _work(self.pipe) as work,
        ):
            pictures = self.draw(self.pipe, self.scenario.steps)
            plan = magcache.stats(self.pipe).streams[0].happened
        self.add(method, setting, work.done / self.whole, pictures, plan=plan)

    def fewer(self) -> None:
        """The plain pipeline with fewer steps, by each solver."""
        own = self.pipe.scheduler
        for name, solver in self.family.solvers(self.scenario.shift).items():
            self.pipe.scheduler = solver
            for speedup in sorted({*COMPARED, *self.scenario.speedups} & {1.5, 1.6, 2.0, 2.7, 3.0}):
                steps = int(self.scenario.steps / speedup + 1e-9)
                pictures = self.draw(self.pipe, steps)
                self.add(f"fewer steps, {name}", str(steps), steps / self.scenario.steps, pictures)
        self.pipe.scheduler = own

    def ours(self) -> None:
        for method, setting, config in self._ours():
            self.cached(method, setting, config)

    def _ours(self) -> Iterator[Configured]:
        for speedup in self.scenario.speedups:
            budget = Budget(speedup=speedup)
            config = MagCacheConfig(budget=budget, mag_ratios=self.curve)
            yield "planned, fitted", f"{speedup:g}x", config
            if not (self.scenario.rules and speedup in (2.0, 3.0)):
                continue
            for name, limited in {
                "planned, fitted, two residuals": replace(budget, max_residuals=2),
                "planned, scaled": replace(budget, reuse="scaled"),
                "planned, linear": replace(budget, reuse="linear"),
                "planned, as is": replace(budget, reuse="as_is"),
            }.items():
                yield name, f"{speedup:g}x", replace(config, budget=limited)
            if self.family.calls > 1:
                apart = replace(config, streams="apart")
                yield "planned, fitted, streams apart", f"{speedup:g}x", apart
        if self.scenario.calibrate_here:
            here = measured_curve(self.family, self.pipe, self.scenario)
            for speedup in COMPARED:
                config = MagCacheConfig(budget=Budget(speedup=speedup), mag_ratios=here)
                yield "planned, fitted, calibrated here", f"{speedup:g}x", config

    def qualities(self) -> None:
        """The named qualities, as a user asks for them."""
        for quality in QUALITIES:
            config = MagCacheConfig(budget=Budget(quality=quality), mag_ratios=self.curve)
            self.cached("quality", quality, config)

    def greedy(self) -> None:
        """The published rule: two plans for each number of computed steps, and known settings."""
        for speedup in sorted({*COMPARED} & {*self.scenario.speedups}):
            for label, config in greedy_configs(self.curve, self._levels(), speedup):
                self.cached("greedy", label, config)
        for threshold, most, retention in ((0.06, 3, 0.2), (0.12, 4, 0.2), (0.24, 5, 0.1)):
            config = MagCacheConfig(threshold, most, retention, mag_ratios=self.curve)
            label = f"{threshold}/{most}/{retention}"
            self.cached("greedy", label, config)
            if self.family.calls > 1:
                self.cached("greedy, streams apart", label, replace(config, streams="apart"))

    def uniform(self) -> None:
        """Every n-th step computed, the residual as it is: what needs no calibration at all."""
        for every in (2, 3):
            ratios = [1.0] * self.scenario.steps
            config = MagCacheConfig(1e-9, every - 1, 0.0, mag_ratios=ratios)
            self.cached("uniform", f"every {every}", config)

    def peers(self) -> None:
        fit = fit_tea_cache(self.family, self.pipe, self._calibration_draw)
        blocks = len(self.pipe.transformer.transformer_blocks)
        for peer in PEERS:
            if self.family.name not in peer.families:
                continue
            count = min(self.scenario.peers, len(peer.values))
            for value in (peer.values[i * len(peer.values) // count] for i in range(count)):
                setting = Setting(self.family, self.scenario.steps, self.curve, value, fit)
                try:
                    with (
                        peer.apply(self.pipe, setting) as pipe,
                        _work(pipe) as work,
                    ):
                        pictures = self.draw(pipe, self.scenario.steps)
                except Exception as error:
                    # A peer that does not run here is named in the results, with its reason.
                    self.failed[peer.name] = f"{type(error).__name__}: {error}"
                    logger.warning("%s: %r", peer.name, error)
                    break
                share = peer.share(work.done / self.whole, blocks)
                label = "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
                self.add(peer.name, label, share, pictures)
        if not torch.equal(self.draw(self.pipe, self.scenario.steps), self.plain):
            raise RuntimeError("a peer left something behind: the plain picture has changed")

    def _calibration_draw(self, pipe: Any) -> None:
        things = self.family.chosen(CALIBRATION)
        start = noise(self.family, range(CALIBRATION))
        self.family.draw(pipe, things, start, self.scenario.steps, self.scenario.guidance)

    def _levels(self) -> tuple[float, ...]:
        scheduler = self.pipe.scheduler
        return tuple(float(t) / 1000 for t in scheduler.timesteps)

    def _fine(self) -> Picture:
        guidance = self.scenario.guidance
        path = BUILD / f"fine-{self.family.name}-{guidance:g}.pt"
        if not path.exists():
            own = self.pipe.scheduler
            self.pipe.scheduler = next(iter(self.family.solvers(1.0).values()))
            pictures = self.draw(self.pipe, FINE_STEPS)
            self.pipe.scheduler = own
            BUILD.mkdir(exist_ok=True)
            part = path.with_suffix(f".{id(self)}")
            torch.save(pictures, part)
            part.replace(path)
        fine: Picture = torch.load(path, weights_only=True)
        return fine

    def _row(self, method: str, setting: str, share: float, pictures: Picture) -> dict[str, Any]:
        return {
            "method": method,
            "setting": setting,
            "share": share,
            "psnr": _spread(psnr(pictures, self.plain).clamp(max=99.0)),
            "ssim": _spread(ssim(pictures, self.plain)),
            "psnr_fine": _spread(psnr(pictures, self.fine).clamp(max=99.0)),
        }


def _work(pipe: Any) -> Work:
    return Work(pipe.transformer.transformer_blocks)


def _spread(values: torch.Tensor) -> dict[str, float]:
    return vars(Spread.of(values))


def family_curve(family: Family) -> MagnitudeCurve:
    """The shipped preset; of the second model, a curve measured as that was."""
    if family.name == "demo":
        return presets.load("demo-emoji")
    scenario = Scenario(family.name, 50)
    return measured_curve(family, family.load(), scenario)


def measured_curve(family: Family, pipe: Any, scenario: Scenario) -> MagnitudeCurve:
    """A curve of this scenario, from things and seeds that are not drawn in it."""
    pipe = copy.copy(pipe)
    with tempfile.TemporaryDirectory() as folder:
        config = MagCacheConfig(mag_calibrate=True)
        with magcache.enable(pipe, config, curves=folder):
            things = family.chosen(CALIBRATION)
            start = noise(family, range(CALIBRATION))
            family.draw(pipe, things, start, scenario.steps, scenario.guidance)
        (path,) = Path(folder).glob("*.json")
        return MagnitudeCurve.load(path)


def greedy_configs(
    curve: MagnitudeCurve, levels: tuple[float, ...], speedup: float
) -> list[tuple[str, MagCacheConfig]]:
    """Settings of the greedy rule that compute as many steps as the speed-up allows."""
    wanted = int(len(levels) / speedup + 1e-9)
    found: dict[str, tuple[str, MagCacheConfig]] = {}
    for retention in (0.1, 0.2):
        for most in (1, 2, 3, 5):
            for threshold in np.geomspace(0.002, 2, 100).round(5).tolist():
                config = MagCacheConfig(threshold, most, retention, mag_ratios=curve)
                plan = magcache.plan(curve, config, sigmas=levels)
                if plan.computed_steps == wanted:
                    label = f"{threshold:.3g}/{most}/{retention}"
                    found.setdefault(str(plan), (label, config))
    plans = list(found.values())
    return [plans[i * len(plans) // 2] for i in range(min(2, len(plans)))]


PARTS = ("ours", "qualities", "fewer", "greedy", "uniform", "peers")


def run(name: str, parts: Sequence[str]) -> None:
    """Run parts of a scenario; rows of other methods that are on file stay."""
    bench = Bench(SCENARIOS[name])
    for part in parts:
        if part != "peers" or bench.scenario.peers:
            getattr(bench, part)()
            save(bench, RESULTS / f"{name}.json")


def save(bench: Bench, path: Path) -> None:
    """Write what there is so far."""
    rows = bench.rows
    if path.exists():
        done = {row["method"] for row in rows}
        before = json.loads(path.read_text())["rows"]
        rows = [*rows, *(row for row in before if row["method"] not in done)]
    result = {
        "machine": machine(),
        "scenario": asdict(bench.scenario),
        "pictures": PICTURES,
        "curve": bench.curve.provenance,
        "failed": bench.failed,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    torch.set_num_threads(options.threads)
    for name in options.names:
        logger.info("== %s", name)
        run(name, options.parts)


if __name__ == "__main__":
    main()
