"""Every private name of diffusers that magcache reads, in one place."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from magcache.errors import CannotCacheError

__all__ = [
    "adapters",
    "begin_index",
    "checkpoint_id",
    "class_of",
    "compiled_call",
    "context_group",
    "context_hooks",
    "context_splits",
    "forwards",
    "guidance_scale",
    "is_through",
    "noise_coordinates",
    "offloaded_weights",
    "refuse_other_cache",
    "settings",
    "step_index",
    "training_timesteps",
    "unwrap_compiled",
]


def step_index(scheduler: Any) -> int | None:
    """The scheduler's place in its timesteps; None before its first step, or if it keeps none."""
    index = getattr(scheduler, "step_index", None)
    return index if index is not None else getattr(scheduler, "_step_index", None)


def is_through(scheduler: Any) -> bool:
    """Whether the scheduler has made all its steps."""
    index = step_index(scheduler)
    return index is not None and index >= len(scheduler.timesteps)


def begin_index(scheduler: Any) -> int | None:
    """Where the pipeline told the scheduler to begin (image-to-image), if it did."""
    index = getattr(scheduler, "begin_index", None)
    return index if index is not None else getattr(scheduler, "_begin_index", None)


def guidance_scale(pipeline: Any) -> float | None:
    """The guidance scale of the pipeline's call that is on (else of its last), if it keeps one."""
    for name in ("guidance_scale", "_guidance_scale"):
        value = getattr(pipeline, name, None)
        if isinstance(value, int | float):
            return float(value)
    return None


def training_timesteps(scheduler: Any) -> float:
    """Number that scales timesteps to noise levels."""
    return float(settings(scheduler).get("num_train_timesteps") or 1000)


def noise_coordinates(scheduler: Any, timesteps: Sequence[float]) -> tuple[float, ...]:
    """Where timesteps lie on a scale on which a model error counts the same everywhere, 0 at clean.

    Sigma for flow models: a sample moves by the velocity times sigma's change. Else arsinh of the
    noise over the signal: the sample over the signal moves by the noise times that ratio's change,
    and of that the later steps leave one part in the root of 1 + ratio squared.
    """
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None or _is_flow(scheduler):
        scale = training_timesteps(scheduler)
        return tuple(t / scale for t in timesteps)
    table = torch.as_tensor(alphas).double().cpu().numpy()
    at = np.interp(timesteps, np.arange(len(table)), table).clip(1e-12, 1.0)
    return tuple(np.arcsinh(np.sqrt((1 - at) / at)).tolist())


def _is_flow(scheduler: Any) -> bool:
    config = settings(scheduler)
    flow = config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas")
    return bool(flow) or type(scheduler).__name__.startswith("FlowMatch")


def refuse_other_cache(module: nn.Module) -> None:
    """Raise `CannotCacheError` if one of diffusers' own caches is on this module."""
    other = _diffusers_cache(module)
    if other is not None:
        raise CannotCacheError(
            f"{type(module).__name__} has diffusers' {other}, and two caches would reuse each "
            "other's results; take one off (transformer.disable_cache() or magcache.disable)"
        )


def _diffusers_cache(module: nn.Module) -> str | None:
    """Name of the diffusers cache that is on this module or on its blocks, if any."""
    config = getattr(module, "_cache_config", None)
    if config is not None:
        return type(config).__name__
    for part in module.modules():
        registry = vars(part).get("_diffusers_hook")
        # Of diffusers' hooks only those of caches keep state between calls.
        for hook in registry.hooks.values() if registry is not None else ():
            if getattr(hook, "_is_stateful", False):
                return type(hook).__name__
    return None


def context_group(module: nn.Module) -> Any:
    """The process group over which context parallelism splits a transformer's tokens, or None."""
    config = getattr(vars(module).get("_parallel_config"), "context_parallel_config", None)
    mesh = getattr(config, "_flattened_mesh", None)
    return mesh.get_group() if mesh is not None and mesh.size() > 1 else None


def context_hooks(block: nn.Module) -> tuple[Any, ...]:
    """The hooks of context parallelism that split what is handed to this module over the ranks."""
    registry = vars(block).get("_diffusers_hook")
    if registry is None:
        return ()
    return tuple(hook for name, hook in registry.hooks.items() if name.startswith("cp_input"))


def context_splits(block: nn.Module) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """How those hooks split the module's arguments, by name. They communicate nothing."""
    return {
        str(name): functools.partial(hook._prepare_cp_input, cp_input=how)
        for hook in context_hooks(block)
        for name, how in hook.metadata.items()
        if not getattr(how, "split_output", True)
    }


def checkpoint_id(module: Any) -> str | None:
    """Repository id or path that a component was loaded from, if it tells."""
    name = settings(module).get("_name_or_path")
    if not name:
        return None
    # A snapshot in the hub's cache lies under models--<owner>--<name>.
    snapshot = re.search(r"models--([^/\\]+?)--([^/\\]+)", str(name))
    return f"{snapshot[1]}/{snapshot[2]}" if snapshot else str(name)


def settings(component: Any) -> dict[str, Any]:
    """A component's configuration; empty if it has none."""
    config = getattr(component, "config", None)
    return dict(config) if isinstance(config, Mapping) else {}


def forwards(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a module's forward is kept, as (namespace, name), the innermost first.

    Hooks of diffusers and of accelerate keep the forward that they wrap, and put it back when they
    are taken off: what is put around them would be lost then (a pipeline takes off and puts on
    accelerate's at the end of each run), what is put inside stays.
    """
    own = vars(module)
    registry = own.get("_diffusers_hook")
    places = [
        (vars(reference), name)
        for reference in (registry._fn_refs if registry is not None else ())
        for name in ("original_forward", "forward")
        if getattr(reference, name) is not None
    ]
    if "_old_forward" in own:
        places.append((own, "_old_forward"))
    return [*places, (own, "forward")]


def offloaded_weights(module: nn.Module) -> dict[str, tuple[Mapping[str, torch.Tensor], str]]:
    """Weights that accelerate holds for the module, by name: where, and under which key there.

    The module has tensors without values in their places meanwhile. Reading one may read a disk.
    """
    held: dict[str, tuple[Mapping[str, torch.Tensor], str]] = {}
    for path, part in module.named_modules():
        hook = vars(part).get("_hf_hook")
        kept: Any = getattr(hook, "weights_map", None)
        own = {**part._parameters, **part._buffers} if kept is not None else {}
        for key, weight in own.items():
            if weight is not None and weight.is_meta:
                held[f"{path}.{key}" if path else key] = (kept, key)
    return held


def adapters(module: nn.Module) -> Iterator[tuple[Any, list[tuple[str, nn.Parameter]]]]:
    """Of each layer that peft has adapted: which adapters act and how much, and their weights."""
    for name, part in module.named_modules():
        own = vars(part)
        if "merged_adapters" not in own:
            continue
        state = (
            name,
            bool(own.get("_disable_adapters")),
            str(own.get("_active_adapter")),
            tuple(own["merged_adapters"]),
            tuple(sorted(own.get("scaling", {}).items())),
        )
        weights = [(n, w) for n, w in part.named_parameters() if not n.startswith("base_layer.")]
        yield state, weights


def class_of(module: nn.Module) -> type[nn.Module]:
    """The transformer's own class, inside `torch.compile` and FSDP2, which makes a class of it."""
    own = type(unwrap_compiled(module))
    return own.__mro__[2] if own.__mro__[1].__name__ == "FSDPModule" else own


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What calls the module since `module.compile()`, or None if that was not called."""
    return vars(module).get("_compiled_call_impl")


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile(module)`, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module
