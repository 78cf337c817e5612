"""Draws the figures of docs/figures.md.

The pairs and the plan there are those of `magcache demo --out docs/images`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import read_quality
from matplotlib.figure import Figure

from magcache import presets
from magcache.report import law_figure

IMAGES = Path(__file__).parent.parent / "docs/images"

# What the frontier plot shows: colour, line and marker by method; the rest are thin and grey.
SHOWN: dict[str, dict[str, Any]] = {
    "planned, fitted": {"color": "#2563c9", "linewidth": 2.6, "marker": "o"},
    "greedy": {"color": "#e07a1f", "marker": "s"},
    "fewer steps, Euler": {"color": "#2a9d8f", "marker": "v"},
    "fewer steps, DDIM": {"color": "#2a9d8f", "marker": "v"},
    "fewer steps, AB2": {"color": "#7a5195", "marker": "^"},
    "fewer steps, DPM++ 2M": {"color": "#7a5195", "marker": "^"},
    "diffusers MagCache": {"color": "#b5485d", "marker": "x"},
    "diffusers TaylorSeer": {"color": "#8d99ae", "marker": "d"},
    "TeaCache rule": {"color": "#8d99ae", "marker": "+"},
    "FirstBlockCache rule": {"color": "#8d99ae", "marker": "1"},
    "cache-dit DBCache": {"color": "#8d99ae", "marker": "2"},
    "cache-dit DBCache + TaylorSeer": {"color": "#8d99ae", "marker": "*"},
}


def frontier_figure(scenarios: list[read_quality.Scenario]) -> Figure:
    """Quality over computed share, one panel a scenario."""
    figure = Figure(figsize=(4.1 * len(scenarios), 5.2), layout="constrained")
    panels = figure.subplots(1, len(scenarios), squeeze=False)[0]
    for axes, scenario in zip(panels, scenarios, strict=True):
        for name, method in scenario.methods.items():
            style = SHOWN.get(name)
            if style is None or (name == "fewer steps, DPM++ 2M" and "demo" in scenario.name):
                continue
            axes.plot(method.shares, method.means("psnr"), label=name, markersize=5, **style)
        axes.set_title(scenario.name, fontsize=11)
        axes.set(xlabel="computed share of the blocks' work", xlim=(0.2, 1.0), ylim=(20, 66))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
    panels[0].set_ylabel("PSNR to the plain pipeline's own picture, dB")
    return figure


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    curve = presets.load("demo-emoji")
    law_figure(curve, heading="The magnitude law on the shipped model").savefig(IMAGES / "law.png")
    scenarios = read_quality.load()
    shown = [scenarios[name] for name in ("demo-28", "demo-50", "dit-28") if name in scenarios]
    frontier_figure(shown).savefig(IMAGES / "frontier.png", dpi=100)


if __name__ == "__main__":
    main()
