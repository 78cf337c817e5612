"""What a run would do, told from a curve without running anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from magcache import presets
from magcache.budget import Budget
from magcache.clock import Timeline, strides_between
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.errors import ConfigError, CurveError
from magcache.frontier import Frontier
from magcache.planner import Planner, RunPath
from magcache.planning import Plan

__all__ = ["frontier", "plan", "require_path"]


def plan(
    curve: MagnitudeCurve | Sequence[float] | str,
    config: MagCacheConfig | None = None,
    steps: int = 28,
    *,
    stream: str | None = None,
    sigmas: Sequence[float] | None = None,
    guidance_scale: float | None = None,
) -> Plan:
    """Which steps a run would compute and which it would skip, without running anything.

    curve: a curve, a list of ratios, or a preset's name. stream: which of its streams; by default
    what `config.streams` says: for the greedy rule the first, for a budget all. sigmas: the run's
    noise levels, one a step; by default they are laid out over `steps` steps as in the run that was
    measured. With a budget, steps count by the change of the noise level, as flow models' do, and
    plans for much guidance extrapolate less; a usual `guidance_scale` is assumed if none is given.
    """
    config = config or MagCacheConfig()
    curve = _curve(curve)
    planner = Planner(_for_stream(config, curve, stream), curve)
    timeline = _timeline(curve, steps, stream, sigmas, guidance_scale)
    name = stream or next(iter(curve.streams))
    return planner.schedule(timeline, name, 0, 0, set()).plan


def frontier(
    curve: MagnitudeCurve | str,
    steps: int = 28,
    *,
    sigmas: Sequence[float] | None = None,
    guidance_scale: float | None = None,
    config: MagCacheConfig | None = None,
) -> Frontier:
    """The best plan for every number of computed steps, with predicted errors.

    curve: a measured curve or its preset's name; a list of ratios alone does not tell enough.
    sigmas, guidance_scale: as for `plan`. config: its budget's limits apply (`max_skip_steps`,
    `max_residuals`, ...), not its goal.
    """
    curve = _curve(curve)
    config = config or MagCacheConfig(budget=Budget(quality="balanced"))
    if config.budget is None:
        raise ConfigError("config has no budget; a frontier needs one's limits")
    budget = dataclasses.replace(config.budget, speedup=None, max_error=0.0, quality=None)
    require_path(curve)
    timeline = _timeline(curve, steps, None, sigmas, guidance_scale)
    places = np.asarray(timeline.levels or timeline.fractions)
    everything = slice(0, timeline.steps)
    return RunPath(curve, budget, timeline, places, everything, list(curve.streams)).frontier()


def _curve(curve: MagnitudeCurve | Sequence[float] | str) -> MagnitudeCurve:
    if isinstance(curve, str):
        return presets.load(curve)
    return curve if isinstance(curve, MagnitudeCurve) else MagnitudeCurve.from_ratios(curve)


def _for_stream(
    config: MagCacheConfig, curve: MagnitudeCurve, stream: str | None
) -> MagCacheConfig:
    if config.budget is not None:
        require_path(curve)
    if stream is None:
        return config
    if stream not in curve.streams:
        raise CurveError(f"no stream {stream!r} in this curve; it has {', '.join(curve.streams)}")
    return dataclasses.replace(config, streams="apart")


def _timeline(
    curve: MagnitudeCurve,
    steps: int,
    stream: str | None,
    sigmas: Sequence[float] | None,
    guidance: float | None,
) -> Timeline:
    if sigmas is not None and curve.axis != "noise":
        raise CurveError("this curve knows steps, not noise levels: give steps, not sigmas")
    places = tuple(sigmas) if sigmas is not None else curve.places(steps, stream)
    if curve.axis == "fraction":
        return Timeline(places, None, (1 / len(places),) * len(places), guidance)
    fractions = tuple(i / len(places) for i in range(len(places)))
    return Timeline(fractions, places, strides_between(places), guidance)


def require_path(curve: MagnitudeCurve) -> None:
    if not curve.has_path:
        raise CurveError(
            "this curve knows ratios only, and a budget needs what magcache.calibrate measures "
            "beside them: calibrate the checkpoint, or use the greedy rule (no budget)"
        )
