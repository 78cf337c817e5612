"""Beside the machinery that others put on a model: offloading and casting."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from models import Case, distance
from test_oracle import enabled, named, run

import magcache

CPU = torch.device("cpu")

either_order = pytest.mark.parametrize("cache_first", [True, False])


@either_order
@pytest.mark.parametrize("case", [named("flux"), named("wan"), named("qwen")], ids=str)
def test_a_skipped_step_loads_no_offloaded_block(
    case: Case, cache_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)
    blocks = {id(block) for listed in case.lists for block in getattr(model, listed)}
    loaded: list[int] = []
    onload = ModuleGroup.onload_

    def spy(group: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.extend(id(m) for m in group.modules if id(m) in blocks)
        return onload(group, *args, **kwargs)

    monkeypatch.setattr(ModuleGroup, "onload_", spy)

    def offload() -> None:
        apply_group_offloading(
            model,
            onload_device=CPU,
            offload_device=CPU,
            offload_type="block_level",
            num_blocks_per_group=1,
        )

    with torch.no_grad():
        plain = model(**inputs)
    if not cache_first:
        offload()
    per_step: list[int] = []
    with enabled(model):
        if cache_first:
            offload()
        outputs = run(model, [inputs], before_call=lambda step: per_step.append(len(loaded)))
        per_step.append(len(loaded))
    steps = [after - before for before, after in pairwise(per_step)]
    assert steps[1] == steps[3] == 0
    assert steps[2] == len(blocks)
    for output in outputs:
        assert distance(output[0], plain) < 1e-5


@either_order
@pytest.mark.parametrize("case", [named("flux"), named("sd3"), named("wan")], ids=str)
def test_layerwise_casting(case: Case, cache_first: bool) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)

    def cast_layers() -> None:
        model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)

    if not cache_first:
        cast_layers()
    with enabled(model):
        if cache_first:
            cast_layers()
        outputs = run(model, [inputs])
        assert magcache.stats(model).streams[0].happened == "C.C."
    with torch.no_grad():
        plain = model(**inputs)
    for output in outputs:
        assert distance(output[0], plain) < 1e-5
