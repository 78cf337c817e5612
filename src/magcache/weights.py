"""Notices that a transformer's weights are no longer those that its curve was found for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import nn

from magcache import compat
from magcache.store import fingerprint

__all__ = ["WeightsWatch"]


class WeightsWatch:
    """Tells whether a transformer's weights have changed since it was asked last.

    Asking costs no more than a walk over the parameters, and waits for no device, unless something
    looks different or there are adapters; then the fingerprint is taken, which decides.
    `fingerprint` is the last one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen = tuple(_signs(module))
        self.fingerprint = fingerprint(module)

    def changed(self) -> bool:
        """Whether this is another checkpoint, or another set of adapters, than at the last call."""
        seen = tuple(_signs(self._module))
        # Swapping an adapter writes past PyTorch's bookkeeping, so the values have to be looked at.
        adapted = any(True for _ in compat.adapters(self._module))
        if seen == self._seen and not adapted:
            return False
        self._seen = seen
        before, self.fingerprint = self.fingerprint, fingerprint(self._module)
        return before != self.fingerprint


def _signs(module: nn.Module) -> Iterator[Hashable]:
    """What is different after most ways of changing weights: other objects, and writes."""
    for weight in module.parameters():
        # Addresses would tell more, but offloading moves weights at every step.
        yield id(weight), 0 if weight.is_inference() else weight._version
