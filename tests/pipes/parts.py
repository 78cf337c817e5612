"""Tiny random components of pipelines: tokenizers made on the spot, text encoders, autoencoders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pipes.base import entry
from typing import Any

import diffusers
import torch
import transformers as hf
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
)
from models import normal, randomised
from PIL import Image
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

__all__ = [
    "NEGATIVE",
    "PROMPT",
    "VOCABULARY",
    "WIDTH",
    "VisionProcessor",
    "autoencoder",
    "clip_text",
    "flow",
    "flow_heun",
    "gemma2",
    "glm",
    "image",
    "llama",
    "mask",
    "normal",
    "picture_entry",
    "quiet",
    "qwen2",
    "qwen2_vl",
    "qwen3",
    "randomised",
    "rng",
    "t5",
    "tokenizer",
    "umt5",
]

PROMPT = "a red cat on a blue boat"
NEGATIVE = "bad"

# Size of every text encoder's hidden state.
WIDTH = 8

_SPECIAL = (
    *("<pad>", "</s>", "<unk>", "<s>", "<|im_start|>", "<|im_end|>"),
    *("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
)
_WORDS = ("system", "user", "assistant", *PROMPT.split(), NEGATIVE, "two", "green", "dogs")
_TOKENS = tuple(dict.fromkeys((*_SPECIAL, " ", "\n", *_WORDS)))
VOCABULARY = 64
assert len(_TOKENS) < VOCABULARY

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(max_length: int = 32, *, begins: bool = False, ends: bool = True) -> Any:
    """Words, signs and blanks are tokens; with <s> before the text or </s> after it, if asked."""
    ids = {token: index for index, token in enumerate(_TOKENS)}
    made = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex(r"\s|\w+|[^\w\s]"), behavior="isolated")
    parts = [*(["<s>"] if begins else []), "$A", *(["</s>"] if ends else [])]
    made.post_processor = TemplateProcessing(
        single=" ".join(parts), special_tokens=[(t, ids[t]) for t in ("<s>", "</s>")]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        additional_special_tokens=list(_SPECIAL[4:]),
        model_max_length=max_length,
        chat_template=_CHAT,
    )


class VisionProcessor:
    """Text and pictures for a Qwen-VL model; diffusers wants torchvision for the real class."""

    def __init__(self, pad: str = "<|image_pad|>") -> None:
        self.tokenizer = tokenizer(1024, ends=False)
        self.tokenizer.padding_side = "left"
        self.pad = pad
        self.image_token = pad
        pixels = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
        self.image_processor = hf.Qwen2VLImageProcessor(size=pixels)

    def __call__(self, text: Any = None, images: Any = None, **settings: Any) -> Any:
        texts = [text] if isinstance(text, str) else list(text)
        seen = {}
        if images is not None:
            seen = self.image_processor(images=images, return_tensors="pt")
            merge = self.image_processor.merge_size**2
            counts = iter((seen["image_grid_thw"].prod(-1) // merge).tolist())
            for i, one in enumerate(texts):
                head, *tails = one.split(self.pad)
                texts[i] = head + "".join(self.pad * next(counts) + tail for tail in tails)
        settings.pop("videos", None)
        encoded = self.tokenizer(texts, **settings)
        return hf.BatchFeature({**encoded, **seen})

    def apply_chat_template(self, *args: Any, **settings: Any) -> Any:
        made = self.tokenizer.apply_chat_template(*args, **settings)
        # Processors return a batch, tokenizers a row.
        return [made] if isinstance(made, list) and isinstance(made[0], int) else made


def clip_text(width: int = WIDTH, *, projected: bool = False, max_length: int = 32) -> Any:
    config = hf.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        projection_dim=width,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=max_length,
        pad_token_id=0,
        bos_token_id=3,
        eos_token_id=1,
    )
    kind = hf.CLIPTextModelWithProjection if projected else hf.CLIPTextModel
    return randomised(kind(config))


_T5 = {
    "vocab_size": VOCABULARY,
    "d_kv": 4,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def t5(width: int = WIDTH) -> Any:
    return randomised(hf.T5EncoderModel(hf.T5Config(**_T5, d_model=width)))


def umt5(width: int = WIDTH) -> Any:
    return randomised(hf.UMT5EncoderModel(hf.UMT5Config(**_T5, d_model=width)))


def _decoder(width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 3,
        "eos_token_id": 1,
    }


def qwen2(width: int = WIDTH, layers: int = 2) -> Any:
    return randomised(hf.Qwen2Model(hf.Qwen2Config(**_decoder(width, layers))))


def qwen3(width: int = WIDTH, layers: int = 2, *, head: bool = False) -> Any:
    kind = hf.Qwen3ForCausalLM if head else hf.Qwen3Model
    return randomised(kind(hf.Qwen3Config(**_decoder(width, layers))))


def llama(width: int = WIDTH, layers: int = 2, *, head: bool = False) -> Any:
    kind = hf.LlamaForCausalLM if head else hf.LlamaModel
    return randomised(kind(hf.LlamaConfig(**_decoder(width, layers))))


def gemma2(width: int = WIDTH, layers: int = 2) -> Any:
    return randomised(hf.Gemma2Model(hf.Gemma2Config(**_decoder(width, layers))))


def glm(width: int = WIDTH, layers: int = 2) -> Any:
    return randomised(hf.GlmModel(hf.GlmConfig(**_decoder(width, layers))))


def qwen2_vl(width: int = WIDTH, layers: int = 2) -> Any:
    """Qwen2.5-VL with its vision part."""
    config = hf.Qwen2_5_VLConfig(
        text_config={
            **_decoder(width, layers),
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
        },
        image_token_id=_TOKENS.index("<|image_pad|>"),
        vision_start_token_id=_TOKENS.index("<|vision_start|>"),
        vision_end_token_id=_TOKENS.index("<|vision_end|>"),
    )
    return randomised(hf.Qwen2_5_VLForConditionalGeneration(config))


def autoencoder(channels: int = 4, levels: int = 1, **config: Any) -> Any:
    """An AutoencoderKL; each level past the first halves height and width."""
    return randomised(
        AutoencoderKL(
            **{
                "block_out_channels": (4,) * levels,
                "down_block_types": ("DownEncoderBlock2D",) * levels,
                "up_block_types": ("UpDecoderBlock2D",) * levels,
                "layers_per_block": 1,
                "norm_num_groups": 1,
                "latent_channels": channels,
                "shift_factor": 0.1,
                "scaling_factor": 0.9,
                "mid_block_add_attention": False,
                **config,
            }
        )
    )


def flow(shift: float = 3.0, **config: Any) -> Any:
    return FlowMatchEulerDiscreteScheduler(shift=shift, **config)


def flow_heun(shift: float = 3.0) -> Any:
    return FlowMatchHeunDiscreteScheduler(shift=shift)


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def image(size: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    pixels = torch.randint(0, 256, (size, size, 3), generator=rng(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def mask(size: int) -> Image.Image:
    """White, to be painted anew, on the right."""
    pixels = torch.zeros(size, size, dtype=torch.uint8)
    pixels[:, size // 2 :] = 255
    return Image.fromarray(pixels.numpy())


def picture_entry(
    name: str,
    parts: Callable[[], dict[str, Any]],
    streams: tuple[str, ...] | dict[str, tuple[str, ...]] = ("0",),
    variant: str = "",
    attributes: dict[str, Any] | None = None,
    **call: Any,
) -> None:
    """Register the pipeline class of this name; what is callable in `call` is made for each run.

    `attributes` are set on the pipeline: sizes that it has no argument for.
    """

    kind = getattr(diffusers, name)
    taken = inspect.signature(kind.__call__).parameters
    usual = {"prompt": PROMPT, "generator": rng, "output_type": "latent"}
    arguments = {**{k: v for k, v in usual.items() if k in taken}, **call}

    def build() -> Any:
        pipe = quiet(kind(**parts()))
        for attribute, value in (attributes or {}).items():
            assert hasattr(pipe, attribute)
            setattr(pipe, attribute, value)
        return pipe

    def made() -> dict[str, Any]:
        return {k: v() if callable(v) else v for k, v in arguments.items()}

    title = f"{name} {variant}".strip()
    of_each = streams if isinstance(streams, dict) else {"transformer": streams}
    entry(name=title, build=build, call=made, streams=of_each)
