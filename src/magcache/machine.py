"""Names the machine and the libraries that a result was measured with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

__all__ = ["machine"]


def machine() -> dict[str, str | int]:
    """Processor (or GPU), cores, threads and versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    versions = {name: metadata.version(name) for name in ("torch", "diffusers", "magcache")}
    return {
        "device": device,
        "cores": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
