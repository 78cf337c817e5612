"""What caching costs in quality on the shipped model, beside fewer steps and diffusers' MagCache.

Every prompt is drawn plainly, with the cache at several settings, with diffusers' MagCache at the
same settings and ratios, and plainly with as few steps as the cache computed. Quality is measured
against the plain pipeline's own picture from the same noise, and against the fine solution (200
steps). Pictures are drawn in batches; times are taken apart, one picture at a time, in turn.

diffusers' MagCache needs a cache context around each call, which a pipeline of its own would set
and SD3's does not; here the contexts are set for it, so that it is compared at its best.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.hooks import HookRegistry, mag_cache
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from rich.console import Console
from rich.table import Table

import magcache
from magcache.demo import EmojiPipeline, load_demo_pipeline, prompts
from magcache.machine import machine
from magcache.metrics import Spread, psnr, ssim

SETTINGS = {
    "0.06/3/0.2": (0.06, 3, 0.2),
    "0.12/4/0.2": (0.12, 4, 0.2),
    "0.24/5/0.1": (0.24, 5, 0.1),
}
FINE_STEPS = 200
GUIDANCE = 3.0


def noise(pipe: EmojiPipeline, seeds: list[int]) -> torch.Tensor:
    """One start per picture, the same for every method."""
    config = pipe.transformer.config
    shape = (1, config.in_channels, config.sample_size, config.sample_size)
    return torch.cat(
        [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
    )


def draw(pipe: EmojiPipeline, texts: list[str], start: torch.Tensor, steps: int) -> torch.Tensor:
    """Pictures [n, 3, size, size] in [0, 1]."""
    pictures = pipe(
        texts,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        latents=start,
        output_type="pt",
        return_dict=False,
    )[0]
    assert isinstance(pictures, torch.Tensor)
    return pictures


@contextmanager
def diffusers_mag_cache(
    pipe: EmojiPipeline, settings: tuple[float, int, float], steps: int, ratios: list[float]
) -> Iterator[list[int]]:
    """diffusers' cache on the pipeline, told cond and uncond apart; yields the computed calls."""
    threshold, most, retention = settings
    model = pipe.transformer
    mag_cache.apply_mag_cache(
        model,
        mag_cache.MagCacheConfig(
            threshold=threshold,
            max_skip_steps=most,
            retention_ratio=retention,
            num_inference_steps=steps,
            mag_ratios=ratios,
        ),
    )
    calls, computed = [0], [0]
    # The second block runs on computed steps only; the first one's hook runs always.
    counter = model.transformer_blocks[1].attn.register_forward_pre_hook(
        lambda *_: computed.__setitem__(0, computed[0] + 1)
    )

    def set_context(*_: Any) -> None:
        _set_cache_context(model, CacheContext("uncond" if calls[0] % 2 else "cond"))
        calls[0] += 1

    context = model.register_forward_pre_hook(set_context)
    try:
        yield computed
    finally:
        context.remove()
        counter.remove()
        registry = HookRegistry.check_if_exists_or_initialize(model)
        registry.remove_hook(mag_cache._MAG_CACHE_LEADER_BLOCK_HOOK, recurse=True)
        registry.remove_hook(mag_cache._MAG_CACHE_BLOCK_HOOK, recurse=True)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    pipe: EmojiPipeline,
    curve: magcache.MagnitudeCurve,
    texts: list[str],
    start: torch.Tensor,
    fine: torch.Tensor,
    steps: int,
    timed_pictures: int,
) -> list[dict[str, Any]]:
    """All methods at one number of steps, beside the `fine` solution of the same noise."""
    plain = draw(pipe, texts, start, steps)
    rows = [_row("plain", "", steps, float(steps), plain, plain, fine)]
    one = (texts[:1], start[:1])
    timers: list[Callable[[], float]] = [lambda: seconds(lambda: draw(pipe, *one, steps))]

    for label, settings in SETTINGS.items():
        threshold, most, retention = settings
        config = magcache.MagCacheConfig(threshold, most, retention, mag_ratios=curve)
        with magcache.enable(pipe, config):
            pictures = draw(pipe, texts, start, steps)
            computed = statistics.mean(s.computed for s in magcache.stats(pipe).streams)
        rows.append(_row("magcache", label, steps, computed, pictures, plain, fine))
        timers.append(lambda config=config: _timed_cached(pipe, config, one, steps))  # type: ignore[misc]

        ratios = list(curve.ratios(curve.places(steps)))
        with diffusers_mag_cache(pipe, settings, steps, ratios) as count:
            pictures = draw(pipe, texts, start, steps)
        theirs = count[0] / 2
        rows.append(_row("diffusers MagCache", label, steps, theirs, pictures, plain, fine))
        timers.append(
            lambda settings=settings, ratios=ratios: _timed_diffusers(  # type: ignore[misc]
                pipe, settings, ratios, one, steps
            )
        )

        fewer = math.ceil(computed)
        pictures = draw(pipe, texts, start, fewer)
        rows.append(_row("fewer steps", label, fewer, float(fewer), pictures, plain, fine))
        timers.append(lambda fewer=fewer: seconds(lambda: draw(pipe, *one, fewer)))  # type: ignore[misc]

    taken: list[list[float]] = [[] for _ in timers]
    for _ in range(timed_pictures):
        for times, timer in zip(taken, timers, strict=True):
            times.append(timer())
    for row, times in zip(rows, taken, strict=True):
        row["seconds_per_picture"] = statistics.median(times)
        ratio = [base / own for base, own in zip(taken[0], times, strict=True)]
        row["speedup"] = statistics.median(ratio)
        row["bound"] = steps / row["computed_steps"]
    return rows


def _timed_cached(
    pipe: EmojiPipeline, config: magcache.MagCacheConfig, one: tuple[Any, Any], steps: int
) -> float:
    with magcache.enable(pipe, config):
        return seconds(lambda: draw(pipe, *one, steps))


def _timed_diffusers(
    pipe: EmojiPipeline,
    settings: tuple[float, int, float],
    ratios: list[float],
    one: tuple[Any, Any],
    steps: int,
) -> float:
    with diffusers_mag_cache(pipe, settings, steps, ratios):
        return seconds(lambda: draw(pipe, *one, steps))


def _row(
    method: str,
    settings: str,
    steps: int,
    computed: float,
    pictures: torch.Tensor,
    plain: torch.Tensor,
    fine: torch.Tensor,
) -> dict[str, Any]:
    same = pictures is plain
    return {
        "method": method,
        "settings": settings,
        "steps": steps,
        "computed_steps": computed,
        "psnr": None if same else vars(Spread.of(psnr(pictures, plain))),
        "ssim": None if same else vars(Spread.of(ssim(pictures, plain))),
        "psnr_fine": vars(Spread.of(psnr(pictures, fine))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 28, 50])
    parser.add_argument("--pictures", type=int, default=24)
    parser.add_argument("--timed", type=int, default=5, help="rounds of timing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/quality.json")
    options = parser.parse_args()

    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    known = list(prompts())
    texts = [known[i * len(known) // options.pictures] for i in range(options.pictures)]
    # Seeds from 1000 up are held out: the shipped curve was calibrated on others.
    start = noise(pipe, list(range(1000, 1000 + len(texts))))
    curve = shipped_curve(pipe)
    fine = draw(pipe, texts, start, FINE_STEPS)
    rows = {
        steps: measure(pipe, curve, texts, start, fine, steps, options.timed)
        for steps in options.steps
    }

    result = {
        "machine": machine(),
        "pictures": len(texts),
        "guidance": GUIDANCE,
        "curve": curve.provenance,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for steps, measured in rows.items():
        show(steps, measured, str(result["machine"]["device"]))  # type: ignore[index]


def shipped_curve(pipe: EmojiPipeline) -> magcache.MagnitudeCurve:
    """The curve that `magcache.enable` finds for the shipped model."""
    from magcache import presets
    from magcache.store import fingerprint

    name = presets.for_checkpoint((fingerprint(pipe.transformer),))
    if name is None:
        raise SystemExit("the shipped model has no preset; run training/calibrate.py first")
    return presets.load(name)


def show(steps: int, rows: list[dict[str, Any]], device: str) -> None:
    """The rows of one number of steps as a table."""
    table = Table(title=f"{steps} steps, guidance {GUIDANCE:g} ({device})")
    table.add_column("method")
    table.add_column("settings")
    for heading in ("computed", "speed-up", "bound", "PSNR dB", "SSIM", "PSNR to 200 steps"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            row["settings"],
            f"{row['computed_steps']:g}",
            f"{row['speedup']:.2f}",
            f"{row['bound']:.2f}",
            f"{Spread(**row['psnr']):.1f}" if row["psnr"] else "",
            f"{Spread(**row['ssim']):.3f}" if row["ssim"] else "",
            f"{Spread(**row['psnr_fine']):.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
