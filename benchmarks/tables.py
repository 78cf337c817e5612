"""Writes the results into README and docs, between their markers: no figure is copied by hand.

A place for a table is `<!-- begin NAME -->` ... `<!-- end NAME -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from magcache.metrics import Spread

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def demo_table() -> str:
    """The demo's own result: docs/images/result.json."""
    result = json.loads((ROOT / "docs/images/result.json").read_text())
    settings = result["settings"]
    lines = [
        "| method | steps computed | seconds a picture | speed-up (bound) | PSNR dB | SSIM |",
        "|---|---|---|---|---|---|",
    ]
    for way in result["ways"]:
        plain = way["name"] == "plain"
        lines.append(
            f"| {way['name']} | {way['computed_steps']:g} of {way['steps']} "
            f"| {way['seconds_per_picture']:.2f} "
            f"| {'' if plain else _speedup(way['speedup'], way['speedup_bound'])} "
            f"| {'' if plain else _spread(way['psnr_db'], '.1f')} "
            f"| {'' if plain else _spread(way['ssim'], '.3f')} |"
        )
    lines += [
        "",
        f"`magcache demo`: {len(result['prompts'])} prompts, guidance {settings['guidance']:g}, "
        f"threshold {settings['threshold']:g}, at most {settings['max_skip_steps']} skips "
        f"in a row, {settings['retention_ratio']:g} of the steps retained; {_machine(result)}. "
        "Against the plain pipeline's own picture of the same seed, mean ± standard deviation.",
    ]
    return "\n".join(lines)


def quality_tables() -> str:
    """benchmarks/results/quality.json, a table for each number of steps."""
    result = json.loads((RESULTS / "quality.json").read_text())
    parts = []
    for steps, rows in result["rows"].items():
        parts += [
            f"**{steps} steps**",
            "",
            "| method | settings | computed | speed-up (bound) | PSNR dB | SSIM "
            "| PSNR to 200 steps |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            plain = row["psnr"] is None
            parts.append(
                f"| {row['method']} | {row['settings']} | {row['computed_steps']:g} "
                f"| {'' if plain else _speedup(row['speedup'], row['bound'])} "
                f"| {'' if plain else _spread(row['psnr'], '.1f')} "
                f"| {'' if plain else _spread(row['ssim'], '.3f')} "
                f"| {_spread(row['psnr_fine'], '.1f')} |"
            )
        parts.append("")
    machine = result["machine"]
    parts.append(
        f"{result['pictures']} pictures with seeds held out from calibration, guidance "
        f"{result['guidance']:g}; settings are threshold/most skips/retention; {_machine(result)}, "
        f"diffusers {machine['diffusers']}."
    )
    return "\n".join(parts)


def overhead_table() -> str:
    """benchmarks/results/overhead.json."""
    result = json.loads((RESULTS / "overhead.json").read_text())
    lines = [
        "| blocks | plain call | computed call, own cost | skipped call | of that own cost |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['blocks']} | {row['microseconds']['plain']:.0f} "
            f"| {_quartiles(row['computed_own_cost'])} "
            f"| {row['microseconds']['skipped']:.0f} | {_quartiles(row['skipped_own_cost'])} |"
        )
    machine = result["machine"]
    lines += [
        "",
        f"Microseconds, median and quartiles; {machine['device']}, one thread, torch "
        f"{machine['torch']}.",
    ]
    return "\n".join(lines)


def _speedup(measured: float, bound: float) -> str:
    return f"{measured:.2f} ({bound:.2f})"


def _spread(values: dict[str, Any], digits: str) -> str:
    names = ("mean", "std", "min", "max", "n")
    return format(Spread(*(values[name] for name in names)), digits)


def _quartiles(cost: dict[str, float]) -> str:
    return f"{cost['median']:.0f} ({cost['quartile_1']:.0f} to {cost['quartile_3']:.0f})"


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['device']}, {machine['torch_threads']} threads, torch {machine['torch']}"


def write(path: Path, name: str, text: str) -> None:
    """Put `text` between the markers of `name`."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before = path.read_text()
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(before):
        raise SystemExit(f"{path} has no place for {name}: {begin} ... {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", before))


def main() -> None:
    write(ROOT / "README.md", "demo", demo_table())
    figures = ROOT / "docs/figures.md"
    write(figures, "demo", demo_table())
    write(figures, "quality", quality_tables())
    write(figures, "overhead", overhead_table())


if __name__ == "__main__":
    main()
