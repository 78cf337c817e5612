"""Writes the weights of a checkpoint as a float16 pipeline folder."""

import argparse
from pathlib import Path

import torch
from data import load
from diffusers import FlowMatchEulerDiscreteScheduler
from model import DemoModel

from magcache.demo import EmojiPipeline


def pipeline_from(checkpoint: Path, data: Path, weights: str = "model") -> EmojiPipeline:
    """The pipeline of a checkpoint with its last weights ("model") or their "average"."""
    state = torch.load(checkpoint, weights_only=True, mmap=True)
    arguments = state["arguments"]
    model = DemoModel(load(data), int(arguments["layers"]), int(arguments["width"]))
    model.load_state_dict(state[weights])
    model.eval().requires_grad_(False)
    return EmojiPipeline(model.transformer, model.text_encoder, FlowMatchEulerDiscreteScheduler())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, default=Path("/work/scratch/training"))
    parser.add_argument("--weights", choices=("model", "average"), default="model")
    args = parser.parse_args()
    pipeline = pipeline_from(args.checkpoint, args.data, args.weights)
    pipeline.transformer.half()
    pipeline.text_encoder.half()
    pipeline.save_pretrained(args.folder)
    for file in args.folder.rglob("*.safetensors"):
        file.chmod(0o644)
