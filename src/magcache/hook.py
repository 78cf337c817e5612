"""What stands at a transformer: puts a cache there, and takes it off again."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from magcache import compat, presets
from magcache.cache import MeasuredListener, TransformerCache
from magcache.clock import CallClock, Clock
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.errors import CannotCacheError, ConfigError
from magcache.stack import Stack, find_block_lists
from magcache.strategy import MagCacheStrategy, MagCacheStrategyRegistry

__all__ = [
    "apply_mag_cache_hook",
    "cache_of",
    "curve_from",
    "remove_mag_cache_hook",
    "stack_of",
]

logger = logging.getLogger("magcache")


@dataclass(frozen=True)
class _NamedContext:
    """What magcache reads of diffusers' CacheContext, for releases that have none."""

    name: str
    step_index: int | None = None
    num_inference_steps: int | None = None


def _strategy_for(
    module: nn.Module, config: MagCacheConfig, strategy: MagCacheStrategy | None
) -> MagCacheStrategy:
    """The given strategy, the one registered under the config's or class's name, or the general."""
    if strategy is not None:
        return strategy
    if config.transformer_type is not None:
        return MagCacheStrategyRegistry.get(config.transformer_type)()
    name = type(compat.unwrap_compiled(module)).__name__
    registered = MagCacheStrategyRegistry.get_if_exists(name)
    if registered is None:
        logger.debug("%s: no strategy registered, the general rule applies", name)
    return (registered or MagCacheStrategy)()


def stack_of(
    transformer: nn.Module, config: MagCacheConfig, strategy: MagCacheStrategy | None = None
) -> Stack:
    """The transformer's stack; raises `CannotCacheError` without one, or if a cache is on."""
    strategy = _strategy_for(transformer, config, strategy)
    inner = compat.unwrap_compiled(transformer)
    other = compat.diffusers_cache(inner)
    if other is not None:
        raise CannotCacheError(
            f"{type(inner).__name__} already has diffusers' {other}; take that off first "
            "(transformer.disable_cache())"
        )
    return Stack(inner, find_block_lists(inner, strategy), strategy)


def cache_of(module: nn.Module) -> TransformerCache | None:
    """The cache on this module, if one is applied."""
    installed = vars(module).get("forward")
    cache = getattr(installed, "__func__", None)
    found = getattr(cache, "magcache", None)
    return found if isinstance(found, TransformerCache) and found.module is module else None


def apply_mag_cache_hook(
    transformer: nn.Module,
    config: MagCacheConfig,
    strategy: MagCacheStrategy | None = None,
    *,
    clock: Clock | None = None,
    curve: MagnitudeCurve | None = None,
    on_measured: MeasuredListener | None = None,
    name: str = "transformer",
) -> TransformerCache:
    """Put a cache on one transformer; applying again replaces it.

    Ratios come from `curve`, else `config.mag_ratios`, else the strategy. Without a `clock`, steps
    are told by the calls' timesteps, and `config.num_inference_steps` has to be set. With
    `on_measured`, which is told of each complete calibration run, ratios may be unknown at first.
    Raises `CannotCacheError` where there is no stack of blocks, or another cache is on; then
    nothing is changed.
    """
    stack = stack_of(transformer, config, strategy)
    curve = curve or curve_from(config, stack.strategy)
    if curve is None and not config.mag_calibrate and on_measured is None:
        raise ConfigError(
            "mag_ratios is None and nothing is known of this model; give ratios, or set "
            "mag_calibrate=True, or use magcache.enable, which looks curves up"
        )
    remove_mag_cache_hook(transformer)
    clock = clock or CallClock(config.num_inference_steps)
    cache = TransformerCache(transformer, config, stack, clock, curve, on_measured, name)
    _install(cache)
    return cache


def remove_mag_cache_hook(transformer: nn.Module) -> None:
    """Take the cache off; the module is then what it was, attribute for attribute."""
    cache = cache_of(transformer)
    if cache is not None:
        cache.close()
        _uninstall(transformer)


def curve_from(config: MagCacheConfig, strategy: MagCacheStrategy) -> MagnitudeCurve | None:
    """The curve that the settings give, or else the strategy, or None."""
    ratios = config.mag_ratios
    if ratios is None:
        ratios = strategy.mag_ratios
    if ratios is None or isinstance(ratios, MagnitudeCurve):
        return ratios
    if isinstance(ratios, str):
        return presets.load(ratios)
    return MagnitudeCurve.from_ratios([float(ratio) for ratio in ratios])


def _install(cache: TransformerCache) -> None:
    module = cache.module
    own = vars(module).get("forward")
    plain = own if own is not None else functools.partial(type(module).forward, module)

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A deep copy of the module carries this method along, bound to the copy: it runs plainly.
        if self is not module:
            return type(self).forward(self, *args, **kwargs)
        if not cache.alive:
            return plain(*args, **kwargs)
        return cache.call(plain, args, kwargs)

    forward.__dict__["magcache"] = cache
    forward.__dict__["magcache_own"] = own
    vars(module)["forward"] = MethodType(forward, module)
    if hasattr(type(module), "cache_context"):
        vars(module)["cache_context"] = _context_method(cache)


def _context_method(cache: TransformerCache) -> MethodType:
    plain = type(cache.module).cache_context  # type: ignore[attr-defined]

    @functools.wraps(plain)
    @contextlib.contextmanager
    def cache_context(self: nn.Module, name: str, **kwargs: Any) -> Iterator[None]:
        context = _NamedContext(name, kwargs.get("step_index"), kwargs.get("num_inference_steps"))
        with plain(self, name, **kwargs):
            if self is not cache.module:
                yield
                return
            with cache.in_context(context):
                yield

    return MethodType(cache_context, cache.module)


def _uninstall(module: nn.Module) -> None:
    installed: Any = vars(module)["forward"]
    own = installed.__func__.magcache_own
    if own is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = own
    vars(module).pop("cache_context", None)
