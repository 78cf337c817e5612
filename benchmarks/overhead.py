"""What the cache itself costs: per computed call and per skipped call, by number of blocks.

On an SD3 transformer so small that Python is what takes the time. Calls with and without the cache
alternate on the same model, so that a machine whose speed drifts treats both alike, and so does
where the weights lie in memory:

computed  a step that is computed, beside the model without the cache
skipped   a step that is skipped, beside the model with its block list emptied by hand: what a skip
          would take if it were free

The cache's own cost is the difference of each two neighbours: median and quartiles.
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
BLOCK_LIST = "transformer_blocks"


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


class Pairs:
    """Calls at each step of a run, over and over: with the cache, and the same without it.

    What the scheduler does between two calls is part of neither's time, but of what both find in
    the processor's caches. A run's first call is computed whatever is measured, and not timed.
    """

    def __init__(self, blocks: int, *, skipped: bool) -> None:
        self.model, self.call = build(blocks)
        self.skipped = skipped
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        settings = magcache.MagCacheConfig(
            threshold=1e9 if skipped else 0.0,
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

    def seconds(self) -> float:
        """Time of one call."""
        start = time.perf_counter()
        self.model(**self.call)
        return time.perf_counter() - start

    def seconds_without(self) -> float:
        """Time of one call without the cache, and where skips are measured, without blocks."""
        cached = vars(self.model).pop("forward")
        blocks = self.model._modules[BLOCK_LIST]
        if self.skipped:
            self.model._modules[BLOCK_LIST] = nn.ModuleList()
        try:
            return self.seconds()
        finally:
            self.model._modules[BLOCK_LIST] = blocks
            vars(self.model)["forward"] = cached

    def times(self, seconds: float) -> list[tuple[float, float]]:
        """The microseconds with and without the cache of as many pairs as fit into the time."""
        taken: list[tuple[float, float]] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.advance()
            if len(taken) % 2:
                with_cache, without = self.seconds(), self.seconds_without()
            else:
                without, with_cache = self.seconds_without(), self.seconds()
            taken.append((1e6 * with_cache, 1e6 * without))
        return taken


def measure(blocks: int, seconds: float, *, skipped: bool) -> dict[str, float]:
    """Median microseconds of both calls, and of the cache's own cost, with its quartiles."""
    measured = Pairs(blocks, skipped=skipped)
    measured.times(seconds / 10)
    times = measured.times(seconds)
    with_cache, without = map(statistics.median, zip(*times, strict=True))
    low, middle, high = statistics.quantiles([a - b for a, b in times], n=4)
    return {
        "pairs": len(times),
        "call": round(with_cache, 1),
        "without": round(without, 1),
        "own_cost": round(middle, 1),
        "quartile_1": round(low, 1),
        "quartile_3": round(high, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="time of each of the six rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/overhead.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        rows: list[dict[str, Any]] = [
            {
                "blocks": blocks,
                "computed": measure(blocks, options.seconds, skipped=False),
                "skipped": measure(blocks, options.seconds, skipped=True),
            }
            for blocks in BLOCKS
        ]
    hardware = machine()
    result = {"machine": hardware, "steps": STEPS, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")

    table = Table(title=f"The cache's own cost in µs ({hardware['device']})")
    for heading in ("blocks", "plain call", "computed +", "skipped call", "skipped +"):
        table.add_column(heading, justify="right")
    for row in rows:
        computed, skipped = row["computed"], row["skipped"]
        table.add_row(
            str(row["blocks"]),
            f"{computed['without']:.0f}",
            f"{computed['own_cost']:.0f}",
            f"{skipped['call']:.0f}",
            f"{skipped['own_cost']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
