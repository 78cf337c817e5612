"""The identical-input oracle, tried on one entry: what a skipped step gives, and what it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

import magcache
from magcache import MagCacheConfig
from magcache.hook import cache_of
from magcache.route import Exit
from magcache.standin import is_block_list
from zoo.base import Made

__all__ = ["Row", "distance", "try_entry"]

# The first step is computed, all others are skipped.
ALWAYS_SKIP = MagCacheConfig(1e9, 99, 0.0, mag_ratios=[1.0])
# DiT's own way: what modulates its output is embedded by a part of the first block.
OUTPUT_EMBEDDING = "transformer_blocks.0.norm1.emb"


@dataclass(frozen=True)
class Row:
    """What happened to one class."""

    lists: tuple[str, ...]
    blocks: int
    exits: tuple[str, ...]
    measured: bool
    happened: tuple[str, ...]
    blocks_run: tuple[str, ...]
    # Lists of blocks outside the stack whose blocks ran on the skipped step.
    still_run: tuple[str, ...]
    computed_equal: bool
    same_container: bool
    error: float
    error_again: float
    error_dropped: float
    restored: bool

    def faults(self) -> list[str]:
        """What is wrong, in words; nothing where the class is right."""
        ran = [name for name in self.blocks_run if not name.startswith(OUTPUT_EMBEDDING)]
        rules = {
            "computed steps are not bit-equal to plain calls": self.computed_equal,
            f"steps went {self.happened}": self.happened == ("C.C..",),
            f"parts of blocks ran on a skip: {ran[:3]}": not ran,
            "the container changed": self.same_container,
            f"skipped step is wrong by {self.error:.1e}": self.error <= 1e-5,
            f"second skipped step is wrong by {self.error_again:.1e}": self.error_again <= 1e-5,
            f"without the residual nothing changes ({self.error_dropped:.1e})": (
                self.error_dropped > 1e-3
            ),
            "not restored after disable": self.restored,
        }
        return [fault for fault, right in rules.items() if not right]


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside an output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from tensors(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from tensors(member)


def distance(a: Any, b: Any) -> float:
    """Largest relative difference of two outputs' tensors; inf where they cannot be compared."""
    ours, theirs = list(tensors(a)), list(tensors(b))
    if [t.shape for t in ours] != [t.shape for t in theirs] or not ours:
        return float("inf")
    pairs = zip(ours, theirs, strict=True)
    distances = [float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs]
    return max(float("inf") if d != d else d for d in distances)


def equal(a: Any, b: Any) -> bool:
    """Bit-equal."""
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    return bool(pairs) and all(torch.equal(x, y) for x, y in pairs)


def shape_of(value: Any) -> Any:
    """The containers of an output, without their tensors."""
    if isinstance(value, dict):
        return type(value), {k: shape_of(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shape_of(v) for v in value]
    return type(value)


@torch.no_grad()
def try_entry(entry: Made) -> Row:
    """Five steps of the same call: learn the route, skip, compute along it, skip, skip without.

    `error` is that of the first skip, `error_again` of the second, `error_dropped` of the third,
    whose residual is zero.
    """
    model, arguments = entry
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5)
    # The calls carry a timestep of their own, which need not be where a run begins.
    scheduler.set_begin_index(0)
    ran: list[str] = []
    others: list[str] = []

    def call() -> Any:
        args, kwargs = arguments(0)
        return model(*args, **kwargs)

    def end_step(index: int) -> None:
        sample = torch.zeros(1)
        scheduler.step(sample, scheduler.timesteps[index], sample)

    plain = call()
    before, own = dict(vars(model)), dict(model._modules)
    magcache.enable(model, ALWAYS_SKIP, scheduler=scheduler)
    try:
        cache: Any = cache_of(model)
        learned = call()
        # Learning drops lists that are no part of the stack.
        lists = cache.stack.walked_lists
        end_step(0)
        state = next(iter(cache.states.values()), None)
        if state is None or not state.held:
            raise AssertionError(f"no residual: {magcache.stats(model)}")
        outside = tuple(
            name
            for name, module in model.named_modules()
            if is_block_list(module) and not f"{name}.".startswith(tuple(f"{n}." for n in lists))
        )
        handles = [*_watch(model, lists, ran), *_watch(model, outside, others)]
        skipped = call()
        for handle in handles:
            handle.remove()
        end_step(1)
        state.held.clear()
        computed = call()
        end_step(2)
        again = call()
        end_step(3)
        at, parts = state.held[-1]
        zeros = tuple(torch.zeros_like(t) for t in parts.tensors)
        state.held[-1] = (at, replace(parts, tensors=zeros))
        dropped = call()
        happened = tuple(s.happened for s in magcache.stats(model).streams)
        routes = [passage.route for passage in cache.stack._passages.values()]
    finally:
        magcache.disable(model)
    return Row(
        lists=lists,
        blocks=sum(len(model.get_submodule(name)) for name in lists),
        exits=tuple(_exit(e) for route in routes for e in route.exits),
        measured=any(route.measured for route in routes),
        happened=happened,
        blocks_run=tuple(ran),
        still_run=tuple(n for n in outside if any(o.startswith(f"{n}.") for o in others)),
        computed_equal=equal(learned, plain) and equal(computed, plain),
        same_container=shape_of(skipped) == shape_of(plain) == shape_of(learned),
        error=distance(skipped, plain),
        error_again=distance(again, plain),
        error_dropped=distance(dropped, plain),
        restored=equal(call(), plain) and vars(model) == before and model._modules == own,
    )


def _exit(exit: Exit) -> str:
    return f"{exit.child or 'output'}({', '.join(map(str, exit.arguments))})"


def _watch(model: nn.Module, lists: tuple[str, ...], ran: list[str]) -> Iterator[Any]:
    """Note every part of a block that is called."""

    def note(name: str) -> Any:
        return lambda *_: ran.append(name)

    for listed in lists:
        for name, part in model.get_submodule(listed).named_modules():
            if name:
                yield part.register_forward_pre_hook(note(f"{listed}.{name}"))
