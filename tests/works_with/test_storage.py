"""Where a residual stays: what each storage keeps, what it costs, and that a run works with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import distance
from pipelines import draw_flux, flux_pipeline
from torch import Tensor

import magcache
from magcache import ConfigError, MagCacheConfig
from magcache.hook import cache_of
from magcache.residual import ResidualParts
from magcache.storage import STORAGES, Storage, store

STEPS = 8
SETTINGS: dict[str, Any] = {"threshold": 0.2, "max_skip_steps": 3, "retention_ratio": 0.2}
RATIOS = [1.0, 1.1, 1.05, 1.02, 1.01, 0.99, 0.98, 0.97]

values = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
tokens = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(values, min_size=width, max_size=width), min_size=1, max_size=4)
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def kept(tensor: Tensor, storage: Storage) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What comes back, and what was held meanwhile."""
    stored = store(ResidualParts((tensor,), (tensor.dtype,), ((), ())), storage)
    loaded = stored.load()
    assert loaded.dtypes == (tensor.dtype,)
    assert loaded.tensors[0].shape == tensor.shape
    assert loaded.tensors[0].dtype == tensor.dtype
    return loaded.tensors[0], stored.tensors


@given(tokens, dtypes)
def test_device_and_host_keep_every_bit(rows: list[list[float]], dtype: torch.dtype) -> None:
    residual = torch.tensor(rows, dtype=dtype)
    for storage in ("device", "host"):
        assert torch.equal(kept(residual, storage)[0], residual)  # type: ignore[arg-type]


@given(tokens)
def test_bfloat16_keeps_eight_bits(rows: list[list[float]]) -> None:
    residual = torch.tensor(rows)
    loaded = kept(residual, "bfloat16")[0]
    assert bool(((loaded - residual).abs() <= residual.abs() * 2**-8).all())


@given(tokens, dtypes)
def test_float8_keeps_four_bits_of_each_token(rows: list[list[float]], dtype: torch.dtype) -> None:
    residual = torch.tensor(rows, dtype=dtype)
    error = (kept(residual, "float8")[0].double() - residual.double()).abs()
    largest = residual.double().abs().amax(-1, keepdim=True)
    # Half of the last bit, and below the smallest normal number (2^-6 of 448) a fixed step.
    bound = torch.maximum(residual.double().abs() * 2**-4, largest / 448 * 2**-10)
    slack = 1e-5 if dtype == torch.float32 else 2**-8
    assert bool((error <= bound * (1 + 1e-5) + slack * residual.double().abs() + 1e-37).all())


def test_one_large_token_does_not_blur_the_others() -> None:
    residual = torch.randn(2, 6, 8)
    residual[:, 0] *= 1e6
    loaded = kept(residual, "float8")[0]
    assert distance(loaded[:, 1:], residual[:, 1:]) < 0.04


def test_zeros_and_empty_residuals_come_back() -> None:
    for storage in STORAGES:
        for residual in (torch.zeros(1, 3, 4), torch.zeros(1, 0, 4), torch.zeros(2, 0)):
            assert torch.equal(kept(residual, storage)[0], residual)


@pytest.mark.parametrize(
    ("storage", "share"), [("device", 1.0), ("host", 1.0), ("bfloat16", 0.5), ("float8", 0.3)]
)
def test_memory_that_is_held(storage: Storage, share: float) -> None:
    residual = torch.randn(1, 16, 64)
    held = sum(t.nbytes for t in kept(residual, storage)[1])
    assert held <= share * residual.nbytes


@pytest.mark.parametrize(
    ("storage", "tolerance"), [("device", 0.0), ("host", 0.0), ("bfloat16", 4e-3), ("float8", 4e-2)]
)
def test_a_run(storage: Storage, tolerance: float) -> None:
    pipe = flux_pipeline()
    with magcache.enable(pipe, MagCacheConfig(**SETTINGS, mag_ratios=RATIOS)):
        expected, plan = draw_flux(pipe, STEPS), str(magcache.stats(pipe))
    dtypes: set[torch.dtype] = set()

    def look(_: Any, step: int, t: Any, kwargs: Any) -> Any:
        for state in cache_of(pipe.transformer).states.values():  # type: ignore[union-attr]
            dtypes.update(t.dtype for _, stored in state.held for t in stored.tensors)
        return kwargs

    config = MagCacheConfig(**SETTINGS, mag_ratios=RATIOS, residual_storage=storage)
    with magcache.enable(pipe, config):
        picture = draw_flux(pipe, STEPS, callback_on_step_end=look)
        assert str(magcache.stats(pipe)) == plan
    assert "." in plan
    error = distance(picture, expected)
    assert error <= tolerance
    assert (error == 0) == (tolerance == 0)
    smaller = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}.get(storage)
    assert smaller is None or smaller in dtypes


def test_calibration_does_not_see_the_storage() -> None:
    curves = []
    for storage in ("device", "float8"):
        pipe = flux_pipeline()
        settings = MagCacheConfig(mag_calibrate=True, residual_storage=storage)  # type: ignore[arg-type]
        with magcache.enable(pipe, settings):
            draw_flux(pipe, STEPS)
            keeper = cache_of(pipe.transformer).on_measured  # type: ignore[union-attr]
            curves.append(keeper.curve.streams)  # type: ignore[union-attr]
    assert curves[0] == curves[1]


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(ConfigError, match="residual_storage is 'disk'; it must be one of device"):
        MagCacheConfig(residual_storage="disk")  # type: ignore[arg-type]
