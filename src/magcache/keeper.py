"""Turns a transformer's calibration runs into its curve, and saves that."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magcache import compat
from magcache.cache import TransformerCache
from magcache.calibration import Measurements, curve_of, library_versions, run_curve
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.ranks import Ranks, gather_runs
from magcache.store import curve_path, fingerprint
from magcache.weights import WeightsWatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CurveKeeper"]

logger = logging.getLogger("magcache")


class CurveKeeper:
    """Told each calibration run of one transformer; `curve` is what they make so far.

    `details` (pipeline arguments, prompts) go into the curve's provenance. Runs of other `ranks`
    count as well; the curve is then the same on each, and each saves it.
    """

    def __init__(
        self,
        config: MagCacheConfig,
        target: Any,
        owner: Any,
        folder: str | Path | None,
        ranks: Ranks,
        watch: WeightsWatch | None,
    ) -> None:
        self.details: dict[str, Any] = {}
        self.curve: MagnitudeCurve | None = None
        self._config = config
        self._target = target
        self._owner = owner
        self._folder = folder
        self.ranks = ranks
        self._watch = watch
        self._runs: list[MagnitudeCurve] = []
        self._steps = 0

    def forget(self) -> None:
        """Start anew: the runs so far are of other weights."""
        self._runs.clear()
        self.curve = None

    def __call__(self, cache: TransformerCache, measured: dict[str, Measurements]) -> None:
        if not measured:
            self.ranks.aborted()
            return
        self._steps = max(m.timeline.steps for m in measured.values())
        tokens = math.prod(cache.residual_shape[:-1])
        run = run_curve(measured, {"prompts": self.details.get("prompts", [])})
        self._learn(cache, self.ranks.measured(run, tokens))

    def share(self, cache: TransformerCache, group: ProcessGroup) -> bool:
        """Make one curve of this rank's runs and those of the group's others, if none failed."""
        runs, self._runs = self._runs, []
        self._learn(cache, gather_runs(group, cache.name, runs))
        return bool(self._runs)

    def _learn(self, cache: TransformerCache, runs: list[MagnitudeCurve]) -> None:
        self._runs += runs
        if not runs:
            return
        self.curve = curve_of(self._runs, self._provenance(cache))
        if self._config.budget is not None and not self.curve.has_path:
            logger.warning("%s: residuals changed their shape in the run; not cached", cache.name)
        elif not self._config.mag_calibrate:
            cache.curve = self.curve
        path = curve_path(cache.module, self._folder, self._identity(cache))
        try:
            self.curve.save(path)
        except OSError as error:
            logger.warning("%s: the curve was measured but not saved: %s", cache.name, error)
        else:
            logger.info("%s: curve of %d run(s) saved to %s", cache.name, len(self._runs), path)

    def _identity(self, cache: TransformerCache) -> str:
        return self._watch.fingerprint if self._watch else fingerprint(cache.module)

    def _provenance(self, cache: TransformerCache) -> dict[str, Any]:
        module = compat.unwrap_compiled(cache.module)
        scheduler = getattr(self._owner, "scheduler", None)
        weight = next(module.parameters(), None)
        return {
            "model": compat.checkpoint_id(module) or compat.checkpoint_id(self._target),
            "transformer": compat.class_of(module).__name__,
            "fingerprint": self._identity(cache),
            "scheduler": type(scheduler).__name__ if scheduler is not None else None,
            "shift": compat.settings(scheduler).get("shift"),
            "steps": self._steps,
            "runs": len(self._runs),
            "residual_shape": list(cache.residual_shape),
            "dtype": str(weight.dtype).removeprefix("torch.") if weight is not None else None,
            **self.details,
            "prompts": list(dict.fromkeys(p for r in self._runs for p in r.provenance["prompts"])),
            **library_versions(),
        }
