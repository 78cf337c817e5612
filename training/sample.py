"""Draws a sheet of samples with their prompts, from the shipped model or a checkpoint."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from export import pipeline_from
from PIL import Image, ImageDraw

from magcache.demo import EmojiPipeline, load_demo_pipeline

SCALE: Final = 2
BATCH: Final = 33


def sheet(pictures: Sequence[Image.Image], prompts: Sequence[str], columns: int) -> Image.Image:
    """Enlarged pictures with their prompts, row by row."""
    size = pictures[0].width * SCALE
    width, height = size + 4, size + 14
    rows = -(-len(pictures) // columns)
    canvas = Image.new("RGB", (columns * width, rows * height), "white")
    draw = ImageDraw.Draw(canvas)
    for index, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        x, y = index % columns * width, index // columns * height
        canvas.paste(picture.resize((size, size), Image.Resampling.BICUBIC), (x, y))
        draw.text((x + 2, y + size), prompt, fill="black", font_size=9 if len(prompt) < 20 else 7)
    return canvas


def draw_all(
    pipeline: EmojiPipeline, prompts: Sequence[str], seed: int, steps: int, guidance: float
) -> list[Image.Image]:
    """One picture a prompt; each has its own noise."""
    pictures: list[Image.Image] = []
    for start in range(0, len(prompts), BATCH):
        batch = list(prompts[start : start + BATCH])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(batch))]
        pictures += pipeline(
            batch,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
            return_dict=False,
        )[0]
    return pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="default: the shipped model")
    parser.add_argument("--weights", choices=("model", "average"), default="model")
    parser.add_argument("--data", type=Path, default=Path("/work/scratch/training"))
    parser.add_argument("--prompts", nargs="*", help="default: all that the model knows")
    parser.add_argument("--every", type=int, default=1, help="only every n-th concept")
    parser.add_argument("--columns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)

    if args.checkpoint is None:
        pipeline = load_demo_pipeline()
    else:
        pipeline = pipeline_from(args.checkpoint, args.data, args.weights)
    pipeline.set_progress_bar_config(disable=True)
    prompts = args.prompts or by_concept(pipeline.text_encoder.prompts, args.every)
    pictures = draw_all(pipeline, prompts, args.seed, args.steps, args.guidance)
    sheet(pictures, prompts, args.columns).save(args.out)


def by_concept(prompts: Sequence[str], every: int) -> list[str]:
    """Orders the prompts so that the styles of a concept are neighbours."""
    styles: dict[str, list[str]] = {}
    for prompt in prompts:
        styles.setdefault(prompt.split(maxsplit=1)[1], []).append(prompt)
    return [prompt for group in list(styles.values())[::every] for prompt in group]


if __name__ == "__main__":
    main()
