"""Finds and loads the model that is shipped with the package."""

import json
from pathlib import Path
from typing import Final

import torch

from magcache.demo.pipeline import EmojiPipeline

MODEL_PATH: Final = Path(__file__).with_name("model")

DEMO_PROMPTS: Final = (
    "noto red heart",
    "noto face with sunglasses",
    "fluent ghost",
    "noto panda",
    "fluent frog",
    "noto strawberry",
    "fluent watermelon",
    "noto rainbow",
    "fluent rocket",
)


def load_demo_pipeline(dtype: torch.dtype = torch.float32) -> EmojiPipeline:
    """The shipped pipeline; the weights are stored in float16."""
    # Converted afterwards, because the name of the argument for it depends on diffusers' version.
    # So small a model gains nothing from accelerate's loading, which warns where that is missing.
    pipeline: EmojiPipeline = EmojiPipeline.from_pretrained(
        MODEL_PATH, local_files_only=True, low_cpu_mem_usage=False
    )
    pipeline.transformer.type(dtype)
    pipeline.text_encoder.type(dtype)
    return pipeline


def prompts() -> tuple[str, ...]:
    """Every prompt that the shipped model was trained on: a style and a concept.

    A concept without a style works as well, the model then picks one of the styles.
    """
    config = json.loads((MODEL_PATH / "text_encoder" / "config.json").read_text())
    return tuple(config["prompts"])
