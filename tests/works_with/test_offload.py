"""Offloaded models: the same pictures and plan, nothing loaded on a skipped step, either order.

Everything runs on the CPU, which is then both the device that computes and the one that stores.
Accelerate's sequential offload really takes the weights away (to the meta device), and diffusers'
group offload goes through all its loading, here and on disk; only the copies are short.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers.hooks import HookRegistry, apply_group_offloading
from diffusers.hooks.group_offloading import LazyPrefetchGroupOffloadingHook
from pipelines import RIGS, draw_flux, flux_pipeline
from test_oracle import assert_same_attributes, snapshot
from torch import Tensor, nn

import magcache
from magcache import MagCacheConfig
from magcache.hook import cache_of
from magcache.store import fingerprint

CPU = torch.device("cpu")
STEPS = 8
CONFIG = MagCacheConfig(0.1, 3, 0.2, mag_ratios=[1.0, 1.1, 1.05, 1.02, 1.01, 0.99, 0.98, 0.97])

either_order = pytest.mark.parametrize("cache_first", [True, False])


def model_offload(pipe: Any, folder: Path) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def sequential_offload(pipe: Any, folder: Path) -> None:
    """What `enable_sequential_cpu_offload` does, which names its device "cpu:0".

    Accelerate 1.15 cannot put weights there.
    """
    for model in pipe.components.values():
        if isinstance(model, nn.Module):
            cpu_offload(model, CPU, offload_buffers=bool(model._parameters))
    assert all(weight.is_meta for weight in pipe.transformer.parameters())


def blocks_in_groups(pipe: Any, folder: Path) -> None:
    group_offload(pipe, offload_type="block_level", num_blocks_per_group=1)


def pairs_of_blocks(pipe: Any, folder: Path) -> None:
    group_offload(pipe, offload_type="block_level", num_blocks_per_group=2)


def leaves_in_groups(pipe: Any, folder: Path) -> None:
    group_offload(pipe, offload_type="leaf_level")


def blocks_on_disk(pipe: Any, folder: Path) -> None:
    group_offload(
        pipe,
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(folder / "groups"),
    )


def group_offload(pipe: Any, **kwargs: Any) -> None:
    apply_group_offloading(pipe.transformer, onload_device=CPU, offload_device=CPU, **kwargs)


WAYS = [
    model_offload,
    sequential_offload,
    blocks_in_groups,
    pairs_of_blocks,
    leaves_in_groups,
    blocks_on_disk,
]
Way = Callable[[Any, Path], None]
by_way = pytest.mark.parametrize("offload", WAYS, ids=lambda way: way.__name__)


class Loads:
    """Counts what the blocks' hooks load, by wrapping those on each module's instance."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.wrapped: set[int] = set()
        for name in ("transformer_blocks", "single_transformer_blocks"):
            for part in model.get_submodule(name).modules():
                accelerate = vars(part).get("_hf_hook")
                if accelerate is not None and accelerate.offload:
                    self.wrap(accelerate, "pre_forward")
                registry = vars(part).get("_diffusers_hook")
                group = registry.get_hook("group_offloading") if registry else None
                if group is not None:
                    self.wrap(group.group, "onload_")

    def wrap(self, owner: Any, name: str) -> None:
        if id(owner) in self.wrapped:
            return
        plain = getattr(owner, name)
        self.wrapped.add(id(owner))

        @functools.wraps(plain)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return plain(*args, **kwargs)

        setattr(owner, name, counted)


def cached_reference() -> tuple[Tensor, list[str]]:
    pipe = flux_pipeline()
    with magcache.enable(pipe, CONFIG):
        picture = draw_flux(pipe, STEPS)
        return picture, rows(pipe)


def rows(pipe: Any) -> list[str]:
    return [stream.happened for stream in magcache.stats(pipe).streams]


@either_order
@by_way
def test_offloaded_pipelines_draw_the_same(offload: Way, cache_first: bool, tmp_path: Path) -> None:
    expected, plan = cached_reference()
    pipe = flux_pipeline()
    plain = draw_flux(pipe, STEPS)
    if not cache_first:
        offload(pipe, tmp_path)
    magcache.enable(pipe, CONFIG)
    if cache_first:
        offload(pipe, tmp_path)
    # A pipeline takes off and puts on its offloading at the end of each run.
    for _ in range(3):
        assert torch.equal(draw_flux(pipe, STEPS), expected)
        assert rows(pipe) == plan
        assert magcache.stats(pipe).streams[0].as_planned
    assert "." in plan[0]
    magcache.disable(pipe)
    assert cache_of(pipe.transformer) is None
    assert torch.equal(draw_flux(pipe, STEPS), plain)


@either_order
@pytest.mark.parametrize("offload", WAYS[1:], ids=lambda way: way.__name__)
def test_a_skipped_step_loads_no_block(offload: Way, cache_first: bool, tmp_path: Path) -> None:
    pipe = flux_pipeline()
    if not cache_first:
        offload(pipe, tmp_path)
    magcache.enable(pipe, CONFIG)
    if cache_first:
        offload(pipe, tmp_path)
    loads = Loads(pipe.transformer)
    assert loads.wrapped
    for _ in range(2):
        counts = [loads.count]

        def ended(_: Any, step: int, t: Any, kwargs: Any, counts: list[int] = counts) -> Any:
            counts.append(loads.count)
            return kwargs

        draw_flux(pipe, STEPS, callback_on_step_end=ended)
        row = rows(pipe)[0]
        assert rows(pipe) == [row, row]
        loaded = [after - before for before, after in pairwise(counts)]
        assert all((count == 0) == (what == ".") for count, what in zip(loaded, row, strict=True))
        assert "." in row


@by_way
def test_disable_gives_back_what_was_offloaded(offload: Way, tmp_path: Path) -> None:
    pipe = flux_pipeline()
    offload(pipe, tmp_path)
    before, inner = snapshot(pipe.transformer), inner_forward(pipe.transformer)
    magcache.enable(pipe, CONFIG).disable()
    assert_same_attributes(before, snapshot(pipe.transformer))
    assert inner_forward(pipe.transformer) == inner


def inner_forward(model: nn.Module) -> Any:
    registry = vars(model).get("_diffusers_hook")
    wrapped = [reference.forward for reference in registry._fn_refs] if registry else []
    return wrapped, vars(model).get("_old_forward")


@by_way
def test_disable_reaches_below_offloading_that_came_later(offload: Way, tmp_path: Path) -> None:
    pipe = flux_pipeline()
    plain = draw_flux(pipe, STEPS)
    magcache.enable(pipe, CONFIG)
    offload(pipe, tmp_path)
    magcache.disable(pipe)
    forwards = [*inner_forward(pipe.transformer)[0], inner_forward(pipe.transformer)[1]]
    assert not any(hasattr(getattr(f, "__func__", None), "magcache") for f in forwards)
    assert torch.equal(draw_flux(pipe, STEPS), plain)
    # Offloading can be taken off as well, and then the cache is not back.
    if offload in (model_offload, sequential_offload):
        pipe.remove_all_hooks()
        assert not hasattr(getattr(pipe.transformer.forward, "__func__", None), "magcache")


def test_the_cache_outlives_a_hook_that_is_taken_off() -> None:
    pipe = flux_pipeline()
    blocks_in_groups(pipe, Path())
    magcache.enable(pipe, CONFIG)
    pipe.transformer._diffusers_hook.remove_hook("group_offloading")
    draw_flux(pipe, STEPS)
    assert "." in rows(pipe)[0]


def test_prefetching_loads_no_more_than_the_first_block_on_a_skipped_step() -> None:
    """Prefetching is traced on the first pass, as with streams, which the CPU has none of.

    Diffusers' hook around the whole model prefetches the first block before anything is decided.
    """
    reference = flux_pipeline()
    with magcache.enable(reference, CONFIG):
        first = draw_flux(reference, STEPS, guided=False)
        plan = rows(reference)
    pipe = flux_pipeline()
    blocks_in_groups(pipe, Path())
    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    registry.register_hook(LazyPrefetchGroupOffloadingHook(), "lazy_prefetch_group_offloading")
    magcache.enable(pipe, CONFIG)
    loads = Loads(pipe.transformer)
    counts = [0]

    def ended(_: Any, step: int, t: Any, kwargs: Any) -> Any:
        counts.append(loads.count)
        return kwargs

    for _ in range(2):
        assert torch.equal(draw_flux(pipe, STEPS, guided=False, callback_on_step_end=ended), first)
        assert rows(pipe) == plan[:1]
    loaded = [after - before for before, after in pairwise(counts)]
    for count, what in zip(loaded, plan[0] * 2, strict=True):
        assert count <= 1 if what == "." else count >= 4


def test_the_first_run_calibrates_an_offloaded_model(caplog: pytest.LogCaptureFixture) -> None:
    settings = MagCacheConfig(0.5, 3, 0.2)
    pipe = flux_pipeline()
    sequential_offload(pipe, Path())
    with magcache.enable(pipe, settings):
        draw_flux(pipe, STEPS)
        assert set(rows(pipe)[0]) == {"C"}
        draw_flux(pipe, STEPS)
        offloaded = rows(pipe)
    # The same checkpoint without offloading finds that curve.
    plain = flux_pipeline()
    with magcache.enable(plain, settings):
        draw_flux(plain, STEPS)
        assert rows(plain) == offloaded
    assert "." in offloaded[0]


def test_weights_that_accelerate_holds_are_part_of_the_fingerprint() -> None:
    seeds = [fingerprint(flux_pipeline(seed).transformer) for seed in (0, 1)]
    assert seeds[0] != seeds[1]
    for seed, expected in enumerate(seeds):
        pipe = flux_pipeline(seed)
        sequential_offload(pipe, Path())
        assert fingerprint(pipe.transformer) == expected


@pytest.mark.parametrize("rig", RIGS, ids=str)
def test_sequential_offload_on_other_pipelines(rig: Any) -> None:
    expected_pipe, pipe = rig.build(), rig.build()
    with magcache.enable(expected_pipe, CONFIG):
        expected = rig.draw(expected_pipe, STEPS)
    sequential_offload(pipe, Path())
    with magcache.enable(pipe, CONFIG):
        for _ in range(2):
            assert torch.equal(rig.draw(pipe, STEPS), expected)
            assert "." in rows(pipe)[0]
