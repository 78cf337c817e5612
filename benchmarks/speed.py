"""Measured speed-up beside its bound: ours and other caches, eager and compiled, in one run.

A Flux transformer with random weights, in three shapes whose blocks take about 50, 90 and 99 % of
a call, makes runs of 24 steps. Each two (three) steps get the same input, so that every cache, by
whatever it decides, computes each second (third) step and skips the others, as uniform plans do.

bound      what the run would take over what it takes if a skipped call took as long as the model
           without its blocks: 24 T / (computed * T + skipped * E), T and E measured in the same run
reached    measured speed-up over that bound
product    under compilation: the speed-up over the plain eager model, over the product of what
           compiling and caching (its bound) gain alone

Variants take turns, run by run, so that a machine whose speed drifts treats all alike.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
)
from diffusers import MagCacheConfig as DiffusersMagCacheConfig
from peers import Work
from rich.console import Console
from rich.table import Table
from torch import nn

import magcache
from magcache.machine import machine

STEPS = 24
EVERY = (2, 3)
LISTS = ("transformer_blocks", "single_transformer_blocks")
RESULTS = Path(__file__).parent / "results/speed.json"


@dataclass(frozen=True)
class Shape:
    """A transformer by its blocks (double, single) and by what its blocks do not do.

    text: width of the text embedding, whose projection to the model's width is outside the blocks.
    """

    name: str
    double: int
    single: int
    text: int
    text_tokens: int


SHAPES = (
    Shape("50 %", 1, 1, 16384, 96),
    Shape("90 %", 2, 3, 4096, 96),
    Shape("99 %", 4, 8, 64, 32),
)


def build(shape: Shape) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=shape.double,
        num_single_layers=shape.single,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=shape.text,
        pooled_projection_dim=64,
        axes_dims_rope=(16, 24, 24),
        guidance_embeds=False,
    ).eval()


def inputs(shape: Shape, every: int) -> list[dict[str, Any]]:
    """One call's arguments for each step; `every` steps in a row get the same picture."""
    side = 10
    places = torch.zeros(side * side, 3)
    places[:, 1] = torch.arange(side * side) // side
    places[:, 2] = torch.arange(side * side) % side
    random = torch.Generator().manual_seed(1)
    text = torch.randn(1, shape.text_tokens, shape.text, generator=random)
    pooled = torch.randn(1, 64, generator=random)
    pictures = [torch.randn(1, side * side, 16, generator=random) for _ in range(STEPS // every)]
    return [
        {
            "hidden_states": pictures[step // every],
            "timestep": torch.tensor([1 - (step // every) * every / STEPS]),
            "encoder_hidden_states": text,
            "pooled_projections": pooled,
            "img_ids": places,
            "txt_ids": torch.zeros(shape.text_tokens, 3),
            "return_dict": False,
        }
        for step in range(STEPS)
    ]


class Variant:
    """A model with a cache (or none), compiled (or not), and the times of its runs."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        every: int,
        compiled: str,
        put: Callable[[nn.Module, Any, int], None] | None = None,
    ) -> None:
        self.name, self.compiled, self.every = name, compiled, every
        self.model = build(shape)
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.calls = inputs(shape, every)
        self.times: list[float] = []
        if name == "empty":
            for listed in LISTS:
                setattr(self.model, listed, nn.ModuleList())
        if compiled == "whole":
            self.model.compile()
        elif compiled == "regional" and name != "empty":
            self.model.compile_repeated_blocks(fullgraph=True)
        if put is not None:
            put(self.model, self.scheduler, every)

    def run(self) -> float:
        """Seconds of one run."""
        self.scheduler.set_timesteps(STEPS)
        sample = self.calls[0]["hidden_states"]
        start = time.perf_counter()
        for step, call in enumerate(self.calls):
            with self.model.cache_context("cond"):
                self.model(**call)
            self.scheduler.step(sample, self.scheduler.timesteps[step], sample)
        return time.perf_counter() - start

    def work(self) -> int:
        """Multiplications of the blocks' linear layers in a run. Not for compiled models."""
        with Work(*(getattr(self.model, name) for name in LISTS)) as work:
            self.run()
        return work.done


def ours(model: nn.Module, scheduler: Any, every: int) -> None:
    settings = magcache.MagCacheConfig(
        threshold=1e-9, max_skip_steps=every - 1, retention_ratio=0.0, mag_ratios=[1.0] * STEPS
    )
    magcache.enable(model, settings, scheduler=scheduler)


def diffusers_mag_cache(model: Any, scheduler: Any, every: int) -> None:
    model.enable_cache(
        DiffusersMagCacheConfig(
            threshold=1e-9,
            max_skip_steps=every - 1,
            retention_ratio=0.0,
            num_inference_steps=STEPS,
            mag_ratios=torch.ones(STEPS),
        )
    )


def first_block(model: Any, scheduler: Any, every: int) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=1e-4))


def cache_dit(model: Any, scheduler: Any, every: int) -> None:
    import cache_dit

    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        max_warmup_steps=0,
        residual_diff_threshold=1e-4,
        num_inference_steps=STEPS,
    )
    cache_dit.enable_cache(model, cache_config=config)


CACHES: dict[str, Callable[[nn.Module, Any, int], None]] = {
    "magcache": ours,
    "diffusers MagCache": diffusers_mag_cache,
    "FirstBlockCache": first_block,
}
if importlib.util.find_spec("cache_dit"):
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "warning")
    CACHES["cache-dit"] = cache_dit


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def measure(shape: Shape, every: int, compiled: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of one shape, plan and way of compiling."""
    whole = Variant("plain eager", shape, every, "eager").work()
    base = {"shape": shape.name, "every": every, "compiled": compiled}
    rows: list[dict[str, Any]] = []
    variants = [Variant("plain eager", shape, every, "eager")]
    if compiled != "eager":
        variants.append(Variant("plain", shape, every, compiled))
    variants.append(Variant("empty", shape, every, compiled))
    for name, put in CACHES.items():
        try:
            share = Variant(name, shape, every, "eager", put).work() / whole
            variant = Variant(name, shape, every, compiled, put)
            variant.run()
        except Exception as error:
            # A cache that does not run so is named in the results, with its reason.
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            rows.append({**base, "cache": name, "failed": reason})
        else:
            variants.append(variant)
            rows.append({**base, "cache": name, "computed_share": share})
    for variant in variants:
        variant.run()
    for _ in range(rounds):
        for variant in variants:
            variant.times.append(variant.run())
    at = {variant.name: variant for variant in variants}
    eager = at["plain eager"]
    plain = at.get("plain", eager)
    rest = ratio(at["empty"], plain)
    compiling = ratio(eager, plain)
    for row in rows:
        if row["cache"] in at:
            cached, share = at[row["cache"]], row["computed_share"]
            bound = 1 / (share + (1 - share) * rest)
            row["blocks_share"] = 1 - rest
            row["bound"] = bound
            row["speedup"] = ratio(plain, cached)
            row["reached"] = row["speedup"] / bound
            row["compiling_gains"] = compiling
            row["over_plain_eager"] = ratio(eager, cached)
            row["product"] = row["over_plain_eager"] / (compiling * bound)
    return rows


def ratio(first: Variant, second: Variant) -> float:
    """Median over the rounds of the first's time over the second's."""
    return statistics.median(a / b for a, b in zip(first.times, second.times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--compiled", nargs="+", default=["eager", "regional", "whole"], metavar="WAY"
    )
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    table = Table(title=f"Speed-up over bound ({machine()['device']})")
    for heading in ("blocks", "compiled", "every", "cache", "bound", "speed-up", "reached"):
        table.add_column(heading, justify="right")
    for shape in (s for s in SHAPES if s.name in options.shapes):
        for compiled in options.compiled:
            for every in EVERY if compiled == "eager" else EVERY[:1]:
                with torch.no_grad(), _fresh_compiler():
                    rows += measure(shape, every, compiled, options.rounds)
                result = {"machine": machine(), "steps": STEPS, "rows": rows}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        cells = [row["shape"], row["compiled"], str(row["every"]), row["cache"]]
        if "failed" in row:
            cells += ["", row["failed"][:60], ""]
        else:
            cells[0] = f"{row['blocks_share']:.0%}"
            cells += [f"{row['bound']:.2f}", f"{row['speedup']:.2f}", f"{row['reached']:.1%}"]
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
