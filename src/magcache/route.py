"""Where a residual enters and leaves a model: learned from one call, by trying.

The model is run once with its blocks and once, on the same inputs, with the stack stepped over.
Past the stack, the first values that differ are where a residual belongs; with those put right the
rest must come out as it did with the blocks. So nothing needs to be known of the model's class:
fused streams, values injected between blocks (ControlNet, VACE) and code between the last block
and the norm are all part of what is compared. Costs two stepped-over passes, once per kind of call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from magcache.errors import CannotCacheError
from magcache.outputs import output_tensors
from magcache.standin import Call, Key, StandIn, Watched, standing_in, stepped_over, walked

__all__ = ["OUTPUT", "Exit", "Route", "Source", "learn_route"]

# Name of the exit that is the forward's own output, where no module takes the stack's.
OUTPUT = ""


@dataclass(frozen=True)
class Source:
    """An argument of the block that a list's walk enters first: what entered the stack."""

    blocks: str
    block: str
    argument: Key
    # Some blocks write into their input; then the note of what entered must be a copy.
    clone: bool


@dataclass(frozen=True)
class Exit:
    """Arguments, at one call of a child past the stack, that take a residual.

    `walked` and `skipped` number that call among the child's calls of a pass, from 0: a child that
    is also called between blocks is called less often when they are stepped over. Arguments stand
    in the order (hidden, encoder). A source of None means that the argument is not simply what
    entered the stack; its base is then measured with a stepped-over pass at each computed step.
    """

    child: str
    walked: int
    skipped: int
    arguments: tuple[Key, ...]
    sources: tuple[Source | None, ...]


@dataclass(frozen=True)
class Route:
    """The exits of a model for one kind of call, in the order in which a forward meets them."""

    exits: tuple[Exit, ...]

    @property
    def measured(self) -> bool:
        """Whether a computed step needs a stepped-over pass to tell its residual."""
        return any(source is None for exit in self.exits for source in exit.sources)


@dataclass
class _Entry:
    """A list's first block call: its tensors, and copies from before the block could write."""

    block: str
    tensors: dict[Key, torch.Tensor]
    copies: dict[Key, torch.Tensor]


@dataclass
class _Trace:
    """What one watched pass met."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    # Calls of children since the last block: (child, number of the call) -> arguments.
    past_stack: dict[tuple[str, int], Call] = field(default_factory=dict)
    blocks_met: int = 0


Forward = Callable[..., Any]


def learn_route(
    module: nn.Module, lists: tuple[str, ...], forward: Forward, call: Call
) -> tuple[Any, Route | None, tuple[torch.Tensor, ...]]:
    """Run `forward` on `call`; returns (its output, the route, the residuals' exit and base pairs).

    The last is a flat tuple value, base, value, base, ... in the order of the exits' arguments.
    The route is None where the stack leaves no trace in the output (blocks that are all zero):
    there is nothing to learn from such a call. Raises `CannotCacheError` where the model does not
    walk its lists, or does not run with the stack stepped over.
    """
    trace = _Trace()
    with standing_in(module, _watching(module, lists, trace)):
        output = forward(*call.args, **call.kwargs)
    if not trace.blocks_met:
        raise CannotCacheError(
            f"{type(module).__name__} did not walk {_names(lists)} in its forward; register a "
            "MagCacheStrategy that names its block classes"
        )

    dry = _Trace()
    _run_stepped_over(module, lists, forward, call, _watching(module, (), dry))
    exits, pairs, replayed = _replay(module, lists, forward, call, trace, dry)

    shortfall = _differing(output_tensors(output), output_tensors(replayed))
    if shortfall:
        computed, stepped = output_tensors(output), output_tensors(replayed)
        exits.append(_exit(OUTPUT, 0, 0, {k: stepped[k] for k in shortfall}, trace))
        pairs += [tensor for k in exits[-1].arguments for tensor in (computed[k], stepped[k])]
    return output, (Route(tuple(exits)) if exits else None), tuple(pairs)


def _watching(module: nn.Module, lists: tuple[str, ...], trace: _Trace) -> dict[str, nn.Module]:
    """Stand-ins that note every block of the lists and every other child that can be called."""

    def on_block(name: str, key: str) -> Callable[[Call], Call]:
        def report(call: Call) -> Call:
            if name not in trace.entries:
                tensors = call.tensors()
                copies = {k: tensor.clone() for k, tensor in tensors.items()}
                trace.entries[name] = _Entry(key, tensors, copies)
            trace.blocks_met += 1
            trace.past_stack.clear()
            return call

        return report

    def on_child(name: str) -> Callable[[Call], Call]:
        def report(call: Call) -> Call:
            trace.past_stack[name, trace.calls[name]] = call
            trace.calls[name] += 1
            return call

        return report

    children: dict[str, nn.Module] = {}
    for name in lists:
        blocks = module._modules[name]
        assert blocks is not None
        watched: dict[str, StandIn] = {
            key: Watched(block, on_block(name, key))
            for key, block in blocks._modules.items()
            if block is not None
        }
        children[name] = walked(blocks, watched)
    for name, child in module.named_children():
        if name not in lists and type(child).forward is not nn.Module.forward:
            children[name] = Watched(child, on_child(name))
    return children


def _run_stepped_over(
    module: nn.Module,
    lists: tuple[str, ...],
    forward: Forward,
    call: Call,
    children: dict[str, nn.Module],
) -> Any:
    over = {name: stepped_over(module._modules[name]) for name in lists}  # type: ignore[arg-type]
    try:
        with standing_in(module, {**children, **over}):
            return forward(*call.args, **call.kwargs)
    except Exception as error:
        raise CannotCacheError(
            f"{type(module).__name__} does not run with {_names(lists)} stepped over "
            f"({type(error).__name__}: {error}); it needs a MagCacheStrategy of its own"
        ) from error


def _replay(
    module: nn.Module,
    lists: tuple[str, ...],
    forward: Forward,
    call: Call,
    trace: _Trace,
    dry: _Trace,
) -> tuple[list[Exit], list[torch.Tensor], Any]:
    """Step over the stack and put right, one by one, what differs past it."""
    exits: list[Exit] = []
    pairs: list[torch.Tensor] = []
    seen: Counter[str] = Counter()

    def on_child(name: str) -> Callable[[Call], Call]:
        def report(stepped: Call) -> Call:
            skipped = seen[name]
            seen[name] += 1
            # Counted from the end, the calls of both passes are the same ones.
            number = skipped + trace.calls[name] - dry.calls[name]
            if (name, number) not in trace.past_stack:
                return stepped
            computed = trace.past_stack[name, number].tensors()
            differing = _differing(computed, stepped.tensors())
            if not differing:
                return stepped
            found = _exit(name, number, skipped, {k: stepped[k] for k in differing}, trace)
            exits.append(found)
            pairs.extend(t for k in found.arguments for t in (computed[k], stepped[k]))
            return stepped.replaced({k: computed[k] for k in differing})

        return report

    children: dict[str, nn.Module] = {
        name: Watched(module._modules[name], on_child(name))  # type: ignore[arg-type]
        for name in {child for child, _ in trace.past_stack}
    }
    output = _run_stepped_over(module, lists, forward, call, children)
    return exits, pairs, output


def _exit(
    child: str, number: int, skipped: int, stepped: dict[Key, torch.Tensor], trace: _Trace
) -> Exit:
    # (hidden, encoder): the one order of residual tuples.
    arguments = tuple(sorted(stepped, key=lambda key: str(key).startswith("encoder")))
    sources = tuple(_source(stepped[key], trace.entries) for key in arguments)
    return Exit(child, number, skipped, arguments, sources)


def _source(base: torch.Tensor, entries: dict[str, _Entry]) -> Source | None:
    """The argument of a first block that `base` is, up to its dtype."""
    for name, entry in entries.items():
        for key, copy in entry.copies.items():
            if copy.shape == base.shape and _same(copy.to(base.dtype), base):
                clone = not _same(entry.tensors[key], copy)
                return Source(name, entry.block, key, clone)
    return None


def _differing(computed: dict[Any, torch.Tensor], stepped: dict[Any, torch.Tensor]) -> list[Any]:
    return [k for k, tensor in computed.items() if k in stepped and not _same(tensor, stepped[k])]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to what non-deterministic kernels do to the last bits."""
    if a.shape != b.shape:
        return False
    coarsest = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    tolerance = 1e-5 if coarsest < 1e-6 else 1e-2
    a, b = a.double().nan_to_num(), b.to(a.device).double().nan_to_num()
    return bool((a - b).norm() <= tolerance * b.norm())


def _names(lists: tuple[str, ...]) -> str:
    return " and ".join(lists)
