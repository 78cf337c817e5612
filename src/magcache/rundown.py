"""Notices a pipeline's denoising loop, and that it is over however it ends, by the progress bar."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from types import MethodType
from typing import Any

__all__ = ["unwatch", "watch"]


class _Watched:
    """An iterable that reports when its iteration ends, also when it is dropped half-way."""

    def __init__(self, items: Iterable[Any], end: Callable[[], None]) -> None:
        self._items = items
        self._end = end

    def __len__(self) -> int:
        return len(self._items) if isinstance(self._items, Sized) else 0

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._items
        finally:
            self._end()


def watch(
    pipeline: Any,
    begin: Callable[[], None],
    leave: Callable[[], None],
    abort: Callable[[], None],
) -> None:
    """Call `begin` when the pipeline's outermost progress bar opens.

    And when it closes `leave`, or `abort` if that is because of an exception.

    Diffusers' loops run inside `self.progress_bar(...)`, which an exception closes as well. The
    method is wrapped on the instance; `unwatch` takes that off.
    """
    unwatch(pipeline)
    if not hasattr(type(pipeline), "progress_bar"):
        return
    plain = type(pipeline).progress_bar
    bars_open = 0

    @functools.wraps(plain)
    def progress_bar(
        self: Any, iterable: Iterable[Any] | None = None, total: int | None = None
    ) -> Any:
        nonlocal bars_open

        def closed() -> None:
            nonlocal bars_open
            bars_open -= 1
            if not bars_open and self is pipeline:
                leave() if sys.exc_info()[0] is None else abort()

        if iterable is not None:
            bar = plain(self, iterable=_Watched(iterable, closed))
        else:
            bar = plain(self, total=total)
            bar.close = _once(bar.close, closed)
        if not bars_open and self is pipeline:
            begin()
        bars_open += 1
        return bar

    progress_bar.__dict__["magcache"] = True
    vars(pipeline)["progress_bar"] = MethodType(progress_bar, pipeline)


def unwatch(pipeline: Any) -> None:
    """Undo `watch`."""
    installed = vars(pipeline).get("progress_bar")
    if getattr(getattr(installed, "__func__", None), "magcache", False):
        del vars(pipeline)["progress_bar"]


def _once(close: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """`close`, and `after` the first time; tqdm closes a bar again when it is collected."""
    closed = False

    def close_and_report() -> None:
        nonlocal closed
        close()
        if not closed:
            closed = True
            after()

    return close_and_report
