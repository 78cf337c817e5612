"""Does the drift guard help, and does what it looks at tell how far off the picture will be?

Prompts like those of the calibration, and odd ones: empty, words that the model has never seen
together. Each is drawn plainly, planned, planned with the guard, and planned for as many computed
steps as the guard came to on average: what the guard must beat is that. And by the greedy rule at
the planned number of steps, whose worst prompt ours must not fall below.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES
from quality import family_curve, greedy_configs

import magcache
from magcache import Budget, MagCacheConfig, guard
from magcache.machine import machine
from magcache.metrics import psnr

RESULTS = Path(__file__).parent / "results/drift.json"
ODD = ("", "red blue", "cat car", "noto fluent dog pizza", "heart star moon", "fluent noto", "face")
STEPS = 28


class Watched:
    """Draws one prompt at a time and notes what the guard saw."""

    def __init__(self) -> None:
        self.family = FAMILIES["demo"]
        self.pipe = self.family.load()
        self.readings: list[float] = []

    def draw(
        self, prompt: str, seed: int, budget: Budget | MagCacheConfig | None
    ) -> tuple[torch.Tensor, float]:
        """A picture and its number of computed steps."""
        random = torch.Generator().manual_seed(seed)
        kwargs: dict[str, Any] = {"output_type": "pt", "return_dict": False, "generator": random}
        if budget is None:
            return self.pipe(prompt, num_inference_steps=STEPS, **kwargs)[0], STEPS
        config = budget if isinstance(budget, MagCacheConfig) else MagCacheConfig(budget=budget)
        with magcache.enable(self.pipe, config):
            picture = self.pipe(prompt, num_inference_steps=STEPS, **kwargs)[0]
            streams = magcache.stats(self.pipe).streams
        return picture, statistics.fmean(stream.computed for stream in streams)

    def seen(self, prompt: str, seed: int, budget: Budget) -> list[float]:
        """Reuse error over the predicted one at each computed step, the guard only looking on."""
        readings: list[float] = []
        sent = guard._sent

        def note(error: torch.Tensor, predicted: float) -> Any:
            readings.append(float((error / predicted).sqrt()))
            return sent(error * 0, predicted)

        guard._sent = note
        try:
            self.draw(prompt, seed, replace(budget, drift_guard=True))
        finally:
            guard._sent = sent
        return readings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speedup", type=float, default=2.5)
    parser.add_argument("--known", type=int, default=14)
    options = parser.parse_args()
    torch.set_num_threads(1)
    watched = Watched()
    prompts = [(p, "known") for p in watched.family.chosen(options.known, 3)]
    prompts += [(p, "odd") for p in ODD for _ in range(2)]
    free = Budget(speedup=options.speedup)
    watched.pipe.scheduler.set_timesteps(STEPS)
    levels = tuple(float(t) / 1000 for t in watched.pipe.scheduler.timesteps)
    _, greedy = greedy_configs(family_curve(watched.family), levels, options.speedup)[0]
    rows = []
    for seed, (prompt, kind) in enumerate(prompts, start=3000):
        plain, _ = watched.draw(prompt, seed, None)
        picture, computed = watched.draw(prompt, seed, free)
        guarded, more = watched.draw(prompt, seed, replace(free, drift_guard=True))
        by_rule, computed_by_rule = watched.draw(prompt, seed, greedy)
        rows.append(
            {
                "prompt": prompt,
                "kind": kind,
                "seed": seed,
                "planned": {"psnr": psnr(picture, plain).item(), "computed": computed},
                "guarded": {"psnr": psnr(guarded, plain).item(), "computed": more},
                "greedy": {"psnr": psnr(by_rule, plain).item(), "computed": computed_by_rule},
                "largest_reading": max(watched.seen(prompt, seed, free)),
            }
        )
    spent = statistics.fmean(row["guarded"]["computed"] for row in rows)
    for row in rows:
        plain, _ = watched.draw(row["prompt"], row["seed"], None)
        same = Budget(speedup=STEPS / spent)
        picture, computed = watched.draw(row["prompt"], row["seed"], same)
        row["planned_at_the_same_cost"] = {
            "psnr": psnr(picture, plain).item(),
            "computed": computed,
        }
    readings = np.log([row["largest_reading"] for row in rows])
    qualities = [row["planned"]["psnr"] for row in rows]
    result = {
        "machine": machine(),
        "speedup": options.speedup,
        "limit": guard._LIMIT,
        "correlation_of_reading_and_psnr": float(np.corrcoef(readings, qualities)[0, 1]),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
