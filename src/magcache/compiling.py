"""Deciding outside of the graph for a module that `torch.compile(module)` wraps.

Its compiled call runs the module's own one with a compiler switched on, which would trace the
cache. A cache's entry is left to Python instead: it switches the compiler off, and on again around
what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame

__all__ = ["left_to_python", "switch_compiler", "with_compiler"]

Forward = Callable[..., Any]

# Returns what was on before. No Python function, so a compiler that is on does not trace the call.
switch_compiler = eval_frame.set_eval_frame


def left_to_python(function: Forward) -> Forward:
    """Keep compilers from tracing the function's own frame, not from what the function calls."""
    # A second of imports where diffusers is not used, which makes them anyway.
    from torch._dynamo.decorators import skip

    skip(function)
    reason = "the cache decides outside of graphs: compile the transformer, not what calls it"
    function.__dict__["_torchdynamo_disable_msg"] = reason
    return function


def with_compiler(
    compiler: Any, call: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any], plain: Forward
) -> Forward:
    """`call`, in which only `plain` is compiled. To be called with the compiler switched off."""

    def compiled(*args: Any, **kwargs: Any) -> Any:
        switch_compiler(compiler)
        try:
            return plain(*args, **kwargs)
        finally:
            switch_compiler(None)

    def decide(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(compiled, args, kwargs)
        finally:
            _expect_no_graph()
            switch_compiler(compiler)

    return decide


def _expect_no_graph() -> None:
    """`fullgraph=True` refuses calls that run no graph (PyTorch 2.13); the learning call does."""
    count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is not None:
        count(-1)
