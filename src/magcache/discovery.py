"""Which of a pipeline's parts are denoising transformers."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from magcache import compat
from magcache.errors import CannotCacheError
from magcache.strategy import MagCacheStrategyRegistry

__all__ = ["denoisers"]

_NAMES = re.compile(r"(.*_)?transformer(_\d+)?|prior")


def denoisers(target: Any) -> dict[str, nn.Module]:
    """The denoising transformers of a pipeline by component name, or a bare transformer.

    Of a pipeline: components called transformer, transformer_2, unconditional_transformer, ... or
    prior, and those for whose class a strategy is registered. Raises `CannotCacheError`, which
    lists the components, for none.
    """
    if isinstance(target, nn.Module):
        return {"transformer": target}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        components = vars(target) if hasattr(target, "__dict__") else {}
    modules = {n: c for n, c in components.items() if isinstance(c, nn.Module)}
    found = {n: m for n, m in modules.items() if _denoises(n, m)}
    if not found:
        listed = ", ".join(f"{n} ({type(m).__name__})" for n, m in modules.items()) or "none"
        raise CannotCacheError(
            f"{type(target).__name__} has no denoising transformer; its models are: {listed}. "
            "Pass the transformer itself if it goes by another name."
        )
    return found


def _denoises(name: str, module: nn.Module) -> bool:
    class_name = compat.class_of(module).__name__
    registered = MagCacheStrategyRegistry.get_if_exists(class_name) is not None
    return registered or _NAMES.fullmatch(name) is not None
