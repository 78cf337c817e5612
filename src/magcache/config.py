"""The settings."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from magcache.budget import Budget
from magcache.curve import MagnitudeCurve
from magcache.errors import ConfigError, CurveError
from magcache.storage import STORAGES, Storage

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MagCacheConfig"]


@dataclass(frozen=True)
class MagCacheConfig:
    """Settings of a cache. Anything out of range raises `ConfigError` at once.

    threshold: largest accumulated error on which a step may still be skipped; 0 never skips.
    max_skip_steps: most steps skipped in a row (the paper's K).
    retention_ratio: share of the first steps always computed.
    num_inference_steps: steps of a run; None takes it from each run.
    mag_ratios: the model's magnitude ratios: a sequence or 1-D tensor of floats, a
        `MagnitudeCurve`, a preset's name, or None to look them up.
    mag_calibrate: measure instead of skipping.
    transformer_type: registered strategy to use; None takes the transformer's class name.
    budget: plan each run for a speed-up or an error; None takes the greedy rule, whose settings are
        the first three.
    residual_storage: how residuals are kept between steps: "device", "host" (pinned memory),
        "bfloat16" or "float8" (e4m3, one scale a token); docs/works-with.md says what each costs.
    streams: whether the passes of a guided run are decided together ("joint") or "apart".
    """

    threshold: float = 0.06
    max_skip_steps: int = 3
    retention_ratio: float = 0.2
    num_inference_steps: int | None = None
    mag_ratios: Sequence[float] | torch.Tensor | MagnitudeCurve | str | None = None
    mag_calibrate: bool = False
    transformer_type: str | None = None
    budget: Budget | None = None
    streams: Literal["joint", "apart"] = "joint"
    residual_storage: Storage = "device"

    def __post_init__(self) -> None:
        _require_number("threshold", self.threshold, 0, math.inf, "0 never skips, 0.06 is mild")
        _require_int("max_skip_steps", self.max_skip_steps, 0)
        _require_number("retention_ratio", self.retention_ratio, 0, 1, "0.2 keeps the first fifth")
        if self.num_inference_steps is not None:
            _require_int("num_inference_steps", self.num_inference_steps, 1)
        if not isinstance(self.mag_calibrate, bool):
            raise _bad("mag_calibrate", self.mag_calibrate, "True or False")
        if self.transformer_type is not None and not isinstance(self.transformer_type, str):
            raise _bad("transformer_type", self.transformer_type, "a registered name or None")
        if self.streams not in ("joint", "apart"):
            raise _bad("streams", self.streams, "'joint' or 'apart'")
        if self.residual_storage not in STORAGES:
            raise _bad("residual_storage", self.residual_storage, f"one of {', '.join(STORAGES)}")
        self._check_budget()
        if not isinstance(self.mag_ratios, MagnitudeCurve | str | None):
            object.__setattr__(self, "mag_ratios", _ratios(self.mag_ratios))

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        if not isinstance(self.budget, Budget):
            raise _bad("budget", self.budget, "a magcache.Budget or None")
        for field in dataclasses.fields(self):
            greedy = field.name in ("threshold", "max_skip_steps", "retention_ratio")
            if greedy and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{field.name} is {getattr(self, field.name)!r}, and there is a budget; "
                    f"{field.name} belongs to the greedy rule: give one of the two"
                )

    def save(self, path: str | Path) -> Path:
        """Write as JSON; returns the path."""
        data = dataclasses.asdict(self)
        if isinstance(self.mag_ratios, MagnitudeCurve):
            data["mag_ratios"] = self.mag_ratios.model_dump(mode="json")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> MagCacheConfig:
        """Read from JSON; unknown keys are an error."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: no such file") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not JSON ({error})") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: found a {type(data).__name__}, expected an object")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MagCacheConfig:
        """Settings from a mapping; unknown keys are an error."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        if isinstance(data.get("budget"), dict):
            data = {**data, "budget": Budget.from_dict(data["budget"])}
        ratios = data.get("mag_ratios")
        if isinstance(ratios, dict):
            try:
                data = {**data, "mag_ratios": MagnitudeCurve.model_validate(ratios)}
            except ValueError as error:
                raise ConfigError(f"mag_ratios is not a magnitude curve: {error}") from error
        return cls(**data)


def _ratios(value: Any) -> tuple[float, ...]:
    if isinstance(value, torch.Tensor):
        if value.ndim != 1:
            raise _bad("mag_ratios", f"a tensor of shape {tuple(value.shape)}", "one dimension")
        value = value.detach().to("cpu", torch.float64).tolist()
    try:
        ratios = tuple(float(ratio) for ratio in value)
        MagnitudeCurve.from_ratios(ratios)
    except CurveError as error:
        raise ConfigError(f"mag_ratios: {error}") from error
    except (TypeError, ValueError) as error:
        raise _bad("mag_ratios", value, "a flat list of positive numbers, one a step") from error
    return ratios


def _bad(field: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{field} is {value!r}; it must be {remedy}")


def _require_int(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(field, value, f"a whole number, {least} or more")


def _require_number(field: str, value: object, least: float, most: float, hint: str) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and least <= number <= most):
        bounds = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
        raise _bad(field, value, f"a finite number, {bounds} ({hint})")
