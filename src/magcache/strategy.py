"""Residual rules, one per architecture where the general rule does not fit, and their registry."""

from __future__ import annotations

import torch
from torch import nn

from magcache.errors import ConfigError

__all__ = ["MagCacheStrategy", "MagCacheStrategyRegistry"]

Residual = torch.Tensor | tuple[torch.Tensor, ...]


class MagCacheStrategy:
    """The general rule: residual = what leaves the block stack - what entered it.

    Subclass it and register the subclass for a transformer that needs another rule. Where a model
    keeps two streams past its last block, residuals are tuples (hidden, encoder), always in this
    order.
    """

    # Default magnitude ratios of the architecture, or None. Ratios belong to a checkpoint, so a
    # preset or a saved curve goes before them.
    mag_ratios: tuple[float, ...] | None = None

    def __init__(self) -> None:
        self.block_classes: list[type[nn.Module]] = []
        self.register_blocks()

    def register_blocks(self) -> None:
        """Name the stack's block classes with `register_block_metadata`; by default, none.

        Without a name, every direct child that is a list of blocks belongs to the stack.
        """

    def register_block_metadata(self, block_class: type[nn.Module]) -> None:
        """Restrict the stack to lists of `block_class` (and of the others named so)."""
        self.block_classes.append(block_class)

    def compute_residual(self, output: torch.Tensor, head_input: torch.Tensor) -> torch.Tensor:
        """What the stack added, [batch, tokens, hidden] like both arguments, in head_input's dtype.

        Models that take the stack's output on in float32 hand it over as such: kept in the dtype
        of the stack's input, a residual takes no more memory than a hidden state.
        """
        return (output - head_input).to(head_input.dtype)

    def apply_residual(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Hidden states past a skipped stack, in the dtype of `hidden_states`."""
        added = hidden_states + residual
        return added if added.dtype == hidden_states.dtype else added.to(hidden_states.dtype)

    def apply_residual_tuple(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        residual: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both streams past a skipped stack; `residual` is (hidden, encoder)."""
        return (
            self.apply_residual(hidden_states, residual[0]),
            self.apply_residual(encoder_hidden_states, residual[1]),
        )

    def compute_calibration_metrics(
        self, current: Residual, previous: Residual
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(mean ratio, its standard deviation, mean cosine distance), float32 scalars.

        Per token over the hidden dimension, then over all tokens (paper Eq. 5 to 7); of a tuple,
        the hidden stream's. They stay on the residual's device: nothing waits for them.
        """
        now, before = (
            (r[0] if isinstance(r, tuple) else r).detach().float() for r in (current, previous)
        )
        now_norm, before_norm = now.norm(dim=-1), before.norm(dim=-1)
        tiny = torch.finfo(torch.float32).tiny
        ratio = now_norm / before_norm.clamp_min(tiny)
        cosine = (now * before).sum(dim=-1) / (now_norm * before_norm).clamp_min(tiny)
        return ratio.mean(), ratio.std(correction=0), (1 - cosine).mean()


class MagCacheStrategyRegistry:
    """Strategies by transformer class name."""

    _strategies: dict[str, type[MagCacheStrategy]] = {}  # noqa: RUF012 - the one global registry

    @classmethod
    def register(cls, name: str, strategy: type[MagCacheStrategy]) -> None:
        """Use `strategy` for transformers whose class is called `name`; replaces a former one."""
        if not (isinstance(strategy, type) and issubclass(strategy, MagCacheStrategy)):
            raise ConfigError(f"strategy is {strategy!r}; it must subclass MagCacheStrategy")
        cls._strategies[name] = strategy

    @classmethod
    def unregister(cls, name: str) -> None:
        """Forget the strategy for `name`, if there is one."""
        cls._strategies.pop(name, None)

    @classmethod
    def get(cls, name: str) -> type[MagCacheStrategy]:
        """The strategy registered for `name`; an error names what is registered."""
        if name not in cls._strategies:
            known = ", ".join(sorted(cls._strategies)) or "none"
            raise ConfigError(
                f"no strategy is registered for {name!r} (registered: {known}); register one with "
                "MagCacheStrategyRegistry.register, or leave transformer_type unset"
            )
        return cls._strategies[name]

    @classmethod
    def get_if_exists(cls, name: str) -> type[MagCacheStrategy] | None:
        """The strategy registered for `name`, or None."""
        return cls._strategies.get(name)
