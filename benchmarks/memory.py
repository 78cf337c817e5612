"""Memory that a cache takes beside the plain pipeline: at its peak, and after the run.

The demo model draws under guidance (two streams) with every allocation of PyTorch's allocator
written down: by its profiler on the CPU, by `torch.cuda` on a GPU. What is told is the peak of a
cached run over that of the plain one, in residuals; expected is one for each that a stream keeps
(float8 keeps a quarter of each, and holds one whole beside them while it is computed or added).
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import magcache
from magcache import Budget, MagCacheConfig
from magcache.demo import load_demo_pipeline, prompts
from magcache.hook import cache_of
from magcache.machine import machine

RESULTS = Path(__file__).parent / "results/memory.json"
STEPS = 28
CONFIGS: dict[str, MagCacheConfig] = {
    "greedy": MagCacheConfig(mag_ratios="demo-emoji"),
    **{
        f"budget, {n} residuals": MagCacheConfig(budget=Budget(speedup=2.0, max_residuals=n))
        for n in (1, 2, 3)
    },
    "budget, 3 residuals, float8": MagCacheConfig(
        budget=Budget(speedup=2.0), residual_storage="float8"
    ),
}


class _StoppedError(Exception):
    """Ends a run in its middle."""


def allocated(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that `run` has allocated at its peak, and those that it leaves allocated."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    results: Any = profiled.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, now


def draw(pipe: Any, count: int, stop_at: int | None = None) -> None:
    """Draw and forget; `stop_at` raises at that step, as a user's interrupt does."""

    def stop(_: Any, step: int, *__: Any) -> dict[str, Any]:
        if step == stop_at:
            raise _StoppedError
        return {}

    with contextlib.suppress(_StoppedError):
        pipe(
            list(prompts()[:count]),
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            callback_on_step_end=stop,
        )


def residual_bytes(pipe: Any, count: int) -> int:
    """Bytes of one stream's residual."""
    sizes: list[int] = []

    def look(_: Any, step: int, *__: Any) -> dict[str, Any]:
        cache = cache_of(pipe.transformer)
        assert cache is not None
        for state in cache.states.values():
            sizes.extend(sum(t.nbytes for t in parts.tensors) for _, parts in state.held)
        return {}

    with magcache.enable(pipe, CONFIGS["greedy"]):
        pipe(list(prompts()[:count]), num_inference_steps=4, callback_on_step_end=look)
    return max(sizes)


def measure(count: int) -> list[dict[str, Any]]:
    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    if torch.cuda.is_available():
        pipe.to("cuda")
    one = residual_bytes(pipe, count)
    plain, plain_left = allocated(lambda: draw(pipe, count))
    rows = []
    for name, config in CONFIGS.items():
        with magcache.enable(pipe, config):
            draw(pipe, count)
            peak, left = allocated(lambda: draw(pipe, count))
            _, left_after_stop = allocated(lambda: draw(pipe, count, stop_at=STEPS // 2))
        kept = 2 * (config.budget.max_residuals if config.budget else 1)
        rows.append(
            {
                "config": name,
                "residual_bytes": one,
                "plain_peak_bytes": plain,
                "extra_peak_bytes": peak - plain,
                "extra_residuals": (peak - plain) / one,
                "expected_residuals": kept,
                "left_bytes": left - plain_left,
                "left_after_exception_bytes": left_after_stop - plain_left,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = measure(options.pictures)
    result = {"machine": machine(), "pictures": options.pictures, "steps": STEPS, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title="Extra peak memory, in residuals (two streams)")
    for heading in ("cache", "extra", "expected", "left", "left after an exception"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["config"],
            f"{row['extra_residuals']:.2f}",
            str(row["expected_residuals"]),
            f"{row['left_bytes']} B",
            f"{row['left_after_exception_bytes']} B",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
