"""Reads results/quality/*.json: what each method comes to at the same computed share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

__all__ = ["GROUPS", "Measure", "Method", "Scenario", "at_share", "load"]

FOLDER = Path(__file__).parent / "results/quality"
Measure = Literal["psnr", "ssim", "psnr_fine"]

# Settings a little beside the share asked for still count as there: steps are whole.
_BESIDE = 0.025
# Identical pictures stand as this many dB in the results.
_IDENTICAL = 99.0

# In the order of the tables; what stands in no group is left to the JSON.
GROUPS = {
    "ours": ("planned, fitted", "planned, fitted, calibrated here"),
    "ours, other rules": (
        "planned, fitted, two residuals",
        "planned, linear",
        "planned, scaled",
        "planned, as is",
        "planned, fitted, streams apart",
    ),
    "the published rule": ("greedy", "greedy, streams apart", "uniform"),
    "fewer steps": (
        "fewer steps, Euler",
        "fewer steps, Euler, even",
        "fewer steps, DDIM",
        "fewer steps, AB2",
        "fewer steps, AB2, even",
        "fewer steps, DPM++ 2M",
        "fewer steps, UniPC",
    ),
    "peers": (
        "diffusers MagCache",
        "vLLM-Omni MagCache rule",
        "FirstBlockCache rule",
        "TeaCache rule",
        "diffusers TaylorSeer",
        "diffusers PAB",
        "cache-dit DBCache",
        "cache-dit DBCache + TaylorSeer",
    ),
}


@dataclass(frozen=True)
class Method:
    """A method's settings in one scenario, least share first."""

    name: str
    rows: tuple[dict[str, Any], ...]

    @property
    def shares(self) -> list[float]:
        return [row["share"] for row in self.rows]

    def means(self, measure: Measure) -> list[float]:
        return [row[measure]["mean"] for row in self.rows]


@dataclass(frozen=True)
class Scenario:
    """One file."""

    name: str
    data: dict[str, Any]

    @property
    def methods(self) -> dict[str, Method]:
        """By name; of several settings with the same share, the best stands for it."""
        found: dict[str, dict[float, dict[str, Any]]] = {}
        for row in self.data["rows"]:
            if row["psnr"]["max"] >= _IDENTICAL:
                # Of some pictures nothing was skipped: a mean with infinities says nothing.
                continue
            best = found.setdefault(row["method"], {})
            share = round(row["share"], 2)
            if share not in best or row["psnr"]["mean"] > best[share]["psnr"]["mean"]:
                best[share] = row
        return {
            name: Method(name, tuple(rows[share] for share in sorted(rows)))
            for name, rows in found.items()
        }


def load() -> dict[str, Scenario]:
    """All scenarios that have been run."""
    return {
        path.stem: Scenario(path.stem, json.loads(path.read_text()))
        for path in sorted(FOLDER.glob("*.json"))
    }


def at_share(method: Method, share: float, measure: Measure) -> tuple[float, float] | None:
    """Mean and spread at a computed share, between the neighbouring settings; None outside."""
    shares = method.shares
    if not shares[0] - _BESIDE <= share <= shares[-1] + _BESIDE:
        return None
    stds = [row[measure]["std"] for row in method.rows]
    mean = float(np.interp(share, shares, method.means(measure)))
    return mean, float(np.interp(share, shares, stds))
