"""What calibration knows of a model: how the residual's magnitude changes along the noise.

A curve is kept as measured and served for any schedule. A ratio over a longer step is the product
of the ratios it spans, so resampling interpolates the cumulative log-magnitude, never the ratios.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from magcache.errors import CurveError

__all__ = ["Axis", "MagnitudeCurve", "StreamCurve"]

Axis = Literal["noise", "fraction"]

Array = npt.NDArray[np.float64]

_NUMBERS = ("places", "token_std", "cosine_distance", "prompt_spread", "scale")
# Two places on the noise axis closer than this are the same place: timesteps go through float32.
_SAME_PLACE = 1e-6


class StreamCurve(BaseModel):
    """One stream's measurements, in the order in which a run meets them.

    `places` are noise levels (timestep over the scheduler's training timesteps: sigma for flow
    models) or shares i/N of a run, by the curve's axis. `ratios[i]` is the mean over tokens of
    |residual_i| / |residual_(i-1)|, the first one 1. The others are optional, one entry a step:
    spread over tokens, mean cosine distance to the step before, and spread over prompts; `scale`,
    the standard deviation of the hidden states past the stack; and `path`, coordinates of the
    residuals, whose inner products are those of the residuals (mean over elements and prompts).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    places: tuple[float, ...]
    ratios: tuple[float, ...]
    token_std: tuple[float, ...] = ()
    cosine_distance: tuple[float, ...] = ()
    prompt_spread: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    path: tuple[tuple[float, ...], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> StreamCurve:
        if not self.ratios:
            raise ValueError("ratios are empty; give one positive number a step, the first one 1")
        bad = [r for r in self.ratios if not (math.isfinite(r) and r > 0)]
        if bad:
            raise ValueError(f"ratios must be finite and positive, found {bad[0]!r}")
        for name in (*_NUMBERS, "path"):
            if not np.isfinite(np.array(getattr(self, name), dtype=float)).all():
                raise ValueError(f"{name} must be finite")
        for name in (*_NUMBERS, "path"):
            found = len(getattr(self, name))
            if found != len(self.ratios) and (found or name == "places"):
                raise ValueError(f"{name} has {found} entries, ratios has {len(self.ratios)}")
        return self

    @property
    def log_magnitude(self) -> tuple[float, ...]:
        """Cumulative log of the ratios: log of |residual_i| relative to the first step's."""
        return tuple(accumulate(math.log(ratio) for ratio in self.ratios))

    def at(self, places: Sequence[float]) -> tuple[float, ...]:
        """Ratios for a run that visits `places` in this order; the first is 1.

        Served as measured where the places are those of the measurement. Outside the measured
        range the magnitude counts as constant.
        """
        if len(places) == len(self.places) and np.allclose(
            places, self.places, rtol=0, atol=_SAME_PLACE
        ):
            return self.ratios
        log = self._interpolated(self.log_magnitude, places)
        return (1.0, *np.exp(np.diff(log)).tolist())

    @property
    def has_path(self) -> bool:
        """Whether calibration kept more than ratios: what plans for a budget need."""
        return bool(self.path and self.scale)

    def path_at(self, places: Sequence[float] | Array) -> Array:
        """Coordinates of the residuals of a run that visits `places`, [steps, directions].

        Between the measured places the path is a cubic Hermite spline; outside it stands still. The
        second evaluations that some samplers make at a place have a path of their own.
        """
        wanted, turn = np.asarray(places, dtype=float), _turns(places)
        known, known_turn = np.asarray(self.places), _turns(self.places)
        path = np.asarray(self.path)
        found = np.zeros((len(wanted), path.shape[1]))
        for which in np.unique(turn):
            nodes = np.flatnonzero(known_turn == min(which, known_turn.max()))
            nodes = nodes[np.argsort(known[nodes])]
            found[turn == which] = _smooth(known[nodes], path[nodes], wanted[turn == which])
        return found

    def scale_at(self, places: Sequence[float] | Array) -> Array:
        """`scale` for a run that visits `places`, [steps]."""
        return self._interpolated(self.scale, places)

    def _interpolated(self, values: Sequence[float], places: Sequence[float] | Array) -> Array:
        order = np.argsort(self.places, kind="stable")
        known = np.asarray(self.places)[order]
        return np.asarray(np.interp(places, known, np.asarray(values)[order]))


class MagnitudeCurve(BaseModel):
    """The magnitude curves of a model's streams, with where they come from.

    `axis` says what `places` mean: "noise" curves (measured here) serve any schedule, shift and
    strength; "fraction" curves (published step-indexed tables) know only shares of a run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["magcache-curve-1"] = "magcache-curve-1"
    axis: Axis
    streams: dict[str, StreamCurve] = Field(min_length=1)
    provenance: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_ratios(
        cls,
        ratios: Sequence[float],
        *,
        layout: Literal["single", "cfg_interleaved"] = "single",
        provenance: dict[str, Any] | None = None,
    ) -> MagnitudeCurve:
        """A curve from a step-indexed list, as the paper's scripts print it.

        `layout="cfg_interleaved"` means cond, uncond, cond, ...: it is split into two streams.
        """
        values = [float(r) for r in ratios]
        parts = (
            {"cond": values[0::2], "uncond": values[1::2]}
            if layout == "cfg_interleaved"
            else {"all": values}
        )
        try:
            streams = {
                name: StreamCurve(
                    places=tuple(i / len(part) for i in range(len(part))), ratios=tuple(part)
                )
                for name, part in parts.items()
            }
            return cls(axis="fraction", streams=streams, provenance=provenance or {})
        except ValidationError as error:
            raise CurveError(_reason(error)) from error

    @property
    def has_path(self) -> bool:
        """Whether every stream has what plans for a budget need."""
        return all(stream.has_path for stream in self.streams.values())

    def stream(self, name: str | None = None, order: int = 0) -> StreamCurve:
        """The stream called `name`; else the `order`-th one; else the last one there is."""
        if name is not None and name in self.streams:
            return self.streams[name]
        known = list(self.streams.values())
        return known[min(order, len(known) - 1)]

    def places(self, steps: int, stream: str | None = None) -> tuple[float, ...]:
        """Where `steps` steps would fall on the axis, if laid out like the measured run."""
        if steps < 1:
            raise CurveError(f"steps is {steps}, expected 1 or more")
        if self.axis == "fraction":
            return tuple(i / steps for i in range(steps))
        measured = self.stream(stream).places
        share = np.arange(len(measured)) / len(measured)
        return tuple(np.interp(np.arange(steps) / steps, share, measured).tolist())

    def ratios(self, places: Sequence[float], stream: str | None = None) -> tuple[float, ...]:
        """Ratios for a run that visits `places` (sigmas on a noise axis) in this order."""
        return self.stream(stream).at(places)

    def save(self, path: str | Path) -> Path:
        """Write as JSON; folders are made. Returns the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and moved: a reader never sees half a file, nor two writers' mixture.
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
        part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> MagnitudeCurve:
        """Read a saved curve; raises `CurveError` that names the file and the reason."""
        path = Path(path)
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CurveError(f"{path}: no such file; calibrate first, or check the path") from error
        except (ValidationError, UnicodeDecodeError) as error:
            reason = _reason(error) if isinstance(error, ValidationError) else str(error)
            raise CurveError(
                f"{path}: not a magcache curve ({reason}); delete it and calibrate again"
            ) from error


def _turns(places: Sequence[float] | Array) -> npt.NDArray[np.intp]:
    """How often each place has been visited before."""
    seen: Counter[float] = Counter()
    turns = []
    for place in np.round(np.asarray(places, dtype=float), 6).tolist():
        turns.append(seen[place])
        seen[place] += 1
    return np.array(turns, dtype=np.intp)


def _smooth(known: Array, values: Array, wanted: Array) -> Array:
    """Cubic Hermite interpolation of rows over rising places; slopes by central differences."""
    if len(known) < 2:
        return np.repeat(values, len(wanted), axis=0)
    slopes = np.gradient(values, known, axis=0, edge_order=2 if len(known) > 2 else 1)
    wanted = wanted.clip(known[0], known[-1])
    left = (np.searchsorted(known, wanted, side="right") - 1).clip(0, len(known) - 2)
    width = (known[left + 1] - known[left])[:, None]
    t = (wanted - known[left])[:, None] / width
    ends = values[left] * (1 - t) + values[left + 1] * t
    chord = values[left + 1] - values[left]
    bend = (slopes[left] * width - chord) * (1 - t) - (slopes[left + 1] * width - chord) * t
    return np.asarray(ends + t * (1 - t) * bend)


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
