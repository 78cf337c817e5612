"""Strategies: the registry, rules of one's own, which lists they name, and what they measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import (
    WIDTH,
    Block,
    JoinedTail,
    Plain,
    TwoStreams,
    distance,
    flux,
    flux_inputs,
    normal,
    plain_inputs,
    randomised,
    tensors,
)
from test_oracle import EVERY_OTHER, enabled, run
from torch import Tensor, nn

import magcache
from magcache import (
    CannotCacheError,
    ConfigError,
    MagCacheConfig,
    MagCacheStrategy,
    MagCacheStrategyRegistry,
    apply_mag_cache_hook,
    remove_mag_cache_hook,
)
from magcache.hook import cache_of

Registry = type[MagCacheStrategyRegistry]


class Doubled(MagCacheStrategy):
    """Keeps residuals in float64 and doubled, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def compute_residual(self, output: Tensor, head_input: Tensor) -> Tensor:
        self.kept.append(2 * (output.double() - head_input.double()))
        return self.kept[-1]

    def apply_residual(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        return (hidden_states.double() + residual / 2).to(hidden_states.dtype)


class Halving(MagCacheStrategy):
    """Adds half of the residual, so that its use shows."""

    def apply_residual(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        return super().apply_residual(hidden_states, residual / 2)


# The registry.


def test_registry_gives_what_was_registered(registry: Registry) -> None:
    registry.register("Mine", Doubled)
    assert registry.get("Mine") is registry.get_if_exists("Mine") is Doubled
    registry.register("Mine", Halving)
    assert registry.get("Mine") is Halving
    registry.unregister("Mine")
    registry.unregister("Mine")
    assert registry.get_if_exists("Mine") is None


def test_registry_error_names_what_is_known_and_the_remedy(registry: Registry) -> None:
    registry.register("Mine", Doubled)
    with pytest.raises(ConfigError, match=r"'Yours'.*registered: .*Mine.*register"):
        registry.get("Yours")


@pytest.mark.parametrize("bad", [Doubled(), nn.Module, int, None, "Doubled"])
def test_registry_takes_strategies_only(registry: Registry, bad: Any) -> None:
    with pytest.raises(ConfigError, match="MagCacheStrategy"):
        registry.register("Mine", bad)
    assert registry.get_if_exists("Mine") is None


# A rule of one's own.


def test_a_registered_strategy_is_used_for_its_class_only(registry: Registry) -> None:
    registry.register("Plain", Halving)
    model, inputs = randomised(Plain()), plain_inputs(0, 1, 3)
    with torch.no_grad():
        inside = model.embed(inputs["x"]) + inputs["timestep"][:, None, None]
        residual = model.walk(inside) - inside
        expected = model.head(model.norm(inside + residual / 2))
    with enabled(model):
        outputs = run(model, [inputs])
    for step in (1, 3):
        torch.testing.assert_close(outputs[step][0], expected)
    assert distance(outputs[1][0], outputs[0][0]) > 1e-2
    other = randomised(TwoStreams())
    with enabled(other):
        outputs = run(other, [inputs])
    assert distance(outputs[1][0], outputs[0][0]) < 1e-5


def test_transformer_type_names_the_strategy(registry: Registry) -> None:
    registry.register("Mine", Halving)
    model, inputs = randomised(Plain()), plain_inputs(0, 1, 3)
    config = MagCacheConfig(1.0, 1, 0.0, mag_ratios=[1.0] * 4, transformer_type="Mine")
    with enabled(model, config):
        outputs = run(model, [inputs])
    assert distance(outputs[1][0], outputs[0][0]) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_in_another_dtype_and_scale_comes_back_exact(dtype: torch.dtype) -> None:
    model = randomised(Plain()).to(dtype)
    inputs = {k: v.to(dtype) for k, v in plain_inputs(0, 1, 3).items()}
    strategy = Doubled()
    config = MagCacheConfig(1.0, 1, 0.0, num_inference_steps=6, mag_ratios=[1.0] * 6)
    cache = apply_mag_cache_hook(model, config, strategy)
    kept: list[Any] = []
    with torch.no_grad():
        for step in range(6):
            outputs = model(inputs["x"], torch.tensor([(9 - step) / 10], dtype=dtype))
            kept += [s.residual for s in cache.states.values()]
            assert outputs.dtype == dtype
    assert len(strategy.kept) == 3
    assert all(r.dtype == torch.float64 for r in kept)
    assert any(kept[0] is r for r in strategy.kept)
    remove_mag_cache_hook(model)
    assert cache_of(model) is None

    with enabled(model):
        general = run(model, [inputs])
    assert distance(general[1][0], general[0][0]) < 1e-5 if dtype == torch.float32 else True


def test_a_strategy_for_a_real_model_is_used(registry: Registry) -> None:
    registry.register("FluxTransformer2DModel", Doubled)
    model, inputs = flux(), flux_inputs(0, 1, 4)
    with enabled(model):
        outputs = run(model, [inputs])
        strategy: Any = cache_of(model).stack.strategy  # type: ignore[union-attr]
    assert isinstance(strategy, Doubled)
    assert [tuple(k.shape) for k in strategy.kept] == [(1, 16, 16)] * 2  # image tokens alone
    assert distance(outputs[1][0], outputs[0][0]) < 1e-6


class Labelled(MagCacheStrategy):
    """Marks which member is which: hidden times 2, encoder times 3."""

    def apply_residual_tuple(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, residual: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        return hidden_states + 2 * residual[0], encoder_hidden_states + 3 * residual[1]


def test_tuple_residuals_are_hidden_then_encoder_also_where_the_call_is_not(
    registry: Registry,
) -> None:
    registry.register("JoinedTail", Labelled)
    model, inputs = randomised(JoinedTail()), plain_inputs(0, 1, 3)
    with torch.no_grad():
        hidden = head = model.embed(inputs["x"]) + inputs["timestep"][:, None, None]
        encoder = text = model.embed_text(inputs["x"][:, :2])
        for block in model.blocks:
            hidden, encoder = block(hidden, encoder)
        expected = model.tail(head + 2 * (hidden - head), text + 3 * (encoder - text))
    seen: list[Any] = []

    def look(_: int) -> None:
        seen.extend(s.residual for s in cache_of(model).states.values())  # type: ignore[union-attr]

    with enabled(model):
        outputs = run(model, [inputs], before_call=look)
    for step in (1, 3):
        assert distance(outputs[step][0], expected) < 1e-5
    torch.testing.assert_close(seen[0][0], hidden - head)
    torch.testing.assert_close(seen[0][1], encoder - text)


def test_an_architectures_own_ratios_serve_where_no_others_are_known(registry: Registry) -> None:
    class WithRatios(MagCacheStrategy):
        mag_ratios = (1.0, 1.0, 1.0, 9.0)

    registry.register("Plain", WithRatios)
    model, inputs = randomised(Plain()), plain_inputs(0, 1, 3)
    with enabled(model, MagCacheConfig(1.0, 3, 0.0)):
        run(model, [inputs])
        assert magcache.stats(model).streams[0].happened == "C..C"
    with enabled(model, EVERY_OTHER):
        run(model, [inputs])
        assert magcache.stats(model).streams[0].happened == "C.C."


# Which lists make up the stack.


class Refining(Plain):
    """Refines its input by blocks of another class before the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.refiners = nn.ModuleList(Refiner() for _ in range(2))

    def walk(self, x: Tensor) -> Tensor:
        for refiner in self.refiners:
            x = refiner(x)
        return super().walk(x)


class Refiner(Block):
    pass


class Unrelated(nn.Module):
    pass


def naming(*classes: type[nn.Module]) -> type[MagCacheStrategy]:
    class Naming(MagCacheStrategy):
        def register_blocks(self) -> None:
            for block_class in classes:
                self.register_block_metadata(block_class)

    return Naming


@pytest.mark.parametrize(
    ("classes", "lists"),
    [
        ((), ("blocks", "refiners")),
        ((Refiner,), ("refiners",)),
        ((Block,), ("blocks", "refiners")),
        ((Refiner, Unrelated), ("refiners",)),
    ],
)
def test_block_metadata_restricts_the_stack(
    registry: Registry, classes: tuple[type[nn.Module], ...], lists: tuple[str, ...]
) -> None:
    registry.register("Refining", naming(*classes))
    model, inputs = randomised(Refining()), plain_inputs(0, 1, 3)
    ran: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        return lambda *_: ran.update({name: ran.get(name, 0) + 1})

    for name in ("blocks", "refiners"):
        getattr(model, name)[0].register_forward_pre_hook(count(name))
    with enabled(model):
        outputs = run(model, [inputs])
    assert ran == {name: 2 if name in lists else ran[name] for name in ("blocks", "refiners")}
    assert all(ran[name] >= 4 for name in ran if name not in lists)
    assert distance(outputs[1][0], outputs[0][0]) < 1e-5
    assert distance(outputs[3][0], outputs[2][0]) < 1e-5


def test_metadata_that_fits_no_list_is_refused(registry: Registry) -> None:
    registry.register("Plain", naming(Unrelated))
    model = randomised(Plain())
    with pytest.raises(CannotCacheError, match=r"Plain has no list.*blocks \(ModuleList\)"):
        apply_mag_cache_hook(model, EVERY_OTHER)
    assert "forward" not in vars(model)


# The hook itself.


def test_applying_again_replaces() -> None:
    model = randomised(Plain())
    first = apply_mag_cache_hook(model, EVERY_OTHER)
    second = apply_mag_cache_hook(model, EVERY_OTHER)
    assert cache_of(model) is second is not first
    remove_mag_cache_hook(model)
    assert cache_of(model) is None
    assert "forward" not in vars(model)
    remove_mag_cache_hook(model)


def test_hook_without_ratios_is_refused_and_changes_nothing() -> None:
    model = randomised(Plain())
    keys = list(vars(model))
    with pytest.raises(ConfigError, match="mag_ratios is None"):
        apply_mag_cache_hook(model, MagCacheConfig())
    assert list(vars(model)) == keys


# Calibration metrics.


def by_hand(now: Tensor, before: Tensor) -> list[float]:
    a, b = (t.detach().float().numpy().astype(np.float64) for t in (now, before))
    a_norm, b_norm = np.sqrt((a * a).sum(-1)), np.sqrt((b * b).sum(-1))
    ratio, cosine = a_norm / b_norm, (a * b).sum(-1) / (a_norm * b_norm)
    return [ratio.mean(), ratio.std(), (1 - cosine).mean()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_metrics_by_hand_in_float32(dtype: torch.dtype) -> None:
    now, before = normal(0, 2, 40, 64).to(dtype), normal(1, 2, 40, 64).to(dtype)
    found = MagCacheStrategy().compute_calibration_metrics(now, before)
    assert all(m.dtype == torch.float32 and m.ndim == 0 for m in found)
    assert [float(m) for m in found] == pytest.approx(by_hand(now, before), rel=1e-5)


def test_metrics_of_bfloat16_are_not_rounded_to_its_grid() -> None:
    """In bfloat16, norms near 1 come in steps of 1/128: a ratio of 1.003 would read 1.0."""
    before = normal(0, 1, 50, 64).to(torch.bfloat16)
    now = before.clone()
    now[..., 0] *= 1.1
    ratio = float(MagCacheStrategy().compute_calibration_metrics(now, before)[0])
    assert ratio == pytest.approx(by_hand(now, before)[0], abs=1e-6)
    assert 1 < ratio < 1 + 1 / 128
    rough = (now.norm(dim=-1) / before.norm(dim=-1)).mean()
    assert abs(float(rough) - by_hand(now, before)[0]) > 1e-4


def test_metrics_of_half_precision_do_not_overflow() -> None:
    big = torch.full((1, 3, 64), 60000.0, dtype=torch.float16)
    found = MagCacheStrategy().compute_calibration_metrics(big, big)
    assert [float(m) for m in found] == pytest.approx([1, 0, 0], abs=1e-6)


def test_metrics_of_a_tuple_are_the_hidden_streams() -> None:
    hidden, encoder = (normal(0, 1, 5, 8), normal(1, 1, 5, 8)), normal(2, 1, 3, 8)
    found = MagCacheStrategy().compute_calibration_metrics(
        (hidden[0], encoder), (hidden[1], 9 * encoder)
    )
    assert [float(m) for m in found] == pytest.approx(by_hand(*hidden), rel=1e-5)


def test_metrics_of_a_doubled_residual() -> None:
    residual = normal(0, 1, 5, 8)
    found = MagCacheStrategy().compute_calibration_metrics(2 * residual, residual)
    assert [float(m) for m in found] == pytest.approx([2, 0, 0], abs=1e-6)


def test_a_strategys_own_metrics_make_the_curve(registry: Registry) -> None:
    class Constant(MagCacheStrategy):
        def compute_calibration_metrics(self, current: Any, previous: Any) -> Any:
            return torch.tensor(1.5), torch.tensor(0.25), torch.tensor(0.125)

    registry.register("Injected", Constant)
    from pipelines import odd_pipeline

    curve = magcache.calibrate(odd_pipeline(), steps=4)
    for stream in curve.streams.values():
        assert stream.ratios == (1.0, 1.5, 1.5, 1.5)
        assert stream.token_std == (0.0, 0.25, 0.25, 0.25)
        assert stream.cosine_distance == (0.0, 0.125, 0.125, 0.125)


def test_residuals_are_detached_and_of_one_hidden_states_size() -> None:
    model = randomised(Plain())
    kept: list[Any] = []

    def look(_: int) -> None:
        kept.extend(s.residual for s in cache_of(model).states.values())  # type: ignore[union-attr]

    with enabled(model):
        outputs = run(model, [plain_inputs(0, 2, 3)], before_call=look)
    assert kept
    assert {tuple(r.shape) for r in kept} == {(2, 9, WIDTH)}
    assert not any(r.requires_grad for r in kept)
    assert len(tensors(outputs)) == 4
