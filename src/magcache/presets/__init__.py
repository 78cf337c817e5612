"""Published magnitude curves, and our own, by name and by the checkpoint they were measured on."""

from __future__ import annotations

from functools import cache
from importlib import resources

from magcache.curve import MagnitudeCurve
from magcache.errors import ConfigError

__all__ = ["for_checkpoint", "load", "names"]


@cache
def names() -> tuple[str, ...]:
    """Names of all presets."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def load(name: str) -> MagnitudeCurve:
    """The preset called `name`; an error names those that exist."""
    if name not in names():
        raise ConfigError(f"no preset is called {name!r}; known are {', '.join(names())}")
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return MagnitudeCurve.model_validate_json(text)


def for_checkpoint(identities: tuple[str, ...]) -> str | None:
    """Name of the preset measured on one of these checkpoint identities, if there is one."""
    for name in names():
        if set(load(name).provenance.get("checkpoints", ())) & set(identities):
            return name
    return None
