"""Where a call enters and leaves the stack: the residual is taken there, or added.

Stand-ins note what enters (the head) and meet what comes out (the tail); what they know of one
forward pass is a `Crossing`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from magcache.residual import ResidualMisfitError, ResidualParts
from magcache.route import Exit, Key, Source
from magcache.standin import Call, StandIn
from magcache.strategy import MagCacheStrategy

__all__ = ["Crossing", "MagCacheBlockHook", "MagCacheHeadHook"]

# What an exit reads and writes: a call's arguments, or the tensors of an output by their paths.
Values = Call | dict[Key, Any]


class Crossing:
    """What passes between the stand-ins of one forward pass.

    `residual` is set on a skipped step and added at the exits. Else the exits note their `values`,
    and turn them into residual `parts` at once where the `heads` know what entered the stack. Where
    they do not (`measured`), a stepped-over pass follows that measures the bases: `replay` is set
    in it. `calls` counts those of each tail, by its name, in the pass that is on.
    """

    def __init__(self, strategy: MagCacheStrategy, *, measured: bool) -> None:
        self.strategy = strategy
        self.measured = measured
        self.heads: dict[tuple[str, str], MagCacheHeadHook] = {}
        self.residual: ResidualParts | None = None
        self.replay = False
        self.values: list[torch.Tensor] = []
        self.parts: list[torch.Tensor] = []
        self.dtypes: list[torch.dtype] = []
        self.calls: dict[str, int] = {}

    def clear(self) -> None:
        """Let go of the pass's tensors."""
        self.residual = None
        self.replay = False
        self.values, self.parts, self.dtypes = [], [], []
        for head in self.heads.values():
            head.entered.clear()

    def cross(self, exit: Exit, offset: int, values: Values) -> bool:
        """Pass one exit, at `offset` in the residual.

        Returns whether it put other values in the places of the exit's arguments.
        """
        if self.residual is not None:
            self._add(exit, offset, values, self.residual)
        elif self.replay:
            self._replay(exit, offset, values)
        else:
            self._take(exit, values)
            return False
        return True

    def _add(self, exit: Exit, offset: int, values: Values, residual: ResidualParts) -> None:
        """Add the residual to what stepped over the stack."""
        onto = exit.split([values[key] for key in exit.arguments])
        parts = []
        for i, argument in enumerate(onto):
            part, own = residual.tensors[offset + i], residual.dtypes[offset + i]
            if argument.shape != part.shape or argument.dtype != exit.dtypes[i]:
                raise ResidualMisfitError(
                    f"residual of {tuple(part.shape)} onto {exit.dtypes[i]}, "
                    f"hidden states of {tuple(argument.shape)} in {argument.dtype}"
                )
            if argument.dtype != own:
                onto[i] = argument.to(own)
            # Offloading and device maps may have moved the hidden states since.
            parts.append(part if part.device == argument.device else part.to(argument.device))
        if len(parts) == 2:
            added = self.strategy.apply_residual_tuple(onto[0], onto[1], tuple(parts))
            values[exit.arguments[0]], values[exit.arguments[1]] = added
        else:
            for key, argument, part in zip(exit.arguments, onto, parts, strict=True):
                values[key] = self.strategy.apply_residual(argument, part)

    def _replay(self, exit: Exit, offset: int, values: Values) -> None:
        """Take the residual from what stepped over the stack; go on as the computed pass did."""
        bases = exit.split([values[key] for key in exit.arguments])
        computed = self.values[offset : offset + len(bases)]
        for key, value, base in zip(exit.arguments, computed, bases, strict=True):
            self.parts.append(self.strategy.compute_residual(value, base))
            values[key] = value

    def _take(self, exit: Exit, values: Values) -> None:
        """Note what comes out of the stack; take the residual if what entered is known."""
        arguments = [values[key] for key in exit.arguments]
        self.dtypes += [argument.dtype for argument in arguments]
        self.values += arguments
        if self.measured:
            return
        bases = []
        for argument, source in zip(arguments, exit.sources, strict=True):
            assert source is not None
            entered = self.heads[source.blocks, source.block].entered[source]
            bases.append(source.base(entered, argument))
        for argument, base in zip(arguments, exit.split(bases), strict=True):
            self.parts.append(self.strategy.compute_residual(argument, base))


class MagCacheHeadHook(StandIn):
    """Stands at the first block of a computed step and notes what enters the stack."""

    def __init__(self, block: nn.Module, sources: tuple[Source, ...]) -> None:
        super().__init__(block)
        self.sources = sources
        self.entered: dict[Source, torch.Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs)
        for source in self.sources:
            tensor = call[source.argument]
            self.entered[source] = tensor.clone() if source.clone else tensor
        return self.inner(*args, **kwargs)


class MagCacheBlockHook(StandIn):
    """Stands past the last block, at the child that takes the stack's output on (the tail).

    On a computed step it takes the residual, on a skipped one it adds it, once.
    """

    def __init__(
        self,
        inner: nn.Module,
        name: str,
        exits: tuple[tuple[Exit, int], ...],
        crossing: Crossing,
    ) -> None:
        super().__init__(inner)
        self.name = name
        self.exits = exits
        self.crossing = crossing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        crossing = self.crossing
        over = crossing.residual is not None or crossing.replay
        number = crossing.calls.get(self.name, 0)
        crossing.calls[self.name] = number + 1
        call = Call(args, kwargs)
        for exit, offset in self.exits:
            if number == (exit.skipped if over else exit.walked):
                crossing.cross(exit, offset, call)
        return self.inner(*call.args, **call.kwargs)
