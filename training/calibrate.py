"""Measure the shipped model's magnitude curve and keep it as the preset that `enable` finds.

To be run after `export.py`: a preset belongs to one checkpoint, told by its fingerprint.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

import torch

import magcache
from magcache import presets
from magcache.demo import load_demo_pipeline, prompts
from magcache.store import fingerprint

PRESET = "demo-emoji"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    pipe = load_demo_pipeline()
    known = prompts()
    chosen = [known[i * len(known) // options.prompts] for i in range(options.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        curve = magcache.calibrate(
            pipe,
            chosen,
            curves=folder,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            generator=torch.Generator().manual_seed(options.seed),
        )
    # Where the weights lay while they were measured says nothing to a reader.
    provenance = {
        **{k: v for k, v in curve.provenance.items() if k != "model"},
        "model": "magcache's own demo model",
        "seed": options.seed,
        "checkpoints": [fingerprint(pipe.transformer)],
    }
    path = Path(presets.__file__).parent / f"{PRESET}.json"
    curve.model_copy(update={"provenance": provenance}).save(path)
    logging.info("preset written to %s", path)


if __name__ == "__main__":
    main()
