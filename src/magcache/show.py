"""What the command line shows: tables, rows and figures of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from magcache.config import MagCacheConfig
from magcache.curve import Axis, MagnitudeCurve
from magcache.frontier import Frontier
from magcache.planning import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from magcache.demo_run import DemoResult, Way

__all__ = [
    "columns",
    "curve",
    "demo",
    "frontier",
    "pairs",
    "plan",
    "plan_table",
    "plans",
    "settings",
]


def settings(config: MagCacheConfig) -> str:
    """A configuration in words."""
    if config.budget is not None:
        kept = config.budget.max_residuals
        residuals = "one residual" if kept == 1 else f"up to {kept} residuals"
        return f"planned for {config.budget}, {residuals} kept a stream"
    return (
        f"threshold {config.threshold:g}, at most {config.max_skip_steps} skipped in a row, "
        f"the first {config.retention_ratio:.0%} computed"
    )


def columns(console: Console, words: Sequence[str]) -> None:
    """Words side by side; one a line where the output is not a terminal."""
    if console.is_terminal:
        console.print(Columns(words, column_first=True, padding=(0, 3)))
    else:
        console.print("\n".join(words), soft_wrap=True)


def demo(
    console: Console, result: DemoResult, config: MagCacheConfig, run: dict[str, Any], prompts: int
) -> None:
    """The three ways as a table, the rows of the plan under it."""
    many = f"{_count(prompts, 'prompt')}, {_count(run['steps'], 'step')}"
    told = f"guidance {run['guidance']:g}, seed {run['seed']}"
    console.print(f"\n{many}, {told}\n{settings(config)}\n")
    table = _table()
    table.add_column("")
    for name in ("computed", "s/picture", "speed-up", "bound", "PSNR, dB", "SSIM"):
        table.add_column(name, justify="right")
    for way in result.ways:
        steps = f"{way.computed:g} of {way.steps}"
        times = (f"{way.seconds_per_picture:.3f}", f"{result.speedup(way):.2f}x")
        bold = "bold" if way is result.cached else None
        table.add_row(way.name, steps, *times, *_against_plain(result, way), style=bold)
    console.print(table)
    console.print()
    width = max(len(stream.stream) for stream in result.streams)
    for stream in result.streams:
        row = Text(f"stream {stream.stream:<{width}}  ").append(stream.happened, style="bold")
        console.print(row, soft_wrap=True)
        if stream.plan != stream.happened:
            console.print(f"{'planned':<{width + 7}}  {stream.plan}", soft_wrap=True)
        for reason, count in stream.fallbacks.items():
            console.print(f"  {count} x {reason}", soft_wrap=True)
    console.print("\nC is a computed step, . a skipped one; PSNR and SSIM are against plain.\n")


def pairs(result: DemoResult, prompts: Sequence[str]) -> Figure:
    """The sheet of pairs, headed by what it took."""
    from magcache.report import pairs_figure

    plain, cached = result.plain, result.cached
    gain = f"{result.speedup(cached):.2f}x as fast, {result.psnr(cached):.1f} dB"
    return pairs_figure(
        prompts,
        plain.pictures,
        cached.pictures,
        titles=(f"{plain.computed:g} steps", f"{cached.computed:g} steps"),
        heading=f"{plain.computed:g} steps without the cache, {cached.computed:g} with it: {gain}",
    )


def plans(result: DemoResult, config: MagCacheConfig) -> Figure:
    """The plan of each stream."""
    from magcache.report import plan_figure

    threshold = None if config.budget is not None else config.threshold
    return plan_figure(result.plans, result.noise, threshold=threshold)


def plan(console: Console, stream: str, plan: Plan) -> None:
    """A plan's counts, bound and row."""
    counts = f"{plan.computed_steps} of {plan.steps} steps computed"
    console.print(
        f"\nstream {stream}: {counts}, at most {plan.speedup:.2f}x as fast", soft_wrap=True
    )
    console.print(Text(f"  {plan}", style="bold"), soft_wrap=True)


def frontier(console: Console, frontier: Frontier) -> None:
    """Each plan of a run with the speed-up that it bounds and the error that it predicts."""
    table = _table()
    for name in ("computed", "at most", "predicted error"):
        table.add_column(name, justify="right")
    table.add_column("plan")
    for count, (speedup, error) in zip(frontier.counts, frontier.points, strict=True):
        row = Text(str(frontier.plan(count)))
        table.add_row(str(count), f"{speedup:.2f}x", f"{error:.5f}", row)
    console.print(table)


def plan_table(
    console: Console, plan: Plan, places: Sequence[float], ratios: Sequence[float], axis: Axis
) -> None:
    """Every step of a plan with its ratio and the error that the rule saw."""
    table = _table()
    place = "noise level" if axis == "noise" else "share of run"
    for name in ("step", place, "ratio", "accumulated ratio", "error", ""):
        table.add_column(name, justify="right")
    rows = zip(places, ratios, plan.ratios, plan.errors, plan.computed, strict=True)
    for step, (at, ratio, accumulated, error, computed) in enumerate(rows, start=1):
        figures = (f"{at:.3f}", f"{ratio:.4f}", f"{accumulated:.4f}", f"{error:.4f}")
        table.add_row(str(step), *figures, "C" if computed else ".")
    console.print(table)


def curve(console: Console, name: str, curve: MagnitudeCurve) -> None:
    """A curve's streams and provenance."""
    axis = "noise level" if curve.axis == "noise" else "share of the run"
    console.print(f"{name}: magnitude ratios over the {axis}\n", soft_wrap=True)
    table = _table()
    table.add_column("stream")
    for column in ("steps", "from", "to", "lowest", "highest", "product"):
        table.add_column(column, justify="right")
    for stream, found in curve.streams.items():
        total = _product(found.ratios)
        figures = (found.places[0], found.places[-1], min(found.ratios), max(found.ratios), total)
        table.add_row(stream, str(len(found.ratios)), *(f"{figure:.3f}" for figure in figures))
    console.print(table)
    for key, value in curve.provenance.items():
        console.print(f"{key}: {value}", soft_wrap=True)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def _against_plain(result: DemoResult, way: Way) -> tuple[str, str, str]:
    if way is result.plain:
        return "", "", ""
    return f"{result.bound(way):.2f}x", f"{result.psnr(way):.1f}", f"{result.ssim(way):.3f}"


def _product(ratios: Sequence[float]) -> float:
    product = 1.0
    for ratio in ratios:
        product *= ratio
    return product
