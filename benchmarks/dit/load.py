"""Finds and loads the weights that lie beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch

from .pipeline import ClassPipeline

MODEL_PATH: Final = Path(__file__).with_name("model")


def load_class_pipeline(
    dtype: torch.dtype = torch.float32, folder: Path = MODEL_PATH
) -> ClassPipeline:
    """The pipeline with a DDIM scheduler; the weights are stored in float16."""
    # Converted afterwards, because the name of the argument for it depends on diffusers' version.
    pipeline: ClassPipeline = ClassPipeline.from_pretrained(
        folder, local_files_only=True, low_cpu_mem_usage=False
    )
    pipeline.transformer.type(dtype)
    return pipeline


def class_names(folder: Path = MODEL_PATH) -> tuple[str, ...]:
    """What each class shows, in the order of their numbers."""
    return tuple(json.loads((folder / "classes.json").read_text()))
