"""The identical-input oracle: a skipped step gives what a computed one does on the same inputs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import FlowMatchEulerDiscreteScheduler
from models import (
    CASES,
    REAL,
    Case,
    Injected,
    InjectedAfter,
    Inputs,
    Plain,
    cast,
    distance,
    dit,
    dit_inputs,
    flux,
    flux_inputs,
    injected_inputs,
    normal,
    plain_inputs,
    randomised,
    same_container,
    sd3,
    sd3_inputs,
    tensors,
    wan,
    wan_inputs,
)
from torch import Tensor, nn

import magcache
from magcache import MagCacheConfig
from magcache.hook import cache_of

STEPS = 4
# C.C.: one residual from the call that learns the route, one from an ordinary walk.
EVERY_OTHER = MagCacheConfig(1.0, 1, 0.0, mag_ratios=[1.0] * STEPS)
CONTEXTS = ("cond", "uncond")


def named(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_real_case = pytest.mark.parametrize("case", REAL, ids=str)


def run(
    model: Any,
    calls: Sequence[Inputs] | Callable[[int], Sequence[Inputs]],
    *,
    contexts: bool = False,
    before_call: Callable[[int], None] = lambda step: None,
    steps: int = STEPS,
) -> list[list[Any]]:
    """Outputs by step and call of an enabled model, in a loop that a scheduler tells the steps."""
    scheduler = cache_of(model).clock.owners[0].scheduler  # type: ignore[union-attr]
    scheduler.set_timesteps(steps)
    outputs = []
    for step, t in enumerate(scheduler.timesteps):
        made = []
        for name, call in zip(CONTEXTS, calls(step) if callable(calls) else calls, strict=False):
            before_call(step)
            with model.cache_context(name) if contexts else contextlib.nullcontext():
                made.append(model(**call))
        outputs.append(made)
        scheduler.step(torch.zeros(1), t, torch.zeros(1))
    return outputs


@contextlib.contextmanager
def enabled(model: Any, config: MagCacheConfig = EVERY_OTHER) -> Iterator[None]:
    scheduler = FlowMatchEulerDiscreteScheduler()
    with torch.no_grad(), magcache.enable(model, config, scheduler=scheduler):
        yield


def check_oracle(model: Any, calls: Sequence[Inputs], tolerance: float, contexts: bool) -> None:
    with torch.no_grad():
        plain = [model(**call) for call in calls]
    with enabled(model):
        outputs = run(model, calls, contexts=contexts)
        rows = [s.happened for s in magcache.stats(model).streams]
    assert rows == ["C.C."] * len(calls)
    for computed, skipped in ((outputs[0], outputs[1]), (outputs[2], outputs[3])):
        for reference, c, s in zip(plain, computed, skipped, strict=True):
            assert all(map(torch.equal, tensors(c), tensors(reference)))
            assert same_container(c, reference)
            assert same_container(s, reference)
            assert distance(s, reference) <= tolerance


@by_case
def test_skipped_step_gives_what_a_computed_one_does(case: Case) -> None:
    check_oracle(case.build(), [case.inputs(0, 1, 4)], 1e-5, contexts=False)


@by_case
def test_batched_guidance(case: Case) -> None:
    check_oracle(case.build(), [case.inputs(0, 2, 3)], 1e-5, contexts=False)


@by_case
def test_sequential_guidance_without_contexts(case: Case) -> None:
    check_oracle(case.build(), [case.inputs(0, 1, 4), case.inputs(50, 1, 4)], 1e-5, contexts=False)


@by_real_case
def test_sequential_guidance_with_contexts(case: Case) -> None:
    model = case.build()
    if not hasattr(model, "cache_context"):
        assert case.name.startswith(("sd3", "dit", "pixart"))
        return
    check_oracle(model, [case.inputs(0, 1, 4), case.inputs(50, 1, 4)], 1e-5, contexts=True)


@by_real_case
def test_bfloat16(case: Case) -> None:
    model = case.build().to(torch.bfloat16)
    inputs = cast(case.inputs(0, 1, 4), torch.bfloat16)
    check_oracle(model, [inputs], 3e-2, contexts=False)


@by_real_case
def test_autocast(case: Case) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check_oracle(case.build(), [case.inputs(0, 1, 4)], 3e-2, contexts=False)


@pytest.mark.parametrize("kind", [Injected, InjectedAfter])
@pytest.mark.parametrize("zero", [True, False])
def test_what_is_learned_holds_when_an_injection_begins_later(
    kind: type[Plain], zero: bool
) -> None:
    """A ControlNet that starts after some steps: until then it gives zeros, or nothing."""
    model, later = randomised(kind()), injected_inputs(0, 1, 4)
    former = {**later, "injected": torch.zeros_like(later["injected"]) if zero else None}
    with enabled(model):
        outputs = run(model, lambda step: [later if step > 1 else former])
    assert distance(outputs[1], outputs[0]) < 1e-5
    assert distance(outputs[3], outputs[2]) < 1e-5
    assert distance(outputs[2], outputs[0]) > 1e-2


@by_real_case
@pytest.mark.parametrize("return_dict", [True, False])
def test_container_is_the_computed_one(case: Case, return_dict: bool) -> None:
    inputs = {**case.inputs(0, 1, 4), "return_dict": return_dict}
    check_oracle(case.build(), [inputs], 1e-5, contexts=False)


@by_case
def test_without_the_residual_a_skipped_step_is_wrong(case: Case) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)

    def drop(step: int) -> None:
        for state in cache_of(model).states.values():  # type: ignore[union-attr]
            if state.held and step % 2:
                at, parts = state.held[-1]
                zeros = tuple(torch.zeros_like(t) for t in parts.tensors)
                state.held[-1] = (at, replace(parts, tensors=zeros))

    with enabled(model):
        outputs = run(model, [inputs], before_call=drop)
    assert distance(outputs[1], outputs[0]) > 0.02
    assert distance(outputs[3], outputs[2]) > 0.02


@by_case
def test_no_block_works_on_a_skipped_step(case: Case) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)
    ran: list[str] = []

    def count(name: str) -> Callable[..., None]:
        return lambda *_: ran.append(name)

    for listed in case.lists:
        for name, part in getattr(model, listed).named_modules():
            # DiT takes its output's embedding from block 0: that is not the block's own work.
            if name and not name.startswith("0.norm1"):
                part.register_forward_pre_hook(count(f"{listed}.{name}"))
    with torch.no_grad():
        model(**inputs)
    plain = list(ran)
    assert plain

    per_step: list[list[str]] = []
    ran.clear()

    def collect(step: int) -> None:
        per_step.append(list(ran))
        ran.clear()

    with enabled(model):
        run(model, [inputs], before_call=collect)
    collect(STEPS)
    assert per_step[1:] == [plain, [], plain, []]


@by_real_case
def test_residual_of_one_step_is_added_to_the_input_of_the_next(case: Case) -> None:
    """Against a plain model whose tail is handed that sum by a forward hook of the test's own."""
    model = case.build()
    first, second = case.inputs(0, 1, 4), {**case.inputs(0, 1, 4)}
    second["hidden_states"] = case.inputs(7, 1, 4)["hidden_states"]
    block, tail = getattr(model, case.lists[0])[0], model.norm_out
    seen: dict[str, Tensor] = {}
    handles = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(head=(*args, *kwargs.values())[0].clone()),
            with_kwargs=True,
        ),
        tail.register_forward_pre_hook(lambda _, args: seen.update(tail=args[0].clone())),
    ]
    if case.name == "flux_one_single_block":
        # A single block's input is text and image alike, and the tail takes the image's part.
        handles[0].remove()
        handles[0] = model.x_embedder.register_forward_hook(
            lambda _, __, out: seen.update(head=out.clone())
        )
    with torch.no_grad():
        model(**first)
        residual = seen["tail"] - seen["head"]
        model(**second)
        handles[1].remove()
        wanted = (seen["head"] + residual).to(seen["tail"].dtype)
        with tail.register_forward_pre_hook(lambda _, args: (wanted, *args[1:])):
            expected = model(**second)
        handles[0].remove()
        assert distance(expected, model(**second)) > 1e-3
    with enabled(model):
        outputs = run(model, lambda step: [second if step % 2 else first])
    assert distance(outputs[1][0], expected) < 1e-5
    assert distance(outputs[3][0], expected) < 1e-5


def test_plain_residual_by_hand() -> None:
    model = randomised(Plain())
    first, second = plain_inputs(0, 1, 3), plain_inputs(1, 1, 3)
    with torch.no_grad():
        inside = [model.embed(i["x"]) + i["timestep"][:, None, None] for i in (first, second)]
        residual = model.walk(inside[0]) - inside[0]
        expected = model.head(model.norm(inside[1] + residual))
    with enabled(model):
        outputs = run(model, lambda step: [second if step % 2 else first])
    torch.testing.assert_close(outputs[1][0], expected)
    torch.testing.assert_close(outputs[3][0], expected)


@by_case
def test_threshold_zero_is_bit_equal_to_the_plain_model(case: Case) -> None:
    model = case.build()
    calls = [case.inputs(seed, 1, 4) for seed in range(STEPS)]
    with torch.no_grad():
        plain = [model(**call) for call in calls]
    with enabled(model, MagCacheConfig(0, 3, 0.0, mag_ratios=[1.0] * STEPS)):
        outputs = run(model, lambda step: [calls[step]])
        assert [s.happened for s in magcache.stats(model).streams] == ["C" * STEPS]
    for reference, output in zip(plain, outputs, strict=True):
        assert all(map(torch.equal, tensors(output[0]), tensors(reference)))


def snapshot(*owners: Any) -> dict[str, dict[str, Any]]:
    """The attributes of objects and of every module in them; containers by content."""
    found = {}
    for number, owner in enumerate(owners):
        modules = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
        for name, module in modules:
            values = {}
            for key, value in vars(module).items():
                values[key] = dict(value) if isinstance(value, dict) else value
            found[f"{number}.{name}"] = values
    return found


def assert_same_attributes(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> None:
    assert list(before) == list(after)
    for name, values in before.items():
        assert list(values) == list(after[name]), name
        for key, value in values.items():
            now = after[name][key]
            if isinstance(value, dict):
                assert list(value) == list(now), f"{name}.{key}"
                assert all(value[k] is now[k] for k in value), f"{name}.{key}"
            else:
                # Bound methods are made anew on each look.
                assert now is value or now == value, f"{name}.{key}"


@by_case
def test_disable_leaves_no_attribute_behind(case: Case) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        plain = model(**inputs)
        before = snapshot(model)
        keys = set(vars(scheduler))
        magcache.enable(model, EVERY_OTHER, scheduler=scheduler)
        assert snapshot(model) != before
        run(model, [inputs])
        magcache.disable(model)
        assert_same_attributes(before, snapshot(model))
        assert set(vars(scheduler)) == keys
        assert all(map(torch.equal, tensors(model(**inputs)), tensors(plain)))


def test_disable_puts_a_forward_of_the_instance_back() -> None:
    """As offload hooks leave one behind."""
    model, calls = randomised(Plain()), []
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    model.forward = forward
    with enabled(model):
        run(model, [plain_inputs(0, 1, 3)])
        assert len(calls) >= STEPS  # the route is learned by further passes
    assert model.forward is forward


@by_case
def test_the_list_is_the_list_while_enabled(case: Case) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)
    looks: list[Any] = []

    def look() -> list[Any]:
        seen: list[Any] = [list(model.state_dict()), [n for n, _ in model.named_modules()]]
        for listed in case.lists:
            blocks = getattr(model, listed)
            seen += [len(blocks), [id(b) for b in blocks], id(blocks[0]), id(blocks[-1])]
            seen += [id(blocks), type(blocks), [id(b) for b in blocks[:1]]]
        return seen

    before = look()
    with enabled(model):
        assert look() == before
        run(model, [inputs], before_call=lambda step: looks.append(look()))
        looks.append(look())
    assert [*looks, look()] == [before] * (STEPS + 2)


@by_case
def test_weights_can_be_swapped_while_enabled(case: Case) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)
    other = randomised(case.build(), seed=9)
    with torch.no_grad():
        expected = other(**inputs)
    with enabled(model):
        run(model, [inputs])
        model.load_state_dict(other.state_dict())
        outputs = run(model, [inputs])
    assert all(map(torch.equal, tensors(outputs[0]), tensors(expected)))
    assert distance(outputs[1][0], expected) < 1e-5


def test_a_replaced_block_is_used() -> None:
    model = randomised(Plain())
    inputs = plain_inputs(0, 1, 3)
    with enabled(model):
        run(model, [inputs])
        model.blocks[0] = randomised(Plain(), seed=5).blocks[0]
        outputs = run(model, [inputs])
    with torch.no_grad():
        expected = model(**inputs)
    assert torch.equal(outputs[0][0], expected)
    assert torch.equal(outputs[2][0], expected)
    assert distance(outputs[1][0], expected) < 1e-5
    assert distance(outputs[3][0], expected) < 1e-5


@pytest.mark.parametrize("case", [named("flux"), named("sd3"), named("Injected")], ids=str)
def test_deep_copy_of_an_enabled_model_runs_plainly_and_by_itself(case: Case) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)
    with torch.no_grad():
        plain = model(**inputs)
    with enabled(model):
        run(model, [inputs])
        rows = magcache.stats(model)
        twin = copy.deepcopy(model)
        assert cache_of(twin) is None
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.1)
            for _ in range(3):
                changed = twin(**inputs)
                assert distance(changed, plain) > 1e-3
        assert magcache.stats(model) == rows
        outputs = run(model, [inputs])
        assert distance(outputs[1][0], plain) < 1e-5
        with enabled(twin):
            own = run(twin, [inputs])
    assert distance(own[1][0], changed) < 1e-5
    with torch.no_grad():
        assert torch.equal(tensors(twin(**inputs))[0], tensors(changed)[0])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(STEPS))
@pytest.mark.parametrize("case", [named("flux"), named("wan"), named("Injected")], ids=str)
def test_an_error_inside_the_forward_leaves_the_model_whole(
    case: Case, at: int, error: type[BaseException]
) -> None:
    model, inputs = case.build(), case.inputs(0, 1, 4)
    with torch.no_grad():
        plain = model(**inputs)
    armed = {"step": -1}
    tail = getattr(model, "norm_out", None) or model.norm

    def strike(*_: Any) -> None:
        if armed["step"] == at:
            raise error("struck")

    with enabled(model):
        with tail.register_forward_pre_hook(strike), pytest.raises(error, match="struck"):
            run(model, [inputs], before_call=lambda step: armed.update(step=step))
        children = {name: id(child) for name, child in model.named_children()}
        assert {name: id(model._modules[name]) for name in children} == children
        assert all(type(b).__module__ != "magcache.standin" for b in model.modules())
        assert not any(type(b).__module__.startswith("magcache") for b in model.modules())
        armed["step"] = -1
        outputs = run(model, [inputs])
        assert [s.happened for s in magcache.stats(model).streams] == ["C.C."]
        for output in outputs:
            assert distance(output[0], plain) < 1e-5
    assert torch.equal(tensors(model(**inputs))[0], tensors(plain)[0])


@pytest.mark.parametrize("cache_first", [True, False])
def test_a_hook_of_accelerate_on_the_same_module(cache_first: bool) -> None:
    """As CPU offload installs one, before enable or after it."""
    model, inputs = flux(), flux_inputs(0, 1, 4)
    seen: list[int] = []

    class Counting(ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return args, kwargs

    with torch.no_grad():
        plain = model(**inputs)
        if not cache_first:
            add_hook_to_module(model, Counting())
        with enabled(model):
            if cache_first:
                add_hook_to_module(model, Counting())
            outputs = run(model, [inputs])
            assert [s.happened for s in magcache.stats(model).streams] == ["C.C."]
            assert all(distance(output[0], plain) < 1e-5 for output in outputs)
            assert len(seen) >= STEPS
        assert cache_of(model) is None
        assert torch.equal(model(**inputs).sample, plain.sample)
        with enabled(model):
            assert distance(run(model, [inputs])[1][0], plain) < 1e-5
        remove_hook_from_module(model)
        assert torch.equal(model(**inputs).sample, plain.sample)


def test_streams_may_carry_other_kinds_of_arguments() -> None:
    """A ControlNet on the conditional pass only."""
    model = flux()
    base = flux_inputs(0, 1, 4)
    control = {**flux_inputs(1, 1, 4), "controlnet_block_samples": [normal(5, 1, 16, 16)] * 2}
    check_oracle(model, [control, base], 1e-5, contexts=True)


def test_contexts_that_carry_the_step_tell_it_without_a_scheduler() -> None:
    """Inputs and timestep are the same at all steps, so nothing else could."""
    model, calls = wan(), [wan_inputs(0, 1, 4), wan_inputs(50, 1, 4)]
    config = MagCacheConfig(1.0, 1, 0.0, num_inference_steps=99, mag_ratios=[1.0] * 6)
    with torch.no_grad():
        plain = [model(**call).sample for call in calls]
        with magcache.enable(model, config):
            for _ in range(2):
                for step in range(6):
                    for name, call, expected in zip(CONTEXTS, calls, plain, strict=True):
                        with model.cache_context(name, step_index=step, num_inference_steps=6):
                            assert distance(model(**call), expected) < 1e-5
                streams = magcache.stats(model).streams
                assert {s.stream: s.happened for s in streams} == dict.fromkeys(CONTEXTS, "C.C.C.")


def test_positional_calls() -> None:
    model = randomised(Plain())
    inputs = plain_inputs(0, 1, 3)
    scheduler = FlowMatchEulerDiscreteScheduler()
    with torch.no_grad():
        plain = model(**inputs)
        with magcache.enable(model, EVERY_OTHER, scheduler=scheduler):
            scheduler.set_timesteps(STEPS)
            for t in scheduler.timesteps:
                output = model(inputs["x"], inputs["timestep"])
                scheduler.step(torch.zeros(1), t, torch.zeros(1))
                assert distance(output, plain) < 1e-5
            assert magcache.stats(model).streams[0].happened == "C.C."


@pytest.mark.parametrize(
    ("build", "inputs"), [(dit, dit_inputs), (sd3, sd3_inputs), (flux, flux_inputs)]
)
def test_tensors_handed_in_are_not_written_to(
    build: Callable[[], Any], inputs: Callable[[int, int, int], Inputs]
) -> None:
    model, call = build(), inputs(0, 1, 4)
    before = copy.deepcopy(call)
    with enabled(model):
        run(model, [call])
    for name, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(call[name], value), name


class Strict(Plain):
    """Takes whole timesteps only, as an embedding table would."""

    def forward(self, x: Tensor, timestep: Tensor, injected: Tensor | None = None) -> Any:
        if not torch.equal(timestep, timestep.round()):
            raise ValueError("timesteps are whole numbers")
        return super().forward(x, timestep, injected)


def test_a_model_that_refuses_changed_inputs_is_measured() -> None:
    """Learning tries other inputs too; where they are refused, bases are measured each time."""
    model = randomised(Strict())
    inputs = {**plain_inputs(0, 1, 4), "timestep": torch.ones(1)}
    check_oracle(model, [inputs], 1e-5, contexts=False)
    with enabled(model):
        run(model, [inputs])
        passages = cache_of(model).stack._passages.values()  # type: ignore[union-attr]
        assert [passage.route.measured for passage in passages] == [True]
