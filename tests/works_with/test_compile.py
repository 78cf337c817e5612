"""torch.compile: as many graphs as without the cache and one for skipped steps, in any order.

Flux, Qwen and Wan guide by two calls a step, SD3 by one batched call.

`Graphs` is a backend that runs a graph as it is and counts; where `fullgraph=True` is given, a
graph break is an error, and under `no_recompiles` so is a graph that is made anew.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from models import Case, Plain, distance, flux_inputs, plain_inputs, randomised, tensors
from pipelines import FLUX, QWEN, SD3, WAN, Rig
from test_oracle import STEPS, assert_same_attributes, enabled, named, run, snapshot
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

import magcache
from magcache import Budget, MagCacheConfig, MagnitudeCurve
from magcache.hook import cache_of
from magcache.store import find_curve

CONFIG = MagCacheConfig(0.1, 3, 0.2, mag_ratios=[1.0, 1.1, 1.05, 1.02, 1.01, 0.99, 0.98, 0.97])
LENGTHS = (8, 12, 8, 5)
BARE = [named(name) for name in ("flux", "sd3", "qwen", "wan")]
SMALL = [named(name) for name in ("Plain", "AddsAfterStack")]


class Graphs:
    """A compiler backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward  # type: ignore[no-any-return]


class Overwriting(Graphs):
    """What a graph returns lasts until the next call of any, as with CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: tuple[Tensor, ...] = ()

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        plain = super().__call__(graph, inputs)

        def replay(*args: Any) -> Any:
            results = tuple(result.clone() for result in plain(*args))
            for former in self.returned:
                former.fill_(torch.nan)
            self.returned = results
            return results

        return replay


def blocks(model: Any, lists: Sequence[str] = ("transformer_blocks",), **kwargs: Any) -> Any:
    if getattr(model, "_repeated_blocks", None):
        model.compile_repeated_blocks(**kwargs)
    else:
        # Not every class says which of its blocks repeat (SD3 does not).
        for block in (block for name in lists for block in getattr(model, name)):
            block.compile(**kwargs)
    return model


def whole(model: Any, lists: Sequence[str] = (), **kwargs: Any) -> Any:
    model.compile(**kwargs)
    return model


def wrapped(model: Any, lists: Sequence[str] = (), **kwargs: Any) -> Any:
    return torch.compile(model, **kwargs)


Way = Callable[..., Any]
WAYS = (blocks, whole, wrapped)
either_order = pytest.mark.parametrize("cache_first", [True, False], ids=["after", "before"])
by_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def str_or_name(value: Any) -> str:
    if isinstance(value, bool):
        return "after" if value else "before"
    return getattr(value, "__name__", None) or str(value)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def no_recompiles() -> Any:
    return torch.compiler.set_stance("fail_on_recompile")


def built(rig: Rig, way: Way, cache_first: bool, config: Any = CONFIG, **kwargs: Any) -> Any:
    pipe = rig.build()
    if not cache_first:
        pipe.transformer = way(pipe.transformer, **kwargs)
    magcache.enable(pipe, config)
    if cache_first:
        pipe.transformer = way(pipe.transformer, **kwargs)
    return pipe


def steps_of(model: Any) -> Iterator[None]:
    """A loop's steps, told by the scheduler that the model was enabled with."""
    scheduler = cache_of(model).clock.owners[0].scheduler  # type: ignore[union-attr]
    scheduler.set_timesteps(STEPS)
    for t in scheduler.timesteps:
        yield
        scheduler.step(torch.zeros(1), t, torch.zeros(1))


def rows(pipe: Any) -> list[tuple[str, str]]:
    streams = magcache.stats(pipe).streams
    assert all(stream.as_planned for stream in streams)
    return [(stream.stream, stream.happened) for stream in streams]


@functools.cache
def eager(rig: Rig) -> dict[int, tuple[Tensor, list[tuple[str, str]]]]:
    """Pictures and rows of the cached pipeline without a compiler, by number of steps."""
    pipe = rig.build()
    with magcache.enable(pipe, CONFIG):
        return {steps: (rig.draw(pipe, steps), rows(pipe)) for steps in sorted(set(LENGTHS))}


@functools.cache
def graphs_without_cache(rig: Rig, way: Way) -> int:
    pipe, graphs = rig.build(), Graphs()
    pipe.transformer = way(pipe.transformer, backend=graphs, fullgraph=True)
    rig.draw(pipe, 2)
    torch.compiler.reset()
    return graphs.count


def assert_as_eager(rig: Rig, pipe: Any, steps: int) -> None:
    picture, expected = eager(rig)[steps]
    torch.testing.assert_close(rig.draw(pipe, steps), picture, rtol=1e-4, atol=1e-5)
    assert rows(pipe) == expected
    assert "." in expected[0][1]


@pytest.mark.parametrize(
    ("rig", "way", "cache_first"),
    [(FLUX, way, order) for way in WAYS for order in (True, False)]
    + [(rig, way, way is not whole) for rig in (SD3, QWEN, WAN) for way in WAYS],
    ids=str_or_name,
)
def test_pipelines_keep_graphs_plan_and_pictures(rig: Rig, way: Way, cache_first: bool) -> None:
    expected = graphs_without_cache(rig, way) + (way is not blocks)
    graphs = Graphs()
    pipe = built(rig, way, cache_first, backend=graphs, fullgraph=True)
    assert_as_eager(rig, pipe, LENGTHS[0])
    assert graphs.count == expected
    with no_recompiles():
        for steps in LENGTHS[1:]:
            assert_as_eager(rig, pipe, steps)
    assert graphs.count == expected
    assert not counters["graph_break"]


@by_way
def test_without_fullgraph_there_is_no_break_either(way: Way) -> None:
    graphs = Graphs()
    pipe = built(FLUX, way, True, backend=graphs)
    assert_as_eager(FLUX, pipe, 8)
    assert graphs.count == graphs_without_cache(FLUX, way) + (way is not blocks)
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("rig", "dynamic"),
    [(FLUX, None), (FLUX, True)],
    ids=["automatic", "dynamic"],
)
def test_a_second_resolution_is_a_warm_up_of_its_own(rig: Rig, dynamic: bool | None) -> None:
    sizes = (rig.size, rig.other)
    plain, graphs = Graphs(), Graphs()
    pipe = rig.build()
    pipe.transformer = wrapped(pipe.transformer, backend=plain, fullgraph=True, dynamic=dynamic)
    for size in sizes:
        rig.draw(pipe, 2, size=size)
    torch.compiler.reset()

    cached = rig.build()
    magcache.enable(cached, CONFIG)
    pipe = built(rig, wrapped, True, backend=graphs, fullgraph=True, dynamic=dynamic)
    for size in sizes:
        rig.draw(pipe, 8, size=size)
    if dynamic is None:
        assert graphs.count == 2 * plain.count
    with no_recompiles():
        # The third was in no warm-up.
        for size in (*sizes, rig.size + rig.other):
            picture = rig.draw(cached, 5, size=size)
            torch.testing.assert_close(rig.draw(pipe, 5, size=size), picture, rtol=1e-4, atol=1e-5)
            assert rows(pipe) == rows(cached)


@functools.cache
def curve_of(rig: Rig) -> MagnitudeCurve:
    """What the pipeline without a compiler measures."""
    pipe = rig.build()
    with tempfile.TemporaryDirectory() as folder:
        with magcache.enable(pipe, MagCacheConfig(mag_calibrate=True), curves=folder):
            rig.draw(pipe, 12)
        curve = find_curve(pipe.transformer, folder)
    assert curve is not None
    return curve


@pytest.mark.parametrize(
    ("rig", "way"), [(FLUX, blocks), (FLUX, wrapped), (SD3, whole)], ids=str_or_name
)
def test_plans_for_a_budget_combine_several_residuals(rig: Rig, way: Way) -> None:
    config = MagCacheConfig(mag_ratios=curve_of(rig), budget=Budget(speedup=2.0))
    cached, graphs = rig.build(), Graphs()
    magcache.enable(cached, config)
    pipe = built(rig, way, True, config, backend=graphs, fullgraph=True)
    held: set[int] = set()

    def ended(_: Any, step: int, t: Any, kwargs: Any) -> Any:
        cache = cache_of(pipe.transformer)
        assert cache is not None
        held.update(len(state.held) for state in cache.states.values())
        return kwargs

    for steps in (12, 16, 9):
        with no_recompiles() if graphs.count else contextlib.nullcontext():
            picture = rig.draw(pipe, steps, callback_on_step_end=ended)
        torch.testing.assert_close(picture, rig.draw(cached, steps), rtol=1e-4, atol=1e-5)
        assert rows(pipe) == rows(cached)
        assert "." in rows(pipe)[0][1]
    assert max(held) == 3
    assert graphs.count == graphs_without_cache(rig, way) + (way is not blocks)


@pytest.mark.parametrize(("way", "cache_first"), [(whole, True), (wrapped, False)], ids=str_or_name)
def test_the_first_run_calibrates(way: Way, cache_first: bool) -> None:
    graphs = Graphs()
    settings = MagCacheConfig(0.5, 3, 0.2)
    pipe = built(FLUX, way, cache_first, settings, backend=graphs, fullgraph=True)
    FLUX.draw(pipe, 12)
    assert {row for _, row in rows(pipe)} == {"C" * 12}
    assert graphs.count == 1
    curve, expected = find_curve(FLUX.build().transformer), curve_of(FLUX)
    assert curve is not None
    assert list(curve.streams) == list(expected.streams) == list(FLUX.streams)
    for name, stream in expected.streams.items():
        assert curve.streams[name].ratios == pytest.approx(stream.ratios, rel=1e-4)
    FLUX.draw(pipe, 8)
    assert "." in rows(pipe)[0][1]
    assert graphs.count == 2
    with no_recompiles():
        FLUX.draw(pipe, 12)


@either_order
@pytest.mark.parametrize(
    ("case", "way"),
    [(case, wrapped) for case in BARE[:2]] + [(case, way) for case in SMALL for way in WAYS],
    ids=str_or_name,
)
def test_a_bare_transformer(case: Case, way: Way, cache_first: bool) -> None:
    inputs, plain, graphs = case.inputs(0, 1, 4), Graphs(), Graphs()
    with torch.no_grad():
        expected = case.build()(**inputs)
        way(case.build(), lists=case.lists, backend=plain, fullgraph=True)(**inputs)
    torch.compiler.reset()

    model = case.build()
    if not cache_first:
        model = way(model, lists=case.lists, backend=graphs, fullgraph=True)
    with enabled(model):
        if cache_first:
            model = way(model, lists=case.lists, backend=graphs, fullgraph=True)
        outputs = run(model, [inputs])
        with no_recompiles():
            outputs += run(model, [inputs])
        assert magcache.stats(model).streams[0].happened == "C.C."
    assert graphs.count == plain.count + (way is not blocks)
    for output in outputs:
        assert distance(output[0], expected) < 1e-5


@either_order
def test_two_streams_of_a_bare_transformer(cache_first: bool) -> None:
    model, graphs, calls = named("flux").build(), Graphs(), [flux_inputs(i, 1, 4) for i in (0, 1)]
    with torch.no_grad():
        expected = [model(**call) for call in calls]
    if not cache_first:
        model = wrapped(model, backend=graphs, fullgraph=True)
    with enabled(model):
        if cache_first:
            model = wrapped(model, backend=graphs, fullgraph=True)
        outputs = run(model, calls, contexts=True)
        streams = [(s.stream, s.happened) for s in magcache.stats(model).streams]
    assert streams == [("cond", "C.C."), ("uncond", "C.C.")]
    assert graphs.count == 2
    for output in outputs:
        assert distance(output[0], expected[0]) < 1e-5
        assert distance(output[1], expected[1]) < 1e-5


def test_enabling_again_finds_the_cache() -> None:
    graphs = Graphs()
    pipe = built(FLUX, wrapped, True, MagCacheConfig(0.0), backend=graphs, fullgraph=True)
    FLUX.draw(pipe, 8)
    magcache.enable(pipe, CONFIG)
    for steps in LENGTHS:
        assert_as_eager(FLUX, pipe, steps)
    count = graphs.count
    magcache.enable(pipe, CONFIG)
    with no_recompiles():
        assert_as_eager(FLUX, pipe, 8)
    assert graphs.count == count


@either_order
@by_way
def test_disable_gives_back_what_was_compiled(way: Way, cache_first: bool) -> None:
    graphs, rig = Graphs(), FLUX
    pipe = rig.build()
    model = pipe.transformer
    plain, before = rig.draw(pipe, 5), snapshot(model)
    if not cache_first:
        pipe.transformer = way(model, backend=graphs, fullgraph=True)
        before = snapshot(pipe.transformer)
    magcache.enable(pipe, CONFIG)
    if cache_first:
        pipe.transformer = way(model, backend=graphs, fullgraph=True)
    rig.draw(pipe, 5)
    magcache.disable(pipe)
    if not cache_first:
        assert_same_attributes(before, snapshot(pipe.transformer))
    elif way is wrapped:
        # torch.compile's own mark on what it wraps.
        before["0."]["_is_torch_compile"] = True
        assert_same_attributes(before, snapshot(model))
    assert cache_of(pipe.transformer) is None
    assert not any(hasattr(getattr(v, "__func__", None), "magcache") for v in vars(model).values())
    torch.testing.assert_close(rig.draw(pipe, 5), plain, rtol=1e-4, atol=1e-5)
    # Compiled without the cache now: as many graphs as ever, and no more.
    count = graphs.count
    with no_recompiles():
        rig.draw(pipe, 8)
    assert graphs.count == count


def test_residuals_outlive_the_memory_of_a_graph() -> None:
    pipe = built(SD3, wrapped, True, backend=Overwriting(), fullgraph=True)
    for steps in LENGTHS:
        assert_as_eager(SD3, pipe, steps)


def test_bases_are_measured_outside_of_the_graph() -> None:
    """The second pass of such a model would overwrite what the first returned."""
    case = named("AddsAfterStack")
    model, inputs = case.build(), case.inputs(0, 1, 4)
    with torch.no_grad():
        expected = model(**inputs)
    with enabled(model):
        model = wrapped(model, backend=Overwriting(), fullgraph=True)
        for _ in steps_of(model):
            assert distance(model(**inputs), expected) < 1e-5
        assert magcache.stats(model).streams[0].happened == "C.C."


def test_what_calls_the_transformer_may_be_compiled_around_it() -> None:
    model, inputs = randomised(Plain()), plain_inputs(0, 1, 4)
    expected = model(**inputs)

    def caller(call: dict[str, Any]) -> Any:
        return model(**call) * 1.0

    with enabled(model):
        outer = torch.compile(caller, backend=Graphs())
        for _ in steps_of(model):
            assert distance(outer(inputs), expected) < 1e-5
        assert magcache.stats(model).streams[0].happened == "C.C."
        torch.compiler.reset()
        strict = torch.compile(caller, backend=Graphs(), fullgraph=True)
        with pytest.raises(Unsupported, match="compile the transformer, not what calls it"):
            strict(inputs)


def test_aot_eager() -> None:
    pipe = built(FLUX, wrapped, True, backend="aot_eager", fullgraph=True)
    assert_as_eager(FLUX, pipe, 8)
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_as_eager(FLUX, pipe, 12)
    assert graphs == counters["stats"]["unique_graphs"] == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    model, inputs = randomised(Plain()), plain_inputs(0, 1, 4)
    with torch.no_grad():
        expected = model(**inputs)
    with enabled(model):
        model = torch.compile(model, fullgraph=True)
        outputs = run(model, [inputs])
        with no_recompiles():
            outputs += run(model, [inputs])
        assert magcache.stats(model).streams[0].happened == "C.C."
    assert counters["stats"]["unique_graphs"] == 2
    for output in outputs:
        assert distance(output[0], expected) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs(mode: str) -> None:
    reference, pipe = SD3.build().to("cuda"), SD3.build().to("cuda")
    magcache.enable(reference, CONFIG)
    magcache.enable(pipe, CONFIG)
    pipe.transformer = torch.compile(pipe.transformer, mode=mode, fullgraph=True)
    SD3.draw(pipe, 8)
    for steps in LENGTHS:
        expected = SD3.draw(reference, steps)
        torch.testing.assert_close(SD3.draw(pipe, steps), expected, rtol=1e-3, atol=1e-4)
        assert rows(pipe) == rows(reference)


@pytest.mark.parametrize("case", BARE, ids=str)
def test_export_after_disable_gives_the_graph_of_a_model_never_cached(case: Case) -> None:
    inputs, never, model = case.inputs(0, 1, 4), case.build(), case.build()
    with enabled(model):
        run(model, [inputs])
    with torch.no_grad():
        expected = torch.export.export(never, (), inputs)
        exported = torch.export.export(model, (), inputs)
        assert exported.graph_module.code == expected.graph_module.code
        assert str(exported.graph_signature) == str(expected.graph_signature)
        assert all(map(torch.equal, tensors(exported.module()(**inputs)), tensors(never(**inputs))))
