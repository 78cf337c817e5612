"""Does a curve that was measured one way serve runs of another: length, shift, strength?

On the shipped model, a curve measured at 50 steps serves runs of 10 to 100 steps, of another shift
and of a late start, each beside a curve that was measured in just such a run. On published tables,
those that were measured at several lengths or resolutions serve one another.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES, noise

import magcache
from magcache import Budget, MagCacheConfig, MagnitudeCurve
from magcache.machine import machine

RESULTS = Path(__file__).parent / "results/transfer.json"
TABLES = Path(__file__).parent.parent / "tests/data/mag_ratios.json"
PICTURES = 8
PLANS = {
    "greedy 0.06/3/0.2": MagCacheConfig(0.06, 3, 0.2),
    "greedy 0.12/4/0.2": MagCacheConfig(0.12, 4, 0.2),
    "planned 2x": MagCacheConfig(budget=Budget(speedup=2.0)),
    "planned 3x": MagCacheConfig(budget=Budget(speedup=3.0)),
}


def measured(steps: int, shift: float) -> tuple[MagnitudeCurve, tuple[float, ...]]:
    """A curve of the shipped model, and the noise levels it was measured at."""
    family = FAMILIES["demo"]
    pipe = family.load()
    pipe.scheduler = family.solvers(shift)["Euler"]
    with tempfile.TemporaryDirectory() as folder:
        with magcache.enable(pipe, MagCacheConfig(mag_calibrate=True), curves=folder):
            family.draw(pipe, family.chosen(PICTURES), noise(family, range(PICTURES)), steps, 3.0)
        (path,) = Path(folder).glob("*.json")
        curve = MagnitudeCurve.load(path)
    return curve, next(iter(curve.streams.values())).places


def compared(
    own: MagnitudeCurve, other: MagnitudeCurve, levels: tuple[float, ...]
) -> dict[str, Any]:
    """How `other` serves a run at these levels, beside `own`, which was measured there."""
    errors = [
        abs(a - b)
        for stream in own.streams
        for a, b in zip(own.ratios(levels, stream), other.ratios(levels, stream), strict=True)
    ]
    differing = {}
    for name, config in PLANS.items():
        plans = [magcache.plan(c, config, sigmas=levels).computed for c in (own, other)]
        differing[name] = sum(a != b for a, b in zip(*plans, strict=True)) / len(levels) * 50
    best = magcache.frontier(own, sigmas=levels)
    excess = {}
    for name, config in PLANS.items():
        if config.budget is not None:
            plans = [magcache.plan(c, config, sigmas=levels).computed for c in (own, other)]
            least, found = map(best.error_of, plans)
            excess[name] = found / least
    return {
        "mean_ratio_error": statistics.fmean(errors),
        "differing_of_50": differing,
        "error_over_the_best": excess,
    }


def shipped_model() -> Iterator[dict[str, Any]]:
    reference, _ = measured(50, 1.0)
    for steps, shift in ((10, 1.0), (20, 1.0), (28, 1.0), (100, 1.0), (28, 3.0), (50, 3.0)):
        own, levels = measured(steps, shift)
        yield {"run": f"{steps} steps, shift {shift:g}", **compared(own, reference, levels)}
        if steps == 28:
            late = levels[round(0.4 * steps) :]
            name = f"{steps} steps, shift {shift:g}, strength 0.6"
            yield {"run": name, **compared(own, reference, late)}


def published() -> Iterator[dict[str, Any]]:
    """Pairs of tables of one model: FramePack at other lengths, others at other resolutions."""
    tables = json.loads(TABLES.read_text())
    families: dict[str, list[str]] = {}
    for name in tables:
        if name.startswith("framepack-studio/"):
            families.setdefault(name.rsplit("-", 1)[0], []).append(name)
    groups = [("FramePack, other lengths", names) for names in families.values()]
    groups += [
        (
            "Kandinsky 5, SD and HD",
            [f"kandinsky5/k5_pro_{task}_sft_{size}" for size in ("sd", "hd")],
        )
        for task in ("t2v_5s", "t2v_10s", "i2v_5s")
    ]
    wan = ["upstream/wan2.1-i2v-14b-480p", "upstream/wan2.1-i2v-14b-720p"]
    groups.append(("Wan 2.1 I2V, 480p and 720p", wan))
    for label, names in groups:
        for served, source in permutations(names, 2):
            yield {
                "group": label,
                "served": served,
                "from": source,
                **_pair(tables, served, source),
            }


def _pair(tables: dict[str, Any], served: str, source: str) -> dict[str, Any]:
    own, other = (
        MagnitudeCurve.from_ratios(tables[name]["ratios"], layout=tables[name]["layout"])
        for name in (served, source)
    )
    steps = len(next(iter(own.streams.values())).ratios)
    places = own.places(steps)
    true = np.array(own.ratios(places))
    theirs = np.array(next(iter(other.streams.values())).ratios)
    nearest = theirs[np.linspace(0, len(theirs) - 1, steps).round().astype(int)]
    result: dict[str, Any] = {}
    for label, ratios in (("ours", other.ratios(places)), ("nearest index", nearest.tolist())):
        differing = []
        for name in ("greedy 0.06/3/0.2", "greedy 0.12/4/0.2"):
            plans = [magcache.plan(r, PLANS[name], steps) for r in (list(true), list(ratios))]
            pairs = zip(plans[0].computed, plans[1].computed, strict=True)
            differing.append(sum(a != b for a, b in pairs) / steps * 50)
        result[label] = {
            "mean_ratio_error": float(np.abs(np.array(ratios) - true).mean()),
            "differing_of_50": statistics.fmean(differing),
        }
    return result


def main() -> None:
    torch.set_num_threads(1)
    result = {
        "machine": machine(),
        "shipped_model": list(shipped_model()),
        "published": list(published()),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
