"""What can go wrong, as types a caller can catch."""

from __future__ import annotations

__all__ = ["CannotCacheError", "ConfigError", "CurveError", "MagCacheError", "RanksError"]


class MagCacheError(Exception):
    """Base of every error that magcache raises itself."""


class ConfigError(MagCacheError, ValueError):
    """A setting is out of range, unknown, or does not fit the others."""


class CurveError(MagCacheError, ValueError):
    """Magnitude ratios are malformed, or a curve was asked for what it does not hold."""


class RanksError(MagCacheError, RuntimeError):
    """Another process did not do its part; the message says which one and in what."""


class CannotCacheError(MagCacheError, RuntimeError):
    """This model cannot be cached as it stands; the message says why and what to do."""
