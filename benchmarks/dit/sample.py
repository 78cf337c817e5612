"""Draws a sheet of samples, one picture a class, and measures few steps against many."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from magcache.metrics import psnr

from .load import MODEL_PATH, class_names, load_class_pipeline
from .pipeline import ClassPipeline

SCALE: Final = 3
COLUMNS: Final = 11
FINE_STEPS: Final = 200


def draw(
    pipeline: ClassPipeline, labels: Sequence[int], steps: int, guidance: float, seed: int
) -> Tensor:
    """One picture a label, `[labels, 3, size, size]` in [0, 1]; each has its own noise."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(labels))]
    pictures: Tensor = pipeline(list(labels), steps, guidance, generator=generators)[0]
    return pictures


def sheet(pictures: Tensor, names: Sequence[str]) -> Image.Image:
    """Enlarged pictures with their names, row by row."""
    size = pictures.shape[-1] * SCALE
    width, height = size + 4, size + 14
    rows = -(-len(names) // COLUMNS)
    canvas = Image.new("RGB", (COLUMNS * width, rows * height), "white")
    pen = ImageDraw.Draw(canvas)
    pixels = (pictures.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    for index, (picture, name) in enumerate(zip(pixels, names, strict=True)):
        x, y = index % COLUMNS * width, index // COLUMNS * height
        enlarged = Image.fromarray(picture).resize((size, size), Image.Resampling.BICUBIC)
        canvas.paste(enlarged, (x, y))
        pen.text((x + 2, y + size), name, fill="black", font_size=9)
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="where the sheet goes")
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=int, default=0, help="classes drawn finely as well")
    args = parser.parse_args()
    torch.set_num_threads(1)

    pipeline = load_class_pipeline(folder=args.model)
    pipeline.set_progress_bar_config(disable=True)
    names = class_names(args.model)
    labels = range(len(names))
    pictures = draw(pipeline, labels, args.steps, args.guidance, args.seed)
    sheet(pictures, names).quantize().save(args.out, optimize=True)
    if args.measure:
        some = labels[: args.measure]
        fine = draw(pipeline, some, FINE_STEPS, args.guidance, args.seed)
        values = psnr(pictures[: len(some)], fine).tolist()
        print(
            f"{args.steps} against {FINE_STEPS} steps, PSNR in dB of {len(values)} pictures: "
            f"mean {statistics.mean(values):.2f}, median {statistics.median(values):.2f}, "
            f"{min(values):.2f} to {max(values):.2f}"
        )


if __name__ == "__main__":
    main()
