"""A small text-to-image transformer that runs in seconds on a CPU, to try the cache on."""

from magcache.demo.load import DEMO_PROMPTS, MODEL_PATH, load_demo_pipeline, prompts
from magcache.demo.pipeline import EmojiPipeline
from magcache.demo.text_encoder import EmojiTextEncoder

__all__ = [
    "DEMO_PROMPTS",
    "MODEL_PATH",
    "EmojiPipeline",
    "EmojiTextEncoder",
    "load_demo_pipeline",
    "prompts",
]
