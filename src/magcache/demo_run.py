"""Draw prompts plainly, with the cache, and plainly with as few steps as the cache computed.

The third way is the honest rival: what the cache saves must be worth more than not running those
steps at all.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch

import magcache
from magcache import StreamStats
from magcache.config import MagCacheConfig
from magcache.hook import cache_of
from magcache.machine import machine
from magcache.metrics import Spread, psnr, ssim, timed
from magcache.planning import Plan

__all__ = ["WAYS", "DemoResult", "Way", "as_json", "run_demo"]

WAYS = ("plain", "with cache", "fewer steps")


@dataclass(frozen=True)
class Way:
    """One way of drawing all prompts; `computed` counts steps a run, averaged over the streams."""

    name: str
    steps: int
    computed: float
    seconds: tuple[float, ...]
    pictures: torch.Tensor

    @property
    def seconds_per_picture(self) -> float:
        # A median, for a machine that does other work now and then.
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class DemoResult:
    """The three ways, what each stream did in the cached one, and why."""

    ways: tuple[Way, Way, Way]
    streams: tuple[StreamStats, ...]
    plans: dict[str, Plan]
    noise: tuple[float, ...]

    @property
    def plain(self) -> Way:
        return self.ways[0]

    @property
    def cached(self) -> Way:
        return self.ways[1]

    def speedup(self, way: Way) -> float:
        return self.plain.seconds_per_picture / way.seconds_per_picture

    def bound(self, way: Way) -> float:
        """The speed-up if a skipped step cost nothing."""
        return self.plain.steps / way.computed

    def psnr(self, way: Way) -> Spread:
        return Spread.of(psnr(way.pictures, self.plain.pictures))

    def ssim(self, way: Way) -> Spread:
        return Spread.of(ssim(way.pictures, self.plain.pictures))


def run_demo(
    pipe: Any,
    prompts: Sequence[str],
    config: MagCacheConfig,
    *,
    steps: int,
    guidance: float,
    seed: int,
    on_picture: Callable[[], None] = lambda: None,
) -> DemoResult:
    """Draw every prompt each of the three ways, from the same noise.

    The ways take turns prompt by prompt, so that a machine that slows down slows all alike.
    """

    def draw(prompt: str, steps: int) -> torch.Tensor:
        pictures: torch.Tensor = pipe(
            prompt,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(seed),
            output_type="pt",
        ).images
        return pictures

    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    pictures: dict[str, list[torch.Tensor]] = {name: [] for name in WAYS}

    def measure(way: str, prompt: str, steps: int) -> None:
        drawn, took = timed(lambda: draw(prompt, steps), pipe.device)
        pictures[way].append(drawn.cpu())
        seconds[way].append(took)
        on_picture()

    # Once unmeasured, to warm up; a model without a curve is calibrated by it.
    with magcache.enable(pipe, config):
        draw(prompts[0], steps)
    for prompt in prompts:
        measure(WAYS[0], prompt, steps)
        with magcache.enable(pipe, config):
            measure(WAYS[1], prompt, steps)
            # The same for every prompt: a plan depends on the settings alone.
            streams = magcache.stats(pipe).streams
            plans, noise = _plans(pipe, config, streams)
        computed = sum(stream.computed for stream in streams) / len(streams)
        # Rounded up where the streams differ: in doubt the rival gets the step.
        fewer = math.ceil(computed)
        measure(WAYS[2], prompt, fewer)

    counts = zip(WAYS, (steps, steps, fewer), (steps, computed, fewer), strict=True)
    plain, cached, rival = (
        Way(name, run, done, tuple(seconds[name]), torch.cat(pictures[name]))
        for name, run, done in counts
    )
    return DemoResult((plain, cached, rival), streams, plans, noise)


def _plans(
    pipe: Any, config: MagCacheConfig, streams: Sequence[StreamStats]
) -> tuple[dict[str, Plan], tuple[float, ...]]:
    """What happened in each stream with the error that was planned, and the noise levels."""
    scheduler = pipe.scheduler
    scale = scheduler.config.num_train_timesteps
    noise = tuple(timestep / scale for timestep in scheduler.timesteps.tolist())
    cache = cache_of(pipe.transformer)
    assert cache is not None
    assert cache.curve is not None
    sigmas = noise if cache.curve.axis == "noise" else None
    known = list(cache.curve.streams)
    plans = {}
    for order, stream in enumerate(streams):
        own = stream.stream if stream.stream in known else known[min(order, len(known) - 1)]
        name = None if config.streams == "joint" else own
        plan = magcache.plan(cache.curve, config, len(noise), stream=name, sigmas=sigmas)
        happened = tuple(mark == "C" for mark in stream.happened)
        plans[stream.stream] = dataclasses.replace(plan, computed=happened)
    return plans, noise


def as_json(
    result: DemoResult, prompts: Sequence[str], config: MagCacheConfig, settings: dict[str, Any]
) -> dict[str, Any]:
    """All figures, with the machine and the versions they were measured on."""
    plain = result.plain.pictures
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": {
            **_rule(config),
            **settings,
        },
        "prompts": list(prompts),
        "ways": [
            {
                "name": way.name,
                "steps": way.steps,
                "computed_steps": way.computed,
                "seconds": list(way.seconds),
                "seconds_per_picture": way.seconds_per_picture,
                "speedup": result.speedup(way),
                "speedup_bound": result.bound(way),
                "psnr_db": _spread(result.psnr(way), psnr(way.pictures, plain)),
                "ssim": _spread(result.ssim(way), ssim(way.pictures, plain)),
            }
            for way in result.ways
        ],
        "streams": [dataclasses.asdict(stream) for stream in result.streams],
        "noise_levels": list(result.noise),
        "machine": machine(),
    }


def _rule(config: MagCacheConfig) -> dict[str, Any]:
    if config.budget is not None:
        return {"budget": dataclasses.asdict(config.budget)}
    names = ("threshold", "max_skip_steps", "retention_ratio")
    return {name: getattr(config, name) for name in names}


def _spread(spread: Spread, values: torch.Tensor) -> dict[str, Any]:
    """JSON knows no infinity (the PSNR of identical pictures): it becomes the string "inf"."""
    figures = {**dataclasses.asdict(spread), "each": values.tolist()}
    return {
        name: [_finite(v) for v in value] if isinstance(value, list) else _finite(value)
        for name, value in figures.items()
    }


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
