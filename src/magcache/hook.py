"""What stands at a transformer: puts a cache there, and takes it off again."""

from __future__ import annotations

import logging

from torch import nn

from magcache import compat, presets
from magcache.cache import MeasuredListener, TransformerCache
from magcache.clock import CallClock, Clock
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.errors import ConfigError
from magcache.installation import cache_of, install, uninstall
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


def _strategy_for(
    module: nn.Module, config: MagCacheConfig, strategy: MagCacheStrategy | None
) -> MagCacheStrategy:
    """The given strategy, the one registered under the config's or class's name, or the general."""
    if strategy is not None:
        return strategy
    if config.transformer_type is not None:
        return MagCacheStrategyRegistry.get(config.transformer_type)()
    name = compat.class_of(module).__name__
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
    compat.refuse_other_cache(inner)
    return Stack(inner, find_block_lists(inner, strategy), strategy)


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
    before = cache_of(transformer)
    if (
        before is not None
        and strategy is None
        and type(before.stack.strategy) is type(stack.strategy)
        and before.stack.lists == stack.lists
    ):
        # What has been learned of the model stays.
        stack = before.stack
    remove_mag_cache_hook(transformer)
    clock = clock or CallClock(config.num_inference_steps)
    cache = TransformerCache(transformer, config, stack, clock, curve, on_measured, name)
    install(cache)
    return cache


def remove_mag_cache_hook(transformer: nn.Module) -> None:
    """Take the cache off; the module is then what it was, attribute for attribute."""
    cache = cache_of(transformer)
    if cache is not None:
        cache.close()
        uninstall(cache)


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
