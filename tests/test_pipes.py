"""Every pipeline class that can be built from tiny components runs right with the cache."""

from __future__ import annotations

from pipes import audio, image, other, video  # noqa: F401 - they register the entries
from pipes.base import ENTRIES, Entry, outputs
from typing import Any

import pytest
import torch

import magcache
from magcache import MagCacheConfig
from magcache.discovery import denoisers
from magcache.hook import cache_of

STEPS = 8
# Skips about every other step, whatever the model: C C . C . C . C and the like.
CACHED = MagCacheConfig(
    threshold=1.0, max_skip_steps=1, retention_ratio=0.25, mag_ratios=[1.0] * STEPS
)
NEVER = MagCacheConfig(threshold=0.0, mag_ratios=[1.0] * STEPS)

by_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.name)


def run(pipe: Any, entry: Entry, **more: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    found = outputs(pipe(**{**entry.call(), entry.argument: STEPS, **more}))
    assert found, "the pipeline returned no tensors"
    assert all(torch.isfinite(tensor).all() for tensor in found)
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class AbortedError(Exception):
    pass


def abort_after(pipe: Any, calls: int) -> Any:
    """A hook that raises in the middle of a run, at the pipeline's `calls`-th transformer call."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > calls:
            raise AbortedError

    return [t.register_forward_pre_hook(count) for t in denoisers(pipe).values()]


@by_entry
def test_pipeline(entry: Entry) -> None:
    """Threshold 0 is bit-equal; the plan is what happens, per stream; an abort leaves nothing."""
    plain = run(entry.build(), entry)
    pipe = entry.build()

    magcache.enable(pipe, NEVER)
    assert same(run(pipe, entry), plain), "threshold 0 changed the output"

    magcache.enable(pipe, CACHED)
    cached = run(pipe, entry)
    stats = magcache.stats(pipe)
    assert sum(stats.plain_calls.values()) == entry.plain_calls, stats.plain_calls
    found: dict[str, list[str]] = {}
    for stream in stats.streams:
        found.setdefault(stream.transformer, []).append(stream.stream)
        assert stream.as_planned, stream
        assert not stream.fallbacks
        assert stream.skipped > 0, stream
    assert {name: tuple(streams) for name, streams in found.items()} == entry.streams
    for transformer in denoisers(pipe).values():
        cache = cache_of(transformer)
        assert cache is not None
        assert not cache.states, "the run has ended, its state is still there"
    assert not same(cached, plain), "nothing was skipped that shows in the output"

    hooks = abort_after(pipe, 4)
    with pytest.raises(AbortedError):
        run(pipe, entry)
    for hook in hooks:
        hook.remove()
    assert same(run(pipe, entry), cached), "the run after an aborted one differs"

    magcache.disable(pipe)
    assert same(run(pipe, entry), plain), "disable left something behind"
