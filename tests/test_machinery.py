"""Beside the machinery that others put on a model: offloading, casting, compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from models import Case, distance
from test_oracle import STEPS, assert_same_attributes, enabled, named, run, snapshot
from torch import nn

import magcache

CPU = torch.device("cpu")
SOME = [named(name) for name in ("flux", "sd3", "Plain")]

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


class Graphs:
    """A compiler backend that runs eagerly and counts the graphs it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_blocks(model: nn.Module, lists: Any, backend: Graphs) -> None:
    for listed in lists:
        for block in getattr(model, listed):
            block.compile(backend=backend, fullgraph=True)


@either_order
@pytest.mark.parametrize("case", SOME, ids=str)
def test_compiled_blocks_keep_their_graphs(case: Case, cache_first: bool) -> None:
    inputs, plain = case.inputs(0, 1, 4), Graphs()
    reference = case.build()
    compile_blocks(reference, case.lists, plain)
    with torch.no_grad():
        expected = reference(**inputs)
        reference(**inputs)
    torch.compiler.reset()

    model, graphs = case.build(), Graphs()
    if not cache_first:
        compile_blocks(model, case.lists, graphs)
    with enabled(model):
        if cache_first:
            compile_blocks(model, case.lists, graphs)
        outputs = run(model, [inputs]) + run(model, [inputs])
        assert magcache.stats(model).streams[0].happened == "C.C."
    assert 0 < graphs.count <= plain.count
    for output in outputs:
        assert distance(output[0], expected) < 1e-5


@either_order
@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_model_compiled_as_a_whole(case: Case, cache_first: bool) -> None:
    model, inputs, graphs = case.build(), case.inputs(0, 1, 4), Graphs()
    with torch.no_grad():
        plain = model(**inputs)
    before = snapshot(model)
    if not cache_first:
        model.compile(backend=graphs)
        before = snapshot(model)
    with enabled(model):
        if cache_first:
            model.compile(backend=graphs)
        outputs = run(model, [inputs]) + run(model, [inputs])
        assert len(outputs) == 2 * STEPS
        assert magcache.stats(model).streams[0].happened == "C.C."
        for output in outputs:
            assert distance(output[0], plain) < 1e-5
    assert graphs.count > 0
    if not cache_first:
        assert_same_attributes(before, snapshot(model))
    with torch.no_grad():
        assert distance(model(**inputs), plain) < 1e-5
