"""Whole runs planned for a budget."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import flux, flux_inputs
from pipelines import (
    FLUX,
    QWEN,
    RIGS,
    SD3,
    Rig,
    draw_flux,
    draw_img2img,
    draw_wan,
    flow,
    flux_img2img,
    flux_pipeline,
    wan_pipeline,
)

import magcache
from magcache import Budget, ConfigError, CurveError, MagCacheConfig, MagnitudeCurve
from magcache.demo import load_demo_pipeline
from magcache.hook import cache_of
from magcache.metrics import psnr
from magcache.store import curve_path

by_rig = pytest.mark.parametrize("rig", RIGS, ids=str)


def planned(speedup: float = 2.0, **limits: Any) -> MagCacheConfig:
    return MagCacheConfig(budget=Budget(speedup=speedup, **limits))


@by_rig
def test_the_first_run_measures_and_the_next_is_planned(rig: Rig) -> None:
    pipe, plain = rig.build(), rig.build()
    with magcache.enable(pipe, speedup=2.0):
        assert torch.equal(rig.draw(pipe, 10), rig.draw(plain, 10))
        assert all(not s.skipped for s in magcache.stats(pipe).streams)
        drawn = rig.draw(pipe, 10)
        streams = magcache.stats(pipe).streams
    assert streams
    for stream in streams:
        assert stream.as_planned
        assert stream.skipped >= stream.computed - 1
        assert not stream.fallbacks
    assert drawn.isfinite().all()
    assert not torch.equal(drawn, rig.draw(plain, 10))


@by_rig
def test_a_budget_of_nothing_is_the_plain_pipeline(rig: Rig) -> None:
    pipe, plain = rig.build(), rig.build()
    with magcache.enable(pipe, max_error=0.0):
        for seed in (0, 1):
            assert torch.equal(rig.draw(pipe, 8, seed=seed), rig.draw(plain, 8, seed=seed))


@by_rig
def test_no_tensor_is_kept_past_a_planned_run(rig: Rig) -> None:
    pipe = rig.build()
    kept: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def collect(*_: Any) -> None:
        nonlocal most
        for state in cache_of(pipe.transformer).states.values():  # type: ignore[union-attr]
            most = max(most, len(state.held))
            kept.extend(weakref.ref(t) for _, parts in state.held for t in parts.tensors)

    with magcache.enable(pipe, planned(max_residuals=2)):
        rig.draw(pipe, 10)
        with pipe.transformer.register_forward_pre_hook(collect):
            rig.draw(pipe, 10)
        gc.collect()
    assert most == 2
    assert [ref for ref in kept if ref() is not None] == []


def test_enable_without_settings_is_balanced() -> None:
    pipe = flux_pipeline()
    magcache.enable(pipe)
    config = cache_of(pipe.transformer).config  # type: ignore[union-attr]
    assert config.budget == Budget(quality="balanced")
    magcache.enable(pipe, MagCacheConfig(0.1, 3, 0.2, mag_ratios=[1.0, 0.9]))
    assert cache_of(pipe.transformer).config.budget is None  # type: ignore[union-attr]


def test_each_run_may_have_its_own_budget() -> None:
    pipe = flux_pipeline()
    magcache.enable(pipe, speedup=2.0)
    draw_flux(pipe, 12)
    computed = []
    for speedup in (1.5, 2.0, 3.0):
        magcache.enable(pipe, speedup=speedup)
        draw_flux(pipe, 12)
        computed.append([s.computed for s in magcache.stats(pipe).streams])
    assert computed == [[8, 8], [6, 6], [4, 4]]


def test_asking_changes_the_budgets_goal_and_keeps_its_limits() -> None:
    pipe = flux_pipeline()
    limits = planned(2.0, max_residuals=1, last_steps=2)
    magcache.enable(pipe, limits, quality="fast")
    budget = cache_of(pipe.transformer).config.budget  # type: ignore[union-attr]
    assert budget == Budget(quality="fast", max_residuals=1, last_steps=2)


def test_one_calibration_serves_other_lengths() -> None:
    pipe = flux_pipeline()
    magcache.calibrate(pipe, **{"num_inference_steps": 20, **prompt_of(pipe)})
    with magcache.enable(pipe, speedup=2.0):
        for steps in (5, 10, 20, 33, 60):
            draw_flux(pipe, steps)
            (stream,) = magcache.stats(pipe).streams[:1]
            assert stream.computed == steps // 2
            assert stream.as_planned


def prompt_of(pipe: Any) -> dict[str, Any]:
    from pipelines import flux_prompt

    return {**flux_prompt(0), "height": 8, "width": 8, "output_type": "latent"}


def test_streams_are_decided_together_or_apart() -> None:
    pipe = flux_pipeline()
    magcache.enable(pipe, speedup=2.0)
    draw_flux(pipe, 20)
    draw_flux(pipe, 20)
    together = [s.happened for s in magcache.stats(pipe).streams]
    assert together[0] == together[1]
    config = MagCacheConfig(budget=Budget(speedup=2.0), streams="apart")
    magcache.enable(pipe, config)
    draw_flux(pipe, 20)
    apart = [s.happened for s in magcache.stats(pipe).streams]
    assert [row.count("C") for row in apart] == [10, 10]
    assert apart[0] != apart[1]


def test_experts_are_planned_each_on_its_own_steps() -> None:
    pipe = wan_pipeline()
    magcache.enable(pipe, speedup=2.0)
    draw_wan(pipe, 20)
    draw_wan(pipe, 20)
    streams = magcache.stats(pipe).streams
    assert len({s.transformer for s in streams}) == 2
    for stream in streams:
        assert stream.as_planned
        assert stream.steps > 4
        assert stream.computed == stream.steps // 2
        assert stream.happened.strip("-").startswith("C")


def test_image_to_image_is_planned_from_where_it_begins() -> None:
    pipe = flux_img2img()
    magcache.enable(pipe, speedup=2.0)
    draw_img2img(pipe, 20, strength=0.6)
    draw_img2img(pipe, 20, strength=0.6)
    (stream, *_) = magcache.stats(pipe).streams
    assert (stream.steps, stream.computed) == (12, 6)
    assert stream.as_planned


def test_ratios_alone_are_not_enough_for_a_budget() -> None:
    config = MagCacheConfig(budget=Budget(speedup=2.0), mag_ratios=[1.0, 0.9])
    with pytest.raises(CurveError, match="calibrate"):
        magcache.enable(flux_pipeline(), config)
    with pytest.raises(CurveError, match="calibrate"):
        magcache.plan("flux-dev", planned())
    with pytest.raises(CurveError, match="calibrate"):
        magcache.frontier("flux-dev")


def test_a_saved_curve_of_ratios_alone_is_measured_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = flux_pipeline()
    MagnitudeCurve.from_ratios([1.0, 0.9, 0.95]).save(curve_path(pipe.transformer))
    with caplog.at_level(logging.INFO, "magcache"), magcache.enable(pipe, speedup=2.0):
        draw_flux(pipe, 10)
        assert "first complete run measures" in caplog.text
        draw_flux(pipe, 10)
        assert all(s.computed == 5 for s in magcache.stats(pipe).streams)
    assert MagnitudeCurve.load(curve_path(pipe.transformer)).has_path


def test_greedy_settings_beside_a_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match="threshold"):
        MagCacheConfig(threshold=0.1, budget=Budget(speedup=2.0))
    with pytest.raises(ConfigError, match="budget"):
        MagCacheConfig(budget=2.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="streams"):
        MagCacheConfig(streams="both")  # type: ignore[arg-type]


def test_a_budget_survives_a_file(tmp_path: Path) -> None:
    config = MagCacheConfig(budget=Budget(speedup=2.5, max_residuals=2), streams="apart")
    assert MagCacheConfig.load(config.save(tmp_path / "config.json")) == config


def test_a_bare_transformer_takes_a_budget() -> None:
    model, inputs = flux(), flux_inputs(0, 1, 4)
    scheduler = flow()

    def loop() -> None:
        scheduler.set_timesteps(10, mu=1.0)
        sample = inputs["hidden_states"]
        with torch.no_grad():
            for t in scheduler.timesteps:
                kwargs = {**inputs, "hidden_states": sample, "timestep": t[None] / 1000}
                sample = scheduler.step(model(**kwargs)[0], t, sample)[0]

    with magcache.enable(model, speedup=2.0, scheduler=scheduler):
        loop()
        loop()
        (stream,) = magcache.stats(model).streams
        assert (stream.computed, stream.steps) == (5, 10)


@pytest.mark.parametrize("rig", [FLUX, SD3, QWEN], ids=str)
def test_a_step_that_cannot_be_reused_is_computed(rig: Rig) -> None:
    """Residuals that went missing in mid-run: computed, counted, and skipping goes on after."""
    pipe = rig.build()

    def lose(pipe: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 5:
            for state in cache_of(pipe.transformer).states.values():  # type: ignore[union-attr]
                state.held.clear()
        return tensors

    with magcache.enable(pipe, planned(1.9)):
        rig.draw(pipe, 16)
        rig.draw(pipe, 16, callback_on_step_end=lose)
        streams = magcache.stats(pipe).streams
    assert any(s.fallbacks for s in streams) or all(s.happened[6] == "C" for s in streams)
    for stream in streams:
        assert stream.happened[6] == "C"
        assert "." in stream.happened[7:]


def test_the_frontier_is_what_runs_do() -> None:
    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler.set_timesteps(12)
    sigmas = [float(sigma) for sigma in pipe.scheduler.sigmas[:-1]]
    best = magcache.frontier("demo-emoji", sigmas=sigmas)
    for speedup in (1.5, 2.0):
        with magcache.enable(pipe, speedup=speedup):
            pipe("noto red heart", num_inference_steps=12)
            happened = {s.happened for s in magcache.stats(pipe).streams}
        assert happened == {str(best.plan(int(12 / speedup)))}
        plan = magcache.plan("demo-emoji", planned(speedup), sigmas=sigmas)
        assert happened == {str(plan)}


def test_planned_pictures_are_better_at_the_same_computed_steps() -> None:
    """The point of it all; the margin on more pictures is in docs/figures.md."""
    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    kwargs = {"num_inference_steps": 28, "output_type": "pt", "return_dict": False}

    def draw(**more: Any) -> torch.Tensor:
        random = [torch.Generator().manual_seed(s) for s in (2000, 2001)]
        texts = ["fluent ghost", "noto panda"]
        pictures: torch.Tensor = pipe(texts, **{**kwargs, **more}, generator=random)[0]
        return pictures

    plain = draw()
    fewer = draw(num_inference_steps=14)
    with magcache.enable(pipe, speedup=2.0):
        cached = draw()
        assert [s.computed for s in magcache.stats(pipe).streams] == [14, 14]
    assert psnr(cached, plain).mean() > psnr(fewer, plain).mean() + 6


def drawn_with(pipe: Any, prompt: str, **budget: Any) -> tuple[torch.Tensor, str]:
    random = torch.Generator().manual_seed(3004)
    with magcache.enable(pipe, MagCacheConfig(budget=Budget(**budget))):
        picture = pipe(prompt, generator=random, output_type="pt", return_dict=False)[0]
        return picture, magcache.stats(pipe).streams[0].happened


def test_the_drift_guard_tightens_a_run_that_reuses_badly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Words that the model has never seen together; a prompt like the calibration's is left."""
    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    odd = "noto fluent dog pizza"
    plain = pipe(
        odd, generator=torch.Generator().manual_seed(3004), output_type="pt", return_dict=False
    )[0]
    free, planned_row = drawn_with(pipe, odd, speedup=2.5)
    with caplog.at_level(logging.INFO, "magcache"):
        guarded, row = drawn_with(pipe, odd, speedup=2.5, drift_guard=True)
    assert "reused less well" in caplog.text
    assert row.count("C") > planned_row.count("C")
    tightened = next(i for i, (a, b) in enumerate(zip(row, planned_row, strict=True)) if a != b)
    assert ".." not in row[tightened:]
    assert psnr(guarded, plain) > psnr(free, plain)
    _, row = drawn_with(pipe, "noto blue heart", speedup=2.5, drift_guard=True)
    assert row == planned_row


def test_the_drift_guard_forgets_the_run() -> None:
    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    config = MagCacheConfig(budget=Budget(speedup=2.5, drift_guard=True))
    rows = []
    with magcache.enable(pipe, config):
        for prompt in ("noto blue heart", "noto fluent dog pizza", "noto blue heart"):
            pipe(prompt, generator=torch.Generator().manual_seed(3004))
            rows.append(magcache.stats(pipe).streams[0].happened)
    assert rows[0] == rows[2] != rows[1]


def test_a_runs_plan_knows_its_guidance() -> None:
    pipe, plans = load_demo_pipeline(), []
    with magcache.enable(pipe, speedup=2.0):
        for guidance in (1.0, 3.0, 7.0):
            pipe(
                "red heart",
                num_inference_steps=28,
                guidance_scale=guidance,
                output_type="pt",
                generator=torch.Generator().manual_seed(0),
            )
            levels = [float(t) / 1000 for t in pipe.scheduler.timesteps]
            told = magcache.plan("demo-emoji", planned(), sigmas=levels, guidance_scale=guidance)
            plans.append(magcache.stats(pipe).streams[0].happened)
            assert plans[-1] == str(told)
    assert plans[0] == plans[1] != plans[2]


def test_much_guidance_is_predicted_to_cost_more_and_extrapolates_less() -> None:
    calm, lively = (magcache.frontier("demo-emoji", guidance_scale=g) for g in (3.0, 7.0))
    assert calm.counts == lively.counts
    for count, one, other in zip(calm.counts, calm.errors, lively.errors, strict=True):
        assert one < other or count == 28
