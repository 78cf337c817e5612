"""Where a residual enters and leaves a model, for one kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from magcache.standin import Call

__all__ = ["OUTPUT", "VIEWS", "Exit", "Key", "Route", "Source", "Split"]

# An argument's position or name; in an output, the path to a tensor.
Key = Any

Split = Callable[[torch.Tensor], torch.Tensor]

# Name of the exit that is the forward's own output, where no module takes the stack's.
OUTPUT = ""

# Models join streams before the stack and cut one out after it, or fold tokens back into space.
VIEWS: dict[str, Callable[[torch.Tensor, torch.Size], torch.Tensor]] = {
    "whole": lambda entered, shape: entered,
    "last tokens": lambda entered, shape: entered[:, -shape[1] :],
    "first tokens": lambda entered, shape: entered[:, : shape[1]],
    "reshaped": lambda entered, shape: entered.reshape(shape),
}


@dataclass(frozen=True)
class Source:
    """An argument of the block that a list's walk enters first: what entered the stack.

    `view` names how the model takes it on past the stack, one of `VIEWS`.
    """

    blocks: str
    block: str
    argument: Key
    view: str
    # Some blocks write into their input; then the note of what entered must be a copy.
    clone: bool

    def base(self, entered: torch.Tensor, exit: torch.Tensor) -> torch.Tensor:
        """What `exit` would be if the stack had added nothing."""
        return VIEWS[self.view](entered, exit.shape)


@dataclass(frozen=True)
class Exit:
    """Arguments, at one call of a child past the stack, that take a residual.

    `walked` and `skipped` number that call among the child's calls of a pass, from 0: a child that
    is also called between blocks is called less often when they are stepped over. Arguments stand
    in the order (hidden, encoder). A source of None means that the argument is not simply what
    entered the stack; its base is then measured with a stepped-over pass at each computed step.
    `dtypes` are the arguments' when stepped over: autocast may give a computed one another.
    `splits` are what context parallelism would have done to the arguments at the stack's first
    block, had that been called: they take this rank's tokens out of all. None: nothing.
    """

    child: str
    walked: int
    skipped: int
    arguments: tuple[Key, ...]
    sources: tuple[Source | None, ...]
    dtypes: tuple[torch.dtype, ...]
    splits: tuple[Split | None, ...]

    def split(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments of a call that stepped over the stack, as a computed one has them."""
        if not any(self.splits):
            return list(values)
        pairs = zip(values, self.splits, strict=True)
        return [value if split is None else split(value) for value, split in pairs]


@dataclass(frozen=True)
class Route:
    """The exits of a model for one kind of call, in the order in which a forward meets them.

    `eaten` are list arguments that the blocks' loop empties (HunyuanDiT pops its ControlNet's
    tensors), with the length that is left.
    """

    exits: tuple[Exit, ...]
    eaten: tuple[tuple[Key, int], ...] = ()

    @property
    def measured(self) -> bool:
        """Whether a computed step needs a stepped-over pass to tell its residual."""
        return any(source is None for exit in self.exits for source in exit.sources)

    def stepped(self, call: Call) -> Call:
        """The call as the model expects it past a stack that has been walked."""
        if not self.eaten:
            return call
        return call.replaced({key: call[key][:left] for key, left in self.eaten})
