"""Whole runs of real pipelines: steps, streams, curves, and what is left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxImg2ImgPipeline,
    UNet2DModel,
)
from models import Plain, flux, flux_inputs, normal, plain_inputs, randomised
from pipelines import (
    BOTH,
    DIT,
    FLUX,
    HEUN,
    IMG2IMG,
    ODD,
    QWEN,
    RIGS,
    SD3,
    WAN,
    OddPipeline,
    Rig,
    draw_flux,
    draw_img2img,
    draw_odd,
    draw_sd3,
    draw_wan,
    flow,
    flux_img2img,
    flux_pipeline,
    flux_prompt,
    odd_pipeline,
    odd_prompt,
    odd_reference,
    quiet,
    sd3_pipeline,
    wan_pipeline,
    wan_single,
)
from test_oracle import assert_same_attributes, snapshot
from test_plan import plain_rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import magcache
from magcache import (
    CannotCacheError,
    ConfigError,
    CurveError,
    MagCacheConfig,
    MagCacheError,
    MagnitudeCurve,
    StreamCurve,
)
from magcache.hook import cache_of
from magcache.store import curve_path

RATIOS = [1.0, 1.3, 1.1, 1.05, 1.02, 0.98, 0.97, 0.99, 1.01, 0.96]
SETTING = (0.1, 3, 0.2)
CONFIG = MagCacheConfig(*SETTING, mag_ratios=RATIOS)
CALIBRATE = MagCacheConfig(*SETTING, mag_calibrate=True)

by_rig = pytest.mark.parametrize("rig", RIGS, ids=str)


def predicted(steps: int, config: MagCacheConfig = CONFIG) -> str:
    ratios: Any = config.mag_ratios
    return str(magcache.plan(ratios, config, steps))


def rows(target: Any) -> dict[str, str]:
    """What happened, by stream; of experts, by transformer and stream."""
    streams = magcache.stats(target).streams
    several = len({s.transformer for s in streams}) > 1
    return {f"{s.transformer} {s.stream}" if several else s.stream: s.happened for s in streams}


def fresh(rig: Rig, steps: int, config: MagCacheConfig = CONFIG, **kwargs: Any) -> Tensor:
    """What a pipeline that has done nothing before draws with the cache."""
    pipe = rig.build()
    with magcache.enable(pipe, config):
        return rig.draw(pipe, steps, **kwargs)


def at_step(strike: int, what: Callable[[Any], None]) -> Callable[..., dict[str, Any]]:
    """A callback_on_step_end that does `what` with the pipeline after one step."""

    def callback(pipe: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == strike:
            what(pipe)
        return tensors

    return callback


def raiser(error: type[BaseException]) -> Callable[[Any], None]:
    def strike(_: Any) -> None:
        raise error("struck")

    return strike


# Plan and pictures.


@by_rig
@pytest.mark.parametrize("steps", [10, 20, 5])
def test_what_happens_is_what_the_plan_says(rig: Rig, steps: int) -> None:
    pipe = rig.build()
    with magcache.enable(pipe, CONFIG):
        rig.draw(pipe, steps, size=rig.size)
        row = predicted(rig.evaluations(steps))
        assert "." in row
        assert rows(pipe) == dict.fromkeys(rig.streams, row)
        for stream in magcache.stats(pipe).streams:
            assert stream.plan == stream.happened
            assert stream.fallbacks == {}
            assert (stream.computed, stream.skipped) == (row.count("C"), row.count("."))
        assert magcache.stats(pipe).plain_calls == {}


@pytest.mark.parametrize("steps", [5, 10, 28])
@pytest.mark.parametrize("uncond_first", [False, True])
def test_pictures_equal_a_cache_written_by_hand(steps: int, uncond_first: bool) -> None:
    pipe = odd_pipeline()
    row = predicted(steps)
    expected = odd_reference(pipe, [row, row], seed=4)
    assert not torch.allclose(expected, draw_odd(pipe, steps, 4), atol=1e-3)
    with magcache.enable(pipe, CONFIG):
        for _ in range(2):
            drawn = draw_odd(pipe, steps, 4, uncond_first=uncond_first)
            torch.testing.assert_close(drawn, expected)


@by_rig
def test_the_cache_changes_pictures_a_little(rig: Rig) -> None:
    pipe = rig.build()
    plain = rig.draw(pipe, 10)
    cached = fresh(rig, 10)
    difference = float((cached - plain).norm() / plain.norm())
    assert 0 < difference < 0.7


@by_rig
def test_threshold_zero_and_disable_are_bit_equal_to_the_plain_pipeline(rig: Rig) -> None:
    pipe = rig.build()
    plain = rig.draw(pipe, 6)
    with magcache.enable(pipe, MagCacheConfig(0, 3, 0.2, mag_ratios=[1.0] * 6)):
        assert torch.equal(rig.draw(pipe, 6), plain)
        assert set(rows(pipe).values()) == {"C" * rig.evaluations(6)}
    magcache.enable(pipe, CONFIG)
    assert not torch.equal(rig.draw(pipe, 6), plain)
    magcache.disable(pipe)
    assert torch.equal(rig.draw(pipe, 6), plain)


@by_rig
def test_disable_leaves_no_attribute_behind(rig: Rig) -> None:
    pipe = rig.build()
    rig.draw(pipe, 4)
    before = snapshot(pipe, pipe.transformer, pipe.scheduler)
    magcache.enable(pipe, CONFIG)
    assert list(vars(pipe.transformer)) != list(before["1."])
    magcache.disable(pipe)
    assert_same_attributes(before, snapshot(pipe, pipe.transformer, pipe.scheduler))
    keys = [set(vars(o)) for o in (pipe, pipe.scheduler)]
    magcache.enable(pipe, CONFIG)
    rig.draw(pipe, 4)
    magcache.enable(pipe, CALIBRATE)
    magcache.disable(pipe)
    magcache.disable(pipe)
    assert [set(vars(o)) for o in (pipe, pipe.scheduler)] == keys
    modules = snapshot(pipe.transformer)
    assert_same_attributes({f"0.{k[2:]}": v for k, v in before.items() if k[0] == "1"}, modules)
    with pytest.raises(ConfigError, match=r"call magcache.enable first"):
        magcache.stats(pipe)


def test_enable_works_as_a_context_manager_also_past_an_error() -> None:
    pipe = odd_pipeline()
    plain = draw_odd(pipe, 8)
    with magcache.enable(pipe, CONFIG) as enabled:
        assert not torch.equal(draw_odd(pipe, 8), plain)
        assert enabled.stats() == magcache.stats(pipe)
    with pytest.raises(ValueError, match="mine"), magcache.enable(pipe, CONFIG):
        raise ValueError("mine")
    assert cache_of(pipe.transformer) is None
    assert torch.equal(draw_odd(pipe, 8), plain)


# Streams.


def test_streams_without_contexts_are_told_apart_as_with_them() -> None:
    """The same Flux weights through img2img (no contexts) and text-to-image (contexts)."""
    sequential = fresh(IMG2IMG, 10, guided=True, strength=1.0)
    assert torch.isfinite(sequential).all()
    pipe = flux_img2img()
    names: list[str] = []
    with magcache.enable(pipe, CONFIG):
        plain_forward, order = pipe.transformer.forward, iter(BOTH * 10)

        def forward(*args: Any, **kwargs: Any) -> Any:
            name = next(order)
            names.append(name)
            with pipe.transformer.cache_context(name):
                return plain_forward(*args, **kwargs)

        pipe.transformer.forward = forward
        by_context = draw_img2img(pipe, 10)
        pipe.transformer.forward = plain_forward
    assert len(names) == 20
    torch.testing.assert_close(sequential, by_context)


def test_guidance_alone_and_with_a_negative_pass_differ() -> None:
    pipe = flux_pipeline()
    with magcache.enable(pipe, CONFIG):
        draw_flux(pipe, 10, guided=False)
        assert rows(pipe) == {"cond": predicted(10)}
        draw_flux(pipe, 10, guided=True)
        assert rows(pipe) == dict.fromkeys(BOTH, predicted(10))
        draw_flux(pipe, 10, guided=False)
        assert rows(pipe) == {"cond": predicted(10)}


def truth(
    pipe: Any, steps: int, also: Callable[[int], None] = lambda step: None, **kwargs: Any
) -> tuple[Tensor, str, str]:
    """A picture of `OddPipeline`, and what its blocks did at each step for each prompt."""
    model, negative = pipe.transformer, odd_prompt(-1)
    did = [["-"] * steps, ["-"] * steps]
    at: list[list[str]] = []
    step_now = [0]

    def called(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        at.append(did[torch.equal(kwargs["injected"], negative)])
        at[-1][step_now[0]] = "."

    def worked(*_: Any) -> None:
        at[-1][step_now[0]] = "C"

    hooks = [
        model.register_forward_pre_hook(called, with_kwargs=True),
        model.blocks[0].register_forward_pre_hook(worked),
    ]

    def before_step(step: int) -> None:
        step_now[0] = step
        also(step)

    drawn = draw_odd(pipe, steps, before_step=before_step, **kwargs)
    for hook in hooks:
        hook.remove()
    return drawn, "".join(did[0]), "".join(did[1])


@pytest.mark.parametrize("config", [CONFIG, MagCacheConfig(5.0, 2, 0.0, mag_ratios=RATIOS)])
@pytest.mark.parametrize("uncond_first", [False, True])
@pytest.mark.parametrize(
    "on",
    ["1111100000", "0000011111", "0111111110", "1010101010", "1100110011", "1111011111"],
)
def test_guidance_that_is_off_on_some_steps(
    on: str, uncond_first: bool, config: MagCacheConfig
) -> None:
    """No step reuses a residual that is older than planned, or another stream's."""
    if on[:2] == "01" and uncond_first and config.retention_ratio == 0:
        pytest.skip("after one call, nothing tells that a stream before it has begun")
    pipe = odd_pipeline()
    with magcache.enable(pipe, config):
        drawn, cond, uncond = truth(
            pipe, 10, guided=lambda step: on[step] == "1", uncond_first=uncond_first
        )
    assert "-" not in cond
    assert [c != "-" for c in uncond] == [c == "1" for c in on]
    for row in (cond, uncond):
        for step, done in enumerate(row):
            if done == ".":
                assert step - row[:step].rindex("C") <= config.max_skip_steps
    assert cond.count(".") >= predicted(10, config).count(".") - 1
    torch.testing.assert_close(drawn, odd_reference(pipe, [cond, uncond]))


def test_skip_layer_guidance_calls_a_second_stream_on_some_steps_only() -> None:
    pipe = sd3_pipeline()
    layers = {
        "skip_guidance_layers": [1],
        "skip_layer_guidance_start": 0.15,
        "skip_layer_guidance_stop": 0.75,
    }
    plain = draw_sd3(pipe, 10, **layers)
    with magcache.enable(pipe, CONFIG):
        cached = draw_sd3(pipe, 10, **layers)
        happened = rows(pipe)
    assert list(happened) == ["0", "1"]
    assert happened["0"] == predicted(10)
    assert happened["1"].strip("-")[0] == "C"
    assert "-" in happened["1"]
    assert "." in happened["1"]
    assert 0 < float((plain - cached).norm() / plain.norm()) < 0.7


def test_batched_guidance_is_one_stream() -> None:
    pipe = sd3_pipeline()
    shapes: list[int] = []
    with magcache.enable(pipe, CONFIG):
        hook = pipe.transformer.register_forward_pre_hook(
            lambda _, __, kwargs: shapes.append(len(kwargs["hidden_states"])), with_kwargs=True
        )
        with hook:
            draw_sd3(pipe, 10)
        assert rows(pipe) == {"0": predicted(10)}
    assert shapes == [2] * 10


# Runs.


@by_rig
def test_enabled_after_a_plain_run(rig: Rig) -> None:
    pipe = rig.build()
    rig.draw(pipe, 7, seed=3)
    magcache.enable(pipe, CONFIG)
    assert torch.equal(rig.draw(pipe, 10), fresh(rig, 10))
    assert set(rows(pipe)) == set(rig.streams)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("strike", range(6))
@pytest.mark.parametrize("rig", [FLUX, IMG2IMG, SD3, WAN, QWEN], ids=str)
def test_a_run_after_an_aborted_one_is_as_after_none(
    rig: Rig, strike: int, error: type[BaseException]
) -> None:
    pipe = rig.build()
    with magcache.enable(pipe, CONFIG):
        with pytest.raises(error, match="struck"):
            rig.draw(pipe, 10, callback_on_step_end=at_step(strike, raiser(error)))
        assert cache_of(pipe.transformer).states == {}  # type: ignore[union-attr]
        assert torch.equal(rig.draw(pipe, 10, seed=1), fresh(rig, 10, seed=1))
        with pytest.raises(error, match="struck"):
            rig.draw(pipe, 10, callback_on_step_end=at_step(strike, raiser(error)))
        other = rig.draw(pipe, 6, size=rig.other)
    assert torch.equal(other, fresh(rig, 6, size=rig.other))


# The fourth call of the tail is learning's pass on changed inputs, which a model may refuse.
@by_rig
@pytest.mark.parametrize("calls", [1, 3, 5, 6])
def test_a_run_after_an_error_inside_the_model_is_as_after_none(rig: Rig, calls: int) -> None:
    pipe = rig.build()
    left = [calls]

    def strike(*_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("struck")

    with magcache.enable(pipe, CONFIG):
        tail = getattr(pipe.transformer, "norm_out", None) or pipe.transformer.norm
        with tail.register_forward_pre_hook(strike), pytest.raises((MagCacheError, RuntimeError)):
            rig.draw(pipe, 10)
        assert cache_of(pipe.transformer).states == {}  # type: ignore[union-attr]
        assert torch.equal(rig.draw(pipe, 10, size=rig.other), fresh(rig, 10, size=rig.other))


@pytest.mark.parametrize("rig", [FLUX, SD3, WAN, QWEN], ids=str)
def test_an_interrupted_run_leaves_nothing(rig: Rig) -> None:
    pipe = rig.build()

    def interrupt(pipe: Any) -> None:
        pipe._interrupt = True

    with magcache.enable(pipe, CONFIG):
        rig.draw(pipe, 10, callback_on_step_end=at_step(3, interrupt))
        done = predicted(10)[:4] + "------"
        assert rows(pipe) == dict.fromkeys(rig.streams, done)
        assert cache_of(pipe.transformer).states == {}  # type: ignore[union-attr]
        assert torch.equal(rig.draw(pipe, 10, seed=1), fresh(rig, 10, seed=1))


@by_rig
@pytest.mark.parametrize("steps", [5, 15, 20])
def test_configured_for_ten_steps_a_run_has_its_own_length(rig: Rig, steps: int) -> None:
    config = MagCacheConfig(*SETTING, num_inference_steps=10, mag_ratios=RATIOS)
    pipe = rig.build()
    with magcache.enable(pipe, config):
        rig.draw(pipe, 10)
        rig.draw(pipe, steps)
        assert rows(pipe) == dict.fromkeys(rig.streams, predicted(rig.evaluations(steps)))


@by_rig
@pytest.mark.parametrize("steps", [2, 4])
def test_runs_of_few_steps_work(rig: Rig, steps: int) -> None:
    pipe = rig.build()
    with magcache.enable(pipe, CONFIG):
        drawn = rig.draw(pipe, steps)
        assert set(rows(pipe).values()) == {predicted(rig.evaluations(steps))}
    assert drawn.isfinite().all()


@pytest.mark.parametrize("rig", [r for r in RIGS if r.name != "dit_dpm"], ids=str)
def test_a_single_step_runs_plainly_and_says_that_nothing_is_gained(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = rig.build()
    plain = rig.draw(pipe, 1)
    with caplog.at_level(logging.INFO, "magcache"), magcache.enable(pipe, CONFIG):
        assert torch.equal(rig.draw(pipe, 1), plain)
        assert set(rows(pipe).values()) == {"C"}
    assert "nothing to gain" in caplog.text


def test_a_single_step_calibration_is_a_clear_error() -> None:
    pipe = odd_pipeline()
    with pytest.raises(CurveError, match="two or more steps"):
        magcache.calibrate(pipe, steps=1)
    assert cache_of(pipe.transformer) is None


def test_heun_evaluations_are_steps() -> None:
    pipe = HEUN.build()
    with magcache.enable(pipe, CONFIG):
        HEUN.draw(pipe, 10)
        assert rows(pipe) == {"0": predicted(19)}
        HEUN.draw(pipe, 10, seed=1)
        assert rows(pipe) == {"0": predicted(19)}


def noise_curve(levels: list[float]) -> MagnitudeCurve:
    """A made-up model whose residual's length is 2 ** (3 * level)."""
    ratios = [1.0, *(8 ** (b - a) for a, b in pairwise(levels))]
    return MagnitudeCurve(
        axis="noise", streams={"all": StreamCurve(places=tuple(levels), ratios=tuple(ratios))}
    )


def timesteps(steps: int, shift: float = 3.0) -> list[float]:
    scheduler = flow(shift)
    scheduler.set_timesteps(steps)
    return [float(t) / 1000 for t in scheduler.timesteps]


@pytest.mark.parametrize(("strength", "begin"), [(0.6, 4), (0.3, 7), (1.0, 0)])
def test_image_to_image_places_ratios_by_noise_level(strength: float, begin: int) -> None:
    pipe = flux_img2img()
    config = MagCacheConfig(0.3, 3, 0.2, mag_ratios=noise_curve(timesteps(100, 1.0)))
    draw_img2img(pipe, 10, strength=strength)
    levels = [float(t) / 1000 for t in pipe.scheduler.timesteps][begin:]
    ratios = [1.0, *(8 ** (b - a) for a, b in pairwise(levels))]
    wanted = plain_rule(ratios, 10 - begin, 0.3, 3, 0.2)
    assert wanted != plain_rule([1.0, *ratios[2:], 1.0], 10 - begin, 0.3, 3, 0.2) or begin
    with magcache.enable(pipe, config):
        draw_img2img(pipe, 10, strength=strength)
        assert rows(pipe) == {"0": wanted, "1": wanted}


def test_image_to_image_places_a_step_table_by_its_share_of_the_schedule() -> None:
    pipe = flux_img2img()
    with magcache.enable(pipe, CONFIG):
        draw_img2img(pipe, 10, strength=0.6)
        wanted = plain_rule([1.0, *RATIOS[5:]], 6, *SETTING)
        assert rows(pipe) == {"0": wanted, "1": wanted}


def test_calibration_of_image_to_image_yields_a_curve_over_its_own_levels() -> None:
    pipe = flux_img2img()
    image = torch.rand(1, 3, 8, 8)
    curve = magcache.calibrate(
        pipe,
        image=image,
        strength=0.6,
        num_inference_steps=10,
        height=8,
        width=8,
        output_type="latent",
        **flux_prompt(0),
    )
    levels = [float(t) / 1000 for t in pipe.scheduler.timesteps][4:]
    assert list(curve.streams) == ["0", "1"]
    for stream in curve.streams.values():
        assert stream.places == pytest.approx(levels)
        assert stream.ratios[0] == 1
        assert len(set(stream.ratios)) == 6


# Two experts.


def wan_expected(steps: int, shift: float = 1.0) -> tuple[str, str]:
    """Rows of the experts: one timeline, and the rule starts anew at the boundary."""
    first = sum(level >= 0.75 for level in timesteps(steps, shift))
    high = predicted(steps)[:first] + "-" * (steps - first)
    retained = int(0.2 * steps + 0.5)
    assert first >= retained
    ratios = np.interp(np.arange(steps) / steps, np.arange(10) / 10, np.cumsum(np.log(RATIOS)))
    served = [1.0, *np.exp(np.diff(ratios))]
    low = plain_rule(served[first:], steps - first, 0.1, 3, 0.0)
    return high, "-" * first + low


@pytest.mark.parametrize("steps", [10, 20])
def test_two_experts_share_a_timeline_and_no_residual(steps: int) -> None:
    pipe = wan_pipeline()
    high, low = wan_expected(steps)
    with magcache.enable(pipe, CONFIG):
        for seed in range(2):
            draw_wan(pipe, steps, seed)
            assert rows(pipe) == {
                "transformer cond": high,
                "transformer uncond": high,
                "transformer_2 cond": low,
                "transformer_2 uncond": low,
            }
        assert all(s.plan[len(low) - len(low.lstrip("-")) :] for s in magcache.stats(pipe).streams)
        assert all(s.fallbacks == {} for s in magcache.stats(pipe).streams)


def test_aborting_in_the_second_expert_clears_both() -> None:
    pipe = wan_pipeline()
    with magcache.enable(pipe, CONFIG):
        with pytest.raises(ValueError, match="struck"):
            draw_wan(pipe, 10, callback_on_step_end=at_step(6, raiser(ValueError)))
        for expert in (pipe.transformer, pipe.transformer_2):
            assert cache_of(expert).states == {}  # type: ignore[union-attr]
        again = draw_wan(pipe, 10, 1)
    other = wan_pipeline()
    with magcache.enable(other, CONFIG):
        assert torch.equal(draw_wan(other, 10, 1), again)


def wan_kwargs(seed: int = 0) -> dict[str, Any]:
    return {
        "prompt_embeds": normal(seed + 100, 1, 3, 8),
        "negative_prompt_embeds": normal(102, 1, 3, 8),
        "guidance_scale": 2.0,
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 10,
        "output_type": "latent",
    }


def test_calibration_of_two_experts_yields_one_curve_over_the_whole_timeline() -> None:
    pipe = wan_pipeline()
    curve = magcache.calibrate(pipe, **wan_kwargs())
    levels = timesteps(10, 1.0)
    first = sum(level >= 0.75 for level in levels)
    assert list(curve.streams) == ["cond", "uncond"]
    for stream in curve.streams.values():
        assert stream.places == pytest.approx(levels)
        assert [i for i, ratio in enumerate(stream.ratios) if ratio == 1] == [0, first]
    with magcache.enable(pipe, MagCacheConfig(1.0, 2, 0.2)):
        draw_wan(pipe, 10)
        assert all("." in row for row in rows(pipe).values())
    with magcache.enable(pipe, MagCacheConfig(1.0, 2, 0.2, mag_ratios=curve)):
        draw_wan(pipe, 10)
        assert all("." in row for row in rows(pipe).values())


def test_disabling_takes_both_experts() -> None:
    pipe = wan_pipeline()
    plain = draw_wan(pipe, 10)
    magcache.enable(pipe, CONFIG)
    draw_wan(pipe, 10)
    magcache.disable(pipe)
    assert cache_of(pipe.transformer) is cache_of(pipe.transformer_2) is None
    assert torch.equal(draw_wan(pipe, 10), plain)


# Calibration.


def metrics(now: Tensor, before: Tensor) -> tuple[float, float, float]:
    a, b = now.double().numpy(), before.double().numpy()
    lengths = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    ratio = lengths[0] / lengths[1]
    cosine = (a * b).sum(-1) / (lengths[0] * lengths[1])
    return float(ratio.mean()), float(ratio.std()), float((1 - cosine).mean())


def test_calibrated_numbers_are_those_of_the_residuals_per_stream() -> None:
    pipe = odd_pipeline()
    curve = magcache.calibrate(pipe, steps=6, seed=2)
    residuals: list[list[Any]] = [[], []]
    odd_reference(pipe, ["C" * 6] * 2, seed=2, residuals=residuals)
    assert list(curve.streams) == ["0", "1"]
    for stream, taken in zip(curve.streams.values(), residuals, strict=True):
        pairs = list(zip(taken[1:], taken, strict=False))
        wanted = [(1.0, 0.0, 0.0), *(metrics(now, before) for now, before in pairs)]
        found = zip(stream.ratios, stream.token_std, stream.cosine_distance, strict=True)
        for measured, by_hand in zip(found, wanted, strict=True):
            assert measured == pytest.approx(by_hand, rel=1e-4, abs=1e-5)
    assert curve.streams["0"].ratios != curve.streams["1"].ratios


def test_several_prompts_are_averaged_and_their_spread_is_kept() -> None:
    pipe = odd_pipeline()
    prompts = ["a", "bbb"]
    single = [magcache.calibrate(pipe, [p], steps=5).stream("0") for p in prompts]
    both = magcache.calibrate(pipe, prompts, steps=5)
    pairs = np.array([s.ratios for s in single])
    assert both.stream("0").ratios == pytest.approx(pairs.mean(0))
    assert both.stream("0").prompt_spread == pytest.approx(pairs.std(0), abs=1e-9)
    assert max(both.stream("0").prompt_spread) > 1e-4
    assert both.provenance["prompts"] == prompts
    assert both.provenance["runs"] == 2


def test_a_curve_tells_where_it_comes_from() -> None:
    pipe = odd_pipeline()
    curve = magcache.calibrate(pipe, ["a"], steps=5, size=3)
    weight = next(pipe.transformer.parameters())
    wanted = {
        "transformer": "Injected",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "shift": 3.0,
        "steps": 5,
        "size": 3,
        "dtype": str(weight.dtype).split(".")[1],
        "torch": torch.__version__,
    }
    assert wanted.items() <= curve.provenance.items()
    assert {"date", "diffusers", "fingerprint", "residual_shape"} <= set(curve.provenance)


@pytest.mark.parametrize("rig", [FLUX, QWEN, WAN, IMG2IMG], ids=str)
def test_calibration_under_guidance_gives_a_curve_per_stream(rig: Rig) -> None:
    pipe = rig.build()
    plain = rig.draw(pipe, 6)
    magcache.enable(pipe, CALIBRATE)
    assert torch.equal(rig.draw(pipe, 6), plain)
    magcache.disable(pipe)
    curve = MagnitudeCurve.load(curve_path(pipe.transformer))
    assert tuple(curve.streams) == rig.streams
    first, second = curve.streams.values()
    assert len(first.ratios) == len(second.ratios) == 6
    assert first.ratios != second.ratios


@pytest.mark.parametrize("rig", RIGS, ids=str)
def test_a_measured_curve_is_found_by_the_same_weights_only(
    rig: Rig, curve_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = MagCacheConfig(5.0, 2, 0.2)
    first = rig.build()
    plain = rig.draw(first, 6)
    steps = rig.evaluations(6)
    with caplog.at_level(logging.INFO, "magcache"), magcache.enable(first, config):
        assert torch.equal(rig.draw(first, 6), plain)
        assert set(rows(first).values()) == {"C" * steps}
        measured = rig.draw(first, 6)
        assert all("." in row for row in rows(first).values())
    assert "first complete run measures" in caplog.text
    assert [p.suffix for p in curve_home.iterdir()] == [".json"]

    second = rig.build()
    with magcache.enable(second, config):
        assert torch.equal(rig.draw(second, 6), measured)
        assert all("." in row for row in rows(second).values())

    third = rig.build()
    with torch.no_grad():
        for weight in third.transformer.parameters():
            weight.mul_(1.05)
    with magcache.enable(third, config):
        rig.draw(third, 6)
        assert set(rows(third).values()) == {"C" * steps}


def test_a_curve_folder_may_be_given(tmp_path: Path, curve_home: Path) -> None:
    pipe = odd_pipeline()
    folder = tmp_path / "mine"
    curve = magcache.calibrate(pipe, steps=5, curves=folder)
    assert not curve_home.exists()
    assert MagnitudeCurve.load(curve_path(pipe.transformer, folder)) == curve
    with magcache.enable(pipe, MagCacheConfig(5.0), curves=folder):
        draw_odd(pipe, 5)
        assert all("." in row for row in rows(pipe).values())


def test_a_broken_saved_curve_is_a_clear_error_and_nothing_is_enabled() -> None:
    pipe = odd_pipeline()
    path = curve_path(pipe.transformer)
    path.parent.mkdir(parents=True)
    path.write_text('{"format": "magcache-cur')
    keys = set(vars(pipe)), set(vars(pipe.transformer)), set(vars(pipe.scheduler))
    with pytest.raises(CurveError, match="delete it and calibrate again"):
        magcache.enable(pipe, MagCacheConfig())
    assert keys == (set(vars(pipe)), set(vars(pipe.transformer)), set(vars(pipe.scheduler)))
    curve = magcache.calibrate(pipe, steps=5)
    assert MagnitudeCurve.load(path) == curve


def test_an_aborted_calibration_is_no_curve(curve_home: Path) -> None:
    pipe = odd_pipeline()

    def strike(step: int) -> None:
        if step == 4:
            raise ValueError("struck")

    with pytest.raises(ValueError, match="struck"):
        magcache.calibrate(pipe, steps=6, before_step=strike)
    assert not curve_home.exists()
    assert cache_of(pipe.transformer) is None


def test_calibrate_twice_then_cache_then_reconfigure() -> None:
    pipe = odd_pipeline()
    magcache.enable(pipe, CALIBRATE)
    draw_odd(pipe, 10)
    magcache.enable(pipe, CALIBRATE)
    draw_odd(pipe, 10)
    magcache.enable(pipe, MagCacheConfig(5.0, 2, 0.2))
    draw_odd(pipe, 10)
    assert set(rows(pipe).values()) == {"CC..C..C.."}
    magcache.enable(pipe, MagCacheConfig(5.0, 1, 0.5))
    draw_odd(pipe, 10)
    assert set(rows(pipe).values()) == {"CCCCC.C.C."}
    magcache.enable(pipe, CONFIG)
    assert torch.equal(draw_odd(pipe, 10), fresh(ODD, 10))
    magcache.disable(pipe)
    assert cache_of(pipe.transformer) is None


def test_calibrate_leaves_what_was_enabled_enabled() -> None:
    pipe = odd_pipeline()
    magcache.enable(pipe, CONFIG)
    magcache.calibrate(pipe, steps=5)
    draw_odd(pipe, 10)
    assert rows(pipe) == dict.fromkeys("01", predicted(10))


def test_calibration_longer_or_shorter_than_configured_is_kept_whole() -> None:
    config = MagCacheConfig(num_inference_steps=10, mag_calibrate=True)
    pipe = odd_pipeline()
    for steps in (7, 14):
        magcache.enable(pipe, config)
        draw_odd(pipe, steps)
        curve = MagnitudeCurve.load(curve_path(pipe.transformer))
        assert len(curve.stream("0").ratios) == steps


# Sharing, copies, schedulers.


def test_another_scheduler_put_into_the_pipeline_is_followed() -> None:
    pipe = sd3_pipeline()
    magcache.enable(pipe, CONFIG)
    draw_sd3(pipe, 10)
    old = pipe.scheduler
    keys = set(vars(old)) - {"step"}
    pipe.scheduler = FlowMatchHeunDiscreteScheduler(shift=3.0)
    draw_sd3(pipe, 10)
    assert rows(pipe) == {"0": predicted(19)}
    assert set(vars(old)) == keys
    pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(old.config)
    assert torch.equal(draw_sd3(pipe, 10), fresh(SD3, 10))
    new = pipe.scheduler
    magcache.disable(pipe)
    assert "step" not in vars(new)
    assert "step" not in vars(old)


def shared_pair() -> tuple[Any, Any]:
    first = flux_pipeline()
    second = quiet(FluxImg2ImgPipeline.from_pipe(first))
    assert second.transformer is first.transformer
    return first, second


@pytest.mark.parametrize("same_scheduler", [True, False])
def test_disabling_one_of_two_pipelines_leaves_the_other_cached(same_scheduler: bool) -> None:
    first, second = shared_pair()
    if not same_scheduler:
        second.scheduler = flow()
    plain = draw_flux(first, 10), draw_img2img(second, 10)
    keys = [set(vars(o)) for o in (first, second, first.scheduler, second.scheduler)]
    magcache.enable(first, CONFIG)
    magcache.enable(second, CONFIG)
    for _ in range(2):
        assert torch.equal(draw_flux(first, 10), fresh(FLUX, 10))
        assert rows(first) == dict.fromkeys(BOTH, predicted(10))
        assert torch.equal(draw_img2img(second, 10), fresh(IMG2IMG, 10))
        assert rows(second) == dict.fromkeys("01", predicted(10))
    magcache.disable(first)
    assert torch.equal(draw_img2img(second, 10), fresh(IMG2IMG, 10))
    magcache.disable(second)
    assert torch.equal(draw_flux(first, 10), plain[0])
    assert torch.equal(draw_img2img(second, 10), plain[1])
    assert [set(vars(o)) for o in (first, second, first.scheduler, second.scheduler)] == keys


def test_two_schedulers_that_keep_no_index_are_told_apart() -> None:
    """Both have run before, and neither knows how far: only the one that runs now counts."""
    pipes = [DIT.build(), DIT.build()]
    pipes[1].register_modules(transformer=pipes[0].transformer)
    for pipe in pipes:
        DIT.draw(pipe, 10)
    for pipe in pipes:
        magcache.enable(pipe, CONFIG)
    for pipe in (*pipes, *pipes):
        assert torch.equal(DIT.draw(pipe, 10), fresh(DIT, 10))
        assert rows(pipe) == {"0": predicted(10)}


def test_a_second_pipeline_that_is_not_enabled_runs_right() -> None:
    first, second = shared_pair()
    second.scheduler = flow()
    plain = draw_img2img(second, 10)
    with magcache.enable(first, CONFIG):
        draw_flux(first, 10)
        assert torch.equal(draw_img2img(second, 10), plain)
        assert sum(magcache.stats(first).plain_calls.values()) == 20
        assert torch.equal(draw_flux(first, 10), fresh(FLUX, 10))


def test_an_aborted_run_of_one_pipeline_leaves_nothing_to_the_other() -> None:
    first, second = shared_pair()
    magcache.enable(first, CONFIG)
    magcache.enable(second, CONFIG)
    with pytest.raises(ValueError, match="struck"):
        draw_flux(first, 10, callback_on_step_end=at_step(5, raiser(ValueError)))
    assert torch.equal(draw_img2img(second, 10), fresh(IMG2IMG, 10))


def test_a_copied_scheduler_does_not_move_the_clock() -> None:
    pipe = odd_pipeline()
    magcache.enable(pipe, CONFIG)
    twins: list[Any] = []

    def step_a_twin(step: int) -> None:
        if step == 2:
            twins.append(copy.deepcopy(pipe.scheduler))
        if step > 2:
            twins[0].step(torch.zeros(1), twins[0].timesteps[step - 1], torch.zeros(1))

    drawn = draw_odd(pipe, 10, before_step=step_a_twin)
    assert twins[0].step_index == 9
    assert torch.equal(drawn, fresh(ODD, 10))


def test_two_requests_in_one_context_are_two_streams() -> None:
    model, scheduler = flux(), flow()
    calls = [flux_inputs(seed, 1, 4) for seed in (0, 50)]
    with torch.no_grad():
        plain = [model(**call).sample for call in calls]
        with magcache.enable(model, CONFIG, scheduler=scheduler):
            scheduler.set_timesteps(10)
            for t in scheduler.timesteps:
                for call, expected in zip(calls, plain, strict=True):
                    with model.cache_context("cond"):
                        torch.testing.assert_close(model(**call).sample, expected)
                scheduler.step(torch.zeros(1), t, torch.zeros(1))
            assert rows(model) == {"cond": predicted(10), "cond#2": predicted(10)}


class SteppingACopy(OddPipeline):
    """Steps a copy of its scheduler only, as pipelines of two modalities do; sets contexts."""

    @torch.no_grad()
    def __call__(self, steps: int, seed: int = 0) -> Tensor:  # type: ignore[override]
        self.scheduler.set_timesteps(steps)
        twin = copy.deepcopy(self.scheduler)
        call = flux_inputs(seed, 1, 4)
        with self.progress_bar(total=steps) as bar:
            for t in self.scheduler.timesteps:
                made = []
                for name in BOTH:
                    call["timestep"] = t.expand(1) / 1000
                    with self.transformer.cache_context(name):
                        made.append(self.transformer(**call).sample)
                    call["encoder_hidden_states"] = -call["encoder_hidden_states"]
                x = call["hidden_states"]
                call["hidden_states"] = twin.step(2 * made[0] - made[1], t, x).prev_sample
                bar.update()
        return call["hidden_states"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("shift", [1.0, 3.0, 20.0])
@pytest.mark.parametrize("steps", [10, 50])
def test_a_pipeline_that_steps_a_copy_of_its_scheduler(shift: float, steps: int) -> None:
    pipe = quiet(SteppingACopy(flux(), flow(shift)))
    with magcache.enable(pipe, CONFIG):
        for seed in range(2):
            drawn = pipe(steps, seed)
            assert rows(pipe) == dict.fromkeys(BOTH, predicted(steps))
            assert cache_of(pipe.transformer).states == {}  # type: ignore[union-attr]
    other = quiet(SteppingACopy(flux(), flow(shift)))
    with magcache.enable(other, CONFIG):
        assert torch.equal(other(steps, 1), drawn)


@pytest.mark.parametrize("rig", [FLUX, SD3, ODD], ids=str)
def test_a_copied_pipeline_runs_plainly_and_by_itself(rig: Rig) -> None:
    pipe = rig.build()
    plain = rig.draw(pipe, 8)
    magcache.enable(pipe, CONFIG)
    rig.draw(pipe, 10)
    twin = copy.deepcopy(pipe)
    before = magcache.stats(pipe)
    assert torch.equal(rig.draw(twin, 8), plain)
    assert magcache.stats(pipe) == before
    assert torch.equal(rig.draw(pipe, 10), fresh(rig, 10))
    magcache.enable(twin, CONFIG)
    assert torch.equal(rig.draw(twin, 10), fresh(rig, 10))
    magcache.disable(twin)
    assert torch.equal(rig.draw(twin, 8), plain)
    assert torch.equal(rig.draw(pipe, 10), fresh(rig, 10))


# A bare transformer.


def loop(
    model: Any,
    steps: int,
    seed: int,
    scheduler: Any,
    streams: int = 2,
    leave_after: int = 99,
    prompts: list[Tensor] | None = None,
) -> list[Tensor]:
    """A sampling loop of the user's own, which tells magcache nothing."""
    prompts = prompts or [normal(seed + 50 + i, 3, 1, 1, 6) for i in range(streams)]
    x, outputs = normal(seed, 1, 9, 4), []
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps[:leave_after]:
        made = [model(x, timestep=t.expand(1) / 1000, injected=p) for p in prompts]
        outputs += made
        x = scheduler.step(sum(made) / streams, t, x, return_dict=False)[0]
    return outputs


def test_timesteps_may_rise() -> None:
    """Some models count time from noise to picture."""
    model = odd_pipeline().transformer
    config = MagCacheConfig(*SETTING, num_inference_steps=10, mag_ratios=RATIOS)
    with torch.no_grad(), magcache.enable(model, config):
        for _ in range(2):
            for step in range(10):
                model(normal(0, 1, 9, 4), torch.tensor([step / 10]), odd_prompt(0))
            assert rows(model) == {"0": predicted(10)}


def test_a_timestep_per_token() -> None:
    pipe = wan_single()
    pipe.register_to_config(expand_timesteps=True)
    with magcache.enable(pipe, CONFIG):
        drawn = draw_wan(pipe, 10)
        assert rows(pipe) == dict.fromkeys(BOTH, predicted(10))
    assert drawn.isfinite().all()


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_bare_transformer_with_a_number_of_steps(streams: int) -> None:
    model = odd_pipeline().transformer
    config = MagCacheConfig(*SETTING, num_inference_steps=10, mag_ratios=RATIOS)
    with torch.no_grad(), magcache.enable(model, config):
        runs = [loop(model, 10, seed, flow(), streams) for seed in (0, 0, 1)]
        assert rows(model) == {str(i): predicted(10) for i in range(streams)}
    for first, second in zip(*runs[:2], strict=True):
        assert torch.equal(first, second)
    with torch.no_grad(), magcache.enable(model, CONFIG, scheduler=(scheduler := flow())):
        for seed, run in zip((0, 1), (runs[0], runs[2]), strict=True):
            told = loop(model, 10, seed, scheduler, streams)
            assert all(map(torch.equal, told, run))


def test_bare_transformer_with_a_scheduler_takes_each_runs_length() -> None:
    model, scheduler = odd_pipeline().transformer, flow()
    keys = set(vars(scheduler))
    with torch.no_grad(), magcache.enable(model, CONFIG, scheduler=scheduler):
        for steps in (10, 5, 20):
            loop(model, steps, 0, scheduler)
            assert rows(model) == dict.fromkeys("01", predicted(steps))
    assert set(vars(scheduler)) >= keys
    assert "step" not in vars(scheduler)


def test_bare_transformer_whose_run_is_cut_short_starts_the_next_clean() -> None:
    model = odd_pipeline().transformer
    config = MagCacheConfig(*SETTING, num_inference_steps=10, mag_ratios=RATIOS)
    with torch.no_grad():
        with magcache.enable(model, config):
            wanted = loop(model, 10, 1, flow())
        with magcache.enable(model, config):
            left = [9]

            def strike(*_: Any) -> None:
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt

            with model.register_forward_pre_hook(strike), pytest.raises(KeyboardInterrupt):
                loop(model, 10, 0, flow())
            found = loop(model, 10, 1, flow())
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("config", [CONFIG, MagCacheConfig(5.0, 9, 0.0, mag_ratios=RATIOS)])
@pytest.mark.parametrize("same_prompts", [False, True])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 4, 5, 9])
def test_bare_transformer_whose_loop_is_left_early_starts_the_next_clean(
    cut: int, told: bool, same_prompts: bool, config: MagCacheConfig
) -> None:
    """The loop just ends, outside of the model: only the next run's timesteps tell."""
    if cut == 1 and same_prompts and not told and config.retention_ratio == 0:
        pytest.skip("with no scheduler, nothing tells a second first step from more streams")
    model, scheduler = odd_pipeline().transformer, flow()
    config = replace(config, num_inference_steps=10)
    by = {"scheduler": scheduler} if told else {}
    prompts = [odd_prompt(seed) for seed in range(4)]
    with torch.no_grad():
        with magcache.enable(model, config, **by):
            wanted = loop(model, 10, 1, scheduler, prompts=prompts[:2])
        with magcache.enable(model, config, **by):
            former = prompts[:2] if same_prompts else prompts[2:]
            loop(model, 10, 0, scheduler, prompts=former, leave_after=cut)
            found = loop(model, 10, 1, scheduler, prompts=prompts[:2])
    assert all(map(torch.equal, found, wanted))


def test_bare_transformer_keeps_no_tensor_past_its_run() -> None:
    model = odd_pipeline().transformer
    config = MagCacheConfig(*SETTING, num_inference_steps=10, mag_ratios=RATIOS)
    with torch.no_grad(), magcache.enable(model, config):
        loop(model, 10, 0, flow())
        assert cache_of(model).states == {}  # type: ignore[union-attr]


def test_bare_transformer_without_either_is_refused() -> None:
    model = randomised(Plain())
    keys = set(vars(model))
    with pytest.raises(ConfigError, match=r"scheduler=.*num_inference_steps"):
        magcache.enable(model, CONFIG)
    assert set(vars(model)) == keys


# Changes in mid-run.


@pytest.mark.parametrize("at", [1, 3, 4, 7, 9])
@pytest.mark.parametrize("before", [None, CONFIG])
@pytest.mark.parametrize("after", [None, MagCacheConfig(5.0, 2, 0.0, mag_ratios=RATIOS)])
def test_settings_may_change_in_mid_run(
    at: int, before: MagCacheConfig | None, after: MagCacheConfig | None
) -> None:
    pipe = odd_pipeline()

    def change(step: int) -> None:
        if step == at:
            magcache.disable(pipe) if after is None else magcache.enable(pipe, after)

    if before is not None:
        magcache.enable(pipe, before)
    drawn, cond, uncond = truth(pipe, 10, also=change)
    assert cond == uncond
    assert cond[:at] == ("C" * 10 if before is None else predicted(10, before))[:at]
    assert cond[at] == "C"
    assert (after is None) == (set(cond[at:]) == {"C"}) or at >= 9
    torch.testing.assert_close(drawn, odd_reference(pipe, [cond, uncond]))
    if after is not None:
        drawn, cond, uncond = truth(pipe, 10)
        assert cond == uncond == predicted(10, after)
        torch.testing.assert_close(drawn, odd_reference(pipe, [cond, uncond]))


@pytest.mark.parametrize("at", [2, 3, 5])
def test_dropping_guidance_in_mid_run_as_diffusers_documents_it(at: int) -> None:
    """The callback halves the batch: what was kept for both halves must not be used."""
    pipe = sd3_pipeline()
    batches: list[int] = []
    worked: list[bool] = []

    def drop(pipe: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step != at:
            return tensors
        pipe._guidance_scale = 0.0
        names = ("prompt_embeds", "pooled_prompt_embeds")
        return {k: v.chunk(2)[-1] if k in names else v for k, v in tensors.items()}

    def called(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        batches.append(len(kwargs["hidden_states"]))
        worked.append(False)

    kwargs = {
        "callback_on_step_end": drop,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds", "pooled_prompt_embeds"],
    }
    with magcache.enable(pipe, CONFIG):
        pipe.transformer.register_forward_pre_hook(called, with_kwargs=True)
        pipe.transformer.transformer_blocks[0].register_forward_pre_hook(
            lambda *_: worked.__setitem__(-1, True)
        )
        drawn = draw_sd3(pipe, 10, **kwargs)
    assert batches == [2] * (at + 1) + [1] * (9 - at)
    assert worked[at + 1]
    assert not all(worked[at + 1 :])
    assert drawn.isfinite().all()


# What is kept, what does not fit.


@by_rig
def test_no_tensor_is_kept_past_a_run(rig: Rig) -> None:
    pipe = rig.build()
    kept: list[weakref.ref[Tensor]] = []

    def collect(*_: Any) -> None:
        for state in cache_of(pipe.transformer).states.values():  # type: ignore[union-attr]
            for _, parts in state.held:
                kept.extend(weakref.ref(t) for t in parts.tensors)

    with magcache.enable(pipe, CONFIG):
        for size in (rig.size, rig.other):
            with pipe.transformer.register_forward_pre_hook(collect):
                rig.draw(pipe, 10, size=size)
            gc.collect()
            assert len(kept) > 3
            assert [ref for ref in kept if ref() is not None] == []
            assert cache_of(pipe.transformer).states == {}  # type: ignore[union-attr]


def test_no_tensor_of_the_run_lives_on() -> None:
    """Neither residual nor head input nor prompt: fewer tensors would be needed to hide one."""

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    pipe = odd_pipeline()
    with magcache.enable(pipe, CONFIG):
        draw_odd(pipe, 10)
        before = alive()
        draw_odd(pipe, 10, seed=1)
        draw_odd(pipe, 10, seed=1, size=6)
        left = [5]

        def strike(_: int) -> None:
            left[0] -= 1
            if not left[0]:
                raise ValueError("struck")

        with pytest.raises(ValueError, match="struck"):
            draw_odd(pipe, 10, before_step=strike)
        assert alive() <= before


@pytest.mark.parametrize("at", range(2, 10))
def test_a_misfit_in_mid_run_is_computed_counted_and_said_once(
    at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Another resolution from one step on."""
    pipe = odd_pipeline()
    row = predicted(10)

    def grow(step: int) -> Any:
        return (lambda x: torch.cat([x, x], dim=1)) if step == at else None

    with caplog.at_level(logging.WARNING, "magcache"), magcache.enable(pipe, CONFIG):
        for _ in range(2):
            drawn = draw_odd(pipe, 10, before_step=grow)
        streams = magcache.stats(pipe).streams
    assert drawn.shape[1] == 32
    for stream in streams:
        assert stream.plan == row
        assert stream.happened[:at] == row[:at]
        assert stream.happened[at] == "C"
        again = plain_rule(RATIOS[at:], 10 - at, 0.1, 3, 0.0)
        assert stream.happened[at:] == (again if row[at] == "." else row[at:])
        assert sum(stream.fallbacks.values()) == (row[at] == ".")
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (2 if row[at] == "." else 0)  # one a stream, not one a run
    assert all("does not fit" in s and f"step {at}" in s for s in said)


def test_another_dtype_in_mid_run_is_computed() -> None:
    model, scheduler = randomised(Plain()), flow()
    row, inputs = predicted(10), plain_inputs(0, 1, 3)
    change = row.index(".")
    with torch.no_grad(), magcache.enable(model, CONFIG, scheduler=scheduler):
        scheduler.set_timesteps(10)
        for step, t in enumerate(scheduler.timesteps):
            if step == change:
                model.to(torch.float64)
                inputs = {k: v.double() for k, v in inputs.items()}
            output = model(**{k: v.clone() for k, v in inputs.items()})
            scheduler.step(torch.zeros(1), t, torch.zeros(1))
            if step == change:
                computed = output
        (stream,) = magcache.stats(model).streams
    assert stream.happened[change] == "C"
    assert "." in stream.happened[change:]
    assert sum(stream.fallbacks.values()) == 1
    with torch.no_grad():
        assert torch.equal(model(**inputs), computed)
        torch.testing.assert_close(model(**inputs), output)


def test_with_gradients_the_model_is_computed_plainly_and_counted() -> None:
    model, scheduler = randomised(Plain()), flow()
    inputs = plain_inputs(0, 1, 3)
    inputs["x"].requires_grad_()
    with magcache.enable(model, CONFIG, scheduler=scheduler):
        scheduler.set_timesteps(10)
        for t in scheduler.timesteps:
            model(**inputs).sum().backward()
            scheduler.step(torch.zeros(1), t, torch.zeros(1))
        stats = magcache.stats(model)
        assert stats.streams == ()
        assert list(stats.plain_calls.values()) == [10]
        assert "gradients" in next(iter(stats.plain_calls))
    assert inputs["x"].grad is not None


def test_gradients_in_mid_run_reuse_nothing_stale() -> None:
    """A step with gradients is a step without a residual of its own."""
    pipe = odd_pipeline()
    row = predicted(10)
    computed_late = max(i for i, c in enumerate(row) if c == "C")
    with magcache.enable(pipe, CONFIG):

        def toggle(step: int) -> None:
            torch.set_grad_enabled(step == computed_late)

        draw_odd(pipe, 10, before_step=toggle)
        for stream in magcache.stats(pipe).streams:
            assert stream.happened[computed_late] == "-"
            if computed_late < 9 and row[computed_late + 1] == ".":
                assert stream.happened[computed_late + 1] == "C"
        assert sum(magcache.stats(pipe).plain_calls.values()) == 2


def test_inference_mode_is_cached_like_no_grad() -> None:
    pipe = odd_pipeline()
    with magcache.enable(pipe, CONFIG):
        with torch.inference_mode():
            first = draw_odd(pipe, 10)
        assert rows(pipe) == dict.fromkeys("01", predicted(10))
        assert torch.equal(draw_odd(pipe, 10), first)


# Refusals.


def unet(*channels: int) -> Any:
    return UNet2DModel(
        sample_size=8,
        block_out_channels=channels,
        norm_num_groups=1,
        layers_per_block=1,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


@pytest.mark.parametrize("channels", [(4, 8), (4, 4)])
def test_a_unet_is_refused_or_exact_and_left_as_it_was(channels: tuple[int, ...]) -> None:
    model, scheduler, sample = unet(*channels), flow(), torch.ones(1, 3, 8, 8)
    refused = False
    with torch.no_grad():
        plain = model(sample, 0).sample
        before = snapshot(model)
        try:
            with magcache.enable(model, CONFIG, scheduler=scheduler):
                scheduler.set_timesteps(10)
                for t in scheduler.timesteps:
                    torch.testing.assert_close(model(sample, 0).sample, plain)
                    scheduler.step(torch.zeros(1), t, torch.zeros(1))
        except CannotCacheError as error:
            refused = "UNet2DModel" in str(error)
        assert refused or channels == (4, 4)
        assert_same_attributes(before, snapshot(model))
        assert torch.equal(model(sample, 0).sample, plain)


def test_a_pipeline_without_a_transformer_is_refused_and_left_as_it_was() -> None:
    pipe = DDPMPipeline(unet(4, 8), DDPMScheduler())
    before = snapshot(pipe, pipe.unet, pipe.scheduler)
    with pytest.raises(CannotCacheError, match=r"no denoising transformer.*unet \(UNet2DModel\)"):
        magcache.enable(pipe, CONFIG)
    assert_same_attributes(before, snapshot(pipe, pipe.unet, pipe.scheduler))


class ByNumber(Plain):
    """Takes its blocks by a number that it knows, so that the list cannot be stepped over."""

    def walk(self, x: Tensor) -> Tensor:
        for index in range(self.layers):
            x = self.blocks[index](x)
        return x


class Unwalked(Plain):
    def walk(self, x: Tensor) -> Tensor:
        return 2 * x


class NeedsBlocks(Plain):
    def walk(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


@pytest.mark.parametrize("kind", [ByNumber, Unwalked, NeedsBlocks])
def test_a_model_that_cannot_be_stepped_over_errs_clearly_or_is_computed(
    kind: type[Plain],
) -> None:
    model, scheduler, inputs = randomised(kind()), flow(), plain_inputs(0, 1, 3)
    with torch.no_grad():
        plain = model(**inputs)
        with magcache.enable(model, CONFIG, scheduler=scheduler):
            scheduler.set_timesteps(10)
            for t in scheduler.timesteps:
                try:
                    assert torch.equal(model(**inputs), plain)
                except CannotCacheError as error:
                    assert kind.__name__ in str(error)  # noqa: PT017
                scheduler.step(torch.zeros(1), t, torch.zeros(1))
        assert torch.equal(model(**inputs), plain)


def test_over_diffusers_own_cache_is_refused_and_nothing_changed() -> None:
    pipe = flux_pipeline()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    keys = set(vars(pipe)), set(vars(pipe.transformer)), set(vars(pipe.scheduler))
    with pytest.raises(CannotCacheError, match=r"FirstBlockCacheConfig.*disable_cache"):
        magcache.enable(pipe, CONFIG)
    assert keys == (set(vars(pipe)), set(vars(pipe.transformer)), set(vars(pipe.scheduler)))
    pipe.transformer.disable_cache()
    with magcache.enable(pipe, CONFIG):
        draw_flux(pipe, 10)
        assert rows(pipe) == dict.fromkeys(BOTH, predicted(10))


def test_diffusers_own_cache_put_on_later_is_refused_at_the_next_call() -> None:
    pipe = flux_pipeline()
    magcache.enable(pipe, CONFIG)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(CannotCacheError, match="FirstBlockCacheConfig"):
        draw_flux(pipe, 10)


@pytest.mark.parametrize(
    "config",
    [
        MagCacheConfig(mag_ratios="no-such-preset"),
        MagCacheConfig(mag_ratios=RATIOS, transformer_type="NoSuchTransformer"),
    ],
)
def test_a_setting_that_names_nothing_is_refused_and_nothing_changed(
    config: MagCacheConfig,
) -> None:
    pipe = wan_pipeline()
    owners = (pipe, pipe.transformer, pipe.transformer_2, pipe.scheduler)
    before = snapshot(*owners)
    with pytest.raises(ConfigError, match=r"no-such-preset|NoSuchTransformer"):
        magcache.enable(pipe, config)
    assert_same_attributes(before, snapshot(*owners))


def test_a_refused_second_expert_leaves_the_first_alone() -> None:
    pipe = wan_pipeline()
    pipe.transformer_2.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    before = snapshot(pipe, pipe.transformer, pipe.scheduler)
    with pytest.raises(CannotCacheError, match="FirstBlockCacheConfig"):
        magcache.enable(pipe, CONFIG)
    assert_same_attributes(before, snapshot(pipe, pipe.transformer, pipe.scheduler))


# Words.


def test_debug_log_tells_each_step(caplog: pytest.LogCaptureFixture) -> None:
    pipe = odd_pipeline()
    with caplog.at_level(logging.DEBUG, "magcache"), magcache.enable(pipe, CONFIG):
        caplog.clear()
        draw_odd(pipe, 10)
    plan = magcache.plan(RATIOS, CONFIG, 10)
    lines = [r.getMessage() for r in caplog.records if " step " in r.getMessage()]
    assert len(lines) == 20
    for step, (computed, error) in enumerate(zip(plan.computed, plan.errors, strict=True)):
        skipped = str(plan)[: step + 1].count(".")
        for stream, line in enumerate(lines[2 * step : 2 * step + 2]):
            word = "miss (computed)" if computed else "hit (skipped)"
            start = f"transformer stream {stream} step {step}/10 {word} error {error:.4f} ratio"
            assert line.startswith(start)
            assert line.endswith(f"skipped {skipped}")


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: values that Python reads."""

    count = 0
    reads = ("_local_scalar_dense", "equal", "is_nonzero", "allclose")

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += op.overloadpacket.__name__ in self.reads
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("rig", [ODD, FLUX, SD3], ids=str)
def test_no_step_waits_for_the_device_also_with_the_debug_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = rig.build()
    with Waits() as plain:
        rig.draw(pipe, 10)
    with caplog.at_level(logging.DEBUG, "magcache"), magcache.enable(pipe, CONFIG):
        with Waits() as learning:
            rig.draw(pipe, 10)
        with Waits() as cached:
            rig.draw(pipe, 10)
        assert "." in magcache.stats(pipe).streams[0].happened
    assert any("hit (skipped)" in record.getMessage() for record in caplog.records)
    assert learning.count > plain.count + 2
    # The clock reads the timesteps at the start of a run, and at most its first call's.
    assert cached.count <= plain.count + 2


def test_info_log_says_once_what_is_enabled(caplog: pytest.LogCaptureFixture) -> None:
    pipe = odd_pipeline()
    with caplog.at_level(logging.INFO, "magcache"), magcache.enable(pipe, CONFIG):
        draw_odd(pipe, 10)
        draw_odd(pipe, 10)
    assert [r.getMessage() for r in caplog.records] == [
        "transformer (Injected): curve from the settings"
    ]


def test_stats_print_as_a_table() -> None:
    pipe = odd_pipeline()
    with magcache.enable(pipe, CONFIG):
        assert str(magcache.stats(pipe)) == "no run yet"
        draw_odd(pipe, 10)
        text = str(magcache.stats(pipe))
    row = predicted(10)
    assert text.splitlines() == [
        f"transformer {i}  10 steps {row.count('C'):3d} computed {row.count('.'):3d} skipped  {row}"
        for i in range(2)
    ]


# Anything, in any order.


SETTINGS = [
    CONFIG,
    MagCacheConfig(0.0, 3, 0.2, mag_ratios=RATIOS),
    MagCacheConfig(5.0, 2, 0.0, mag_ratios=RATIOS),
    MagCacheConfig(0.3, 5, 0.4, num_inference_steps=7, mag_ratios=RATIOS),
]


@pytest.mark.parametrize("rig", [ODD, FLUX, SD3, IMG2IMG], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_any_history_of_runs_leaves_no_trace(rig: Rig, seed: int) -> None:
    choose = random.Random(f"{rig} {seed}")
    pipe, enabled = rig.build(), None

    class StruckError(Exception):
        pass

    def abort() -> None:
        left = [choose.randint(1, 14)]

        def strike(*_: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise StruckError

        size = choose.choice([rig.size, rig.other])
        part = choose.choice([pipe.transformer, getattr(pipe.transformer, "norm_out", None)])
        hook = (part or pipe.transformer).register_forward_pre_hook(strike)
        with hook, contextlib.suppress(StruckError, CannotCacheError):
            rig.draw(pipe, 9, seed=7, size=size)

    def compare() -> None:
        steps, size = choose.randint(2, 12), choose.choice([rig.size, rig.other])
        number = choose.randint(0, 3)
        found = rig.draw(pipe, steps, seed=number, size=size)
        if enabled is None:
            wanted = rig.draw(rig.build(), steps, seed=number, size=size)
        else:
            wanted = fresh(rig, steps, enabled, seed=number, size=size)
        assert torch.equal(found, wanted)

    for _ in range(12):
        match choose.choice(["run", "run", "abort", "abort", "enable", "enable", "disable"]):
            case "run":
                compare()
            case "abort":
                abort()
            case "enable":
                enabled = choose.choice(SETTINGS)
                magcache.enable(pipe, enabled)
            case "disable":
                enabled = None
                magcache.disable(pipe)
    compare()
