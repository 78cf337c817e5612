"""Writes the weights of a checkpoint as a float16 pipeline folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from concepts import CONCEPTS
from diffusers import DDIMScheduler

from .load import MODEL_PATH
from .pipeline import ClassPipeline
from .train import SCHEDULE, new_model


def pipeline_from(checkpoint: Path) -> ClassPipeline:
    """The pipeline of a checkpoint, in float32."""
    state = torch.load(checkpoint, weights_only=True, mmap=True)
    transformer = new_model(state["layers"], state["heads"])
    transformer.load_state_dict(state["model"])
    transformer.eval().requires_grad_(False)
    return ClassPipeline(transformer, DDIMScheduler(**SCHEDULE))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_PATH)
    args = parser.parse_args()
    pipeline = pipeline_from(args.checkpoint)
    pipeline.transformer.half()
    pipeline.save_pretrained(args.folder)
    (args.folder / "classes.json").write_text(json.dumps(list(CONCEPTS), indent=1) + "\n")
    for file in args.folder.rglob("*.safetensors"):
        file.chmod(0o644)
