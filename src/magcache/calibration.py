"""From residuals to a magnitude curve."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
import torch

from magcache.clock import Timeline
from magcache.curve import Axis, MagnitudeCurve, StreamCurve
from magcache.errors import CurveError
from magcache.sketch import Array, principal

__all__ = [
    "Measurement",
    "Measurements",
    "average",
    "curve_of",
    "joined",
    "library_versions",
    "pooled",
    "run_curve",
]


@dataclass(frozen=True)
class Measurement:
    """What one computed step's residual was like.

    metrics: ratio, its spread over tokens, cosine distance (scalars). sketch, scale: see
    `Sketcher`. All on the residual's device.
    """

    step: int
    metrics: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    sketch: torch.Tensor
    scale: torch.Tensor


@dataclass
class Measurements:
    """A stream's measurements over one run. The metrics stay on their device until the end."""

    timeline: Timeline
    taken: list[Measurement] = field(default_factory=list)

    def curve(self, axis: Axis) -> StreamCurve:
        """The run's curve on this axis; the first step counts as ratio 1, spread 0, distance 0."""
        places = self.timeline.levels if axis == "noise" else self.timeline.fractions
        if places is None:
            raise CurveError("noise levels are unknown without a scheduler; use axis 'fraction'")
        rows = [
            (1.0, 0.0, 0.0) if m.metrics is None else tuple(float(x) for x in m.metrics)
            for m in self.taken
        ]
        ratios, stds, distances = zip(*rows, strict=True)
        return StreamCurve(
            places=tuple(places[m.step] for m in self.taken),
            ratios=ratios,
            token_std=stds,
            cosine_distance=distances,
            prompt_spread=(0.0,) * len(rows),
            scale=tuple(float(m.scale) for m in self.taken),
            path=self._path(),
        )

    def _path(self) -> tuple[tuple[float, ...], ...]:
        if len({m.sketch.shape for m in self.taken}) > 1:
            # A residual that changed its shape within the run has no path.
            return ()
        sketches = torch.stack([m.sketch for m in self.taken]).cpu().double().numpy()
        return _rows(principal(sketches))


def average(curves: Sequence[StreamCurve]) -> StreamCurve:
    """Mean of several runs' curves, with the spread of their ratios (standard deviation).

    Runs with other noise levels than the first one's are served at those first.
    """
    first = curves[0]
    ratios = np.array([curve.at(first.places) for curve in curves])
    # Spread and distance are no products: they are taken as they are at the nearest step.
    stds = np.array([_nearest(c.places, c.token_std, first.places) for c in curves])
    distances = np.array([_nearest(c.places, c.cosine_distance, first.places) for c in curves])
    return StreamCurve(
        places=first.places,
        ratios=tuple(ratios.mean(0).tolist()),
        token_std=tuple(stds.mean(0).tolist()),
        cosine_distance=tuple(distances.mean(0).tolist()),
        prompt_spread=tuple(ratios.std(0).tolist()),
        scale=tuple(np.mean([c.scale_at(first.places) for c in curves], axis=0).tolist()),
        path=_path([c.path_at(first.places) for c in curves if c.has_path]),
    )


def _path(paths: Sequence[Array]) -> tuple[tuple[float, ...], ...]:
    """A path whose inner products are the mean of those of `paths`."""
    if not paths:
        return ()
    return _rows(principal(np.concatenate(paths, axis=1) / math.sqrt(len(paths))))


def _rows(matrix: Array) -> tuple[tuple[float, ...], ...]:
    # Nine digits: errors are small differences of these.
    return tuple(tuple(float(f"{x:.9g}") for x in row) for row in matrix)


def _nearest(
    places: Sequence[float], values: Sequence[float], wanted: Sequence[float]
) -> list[float]:
    known = np.asarray(places)
    return [values[int(np.abs(known - place).argmin())] for place in wanted]


def run_curve(measured: dict[str, Measurements], provenance: dict[str, Any]) -> MagnitudeCurve:
    """The curve of one run, from each stream's measurements."""
    axis: Axis = "noise" if all(m.timeline.levels for m in measured.values()) else "fraction"
    streams = {name: m.curve(axis) for name, m in measured.items()}
    return MagnitudeCurve(axis=axis, streams=streams, provenance=provenance)


def curve_of(runs: Sequence[MagnitudeCurve], provenance: dict[str, Any]) -> MagnitudeCurve:
    """The curve of one model from those of its runs. A run may lack some of the streams."""
    return _by_stream(runs, average, provenance)


def pooled(parts: Sequence[MagnitudeCurve], tokens: Sequence[int]) -> MagnitudeCurve:
    """The curve of one run, from those of parts of its tokens: what all tokens at once give.

    But for the path, for which each part has its own sample of tokens.
    """

    def pool(curves: Sequence[StreamCurve]) -> StreamCurve:
        return _pool(curves, np.asarray(tokens, dtype=float) / sum(tokens))

    return _by_stream(parts, pool, parts[0].provenance)


def _by_stream(
    curves: Sequence[MagnitudeCurve],
    merge: Callable[[Sequence[StreamCurve]], StreamCurve],
    provenance: dict[str, Any],
) -> MagnitudeCurve:
    axes = {curve.axis for curve in curves}
    if len(axes) > 1:
        raise CurveError(
            "some runs were measured with a scheduler and some without, and have no scale in "
            "common; enable all of them the same way"
        )
    names = dict.fromkeys(name for curve in curves for name in curve.streams)
    streams = {n: merge([c.streams[n] for c in curves if n in c.streams]) for n in names}
    return MagnitudeCurve(axis=axes.pop(), streams=streams, provenance=provenance)


def _pool(curves: Sequence[StreamCurve], shares: Array) -> StreamCurve:
    first = curves[0]
    ratios = np.array([curve.at(first.places) for curve in curves])
    stds = np.array([_nearest(c.places, c.token_std, first.places) for c in curves])
    distances = np.array([_nearest(c.places, c.cosine_distance, first.places) for c in curves])
    mean = shares @ ratios
    spread = np.sqrt(np.maximum(shares @ (stds**2 + ratios**2) - mean**2, 0))
    known = zip(curves, shares, strict=True) if all(c.has_path for c in curves) else ()
    paths = [curve.path_at(first.places) * math.sqrt(share) for curve, share in known]
    scales = np.array([curve.scale_at(first.places) for curve in curves])
    return StreamCurve(
        places=first.places,
        ratios=tuple(mean.tolist()),
        token_std=tuple(spread.tolist()),
        cosine_distance=tuple((shares @ distances).tolist()),
        prompt_spread=first.prompt_spread,
        scale=tuple((shares @ scales).tolist()),
        path=_rows(principal(np.concatenate(paths, axis=1))) if paths else (),
    )


def joined(curves: Sequence[MagnitudeCurve]) -> MagnitudeCurve:
    """One curve from those of experts that take turns in a run, in their order.

    An expert's first ratio is 1: the residual does not outlive its expert, so the curve has a
    break there.
    """
    streams: dict[str, StreamCurve] = {}
    for curve in curves:
        for name, stream in curve.streams.items():
            before = streams.get(name)
            streams[name] = stream if before is None else _end_to_end(before, stream)
    return curves[0].model_copy(update={"streams": streams})


def _end_to_end(first: StreamCurve, second: StreamCurve) -> StreamCurve:
    names = StreamCurve.model_fields
    both = {name: getattr(first, name) + getattr(second, name) for name in names}
    # Residuals of two experts have nothing to do with each other: their directions are apart.
    zeros = [(0.0,) * len(stream.path[0]) if stream.path else () for stream in (first, second)]
    both["path"] = (*((*row, *zeros[1]) for row in first.path),)
    both["path"] += (*((*zeros[0], *row) for row in second.path),)
    return StreamCurve(**both)


def library_versions() -> dict[str, str]:
    """Versions that a measurement depends on, and today's date."""
    versions = {name: metadata.version(name) for name in ("torch", "diffusers")}
    return {
        **versions,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
