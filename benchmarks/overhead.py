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
from collections.abc import Callable
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


def calls(blocks: int) -> dict[str, Callable[[], Any]]:
    """The four kinds of call, each on a model of its own with the same weights."""
    plain, call = build(blocks)
    empty, _ = build(blocks)
    empty.transformer_blocks = nn.ModuleList()
    return {
        "plain": lambda: plain(**call),
        "empty": lambda: empty(**call),
        "computed": _cached(blocks, call, threshold=0.0),
        "skipped": _cached(blocks, call, threshold=1e9),
    }


def _cached(blocks: int, call: dict[str, Any], threshold: float) -> Callable[[], Any]:
    model, _ = build(blocks)
    scheduler = FlowMatchEulerDiscreteScheduler()
    settings = magcache.MagCacheConfig(
        threshold=threshold, max_skip_steps=10**9, retention_ratio=0.0, mag_ratios=[1.0]
    )
    magcache.enable(model, settings, scheduler=scheduler)
    scheduler.set_timesteps(1000)
    sample, taken = call["hidden_states"], 0

    def one_call() -> None:
        # Each call is a step of a run, so the scheduler's step is part of neither side's time.
        nonlocal taken
        model(**call)
        taken += 1

    def advance() -> None:
        scheduler.step(sample, scheduler.timesteps[taken % 1000], sample)
        if taken % 1000 == 999:
            scheduler.set_timesteps(1000)

    one_call.advance = advance  # type: ignore[attr-defined]
    one_call()
    advance()
    return one_call


def seconds_per_call(call: Callable[[], Any], repeats: int) -> float:
    """Median time of one call."""
    advance = getattr(call, "advance", None)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if advance is not None:
            advance()
    return statistics.median(times)


def measure(blocks: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Microseconds of each kind, and the cache's own cost with its quartiles."""
    kinds = calls(blocks)
    for call in kinds.values():
        seconds_per_call(call, repeats)
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            taken[kind].append(1e6 * seconds_per_call(kinds[kind], repeats))

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
