"""What the cache itself costs: per computed call and per skipped call, by number of blocks.

On an SD3 transformer so small that Python is what takes the time. Four kinds of call are timed in
turn, round by round, so that a machine whose speed drifts treats all alike:

plain     the model without a cache
computed  the model with the cache, on a step that is computed
skipped   the model with the cache, on a step that is skipped
empty     the model with its block list emptied by hand: what a skip would take if it were free

The cache's own cost is computed - plain and skipped - empty: median and quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from rich.console import Console
from rich.table import Table
from torch import nn

import magcache
from magcache.machine import machine

BLOCKS = (8, 24, 57)
STEPS = 50
KINDS = ("plain", "computed", "skipped", "empty")


def build(blocks: int) -> tuple[SD3Transformer2DModel, dict[str, Any]]:
    """A tiny SD3 transformer and one call's arguments (16 image and 4 text tokens, width 32)."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=4,
        in_channels=3,
        out_channels=3,
        num_layers=blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    ).eval()
    call = {
        "hidden_states": torch.randn(1, 3, 16, 16),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 4, 32),
        "pooled_projections": torch.randn(1, 32),
        "return_dict": False,
    }
    return model, call


class Timed:
    """One kind of call: `model(**call)` at each step of a run, over and over.

    What the scheduler does between two calls is part of neither's time, but of what all kinds find
    in the processor's caches. A run's first call is computed whatever the kind, and not timed.
    """

    def __init__(self, blocks: int, kind: str) -> None:
        self.model, self.call = build(blocks)
        if kind == "empty":
            self.model.transformer_blocks = nn.ModuleList()
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        if kind in ("computed", "skipped"):
            settings = magcache.MagCacheConfig(
                threshold=0.0 if kind == "computed" else 1e9,
                max_skip_steps=STEPS,
                retention_ratio=0.0,
                mag_ratios=[1.0],
            )
            magcache.enable(self.model, settings, scheduler=self.scheduler)
        self.step = STEPS

    def advance(self) -> None:
        """Go to the next step; past the last, to the second of a new run."""
        self.step += 1
        if self.step >= STEPS:
            self.scheduler.set_timesteps(STEPS)
            self.model(**self.call)
            self.step = 1
        sample = self.call["hidden_states"]
        self.scheduler.step(sample, self.scheduler.timesteps[self.step - 1], sample)

    def seconds(self, repeats: int) -> float:
        """Median time of one call."""
        times = []
        for _ in range(repeats):
            self.advance()
            start = time.perf_counter()
            self.model(**self.call)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def measure(blocks: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Microseconds of each kind, and the cache's own cost with its quartiles."""
    kinds = {kind: Timed(blocks, kind) for kind in KINDS}
    for timed in kinds.values():
        timed.seconds(2 * STEPS)
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            taken[kind].append(1e6 * kinds[kind].seconds(repeats))

    def own_cost(kind: str, base: str) -> dict[str, float]:
        costs = [a - b for a, b in zip(taken[kind], taken[base], strict=True)]
        low, middle, high = statistics.quantiles(costs, n=4)
        return {
            "median": round(middle, 1),
            "quartile_1": round(low, 1),
            "quartile_3": round(high, 1),
        }

    return {
        "blocks": blocks,
        "microseconds": {kind: round(statistics.median(taken[kind]), 1) for kind in KINDS},
        "computed_own_cost": own_cost("computed", "plain"),
        "skipped_own_cost": own_cost("skipped", "empty"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=40, help="calls of each kind in a round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/overhead.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = [measure(blocks, options.rounds, options.repeats) for blocks in BLOCKS]
    result = {
        "machine": machine(),
        "rounds": options.rounds,
        "repeats": options.repeats,
        "steps": STEPS,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")

    table = Table(title=f"The cache's own cost in µs ({result['machine']['device']})")
    for heading in ("blocks", "plain call", "computed +", "skipped call", "skipped +"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["blocks"]),
            f"{row['microseconds']['plain']:.0f}",
            f"{row['computed_own_cost']['median']:.0f}",
            f"{row['microseconds']['skipped']:.0f}",
            f"{row['skipped_own_cost']['median']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
