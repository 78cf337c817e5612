"""Writes the results into README and docs, between their markers: no figure is copied by hand.

A place for a table is `<!-- begin NAME -->` ... `<!-- end NAME -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import read_quality

from magcache.budget import QUALITIES
from magcache.metrics import Spread

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SPEEDUPS = (1.5, 2.0, 3.0)
_ORDINALS = {2: "second", 3: "third"}
# Scenarios that the README shows, with what they are there.
HEADLINES = {
    "demo-28": "demo model, 28 steps",
    "demo-50": "demo model, 50 steps",
    "dit-28": "class-conditional DiT, 28 steps",
}


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
        f"planned for a speed-up of {settings['budget']['speedup']:g}; {_machine(result)}. "
        "Against the plain pipeline's own picture of the same seed, mean ± standard deviation.",
    ]
    return "\n".join(lines)


def quality_tables() -> str:
    """benchmarks/results/quality: every method at 1.5, 2 and 3 times the speed."""
    parts = []
    for name, scenario in read_quality.load().items():
        parts += [f"**{name}**", "", *_quality_table(scenario), ""]
        machine = scenario.data["machine"]
    told = (
        "PSNR in dB, mean ± standard deviation over 24 pictures with prompts and seeds that "
        "calibration has not seen, against the plain pipeline's own picture of the same seed; "
        "after the slash, the mean against the fine solution (200 steps). Between the settings "
        "that were measured, figures are interpolated over the computed share. "
    )
    return "\n".join([*parts, told + f"{machine['device']}, torch {machine['torch']}."])


def _quality_table(scenario: read_quality.Scenario) -> list[str]:
    plain = scenario.data["rows"][0]["psnr_fine"]["mean"]
    lines = ["| method | 1.5x | 2x | 3x |", "|---|---|---|---|"]
    methods = scenario.methods
    for group in read_quality.GROUPS.values():
        for name in group:
            cells = [_cell(methods[name], 1 / x) for x in SPEEDUPS] if name in methods else []
            if any(cells):
                bold = "**" if name == "planned, fitted" else ""
                lines.append(f"| {bold}{name}{bold} | {' | '.join(cells)} |")
    return [*lines, "", f"The plain picture itself is {plain:.1f} dB from the fine solution."]


def _cell(method: read_quality.Method, share: float) -> str:
    own = read_quality.at_share(method, share, "psnr")
    fine = read_quality.at_share(method, share, "psnr_fine")
    if own is None or fine is None:
        return ""
    return f"{own[0]:.1f} ± {own[1]:.1f} / {fine[0]:.1f}"


def qualities_table() -> str:
    """What the named qualities came to, in the scenarios in which they were drawn."""
    lines = [f"| | {' | '.join(QUALITIES)} |", f"|---|{'---|' * len(QUALITIES)}"]
    for name, scenario in read_quality.load().items():
        rows = {r["setting"]: r for r in scenario.data["rows"] if r["method"] == "quality"}
        cells = [
            f"{1 / rows[quality]['share']:.2f}x, {_spread(rows[quality]['psnr'], '.1f')} dB"
            for quality in QUALITIES
            if quality in rows
        ]
        if cells:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def headline_table() -> str:
    """The few rows of the README: ours, the published rule, fewer steps and the best peer."""
    lines = ["| | 1.5x | 2x | 3x |", "|---|---|---|---|"]
    for name, label in HEADLINES.items():
        methods = read_quality.load()[name].methods
        for row, group in {
            "planned (ours)": ("planned, fitted",),
            "the published rule": ("greedy",),
            "fewer steps, best of its solvers": read_quality.GROUPS["fewer steps"],
            "best other cache": read_quality.GROUPS["peers"],
        }.items():
            cells = [_best([methods[n] for n in group if n in methods], 1 / x) for x in SPEEDUPS]
            bold = "**" if "ours" in row else ""
            lines.append(f"| {label}: {row} | {' | '.join(f'{bold}{c}{bold}' for c in cells)} |")
    return "\n".join(lines)


def _best(methods: list[read_quality.Method], share: float) -> str:
    found = [read_quality.at_share(method, share, "psnr") for method in methods]
    means = [figure[0] for figure in found if figure is not None]
    return f"{max(means):.1f} dB" if means else ""


def drift_table() -> str:
    """benchmarks/results/drift.json."""
    result = json.loads((RESULTS / "drift.json").read_text())
    lines = [
        "| prompts | | greedy | planned | with the guard "
        "| planned, as many steps as the guard took |",
        "|---|---|---|---|---|---|",
    ]
    for kind in ("known", "odd"):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        cells = []
        for way in ("greedy", "planned", "guarded", "planned_at_the_same_cost"):
            spread = Spread.of(row[way]["psnr"] for row in rows)
            computed = sum(row[way]["computed"] for row in rows) / len(rows)
            cells.append(f"{spread:.1f}, worst {spread.min:.1f} dB ({computed:.1f} steps)")
        lines.append(f"| {kind} | {len(rows)} | {' | '.join(cells)} |")
    lines += [
        "",
        f"`benchmarks/drift.py`, demo model, 28 steps planned for {result['speedup']:g}x. The "
        "largest reading of a run (reuse error over the predicted one) and its PSNR correlate by "
        f"{result['correlation_of_reading_and_psnr']:.2f}. {_machine(result)}.",
    ]
    return "\n".join(lines)


def oracle_table() -> str:
    """benchmarks/results/oracle.json."""
    result = json.loads((RESULTS / "oracle.json").read_text())
    lines = [
        "| model | computed of 28 | our plan: tuned on / unseen | search: tuned on / unseen |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            f"{row[way]['tuned_on']['mean']:.1f} / {row[way]['unseen']['mean']:.1f} dB "
            f"`{row[way]['plan']}`"
            for way in ("planned", "searched")
        ]
        shift = row.get("shift", 1)
        model = row["family"] + (f", shift {shift:g}" if shift != 1 else "")
        lines.append(f"| {model} | {row['computed']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"`benchmarks/oracle.py`: {result['rows'][0]['tries']} tries on {result['pictures']} "
        "pictures, which the search is tuned on, then as many unseen ones.",
    ]
    return "\n".join(lines)


def transfer_table() -> str:
    """benchmarks/results/transfer.json."""
    result = json.loads((RESULTS / "transfer.json").read_text())
    names = list(result["shipped_model"][0]["differing_of_50"])
    lines = [
        f"| run | ratio error | {' | '.join(f'{name}: differing' for name in names)} "
        "| predicted error over the best, 2x / 3x |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["shipped_model"]:
        differing = " | ".join(f"{row['differing_of_50'][name]:.0f}" for name in names)
        excess = " / ".join(f"{x:.3f}" for x in row["error_over_the_best"].values())
        lines.append(f"| {row['run']} | {row['mean_ratio_error']:.4f} | {differing} | {excess} |")
    lines += [
        "",
        "The shipped model's curve of 50 steps at shift 1, beside one measured in just such a run: "
        "mean error of the served ratios, steps of 50 that are decided differently, and what the "
        "plan made from it loses, by the errors that the other predicts. Up to the measured length "
        "decisions that differ are near ties. At twice that length the curve does not know how "
        "much finer steps gain: calibrate with as many steps as are usual.",
        "",
        "| published tables | pairs | ratio error, ours / nearest index "
        "| greedy: differing of 50 |",
        "|---|---|---|---|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result["published"]:
        groups.setdefault(row["group"], []).append(row)
    for name, rows in groups.items():
        cells = [
            " / ".join(
                f"{sum(row[way][measure] for row in rows) / len(rows):{digits}}"
                for way in ("ours", "nearest index")
            )
            for measure, digits in (("mean_ratio_error", ".4f"), ("differing_of_50", ".1f"))
        ]
        lines.append(f"| {name} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overhead_table() -> str:
    """benchmarks/results/overhead.json."""
    result = json.loads((RESULTS / "overhead.json").read_text())
    lines = [
        "| blocks | plain call | computed call, own cost | skipped call | of that own cost |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        computed, skipped = row["computed"], row["skipped"]
        lines.append(
            f"| {row['blocks']} | {computed['without']:.0f} | {_own_cost(computed)} "
            f"| {skipped['call']:.0f} | {_own_cost(skipped)} |"
        )
    machine = result["machine"]
    lines += [
        "",
        f"Microseconds, median and quartiles; {machine['device']}, one thread, torch "
        f"{machine['torch']}.",
    ]
    return "\n".join(lines)


def speed_table() -> str:
    """benchmarks/results/speed.json: measured speed-up, its bound, the share reached."""
    result = json.loads((RESULTS / "speed.json").read_text())
    rows = result["rows"]
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    lines = [
        f"| blocks take | compiled | computed | {' | '.join(caches)} |",
        f"|---|---|---|{'---|' * len(caches)}",
    ]
    for key in dict.fromkeys((row["shape"], row["compiled"], row["every"]) for row in rows):
        alike = {r["cache"]: r for r in rows if (r["shape"], r["compiled"], r["every"]) == key}
        _, compiled, every = key
        share = next(r["blocks_share"] for r in alike.values() if "blocks_share" in r)
        lines.append(
            f"| {share:.0%} | {compiled} | every {_ORDINALS[every]} "
            f"| {' | '.join(_speed_cell(alike.get(cache)) for cache in caches)} |"
        )
    reasons = {(r["cache"], r["compiled"]): r["failed"] for r in rows if "failed" in r}
    lines += [
        "",
        "`benchmarks/speed.py`: speed-up over the plain model compiled alike (bound; share of it "
        f"reached), Flux with random weights, runs of {result['steps']} steps; {_machine(result)}.",
    ]
    lines += [f"\n{cache}, {how}: {why}" for (cache, how), why in reasons.items()]
    return "\n".join(lines)


def _speed_cell(row: dict[str, Any] | None) -> str:
    if row is None or "failed" in row:
        return "fails"
    return f"{row['speedup']:.2f} ({row['bound']:.2f}; {row['reached']:.0%})"


def memory_table() -> str:
    """benchmarks/results/memory.json."""
    result = json.loads((RESULTS / "memory.json").read_text())
    lines = [
        "| cache | extra peak, in residuals | residuals kept | left after a run | after an error |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['config']} | {row['extra_residuals']:.2f} | {row['expected_residuals']:g} "
        f"| {row['left_bytes']} bytes | {max(0, row['left_after_exception_bytes'])} bytes |"
        for row in result["rows"]
    ]
    lines += [
        "",
        f"The demo model, {result['pictures']} pictures under guidance: two streams, each of which "
        f"keeps 1 to 3 residuals; {_machine(result)}. `benchmarks/memory.py`",
    ]
    return "\n".join(lines)


def storage_table() -> str:
    """What each way of keeping residuals costs: benchmarks/results/residual_storage.json."""
    result = json.loads((RESULTS / "residual_storage.json").read_text())
    lines = [
        "| rule | stored as | PSNR dB | residuals held, KiB | plan |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['rule']} | {row['storage']} | {row['psnr_db']:.1f} ± {row['psnr_db_std']:.1f} "
        f"| {row['held_kib']:.0f} | `{row['plan']}` |"
        for row in result["storages"]
    ]
    pictures, steps = len(result["prompts"]), result["steps"]
    lines += [
        "",
        f"The demo model, {pictures} prompts, {steps} steps, guidance 3, against the plain one; "
        "greedy at 0.12/4/0.2, and a budget of 2x, which adds several residuals with "
        f"coefficients of both signs. `benchmarks/residual_storage.py`; {_machine(result)}.",
    ]
    return "\n".join(lines)


def _speedup(measured: float, bound: float) -> str:
    return f"{measured:.2f} ({bound:.2f})"


def _spread(values: dict[str, Any], digits: str) -> str:
    names = ("mean", "std", "min", "max", "n")
    return format(Spread(*(values[name] for name in names)), digits)


def _own_cost(row: dict[str, float]) -> str:
    return f"{row['own_cost']:.0f} ({row['quartile_1']:.0f} to {row['quartile_3']:.0f})"


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
    write(ROOT / "README.md", "headline", headline_table())
    figures = ROOT / "docs/figures.md"
    write(figures, "demo", demo_table())
    write(figures, "quality", quality_tables())
    write(figures, "qualities", qualities_table())
    write(ROOT / "docs/calibration.md", "transfer", transfer_table())
    write(figures, "drift", drift_table())
    write(figures, "oracle", oracle_table())
    write(figures, "overhead", overhead_table())
    write(figures, "speed", speed_table())
    write(figures, "memory", memory_table())
    write(ROOT / "docs/works-with.md", "storage", storage_table())


if __name__ == "__main__":
    main()
