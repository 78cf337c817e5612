"""Every transformer class of the installed diffusers, under the identical-input oracle."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import diffusers.models.transformers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin
from zoo import ENTRIES
from zoo.oracle import ALWAYS_SKIP, distance, try_entry

import magcache

# Classes without a stack of blocks to skip, and why: none in the releases that were tried.
NO_STACK: dict[str, str] = {}


def transformer_classes() -> list[str]:
    """The public model classes that diffusers defines among its transformers."""
    package = diffusers.models.transformers
    names = set()
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            own = inspect.isclass(value) and value.__module__ == info.name
            if own and issubclass(value, ModelMixin) and not name.startswith("_"):
                names.add(name)
    return sorted(names)


CLASSES = transformer_classes()


def test_classes_are_found() -> None:
    assert {"FluxTransformer2DModel", "WanTransformer3DModel", "StableAudioDiTModel"} < set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_an_entry(name: str) -> None:
    assert name in ENTRIES or name in NO_STACK, f"write an entry for {name} in tests/zoo"


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_skipped_step_gives_what_a_computed_one_does(name: str) -> None:
    assert try_entry(ENTRIES[name]()).faults() == []


@pytest.mark.skipif("WanAnimate2Transformer3DModel" not in ENTRIES, reason="not in this diffusers")
def test_reference_pass_is_another_stream() -> None:
    """Before the first step, WanAnimate2 is called once to fill a cache of keys and values.

    That call differs from the others in the arguments that are given, not in the shapes.
    """
    model, arguments = ENTRIES["WanAnimate2Transformer3DModel"]()
    given = {"kv_cache": arguments(0)[1]["kv_cache"]}
    only_there = ("reference_grid_sizes", "origin_len", "origin_area")

    def generation() -> Any:
        # No tensor is the one of the step before: only the arguments' names tell the two apart.
        return model(**{**arguments(0)[1], **given})

    def reference() -> Any:
        kwargs = {k: v for k, v in arguments(5)[1].items() if k not in only_there}
        grid = {"offset_grid_sizes": torch.tensor([[1, 2, 2]])}
        return model(**{**kwargs, **given, **grid, "kv_cache_mode": "extract"})

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    scheduler.set_begin_index(0)
    sample = torch.zeros(1)
    with torch.no_grad():
        reference()
        plain = generation()
        with magcache.enable(model, ALWAYS_SKIP, scheduler=scheduler):
            reference()
            for t in scheduler.timesteps:
                assert distance(generation(), plain) <= 1e-5
                if t > scheduler.timesteps[-1]:
                    scheduler.step(sample, t, sample)
            assert [s.happened for s in magcache.stats(model).streams] == ["C--", "C.."]


@pytest.mark.skipif("Flux3Transformer2DModel" not in ENTRIES, reason="not in this diffusers")
def test_lists_belong_to_the_kind_of_call() -> None:
    """A list that calls without a condition do not walk is stepped over in calls that walk it."""
    model, arguments = ENTRIES["Flux3Transformer2DModel"]()
    conditioned = arguments(0)[1]
    plain = {k: v for k, v in conditioned.items() if not k.startswith("image_cond")}
    ran: list[str] = []
    for name, block in model.mode_blocks.named_modules():
        block.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    scheduler = FlowMatchEulerDiscreteScheduler()
    with torch.no_grad(), magcache.enable(model, ALWAYS_SKIP, scheduler=scheduler):
        for inputs in (plain, conditioned):
            scheduler.set_timesteps(2)
            scheduler.set_begin_index(0)
            computed = model(**inputs)
            scheduler.step(torch.zeros(1), scheduler.timesteps[0], torch.zeros(1))
            ran.clear()
            assert distance(model(**inputs), computed) <= 1e-5
            assert ran == []
            scheduler.step(torch.zeros(1), scheduler.timesteps[1], torch.zeros(1))
