"""Pictures of what the cache did: the side-by-side sheet, the plan, the magnitude law.

Each function returns a matplotlib `Figure` of its own (no pyplot, no global state), 1200 pixels
wide; save it with `figure.savefig(path)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from magcache.curve import MagnitudeCurve, StreamCurve
from magcache.metrics import psnr
from magcache.planning import Plan

__all__ = ["law_figure", "pairs_figure", "plan_figure"]

_DPI = 100
_WIDTH = 1200
_INK, _MUTED, _FAINT, _CARD = "#1f2430", "#667085", "#d0d5dd", "#f4f5f7"
# Blue and orange first: they differ for every kind of colour vision.
_STREAM_COLOURS = ("#2563c9", "#e07a1f", "#7a5195", "#2a9d8f", "#b5485d", "#6c757d")
_GAINS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def pairs_figure(
    prompts: Sequence[str],
    plain: torch.Tensor,
    cached: torch.Tensor,
    *,
    titles: tuple[str, str] = ("plain", "cached"),
    heading: str = "The same pictures, without and with the cache",
) -> Figure:
    """Per prompt the plain picture, the cached one, and how they differ, amplified alike for all.

    Pictures are [n, 3, height, width] floats in [0, 1]; the PSNR of each pair stands under it.
    """
    if not len(prompts) == len(plain) == len(cached):
        raise ValueError(
            f"found {len(prompts)} prompts, {len(plain)} plain and {len(cached)} cached pictures; "
            "there must be one of each per prompt"
        )
    decibels = psnr(cached, plain).tolist()
    difference = (cached.float() - plain.float()).abs().mean(1).cpu()
    gain = _gain(difference)

    columns = {1: 1, 2: 2, 4: 2}.get(len(prompts), 3)
    margin, gap, pad, between, top, label, foot = 28, 18, 18, 8, 100, 38, 38
    tile = (_WIDTH - 2 * margin - (columns - 1) * gap) / columns
    side = min(320, (tile - 2 * pad - 2 * between) / 2.5)
    tile = 2.5 * side + 2 * pad + 2 * between
    tile_height = label + side + foot
    rows = math.ceil(len(prompts) / columns)
    height = round(top + rows * tile_height + (rows - 1) * gap + margin)
    figure, canvas = _figure(height, heading)
    legend = f"{titles[0]}   |   {titles[1]}   |   their difference, {gain} times amplified"
    canvas.text(margin, 68, legend, color=_MUTED, fontsize=10.5, va="center")
    for i, prompt in enumerate(prompts):
        left = margin + (i % columns) * (tile + gap)
        up = top + (i // columns) * (tile_height + gap)
        style = "round,pad=0,rounding_size=10"
        card = FancyBboxPatch((left, up), tile, tile_height, boxstyle=style, color=_CARD, lw=0)
        canvas.add_patch(card)
        x, y = left + pad, up + label
        canvas.text(x, up + label / 2, _short(prompt, tile), color=_INK, weight="bold", va="center")
        for picture in (plain[i], cached[i]):
            _picture(_axes(figure, height, x, y, side, side), picture, side)
            x += side + between
        _heat(_axes(figure, height, x, y + side / 4, side / 2, side / 2), difference[i] * gain)
        captions = (*titles, _decibels(decibels[i]))
        middles = (left + pad + side / 2, left + pad + between + 1.5 * side, x + side / 4)
        for caption, middle, colour in zip(captions, middles, (_MUTED, _MUTED, _INK), strict=True):
            canvas.text(
                middle, y + side + foot / 2, caption,
                color=colour, fontsize=9.5, ha="center", va="center",
            )  # fmt: skip
    return figure


def plan_figure(
    plans: Mapping[str, Plan],
    noise: Sequence[float],
    *,
    threshold: float | None,
    heading: str = "Which steps are computed, and the error that decides",
) -> Figure:
    """Each stream's row of computed and skipped steps; below it the error that decided.

    `noise` has the noise level of each step, common to the streams. `threshold` is the greedy
    rule's; None for a plan made for a budget, whose errors are predicted ones.
    """
    lengths = [plan.steps for plan in plans.values()]
    if set(lengths) != {len(noise)}:
        raise ValueError(f"plans have {lengths} steps, noise {len(noise)}; they must be equal")
    strip, chart = 46 * len(plans), 250
    height = 130 + strip + 48 + chart + 64
    figure, _ = _figure(height, heading)
    rows = _axes(figure, height, 110, 130, _WIDTH - 150, strip)
    errors = _axes(figure, height, 110, 130 + strip + 48, _WIDTH - 150, chart)
    for position, (name, plan) in enumerate(plans.items()):
        counts = f"stream {name}\n{plan.computed_steps} of {plan.steps}"
        rows.text(0.3, position, counts, color=_INK, fontsize=9.5, ha="right", va="center")
        _plan_row(rows, position, plan)
        _error_bars(errors, position, len(plans), plan)

    for axes in (rows, errors):
        axes.set_xlim(0.4, len(noise) + 0.6)
    rows.set_ylim(len(plans) - 0.5, -0.5)
    rows.spines[:].set_visible(False)
    rows.set_yticks([])
    rows.xaxis.tick_top()
    ticks = range(0, len(noise), max(1, math.ceil(len(noise) / 15)))
    rows.set_xticks([i + 1 for i in ticks], [f"{noise[i]:.2f}" for i in ticks])
    rows.tick_params(colors=_MUTED, labelsize=9, length=0)
    rows.xaxis.set_label_position("top")
    rows.set_xlabel("noise level", color=_MUTED, labelpad=8)

    highest = max(max(plan.errors) for plan in plans.values())
    if threshold is not None:
        errors.axhline(threshold, color=_INK, linestyle=(0, (5, 3)), linewidth=1.2)
        # At the left stand the retained steps, which have no bars to run into.
        label = f"threshold {threshold:g}"
        errors.text(0.5, threshold, label, color=_INK, fontsize=9.5, va="bottom")
        # A step that had to be computed can err far above it; that must not flatten the rest.
        highest = max(min(highest, 2 * threshold), threshold) or highest
    errors.set_ylim(0, 1.25 * (highest or 1))
    errors.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    errors.set_xlabel("step", color=_MUTED)
    kind = "predicted" if threshold is None else "accumulated"
    errors.set_ylabel(f"{kind} error", color=_MUTED)
    legend = [
        Patch(facecolor=_colour(i), label=f"stream {name}: skipped") for i, name in enumerate(plans)
    ]
    legend.append(Patch(facecolor="white", edgecolor=_MUTED, label="computed anew"))
    errors.legend(
        handles=legend,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(legend),
        frameon=False,
        fontsize=9.5,
        labelcolor=_INK,
    )
    _bare(errors)
    return figure


def law_figure(curve: MagnitudeCurve, *, heading: str = "The magnitude law") -> Figure:
    """Each stream's magnitude ratio with its spread, and below it its cosine distance.

    The light band is the spread over tokens, the dark one that over prompts.
    """
    with_distance = any(stream.cosine_distance for stream in curve.streams.values())
    height = 640 if with_distance else 440
    figure, _ = _figure(height, heading)
    ratio = lowest = _axes(figure, height, 100, 70, _WIDTH - 140, 310)
    if with_distance:
        lowest = _axes(figure, height, 100, 410, _WIDTH - 140, 168)
        lowest.set_ylabel("cosine distance", color=_MUTED)
        ratio.tick_params(labelbottom=False)
    ratio.axhline(1, color=_FAINT, linewidth=1, zorder=0)
    ratio.set_ylabel("magnitude ratio", color=_MUTED)
    for position, (name, stream) in enumerate(curve.streams.items()):
        colour = _colour(position)
        # The first step has no step before it: its ratio of 1 is a convention.
        places = stream.places[1:]
        _band(ratio, stream, stream.token_std, colour, 0.12)
        _band(ratio, stream, stream.prompt_spread, colour, 0.3)
        ratio.plot(
            places, stream.ratios[1:], "o-", color=colour, ms=3.5, lw=1.5, label=f"stream {name}"
        )
        if stream.cosine_distance:
            lowest.plot(places, stream.cosine_distance[1:], "o-", color=colour, ms=3.5, lw=1.5)
    ratio.legend(frameon=False, fontsize=9.5, labelcolor=_INK)
    for axes in {ratio, lowest}:
        _bare(axes)
        if curve.axis == "noise":
            axes.invert_xaxis()
    if with_distance:
        lowest.set_ylim(bottom=0)
    label = "noise level: a run goes from left to right"
    lowest.set_xlabel(label if curve.axis == "noise" else "share of the run", color=_MUTED)
    return figure


def _figure(height: int, heading: str) -> tuple[Figure, Axes]:
    """A figure, and axes over the whole of it whose unit is the pixel, from the top left."""
    figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
    canvas = _axes(figure, height, 0, 0, _WIDTH, height)
    canvas.set_xlim(0, _WIDTH)
    canvas.set_ylim(height, 0)
    canvas.axis("off")
    canvas.text(28, 36, heading, color=_INK, fontsize=15, weight="bold", va="center")
    return figure, canvas


def _axes(figure: Figure, total: int, x: float, y: float, width: float, height: float) -> Axes:
    return figure.add_axes((x / _WIDTH, 1 - (y + height) / total, width / _WIDTH, height / total))


def _picture(axes: Axes, picture: torch.Tensor, side: float) -> None:
    pixels = picture.detach().float().cpu().clamp(0, 1).permute(1, 2, 0).numpy()
    axes.imshow(pixels, interpolation="bicubic" if max(pixels.shape[:2]) < side else "auto")
    axes.axis("off")


def _heat(axes: Axes, difference: torch.Tensor) -> None:
    axes.imshow(difference.numpy(), cmap="gist_heat_r", vmin=0, vmax=1, interpolation="nearest")
    axes.axis("off")


def _gain(difference: torch.Tensor) -> int:
    """The largest round factor that leaves nearly every difference below full scale."""
    strongest = float(difference.flatten().sort().values[int(0.998 * (difference.numel() - 1))])
    return max((gain for gain in _GAINS if gain * strongest <= 1), default=1) if strongest else 1


def _decibels(value: float) -> str:
    return "identical" if math.isinf(value) else f"{value:.1f} dB"


def _short(text: str, width: float) -> str:
    """Cut to what fits into so many pixels at the label's size."""
    most = int(width / 9)
    return text if len(text) <= most else text[: most - 1] + "…"


def _plan_row(axes: Axes, position: int, plan: Plan) -> None:
    for step, computed in enumerate(plan.computed, start=1):
        face = _colour(position) if computed else "#eaecf0"
        axes.add_patch(Rectangle((step - 0.44, position - 0.36), 0.88, 0.72, color=face, lw=0))


def _error_bars(axes: Axes, position: int, streams: int, plan: Plan) -> None:
    width = 0.8 / streams
    for step, (computed, error) in enumerate(zip(plan.computed, plan.errors, strict=True), start=1):
        if not error:
            continue
        face = "white" if computed else _colour(position)
        at = step + (position - (streams - 1) / 2) * width
        axes.bar(at, error, 0.85 * width, color=face, edgecolor=_colour(position), linewidth=1)


def _band(
    axes: Axes, stream: StreamCurve, spread: Sequence[float], colour: str, alpha: float
) -> None:
    if not spread:
        return
    low = [r - s for r, s in zip(stream.ratios, spread, strict=True)]
    high = [r + s for r, s in zip(stream.ratios, spread, strict=True)]
    axes.fill_between(stream.places[1:], low[1:], high[1:], color=colour, alpha=alpha, lw=0)


def _colour(position: int) -> str:
    return _STREAM_COLOURS[position % len(_STREAM_COLOURS)]


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_MUTED, labelsize=9)
    axes.grid(axis="y", color=_FAINT, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
