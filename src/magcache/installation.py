"""What a cache puts on a module's instance: taken off, the instance is what it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from magcache import compat
from magcache.cache import TransformerCache
from magcache.compiling import left_to_python, switch_compiler, with_compiler

__all__ = ["cache_of", "install", "uninstall"]

# Where a module keeps its cache, and which of its methods are wrapped.
_CACHE = "_magcache"
_METHODS = ("_compiled_call_impl", "cache_context", "compile")


@dataclass(frozen=True)
class _NamedContext:
    """What magcache reads of diffusers' CacheContext, for releases that have none."""

    name: str
    step_index: int | None = None
    num_inference_steps: int | None = None


def cache_of(module: nn.Module) -> TransformerCache | None:
    """The cache on this module, or on the one that `torch.compile(module)` wraps, if any is."""
    for holder in (module, compat.unwrap_compiled(module)):
        cache = vars(holder).get(_CACHE)
        if isinstance(cache, TransformerCache):
            return cache
    return None


def install(cache: TransformerCache) -> None:
    """Send the module's calls through the cache, inside the hooks of accelerate and diffusers.

    A module that has been compiled as a whole is entered before the compiled call, so that the
    decision is no part of the graph; compiling it later puts the cache in front again.
    `torch.compile(module)` of a module with a cache compiles what the cache calls.
    """
    module = cache.module
    vars(module)[_CACHE] = cache
    compiled = compat.compiled_call(module)
    inner = cache.stack.module
    if compiled is None:
        holder, name = compat.forwards(module)[0]
        own = holder.get(name)
        plain = own if own is not None else functools.partial(type(module).forward, module)
        _put(module, name, _entry(cache, plain), holder)
    else:
        _put(module, "_compiled_call_impl", _entry(cache, compiled))
    cache.stack.eager = plain if compiled is None and inner is module else inner.forward
    if hasattr(inner, "cache_context"):
        _put(module, "cache_context", _context_method(cache))
    _put(module, "compile", _compile_method(cache))


def uninstall(cache: TransformerCache) -> None:
    """Take everything off, also from inside hooks that were put on since.

    What another wrapper has buried passes calls through.
    """
    module = cache.module
    vars(module).pop(_CACHE, None)
    for holder, name in (*compat.forwards(module), *((vars(module), m) for m in _METHODS)):
        installed = holder.get(name)
        if getattr(getattr(installed, "__func__", None), "magcache", None) is cache:
            _take(module, name, installed, holder)


def _put(
    module: nn.Module,
    name: str,
    function: Callable[..., Any],
    holder: dict[str, Any] | None = None,
) -> None:
    holder = vars(module) if holder is None else holder
    function.__dict__["magcache_own"] = holder.get(name)
    # A bound method follows its module into a deep copy, and there runs the copy plainly.
    holder[name] = MethodType(function, module)


def _take(module: nn.Module, name: str, installed: Any, holder: dict[str, Any]) -> None:
    own = installed.__func__.magcache_own
    if own is not None:
        holder[name] = own
    elif holder is vars(module) and name != "_old_forward":
        del holder[name]
    else:
        # A hook that came later wraps the class's forward now.
        holder[name] = MethodType(type(module).forward, module)


def _entry(cache: TransformerCache, plain: Callable[..., Any]) -> Callable[..., Any]:
    module = cache.module

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module:
            return type(self).forward(self, *args, **kwargs)
        if not cache.alive:
            return plain(*args, **kwargs)
        compiler = switch_compiler(None)
        if compiler is None:
            return cache.call(plain, args, kwargs)
        return with_compiler(compiler, cache.call, plain)(*args, **kwargs)

    forward.__dict__["magcache"] = cache
    return left_to_python(forward)


def _context_method(cache: TransformerCache) -> Callable[..., Any]:
    plain = type(cache.stack.module).cache_context  # type: ignore[attr-defined]

    @functools.wraps(plain)
    @contextlib.contextmanager
    def cache_context(self: nn.Module, name: str, **kwargs: Any) -> Iterator[None]:
        context = _NamedContext(name, kwargs.get("step_index"), kwargs.get("num_inference_steps"))
        inside = cache.in_context(context) if self is cache.module else contextlib.nullcontext()
        with plain(compat.unwrap_compiled(self), name, **kwargs), inside:
            yield

    cache_context.__dict__["magcache"] = cache
    return cache_context


def _compile_method(cache: TransformerCache) -> Callable[..., Any]:
    @functools.wraps(nn.Module.compile)
    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self is cache.module:
            uninstall(cache)
        type(self).compile(self, *args, **kwargs)
        if self is cache.module:
            install(cache)

    compile.__dict__["magcache"] = cache
    return compile
