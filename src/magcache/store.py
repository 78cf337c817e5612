"""Where measured curves are kept, and under which identity."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import torch
from torch import nn

from magcache import compat
from magcache.curve import MagnitudeCurve
from magcache.sharding import whole

T = TypeVar("T")

__all__ = ["curve_folder", "curve_path", "find_curve", "fingerprint"]

# Weights sampled for a fingerprint: enough that two checkpoints differ, little to copy off a GPU.
_SAMPLED_TENSORS = 16
_SAMPLED_VALUES = 16


def curve_folder(folder: str | Path | None = None) -> Path:
    """The given folder, else `MAGCACHE_HOME`, else the platform's user cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    home = os.environ.get("MAGCACHE_HOME")
    return Path(home).expanduser() if home else platformdirs.user_cache_path("magcache")


def fingerprint(module: nn.Module) -> str:
    """16 hex digits that tell this checkpoint from others of its class.

    Hashes the configuration, every weight's name and shape, and a sample of values. Dtype and
    device do not count: values are rounded to bfloat16, so that the same checkpoint in half
    precision keeps its curve. Weights without values (on the meta device) are left out, but not
    those that accelerate has offloaded. Adapters count, with what they weigh. Weights that are
    sharded over ranks count as a whole: all of those ranks have to ask, and get the same answer.
    """
    module = compat.unwrap_compiled(module)
    public = {k: v for k, v in compat.settings(module).items() if not k.startswith("_")}
    digest = hashlib.sha256()
    digest.update(compat.class_of(module).__name__.encode())
    digest.update(json.dumps(public, sort_keys=True, default=str).encode())
    weights = list(_weights(module))
    digest.update(str([(name, tuple(getattr(w, "shape", ()))) for name, w in weights]).encode())
    held = compat.offloaded_weights(module)
    here = [
        (name, w)
        for name, w in weights
        if isinstance(w, torch.Tensor) and w.is_floating_point() and w.numel()
        if name in held or not w.is_meta
    ]
    for name, weight in _sampled(here):
        digest.update(_sample(held[name][0][held[name][1]] if name in held else weight))
    adapters = list(compat.adapters(module))
    if adapters:
        # Few of the sampled tensors would be an adapter's, and its strength is in none.
        digest.update(str([state for state, _ in adapters]).encode())
        adapting = [w for _, weights in adapters for _, w in weights if not w.is_meta]
        for weight in _sampled(adapting):
            digest.update(_sample(weight))
    return digest.hexdigest()[:16]


def _weights(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if compat.class_of(module) is type(module):
        yield from module.state_dict().items()
        return
    # FSDP2 shards the weights again for a state dict, also amid a forward that is using them.
    for path, part in module.named_modules(remove_duplicate=False):
        lasting = {
            k: b for k, b in part._buffers.items() if k not in part._non_persistent_buffers_set
        }
        for key, weight in {**part._parameters, **lasting}.items():
            if weight is not None:
                yield f"{path}.{key}" if path else key, weight


def _sampled(weights: Sequence[T]) -> Sequence[T]:
    return weights[:: max(1, len(weights) // _SAMPLED_TENSORS)]


def _sample(weight: torch.Tensor) -> bytes:
    weight = whole(weight.detach())
    try:
        flat = weight.flatten()
    except NotImplementedError:
        # Quantised weights that only multiply (torchao's) are made of plain tensors.
        names = weight.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return b"".join(_sample(getattr(weight, name)) for name in names)
    sample = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)][:_SAMPLED_VALUES]
    return sample.cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def curve_path(
    module: nn.Module, folder: str | Path | None = None, identity: str | None = None
) -> Path:
    """The file of this checkpoint's own curve. identity: its fingerprint, if that is known."""
    name = compat.class_of(module).__name__
    return curve_folder(folder) / f"{name}-{identity or fingerprint(module)}.json"


def find_curve(
    module: nn.Module, folder: str | Path | None = None, identity: str | None = None
) -> MagnitudeCurve | None:
    """This checkpoint's own curve, if one has been measured; raises if its file is broken."""
    path = curve_path(module, folder, identity)
    return MagnitudeCurve.load(path) if path.exists() else None
