"""Other caches, each put on a pipeline at its best and taken off again.

diffusers' own run as they are; where a pipeline sets no cache contexts, they are set for it.
cache-dit runs as it is, if it can be imported. Rules that diffusers has not, or that crash on this
model there, are written here in their plainest form: they decide, and magcache's stack skips.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.hooks import (
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    apply_pyramid_attention_broadcast,
    apply_taylorseer_cache,
    mag_cache,
)
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from families import Family
from torch import nn

import magcache
from magcache import MagCacheConfig, MagnitudeCurve
from magcache.hook import stack_of
from magcache.residual import ResidualParts
from magcache.standin import Call

__all__ = ["PEERS", "Peer", "Setting", "Work", "fit_tea_cache"]


@dataclass(frozen=True)
class Setting:
    """One setting of a peer, and what is known of the model."""

    family: Family
    steps: int
    curve: MagnitudeCurve
    value: Any
    tea_fit: Callable[[float], float]


@dataclass(frozen=True)
class Peer:
    """A cache, how to put it on a pipeline, and settings from mild to fast."""

    name: str
    apply: Callable[[Any, Setting], Any]
    values: tuple[Any, ...]
    families: tuple[str, ...] = ("demo", "dit")
    # What the peer itself would compute, of what was measured: our plain form may compute more.
    share: Callable[[float, int], float] = lambda measured, blocks: measured


class Work:
    """Counts the multiplications of the linear layers in lists of blocks while it is open."""

    def __init__(self, *lists: nn.Module) -> None:
        self.done = 0
        self._layers = [
            layer for blocks in lists for layer in blocks.modules() if isinstance(layer, nn.Linear)
        ]

    def __enter__(self) -> Work:
        self._handles = [layer.register_forward_hook(self._count) for layer in self._layers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, layer: nn.Module, args: tuple[torch.Tensor, ...], _: Any) -> None:
        assert isinstance(layer, nn.Linear)
        self.done += layer.weight.numel() * (args[0].numel() // layer.in_features)


@contextmanager
def _contexts(model: nn.Module, calls_per_step: int) -> Iterator[None]:
    """Tell diffusers' caches the guidance passes apart, by the order of the calls."""
    calls = [0]

    def set_context(*_: Any) -> None:
        _set_cache_context(model, CacheContext(f"pass {calls[0] % calls_per_step}"))
        calls[0] += 1

    handle = model.register_forward_pre_hook(set_context)
    try:
        yield
    finally:
        handle.remove()
        for part in model.modules():
            vars(part).pop("_cache_context", None)


@contextmanager
def _hooks(pipe: Any, family: Family, put: Callable[[nn.Module], None]) -> Iterator[Any]:
    """diffusers' hooks on the transformer; all of them are removed at the end."""
    model = pipe.transformer
    put(model)
    try:
        with _contexts(model, family.calls):
            yield pipe
    finally:
        for part in list(model.modules()):
            registry = vars(part).get("_diffusers_hook")
            if registry is not None:
                for name in list(registry.hooks):
                    registry.remove_hook(name, recurse=False)
                del part._diffusers_hook


@contextmanager
def diffusers_mag_cache(pipe: Any, setting: Setting) -> Iterator[Any]:
    """Value: (threshold, most skipped, retention)."""
    threshold, most, retention = setting.value
    config = mag_cache.MagCacheConfig(
        threshold=threshold,
        max_skip_steps=most,
        retention_ratio=retention,
        num_inference_steps=setting.steps,
        mag_ratios=list(setting.curve.ratios(setting.curve.places(setting.steps))),
    )
    put = lambda model: mag_cache.apply_mag_cache(model, config)  # noqa: E731
    with _hooks(pipe, setting.family, put) as cached:
        yield cached


@contextmanager
def taylor_seer(pipe: Any, setting: Setting) -> Iterator[Any]:
    """Value: (interval, order). Its lite mode's rule (skip all in the blocks, forecast the output).

    Named by modules, because its own patterns expect no block that returns None, as SD3's last.
    """
    interval, order = setting.value
    output = "proj_out" if hasattr(pipe.transformer, "proj_out") else "proj_out_2"
    config = TaylorSeerCacheConfig(
        cache_interval=interval,
        disable_cache_before_step=3,
        max_order=order,
        taylor_factors_dtype=torch.float32,
        skip_predict_identifiers=[r"transformer_blocks\.\d+\.(attn|attn1|ff|ff_context)"],
        cache_identifiers=[output],
    )
    with _hooks(pipe, setting.family, lambda m: apply_taylorseer_cache(m, config)) as cached:
        yield cached


@contextmanager
def pyramid_attention(pipe: Any, setting: Setting) -> Iterator[Any]:
    """Value: steps for which an attention's output is broadcast."""
    now = [1000.0]
    names = ("timestep", 2)

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now[0] = float(torch.as_tensor(kwargs[names[0]]).max())

    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=setting.value,
        spatial_attention_timestep_skip_range=(-1, 1001),
        spatial_attention_block_identifiers=("transformer_blocks",),
        current_timestep_callback=lambda: int(now[0]),
    )
    handle = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    put = lambda model: apply_pyramid_attention_broadcast(model, config)  # noqa: E731
    try:
        with _hooks(pipe, setting.family, put) as cached:
            yield cached
    finally:
        handle.remove()


@contextmanager
def cache_dit(pipe: Any, setting: Setting) -> Iterator[Any]:
    """Value: (residual threshold, warm-up steps, order of its TaylorSeer or None).

    It patches classes, so it gets a pipeline of its own, and is taken off that.
    """
    import cache_dit as library

    threshold, warm_up, order = setting.value
    own = setting.family.load()
    own.scheduler = pipe.scheduler
    pattern = library.ForwardPattern
    # DiT's own forward looks into its first block, which is no longer there: theirs does not.
    functor = None
    if setting.family.name == "dit":
        from cache_dit.caching.patch_functors import DiTPatchFunctor

        functor = DiTPatchFunctor()
    adapter = library.BlockAdapter(
        pipe=own,
        transformer=own.transformer,
        blocks=own.transformer.transformer_blocks,
        forward_pattern=pattern.Pattern_1 if setting.family.name == "demo" else pattern.Pattern_3,
        patch_functor=functor,
        has_separate_cfg=setting.family.calls == 2,
    )
    config = library.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        residual_diff_threshold=threshold,
        max_warmup_steps=warm_up,
        num_inference_steps=setting.steps,
        enable_separate_cfg=setting.family.calls == 2,
    )
    calibrator = None
    if order is not None:
        # SD3's last block returns no encoder states to forecast.
        calibrator = library.TaylorSeerCalibratorConfig(
            taylorseer_order=order, enable_encoder_calibrator=setting.family.name != "demo"
        )
    library.enable_cache(adapter, cache_config=config, calibrator_config=calibrator)
    try:
        yield own
    finally:
        library.disable_cache(adapter)


class _StoppedError(Exception):
    """A forward has told what it was run for."""


@contextmanager
def _rule(
    pipe: Any,
    family: Family,
    decide: Callable[[dict[str, Any], Callable[[str], Any]], bool],
    amend: Callable[[dict[str, Any], ResidualParts], ResidualParts] | None = None,
) -> Iterator[Any]:
    """A cache that decides at each call, per guidance pass.

    decide: from a pass's memory, and a function that runs the model up to one of its modules and
    returns that one's (inputs, output), whether to skip. amend: the residual to add.
    """
    model = pipe.transformer
    stack = stack_of(model, MagCacheConfig())
    plain = model.forward
    memories: list[dict[str, Any]] = [{} for _ in range(family.calls)]
    calls = [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        memory = memories[calls[0] % family.calls]
        calls[0] += 1
        call = Call(args, kwargs)

        def seen(name: str) -> Any:
            return _seen_at(model.get_submodule(name), lambda: plain(*args, **kwargs))

        if decide(memory, seen) and "residual" in memory:
            residual = memory["residual"]
            return stack.step_over(plain, call, amend(memory, residual) if amend else residual)
        walked = stack.walk(plain, call)
        memory["residual"] = walked.parts
        memory["computed"] = True
        return walked.output

    model.forward = forward
    try:
        yield pipe
    finally:
        del model.forward


def _seen_at(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, Any]:
    found: list[Any] = []

    def stop(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.append((args[0] if args else kwargs["hidden_states"], output))
        raise _StoppedError

    handle = module.register_forward_hook(stop, with_kwargs=True)
    try:
        run()
    except _StoppedError:
        pass
    finally:
        handle.remove()
    return found[0]  # type: ignore[no-any-return]


def _change(now: torch.Tensor, before: torch.Tensor) -> float:
    return float((now - before).abs().mean() / before.abs().mean())


@contextmanager
def first_block(pipe: Any, setting: Setting) -> Iterator[Any]:
    """Value: threshold. FirstBlockCache's rule.

    diffusers' own stumbles over SD3's last block, which returns no encoder states; with that put
    right by hand it came to the same share and picture as this.
    """

    def decide(memory: dict[str, Any], seen: Callable[[str], Any]) -> bool:
        entered, output = seen("transformer_blocks.0")
        hidden = output[1] if isinstance(output, tuple) else output
        memory["first"] = hidden - entered
        computed = memory.pop("computed", False)
        if computed:
            # The step before was computed: its residual, less its first block's, is the tail.
            residual = memory["residual"]
            memory["tail"] = residual.tensors[0] - memory["anchor"]
        skip = "tail" in memory and _change(memory["first"], memory["anchor"]) <= setting.value
        if not skip:
            memory["anchor"] = memory["first"]
        return skip

    def amend(memory: dict[str, Any], residual: ResidualParts) -> ResidualParts:
        tensors = (memory["first"] + memory["tail"],)
        return ResidualParts(tensors, residual.dtypes, residual.kind)

    with _rule(pipe, setting.family, decide, amend) as cached:
        yield cached


@contextmanager
def tea_cache(pipe: Any, setting: Setting) -> Iterator[Any]:
    """Value: threshold. TeaCache's rule (arXiv 2411.19108), its polynomial fitted on this model."""

    def decide(memory: dict[str, Any], seen: Callable[[str], Any]) -> bool:
        _, output = seen("transformer_blocks.0.norm1")
        now = output[0]
        before = memory.get("modulated")
        memory["modulated"] = now
        if before is None:
            return False
        memory["error"] = memory.get("error", 0.0) + setting.tea_fit(_change(now, before))
        if memory["error"] < setting.value:
            return True
        memory["error"] = 0.0
        return False

    with _rule(pipe, setting.family, decide) as cached:
        yield cached


def fit_tea_cache(
    family: Family, pipe: Any, draw: Callable[[Any], Any]
) -> Callable[[float], float]:
    """The polynomial from the change of the modulated input to that of the residual."""
    inputs: list[float] = []
    outputs: list[float] = []

    def decide(memory: dict[str, Any], seen: Callable[[str], Any]) -> bool:
        _, output = seen("transformer_blocks.0.norm1")
        now, residual = output[0], memory.get("residual")
        if "modulated" in memory:
            memory["moved"] = _change(now, memory["modulated"])
        if memory.get("older") is not None and residual is not None:
            outputs.append(_change(residual.tensors[0], memory["older"].tensors[0]))
            inputs.append(memory["last_moved"])
        memory["older"], memory["modulated"] = residual, now
        memory["last_moved"] = memory.get("moved", 0.0)
        return False

    with _rule(pipe, family, decide):
        draw(pipe)
    fitted = np.polynomial.Polynomial.fit(inputs, outputs, 4)
    low, high = min(inputs), max(inputs)
    return lambda moved: float(fitted(min(max(moved, low), high)))


@contextmanager
def vllm_omni(pipe: Any, setting: Setting) -> Iterator[Any]:
    """Value: (threshold, K, retention). vLLM-Omni's rule: one list for both passes, nearest index.

    Its decisions, not its hooks: those need its own server's pipelines.
    """
    threshold, most, retention = setting.value
    (first, *_) = setting.curve.streams.values()
    known = np.asarray(first.ratios)
    nearest = np.linspace(0, len(known) - 1, setting.steps).round().astype(int)
    config = MagCacheConfig(threshold, most, retention, mag_ratios=known[nearest].tolist())
    with magcache.enable(pipe, config):
        yield pipe


def _without_second_run(measured: float, blocks: int) -> float:
    """The first block is run twice on computed steps here, to look at it before deciding."""
    computed = measured - 1 / blocks
    return computed + (1 - computed) / blocks


_MAG = ((0.03, 1, 0.2), (0.05, 2, 0.1), (0.12, 4, 0.2), (0.24, 5, 0.1))
PEERS = [
    Peer("diffusers MagCache", diffusers_mag_cache, _MAG),
    Peer("vLLM-Omni MagCache rule", vllm_omni, _MAG),
    Peer(
        "FirstBlockCache rule",
        first_block,
        (0.06, 0.1, 0.2, 0.35),
        share=_without_second_run,
    ),
    Peer("TeaCache rule", tea_cache, (0.06, 0.1, 0.15, 0.25)),
    Peer("diffusers TaylorSeer", taylor_seer, ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2))),
    # It keeps no guidance passes apart, so it is right only where they are one batched call.
    Peer("diffusers PAB", pyramid_attention, (2, 3, 5), families=("dit",)),
]
if importlib.util.find_spec("cache_dit") is not None:
    logging.getLogger("CACHE_DIT").setLevel(logging.ERROR)
    PEERS += [
        Peer(
            "cache-dit DBCache",
            cache_dit,
            ((0.06, 4, None), (0.1, 4, None), (0.16, 4, None), (0.3, 4, None)),
        ),
        Peer(
            "cache-dit DBCache + TaylorSeer",
            cache_dit,
            ((0.06, 4, 1), (0.1, 4, 1), (0.16, 4, 1), (0.3, 4, 1)),
        ),
    ]
