"""Where measured curves are kept, and under which identity."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import platformdirs
import torch
from torch import nn

from magcache import compat
from magcache.curve import MagnitudeCurve

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
    precision keeps its curve. Weights that are not in memory (offloaded to disk) are left out.
    """
    module = compat.unwrap_compiled(module)
    public = {k: v for k, v in compat.settings(module).items() if not k.startswith("_")}
    digest = hashlib.sha256()
    digest.update(type(module).__name__.encode())
    digest.update(json.dumps(public, sort_keys=True, default=str).encode())
    weights = list(module.state_dict().items())
    digest.update(str([(name, tuple(getattr(w, "shape", ()))) for name, w in weights]).encode())
    here = [
        w
        for _, w in weights
        if isinstance(w, torch.Tensor) and w.is_floating_point() and not w.is_meta and w.numel()
    ]
    for weight in here[:: max(1, len(here) // _SAMPLED_TENSORS)]:
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)][:_SAMPLED_VALUES]
        digest.update(sample.cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def curve_path(module: nn.Module, folder: str | Path | None = None) -> Path:
    """The file of this checkpoint's own curve."""
    name = type(compat.unwrap_compiled(module)).__name__
    return curve_folder(folder) / f"{name}-{fingerprint(module)}.json"


def find_curve(module: nn.Module, folder: str | Path | None = None) -> MagnitudeCurve | None:
    """This checkpoint's own curve, if one has been measured; raises if its file is broken."""
    path = curve_path(module, folder)
    return MagnitudeCurve.load(path) if path.exists() else None
