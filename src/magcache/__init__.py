"""MagCache for diffusion transformers: `magcache.enable(pipe)`."""

from magcache.ahead import frontier, plan
from magcache.budget import Budget
from magcache.cache import StreamStats, TransformerCache
from magcache.config import MagCacheConfig
from magcache.crossing import MagCacheBlockHook, MagCacheHeadHook
from magcache.curve import MagnitudeCurve, StreamCurve
from magcache.errors import (
    CannotCacheError,
    ConfigError,
    CurveError,
    MagCacheError,
    RanksError,
)
from magcache.frontier import Frontier
from magcache.hook import apply_mag_cache_hook, remove_mag_cache_hook
from magcache.pipeline import Enabled, Stats, calibrate, disable, enable, stats
from magcache.planning import Plan
from magcache.state import MagCacheState
from magcache.strategy import MagCacheStrategy, MagCacheStrategyRegistry

__all__ = [
    "Budget",
    "CannotCacheError",
    "ConfigError",
    "CurveError",
    "Enabled",
    "Frontier",
    "MagCacheBlockHook",
    "MagCacheConfig",
    "MagCacheError",
    "MagCacheHeadHook",
    "MagCacheState",
    "MagCacheStrategy",
    "MagCacheStrategyRegistry",
    "MagnitudeCurve",
    "Plan",
    "RanksError",
    "Stats",
    "StreamCurve",
    "StreamStats",
    "TransformerCache",
    "apply_mag_cache_hook",
    "calibrate",
    "disable",
    "enable",
    "frontier",
    "plan",
    "remove_mag_cache_hook",
    "stats",
]

__version__ = "0.1.0"
