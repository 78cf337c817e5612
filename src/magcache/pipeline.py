"""The surface: enable, disable, stats, calibrate, plan."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from magcache import compat, presets, rundown
from magcache.ahead import require_path
from magcache.budget import Budget, Quality
from magcache.cache import StreamStats, TransformerCache
from magcache.calibration import joined
from magcache.clock import CallClock, Clock, SchedulerClock
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.discovery import denoisers
from magcache.errors import ConfigError, CurveError, RanksError
from magcache.hook import (
    apply_mag_cache_hook,
    curve_from,
    remove_mag_cache_hook,
    stack_of,
)
from magcache.installation import cache_of
from magcache.keeper import CurveKeeper
from magcache.ranks import Ranks, tell_failure
from magcache.store import curve_path, find_curve
from magcache.weights import WeightsWatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Enabled", "Stats", "calibrate", "disable", "enable", "stats"]

logger = logging.getLogger("magcache")


@dataclass(frozen=True)
class Stats:
    """What each stream of a pipeline's transformers does in the run that is on, or did in the last.

    `plain_calls` counts, by reason, calls that belonged to no stream. Printed, it is a table.
    """

    streams: tuple[StreamStats, ...]
    plain_calls: dict[str, int]

    def __str__(self) -> str:
        names = [f"{s.transformer} {s.stream}" for s in self.streams]
        width = max(map(len, names), default=0)
        lines = [] if self.streams else ["no run yet"]
        for name, s in zip(names, self.streams, strict=True):
            counts = f"{s.steps:3d} steps {s.computed:3d} computed {s.skipped:3d} skipped"
            lines.append(f"{name:<{width}} {counts}  {s.happened}")
            if not s.as_planned:
                lines.append(f"{'':<{width}} {'planned':>{len(counts)}}  {s.plan}")
            lines += [f"  {count} x {reason}" for reason, count in s.fallbacks.items()]
        lines += [f"{count} calls: {reason}" for reason, count in self.plain_calls.items()]
        return "\n".join(lines)


class Enabled:
    """An enabled cache; as a context manager it is disabled at the end."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable()

    def stats(self) -> Stats:
        """See `magcache.stats`."""
        return stats(self.target)

    def disable(self) -> None:
        """See `magcache.disable`."""
        disable(self.target)


def enable(
    target: Any,
    config: MagCacheConfig | None = None,
    *,
    speedup: float | None = None,
    max_error: float | None = None,
    quality: Quality | None = None,
    scheduler: Any = None,
    curves: str | Path | None = None,
    group: ProcessGroup | None = None,
) -> Enabled:
    """Cache every denoising transformer of a pipeline, or one transformer.

    Each run computes the steps that make the picture best for the time: for a `speedup` (steps over
    computed steps), a `max_error` (predicted root mean square error of the final sample), or a
    `quality`: "high", "balanced" (the default) or "fast". A `config` without a budget takes the
    published greedy rule instead.

    What is known of the checkpoint comes from `config.mag_ratios`, else from a preset for it, else
    from its own saved curve; where there is none (a budget needs more than a list of ratios), the
    first complete run measures it (nothing is skipped) and saves it, and later runs are cached.
    Enabling again reconfigures, at once.

    target: a diffusers pipeline, or a transformer. For a bare transformer give its `scheduler`, or
        set `config.num_inference_steps`: something has to tell how long a run is. With a scheduler,
        the length is each run's own.
    curves: folder of saved curves; default `MAGCACHE_HOME`, else the user's cache folder.
    group: a `torch.distributed` process group whose ranks share one curve, the mean over all of
        them (guidance passes split over ranks: each has one of the streams). Each of its ranks has
        to enable with it and to make the same calibration runs: they wait for each other then, up
        to the process group's timeout. Ranks whose blocks communicate, by context parallelism or
        sharded weights, share their curve without being asked to.

    Raises `CannotCacheError` for a target without a stack of blocks, and leaves it as it was;
    `RanksError` if another rank stays away, and `ConfigError` if its settings are others.
    """
    config = _with_budget(config, speedup, max_error, quality)
    transformers = denoisers(target)
    known, watches, ranks = {}, {}, {}
    for name, transformer in transformers.items():
        stack_of(transformer, config)
        watches[name] = WeightsWatch(transformer) if config.mag_ratios is None else None
        curve, source = _known_curve(transformer, target, config, curves, watches[name])
        ranks[name] = Ranks(transformer, name, group)
        if group is not None:
            curve = ranks[name].agree(config, curve, asked=True)
        known[name] = curve, source
    clock, owner = _clock_for(target, config, scheduler, transformers)
    for name, transformer in transformers.items():
        curve, source = known[name]
        watch = watches[name]
        keep = CurveKeeper(config, target, owner, curves, ranks[name], watch)
        cache = apply_mag_cache_hook(
            transformer, config, clock=clock, curve=curve, on_measured=keep, name=name
        )
        find = functools.partial(_known_curve, transformer, target, config, curves, watch)
        cache.on_run = functools.partial(_look_again, watch, keep, find)
        logger.info("%s (%s): %s", name, compat.class_of(transformer).__name__, source)
    if isinstance(clock, SchedulerClock) and owner is not None:
        clock.attach(owner)
        if owner is target:
            expect = functools.partial(clock.expect, target)
            rundown.watch(target, expect, clock.leave, clock.abort)
    return Enabled(target)


def _with_budget(
    config: MagCacheConfig | None,
    speedup: float | None,
    max_error: float | None,
    quality: Quality | None,
) -> MagCacheConfig:
    """The settings with the budget that is asked for, if one is."""
    asked = {"speedup": speedup, "max_error": max_error, "quality": quality}
    asked = {name: value for name, value in asked.items() if value is not None}
    if not asked:
        return config or MagCacheConfig(budget=Budget(quality="balanced"))
    if config is None:
        return MagCacheConfig(budget=Budget(**asked))  # type: ignore[arg-type]
    if config.budget is None:
        return dataclasses.replace(config, budget=Budget(**asked))  # type: ignore[arg-type]
    nothing = dict.fromkeys(("speedup", "max_error", "quality"))
    budget = dataclasses.replace(config.budget, **{**nothing, **asked})  # type: ignore[arg-type]
    return dataclasses.replace(config, budget=budget)


def disable(target: Any) -> None:
    """Take the cache off a pipeline or a transformer, bit for bit; does nothing if there is none.

    A transformer that another enabled pipeline uses too stays cached for that one.
    """
    transformers = denoisers(target)
    for clock in {id(c.clock): c.clock for c in _caches(transformers)}.values():
        if isinstance(clock, SchedulerClock) and not isinstance(target, nn.Module):
            _detach(clock, target)
            if clock.owners:
                continue
        for transformer in transformers.values():
            remove_mag_cache_hook(transformer)
        if isinstance(clock, SchedulerClock) and not clock.on_end:
            for owner in clock.owners:
                _detach(clock, owner)


def stats(target: Any) -> Stats:
    """What each stream of a pipeline or transformer does in this run, or did in the last one."""
    caches = _caches(denoisers(target))
    if not caches:
        raise ConfigError(f"{type(target).__name__} has no cache; call magcache.enable first")
    plain_calls: dict[str, int] = {}
    for cache in caches:
        for reason, count in cache.unplaced.items():
            plain_calls[reason] = plain_calls.get(reason, 0) + count
    return Stats(tuple(s for cache in caches for s in cache.stats()), plain_calls)


def calibrate(
    pipe: Any,
    prompts: Sequence[str] | None = None,
    *,
    curves: str | Path | None = None,
    group: ProcessGroup | None = None,
    **pipeline_kwargs: Any,
) -> MagnitudeCurve:
    """Measure a pipeline's magnitude curve over one full run a prompt, save it, and return it.

    Nothing is skipped meanwhile. `pipeline_kwargs` go to the pipeline with each prompt; without
    prompts it is run once with them alone. The curve is saved for each of the pipeline's
    transformers, and later calls of `enable` find it. What was enabled before stays enabled, with
    its settings. Experts that take turns in a run come back as one curve.

    group: a `torch.distributed` process group whose ranks average their runs at the end; each may
    bring prompts of its own, and as many as it likes. All of them have to call this, and get the
    same curve. Raises `RanksError` on every rank if one of them failed or stays away.
    """
    transformers = denoisers(pipe)
    before = {name: cache_of(transformer) for name, transformer in transformers.items()}
    settings = next((cache.config for cache in before.values() if cache), None)
    asked = next((k.ranks.group for k in _keepers(list(filter(None, before.values())))), None)
    enable(pipe, MagCacheConfig(mag_calibrate=True), curves=curves)
    caches = _caches(transformers)
    keepers = _keepers(caches)
    try:
        for kwargs in [{"prompt": prompt} for prompt in prompts or ()] or [{}]:
            for keeper in keepers:
                keeper.details = {**_plain(pipeline_kwargs), "prompts": list(prompts or ())}
            pipe(**kwargs, **pipeline_kwargs)
    except BaseException:
        if group is not None:
            for cache in caches:
                tell_failure(group, cache.name)
        raise
    finally:
        disable(pipe) if settings is None else enable(pipe, settings, curves=curves, group=asked)
    if group is not None:
        # Every transformer's, before any is judged: each rank has to take part in all of them.
        shared = [k.share(c, group) for k, c in zip(keepers, caches, strict=True)]
        if not all(shared):
            raise RanksError(
                "another rank failed in its calibration, and nothing was averaged; see the "
                "warning before this, and call calibrate again on every rank"
            )
    measured = [k.curve for k in keepers if k.curve is not None]
    if not measured:
        raise CurveError(
            "the runs measured nothing: a curve needs complete runs of two or more steps"
        )
    return joined(measured)


def _keepers(caches: Sequence[TransformerCache]) -> list[CurveKeeper]:
    return [c.on_measured for c in caches if isinstance(c.on_measured, CurveKeeper)]


def _look_again(
    watch: WeightsWatch | None,
    keep: CurveKeeper,
    find: Callable[[], tuple[MagnitudeCurve | None, str]],
    cache: TransformerCache,
) -> None:
    """Find the curve anew if the weights are others than it was found for (an adapter's, say).

    And see to it that ranks which have to act alike have the same curve.
    """
    changed = watch is not None and watch.changed()
    if changed:
        keep.forget()
        cache.curve, source = find()
        logger.info("%s: its weights have changed: %s", cache.name, source)
    curve = keep.ranks.agree(cache.config, cache.curve, asked=changed)
    if curve is not cache.curve:
        cache.curve = curve


def _known_curve(
    transformer: nn.Module,
    target: Any,
    config: MagCacheConfig,
    folder: str | Path | None,
    watch: WeightsWatch | None,
) -> tuple[MagnitudeCurve | None, str]:
    """The curve to use, if any is known, and in words where it comes from."""
    stack = stack_of(transformer, config)
    if config.mag_ratios is not None or watch is None:
        curve = curve_from(config, stack.strategy)
        if config.budget is not None and curve is not None:
            require_path(curve)
        return curve, "curve from the settings"
    if config.mag_calibrate:
        return None, "calibrating, nothing is skipped"
    ids = (compat.checkpoint_id(transformer), compat.checkpoint_id(target))
    preset = presets.for_checkpoint((watch.fingerprint, *(i for i in ids if i)))
    path = curve_path(transformer, folder, watch.fingerprint)
    candidates: list[tuple[Callable[[], MagnitudeCurve | None], str]] = [
        (lambda: presets.load(preset) if preset else None, f"curve from the preset {preset}"),
        (lambda: find_curve(transformer, folder, watch.fingerprint), f"curve from {path}"),
        (lambda: curve_from(config, stack.strategy), "magnitude ratios of the architecture"),
    ]
    for find, source in candidates:
        curve = find()
        if curve is not None and (config.budget is None or curve.has_path):
            return curve, source
    lacking = "no curve" if config.budget is None else "no calibration"
    return None, f"{lacking} for this checkpoint: the first complete run measures it, uncached"


def _clock_for(
    target: Any, config: MagCacheConfig, scheduler: Any, transformers: dict[str, nn.Module]
) -> tuple[Clock, Any]:
    """A clock for these transformers, and whose scheduler it follows."""
    # A transformer that several pipelines share has one clock that follows all of them.
    shared = next((cache.clock for cache in _caches(transformers)), None)
    if not isinstance(target, nn.Module):
        if not hasattr(target, "scheduler"):
            raise ConfigError(
                f"{type(target).__name__} has no scheduler to tell its steps; enable its "
                "transformer with scheduler=... or num_inference_steps instead"
            )
        return (shared if isinstance(shared, SchedulerClock) else SchedulerClock()), target
    if scheduler is not None:
        return SchedulerClock(), SimpleNamespace(scheduler=scheduler)
    if isinstance(shared, SchedulerClock):
        return shared, None
    if config.num_inference_steps is None:
        raise ConfigError(
            "a bare transformer does not tell how long a run is: pass the pipeline instead, or "
            "scheduler=..., or MagCacheConfig(num_inference_steps=...)"
        )
    return CallClock(config.num_inference_steps), None


def _caches(transformers: dict[str, nn.Module]) -> list[TransformerCache]:
    return [cache for t in transformers.values() if (cache := cache_of(t)) is not None]


def _detach(clock: SchedulerClock, owner: Any) -> None:
    clock.detach(owner)
    rundown.unwatch(owner)


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that can be written down as they are."""
    return {k: v for k, v in kwargs.items() if isinstance(v, str | int | float | bool)}
