"""How far the planned steps are from the best there are: a local search on the true final error.

Starts from the best of our plan, ours with at most 3 steps skipped in a row, and every second
(third) step, and moves one computed step at a time to a near place, keeping what draws the pictures
better; each try draws them anew. What it finds is then drawn with other pictures, beside our plan.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, noise
from quality import family_curve

import magcache
from magcache import Budget, MagCacheConfig
from magcache.hook import cache_of
from magcache.machine import machine
from magcache.metrics import Spread, psnr
from magcache.planner import Schedule

RESULTS = Path(__file__).parent / "results/oracle.json"
PICTURES = 8
logger = logging.getLogger("oracle")

Mask = tuple[bool, ...]


class Search:
    """Draws the same pictures by any plan, with the fitted reuse."""

    def __init__(self, name: str, steps: int, shift: float, seeds: range, offset: int) -> None:
        self.family = FAMILIES[name]
        self.steps = steps
        self.pipe = self.family.load()
        self.pipe.scheduler = next(iter(self.family.solvers(shift).values()))
        self.things = self.family.chosen(PICTURES, offset)
        self.start = noise(self.family, seeds)
        self.curve = family_curve(self.family)
        self.plain = self._draw()

    def _draw(self) -> torch.Tensor:
        return self.family.draw(self.pipe, self.things, self.start, self.steps, 3.0)

    def planned(self, speedup: float, most: int = 6) -> Mask:
        budget = Budget(speedup=speedup, max_skip_steps=most)
        config = MagCacheConfig(budget=budget, mag_ratios=self.curve)
        self.pipe.scheduler.set_timesteps(self.steps)
        with magcache.enable(self.pipe, config):
            self._draw()
            row = magcache.stats(self.pipe).streams[0].happened
        return tuple(mark == "C" for mark in row)

    def quality(self, mask: Mask) -> Spread:
        budget = Budget(speedup=self.steps / sum(mask))
        config = MagCacheConfig(budget=budget, mag_ratios=self.curve)
        with magcache.enable(self.pipe, config):
            cache: Any = cache_of(self.pipe.transformer)
            make = cache._planner.schedule

            def schedule(*args: Any) -> Schedule:
                made: Schedule = make(*args)
                return replace(made, plan=replace(made.plan, computed=mask))

            cache._planner.schedule = schedule
            return Spread.of(psnr(self._draw(), self.plain))


def neighbour(mask: Mask, chance: random.Random) -> Mask:
    """The mask with one computed step moved by up to three places; the first one stays."""
    while True:
        moved = list(mask)
        step = chance.choice([i for i, computed in enumerate(mask) if computed and i > 0])
        to = step + chance.choice([-3, -2, -1, 1, 2, 3])
        if 0 < to < len(mask) and not mask[to]:
            moved[step], moved[to] = False, True
            return tuple(moved)


def row_of(mask: Mask) -> str:
    return "".join("C" if computed else "." for computed in mask)


def search(name: str, steps: int, shift: float, speedup: float, tries: int) -> dict[str, Any]:
    tuned = Search(name, steps, shift, range(500, 500 + PICTURES), offset=1)
    planned = tuned.planned(speedup)
    count = sum(planned)
    uniform = tuple(any(i == k * steps // count for k in range(count)) for i in range(steps))
    short = tuned.planned(speedup, most=3)
    best = max((planned, uniform, short), key=lambda mask: tuned.quality(mask).mean)
    reached = tuned.quality(best).mean
    chance = random.Random(0)
    for _ in range(tries):
        mask = neighbour(best, chance)
        found = tuned.quality(mask).mean
        if found > reached:
            best, reached = mask, found
            logger.info("%s %s %.2f dB", name, row_of(best), reached)
    unseen = Search(name, steps, shift, range(1500, 1500 + PICTURES), offset=5)
    return {
        "family": name,
        "steps": steps,
        "shift": shift,
        "computed": count,
        "tries": tries,
        "planned": {
            "plan": row_of(planned),
            "tuned_on": vars(tuned.quality(planned)),
            "unseen": vars(unseen.quality(planned)),
        },
        "searched": {
            "plan": row_of(best),
            "tuned_on": vars(tuned.quality(best)),
            "unseen": vars(unseen.quality(best)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=25)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    torch.set_num_threads(1)
    rows = []
    for name, shift, speedup in (
        ("demo", 3.0, 3.0),
        ("demo", 1.0, 3.0),
        ("dit", 1.0, 2.0),
        ("dit", 1.0, 3.0),
        ("demo", 1.0, 2.0),
    ):
        rows.append(search(name, 28, shift, speedup, options.tries))
        result = {"machine": machine(), "pictures": PICTURES, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
