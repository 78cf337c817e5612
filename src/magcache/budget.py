"""What a planned run may cost, or how good it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from magcache.errors import ConfigError
from magcache.frontier import Frontier
from magcache.planning import Plan
from magcache.reuse import RULES, RuleName

__all__ = ["QUALITIES", "Budget", "Quality"]

Quality = Literal["high", "balanced", "fast"]

# Largest predicted error of each. docs/figures.md has what they came to on the models measured.
QUALITIES: dict[Quality, float] = {"high": 0.002, "balanced": 0.005, "fast": 0.012}


@dataclass(frozen=True)
class Budget:
    """Plan each run for a budget, from what calibration measured. Give exactly one of the first.

    speedup: bound of the speed-up, steps over computed steps, 1 or more.
    max_error: largest predicted root mean square error of the final sample.
    quality: a named `max_error`: "high", "balanced" or "fast".
    max_skip_steps: most steps skipped in a row.
    first_steps, last_steps: so many steps at either end are always computed.
    max_residuals: most residuals kept per stream to make a skipped step's from, 1 to 3. Each is a
        tensor of the size of the hidden states.
    reuse: how they are combined: "fitted" by calibrated least squares, "linear" over the noise
        level, "scaled" by the calibrated factor, or "as_is".
    drift_guard: skip no two steps in a row any more once a run's residuals can be reused less well
        than calibration predicts. Makes plans depend on the prompt; costs a few small operations
        at computed steps, and nothing when off.
    """

    speedup: float | None = None
    max_error: float | None = None
    quality: Quality | None = None
    max_skip_steps: int = 6
    first_steps: int = 1
    last_steps: int = 0
    max_residuals: int = 3
    reuse: RuleName = "fitted"
    drift_guard: bool = False

    def __post_init__(self) -> None:
        given = [f for f in ("speedup", "max_error", "quality") if getattr(self, f) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ConfigError(
                f"a budget is one of speedup, max_error and quality; found {found}: give one"
            )
        for name, least in (("speedup", 1.0), ("max_error", 0.0)):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value >= least):
                raise ConfigError(f"{name} is {value!r}; it must be a number, {least:g} or more")
        for name, choices in (("quality", get_args(Quality)), ("reuse", tuple(RULES))):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
        for name, low, high in (
            ("max_skip_steps", 0, 20),
            ("first_steps", 1, math.inf),
            ("last_steps", 0, math.inf),
            ("max_residuals", 1, 3),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole and low <= value <= high):
                bounds = f"{low} or more" if high == math.inf else f"from {low} to {high}"
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, {bounds}")

        if not isinstance(self.drift_guard, bool):
            raise ConfigError(f"drift_guard is {self.drift_guard!r}; it must be True or False")

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Budget:
        """From a mapping; unknown keys are an error."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(
                f"unknown budget setting {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(**data)  # type: ignore[arg-type]

    def computed_steps(self, steps: int) -> int | None:
        """Most steps that may be computed for `speedup`, or None: the error decides."""
        return None if self.speedup is None else max(1, math.floor(steps / self.speedup + 1e-9))

    @property
    def most_error(self) -> float:
        """Largest predicted error; 0 where a speed-up is asked for."""
        return QUALITIES[self.quality] if self.quality else self.max_error or 0.0

    def choose(self, frontier: Frontier) -> Plan:
        """The plan of a run's frontier that this budget asks for."""
        computed = self.computed_steps(frontier.steps)
        if computed is not None:
            return frontier.plan(computed)
        return frontier.within(self.most_error)

    def __str__(self) -> str:
        if self.speedup is not None:
            return f"speedup {self.speedup:g}"
        return f"quality {self.quality}" if self.quality else f"max_error {self.max_error:g}"


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]
