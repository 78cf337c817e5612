"""Adapters and other weights: LoRA, IP-adapter, quantised and cast weights, flags and formats."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, _replace_with_gguf_linear
from models import Case, distance, flux, normal, randomised
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from pipelines import draw_flux, draw_sd3, flux_pipeline, sd3_pipeline
from test_oracle import EVERY_OTHER, enabled, named, run, tensors
from torch import Tensor, nn

import magcache
from magcache import MagCacheConfig
from magcache.store import curve_path, fingerprint

STEPS = 8
RATIOS = [1.0, 1.1, 1.05, 1.02, 1.01, 0.99, 0.98, 0.97]
SKIPPING = MagCacheConfig(0.1, 3, 0.2, mag_ratios=RATIOS)
NEVER = MagCacheConfig(0.0, 3, 0.2, mag_ratios=RATIOS)
LEARNING = MagCacheConfig(0.5, 3, 0.2)

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_out", "x_embedder"]

Change = Callable[[Any], None]


def lora(seed: int, rank: int = 2) -> dict[str, Tensor]:
    """A LoRA file's content for `flux_pipeline`, as diffusers saves it."""
    model = flux()
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS))
    weights = get_peft_model_state_dict(model)
    return {
        f"transformer.{name}": 0.3 * normal(seed + i, *weight.shape)
        for i, (name, weight) in enumerate(weights.items())
    }


def load(pipe: Any) -> None:
    pipe.load_lora_weights(lora(0), adapter_name="one")


def load_second(pipe: Any) -> None:
    pipe.load_lora_weights(lora(500, rank=3), adapter_name="two")
    pipe.set_adapters(["one", "two"], [0.7, 0.4])


def weaken(pipe: Any) -> None:
    pipe.set_adapters(["one"], [0.25])


def fuse(pipe: Any) -> None:
    pipe.fuse_lora()


def unfuse(pipe: Any) -> None:
    pipe.unfuse_lora()


def switch_off(pipe: Any) -> None:
    pipe.disable_lora()


def switch_on(pipe: Any) -> None:
    pipe.enable_lora()


def unload(pipe: Any) -> None:
    pipe.unload_lora_weights()


def hotswap(pipe: Any) -> None:
    pipe.load_lora_weights(lora(900), adapter_name="one", hotswap=True)


LORA_STORY: list[Change] = [
    load,
    weaken,
    load_second,
    unload,
    load,
    fuse,
    unfuse,
    switch_off,
    switch_on,
    hotswap,
    unload,
]


def picture(changes: list[Change], config: MagCacheConfig | None = None) -> Tensor:
    """Drawn by a new pipeline with these changes, the cache put on last."""
    pipe = flux_pipeline()
    for change in changes:
        change(pipe)
    if config is None:
        return draw_flux(pipe, STEPS)
    with magcache.enable(pipe, config):
        return draw_flux(pipe, STEPS)


@pytest.mark.parametrize("config", [NEVER, SKIPPING], ids=["threshold 0", "skipping"])
def test_lora_comes_and_goes_under_the_cache(config: MagCacheConfig) -> None:
    pipe = flux_pipeline()
    pictures = [draw_flux(pipe, STEPS)]
    magcache.enable(pipe, config)
    for done, change in enumerate(LORA_STORY, start=1):
        change(pipe)
        drawn = draw_flux(pipe, STEPS)
        never = config.threshold == 0
        assert torch.equal(drawn, picture(LORA_STORY[:done], None if never else config))
        assert ("." in magcache.stats(pipe).streams[0].happened) != never
        assert not torch.equal(drawn, pictures[-1])
        pictures.append(drawn)
    magcache.disable(pipe)
    # Fusing and unfusing round; so they do without a cache.
    assert torch.equal(draw_flux(pipe, STEPS), picture(LORA_STORY))


def test_other_weights_take_another_curve_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "magcache")
    pipe = flux_pipeline()
    magcache.enable(pipe, LEARNING)

    def runs() -> list[str]:
        draw_flux(pipe, STEPS)
        return [stream.happened for stream in magcache.stats(pipe).streams]

    def said() -> int:
        return sum("its weights have changed" in message for message in caplog.messages)

    seen = set()
    for number, change in enumerate(
        [lambda _: None, load, hotswap, weaken, fuse, unfuse_and_hotswap]
    ):
        change(pipe)
        # The first run with new weights measures, the next one skips.
        assert set(runs()[0]) == {"C"}, change
        assert said() == number
        assert "." in runs()[0]
        assert said() == number
        assert curve_path(pipe.transformer).exists()
        seen.add(fingerprint(pipe.transformer))
    assert len(seen) == 6
    unload(pipe)
    # The plain checkpoint's own curve is found again.
    assert "." in runs()[0]
    assert f"its weights have changed: curve from {curve_path(pipe.transformer)}" in caplog.text


def unfuse_and_hotswap(pipe: Any) -> None:
    pipe.unfuse_lora()
    pipe.load_lora_weights(lora(1300), adapter_name="one", hotswap=True)


def test_weights_written_in_place_take_another_curve(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "magcache")
    pipe = flux_pipeline()
    magcache.enable(pipe, LEARNING)
    draw_flux(pipe, STEPS)
    pipe.transformer.load_state_dict(flux(seed=7).state_dict())
    draw_flux(pipe, STEPS)
    assert set(magcache.stats(pipe).streams[0].happened) == {"C"}
    assert "its weights have changed" in caplog.text


def load_ip_adapter(pipe: Any) -> None:
    """What `load_ip_adapter` does with a downloaded file, with random weights."""
    model = pipe.transformer
    width, embedding = model.inner_dim, 64
    attention = SD3IPAdapterJointAttnProcessor2_0(
        width, width, model.config.attention_head_dim, embedding
    )
    projection = IPAdapterTimeImageProjection(8, width, embedding, heads=1, num_queries=4)
    weights = randomised(attention).state_dict()
    blocks = range(len(model.transformer_blocks))
    model._load_ip_adapter_weights(
        {
            "ip_adapter": {f"{i}.{name}": w for i in blocks for name, w in weights.items()},
            "image_proj": randomised(projection).state_dict(),
        }
    )
    pipe.set_ip_adapter_scale(0.6)


@pytest.mark.parametrize("config", [NEVER, SKIPPING], ids=["threshold 0", "skipping"])
def test_ip_adapter(config: MagCacheConfig) -> None:
    image = {"ip_adapter_image_embeds": normal(3, 2, 5, 8)}
    other, pipe = sd3_pipeline(), sd3_pipeline()
    without = draw_sd3(other, STEPS)
    load_ip_adapter(other)
    if config is SKIPPING:
        magcache.enable(other, config)
    expected = draw_sd3(other, STEPS, **image)
    magcache.enable(pipe, config)
    draw_sd3(pipe, STEPS)
    load_ip_adapter(pipe)
    assert torch.equal(draw_sd3(pipe, STEPS, **image), expected)
    assert ("." in magcache.stats(pipe).streams[0].happened) == (config is SKIPPING)
    pipe.unload_ip_adapter()
    magcache.disable(pipe)
    assert torch.equal(draw_sd3(pipe, STEPS), without)
    assert not torch.equal(expected, without)


def test_an_ip_adapter_takes_another_curve(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "magcache")
    pipe = sd3_pipeline()
    magcache.enable(pipe, LEARNING)
    draw_sd3(pipe, STEPS)
    load_ip_adapter(pipe)
    draw_sd3(pipe, STEPS, ip_adapter_image_embeds=normal(3, 2, 5, 8))
    assert set(magcache.stats(pipe).streams[0].happened) == {"C"}
    assert "its weights have changed" in caplog.text


class Steady:
    """The oracle on a model whose weights or flags were changed: computed and skipped agree."""

    def __init__(self, case: Case, change: Callable[[Any], Any], dtype: torch.dtype) -> None:
        self.case, self.change, self.dtype = case, change, dtype

    def inputs(self) -> dict[str, Any]:
        return {
            k: v.to(self.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in self.case.inputs(0, 1, 4).items()
        }

    def check(self, tolerance: float, *, cache_first: bool) -> None:
        model, inputs = self.case.build(), self.inputs()
        if not cache_first:
            model = self.change(model) or model
        with enabled(model, EVERY_OTHER):
            if cache_first:
                self.change(model)
            outputs = run(model, [inputs])
            assert magcache.stats(model).streams[0].happened == "C.C."
        with torch.no_grad():
            plain = model(**inputs)
        for computed in (outputs[0], outputs[2]):
            assert all(map(torch.equal, tensors(computed[0]), tensors(plain)))
        for skipped in (outputs[1], outputs[3]):
            assert distance(skipped[0], plain) <= tolerance


def layerwise_casting(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def half(model: Any) -> None:
    model.to(torch.float16)


def brain_half(model: Any) -> None:
    model.to(torch.bfloat16)


def channels_last(model: Any) -> None:
    video = any(weight.ndim == 5 for weight in model.parameters())
    model.to(memory_format=torch.channels_last_3d if video else torch.channels_last)


def checkpointing(model: Any) -> None:
    model.enable_gradient_checkpointing()
    model.train()


def gradients_left_on(model: Any) -> None:
    model.requires_grad_(True)


def int8_weights(model: Any) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert any("torchao" in type(weight).__module__ for weight in model.parameters())


def gguf_weights(model: Any) -> None:
    """Q8_0 in each layer whose rows are whole blocks of 32, as a GGUF file is loaded."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q8_0
    state = {
        name: GGUFParameter(
            torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind)), quant_type=kind
        )
        if name.endswith(".weight") and weight.ndim == 2 and weight.shape[1] % 32 == 0
        else weight
        for name, weight in model.state_dict().items()
    }
    _replace_with_gguf_linear(model, torch.float32, state)
    for name, weight in state.items():
        module, _, key = name.rpartition(".")
        part = model.get_submodule(module)
        if isinstance(part, GGUFLinear):
            setattr(
                part, key, nn.Parameter(weight, requires_grad=False) if key == "bias" else weight
            )
    assert any(isinstance(weight, GGUFParameter) for weight in model.parameters())


def four_bits(model: Any) -> None:
    """Linear4bit of bitsandbytes in the blocks."""
    bnb = pytest.importorskip("bitsandbytes")
    linear = [
        (name, part)
        for name, part in model.named_modules()
        if type(part) is nn.Linear and "blocks" in name
    ]
    for name, part in linear:
        made = bnb.nn.Linear4bit(
            part.in_features,
            part.out_features,
            bias=part.bias is not None,
            compute_dtype=torch.float32,
        )
        made.load_state_dict(part.state_dict())
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._modules[key] = made.to("cpu")
    assert linear


FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CHANGES: list[tuple[Change, torch.dtype, float]] = [
    (layerwise_casting, FULL, 1e-5),
    (half, HALF, 2e-3),
    (brain_half, BRAIN, 2e-2),
    (channels_last, FULL, 1e-5),
    (checkpointing, FULL, 1e-5),
    (gradients_left_on, FULL, 1e-5),
    (int8_weights, FULL, 1e-5),
    (four_bits, FULL, 1e-5),
]
both_orders = pytest.mark.parametrize("cache_first", [True, False])
MODELS = [named(name) for name in ("flux", "sd3", "wan", "qwen")]


@both_orders
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c[0].__name__)
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_weights_and_flags(
    case: Case, change: tuple[Change, torch.dtype, float], cache_first: bool
) -> None:
    apply, dtype, tolerance = change
    Steady(case, apply, dtype).check(tolerance, cache_first=cache_first)


@both_orders
@pytest.mark.parametrize("case", [named("flux"), named("sd3"), named("qwen")], ids=str)
def test_gguf_weights(case: Case, cache_first: bool) -> None:
    Steady(case, gguf_weights, FULL).check(1e-5, cache_first=cache_first)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_autocast(case: Case) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)
    with torch.autocast("cpu", torch.bfloat16), enabled(model):
        outputs = run(model, [inputs])
        assert magcache.stats(model).streams[0].happened == "C.C."
        with torch.no_grad():
            plain = model(**inputs)
    assert all(map(torch.equal, tensors(outputs[0][0]), tensors(plain)))
    assert distance(outputs[1][0], plain) < 2e-2


def test_int8_weights_have_a_fingerprint_of_their_own_values() -> None:
    marks = []
    for seed in (0, 1):
        model = flux(seed=seed)
        int8_weights(model)
        marks.append(fingerprint(model))
    assert marks[0] != marks[1]
