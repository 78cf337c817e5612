"""Draws the figures of docs/figures.md that come from the shipped curve.

The pairs and the plan there are those of `magcache demo --out docs/images`.
"""

from __future__ import annotations

from pathlib import Path

from magcache import presets
from magcache.report import law_figure

IMAGES = Path(__file__).parent.parent / "docs/images"


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    curve = presets.load("demo-emoji")
    law_figure(curve, heading="The magnitude law on the shipped model").savefig(IMAGES / "law.png")


if __name__ == "__main__":
    main()
