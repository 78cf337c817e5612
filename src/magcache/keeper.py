"""Turns a transformer's calibration runs into its curve, and saves that."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from magcache import compat
from magcache.cache import TransformerCache
from magcache.calibration import Measurements, curve_of, library_versions
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.store import curve_path, fingerprint

__all__ = ["CurveKeeper"]

logger = logging.getLogger("magcache")


class CurveKeeper:
    """Told each complete calibration run of one transformer; `curve` is what they make so far.

    `details` (pipeline arguments, prompts) go into the curve's provenance.
    """

    def __init__(
        self, config: MagCacheConfig, target: Any, owner: Any, folder: str | Path | None
    ) -> None:
        self.details: dict[str, Any] = {}
        self.curve: MagnitudeCurve | None = None
        self._config = config
        self._target = target
        self._owner = owner
        self._folder = folder
        self._runs: list[dict[str, Measurements]] = []

    def forget(self) -> None:
        """Start anew: the runs so far are of other weights."""
        self._runs.clear()
        self.curve = None

    def __call__(self, cache: TransformerCache, measured: dict[str, Measurements]) -> None:
        self._runs.append(measured)
        self.curve = curve_of(self._runs, self._provenance(cache, measured))
        if self._config.budget is not None and not self.curve.has_path:
            logger.warning("%s: residuals changed their shape in the run; not cached", cache.name)
        elif not self._config.mag_calibrate:
            cache.curve = self.curve
        path = curve_path(cache.module, self._folder)
        try:
            self.curve.save(path)
        except OSError as error:
            logger.warning("%s: the curve was measured but not saved: %s", cache.name, error)
        else:
            logger.info("%s: curve of %d run(s) saved to %s", cache.name, len(self._runs), path)

    def _provenance(
        self, cache: TransformerCache, measured: dict[str, Measurements]
    ) -> dict[str, Any]:
        module = compat.unwrap_compiled(cache.module)
        scheduler = getattr(self._owner, "scheduler", None)
        weight = next(module.parameters(), None)
        return {
            "model": compat.checkpoint_id(module) or compat.checkpoint_id(self._target),
            "transformer": type(module).__name__,
            "fingerprint": fingerprint(module),
            "scheduler": type(scheduler).__name__ if scheduler is not None else None,
            "shift": compat.settings(scheduler).get("shift"),
            "steps": max(m.timeline.steps for m in measured.values()),
            "runs": len(self._runs),
            "residual_shape": list(cache.residual_shape),
            "dtype": str(weight.dtype).removeprefix("torch.") if weight is not None else None,
            **self.details,
            **library_versions(),
        }
