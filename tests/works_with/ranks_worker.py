"""What each process of `test_ranks.py` does, and how processes are started and waited for.

Nothing but this module is imported by them, so that one process can import it for all of them.
"""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch
from models import grid, normal
from pipelines import (
    draw_flux,
    draw_qwen,
    draw_wan,
    flux_pipeline,
    odd_pipeline,
    qwen_pipeline,
    wan_single,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import magcache
from magcache import ConfigError, MagCacheConfig, MagnitudeCurve, ranks
from magcache.errors import RanksError
from magcache.hook import cache_of
from magcache.ranks import _Circle
from magcache.store import curve_path, fingerprint

Work = Callable[..., Any]

STEPS = 8
RATIOS = [1.0, 1.1, 1.05, 1.02, 1.01, 0.99, 0.98, 0.97]
CONFIG = MagCacheConfig(0.1, 3, 0.2, mag_ratios=RATIOS)
MEASURING = MagCacheConfig(0.5, 3, 0.2)

# Context parallelism cuts text too: it has to be a multiple of the ranks.
TEXT = 4


def flux(pipe: Any, seed: int = 0, steps: int = STEPS, **kwargs: Any) -> Tensor:
    texts = {
        "prompt_embeds": normal(seed + 100, 1, TEXT, 8),
        "negative_prompt_embeds": normal(102, 1, TEXT, 8),
    }
    return draw_flux(pipe, steps, seed, **{**texts, **kwargs})


def wan(pipe: Any) -> Tensor:
    return draw_wan(pipe, STEPS)


def qwen(pipe: Any) -> Tensor:
    mask = torch.ones(1, TEXT, dtype=torch.int64)
    return draw_qwen(
        pipe,
        STEPS,
        prompt_embeds=normal(100, 1, TEXT, 8),
        prompt_embeds_mask=mask,
        negative_prompt_embeds=normal(102, 1, TEXT, 8),
        negative_prompt_embeds_mask=mask,
    )


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "flux": (flux_pipeline, flux),
    "wan": (wan_single, wan),
    "qwen": (qwen_pipeline, qwen),
}

# Ways to spread a transformer over ranks.


def ulysses(transformer: Any) -> None:
    context_parallel(transformer, ulysses_degree=dist.get_world_size())


def ulysses_anything(transformer: Any) -> None:
    context_parallel(transformer, ulysses_degree=dist.get_world_size(), ulysses_anything=True)


def ring(transformer: Any) -> None:
    attention_dispatch._native_attention_forward_op = attention_with_lse
    context_parallel(transformer, ring_degree=dist.get_world_size())


def unified(transformer: Any) -> None:
    attention_dispatch._native_attention_forward_op = attention_with_lse
    context_parallel(transformer, ring_degree=2, ulysses_degree=dist.get_world_size() // 2)


def context_parallel(transformer: Any, **config: Any) -> None:
    transformer.enable_parallelism(config=diffusers.ContextParallelConfig(**config))


def attention_with_lse(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Attention that gives the log-sum-exp as well, which a ring needs and the CPU's does not."""
    del ctx, kwargs
    mask, scale, return_lse = args[0], args[3], args[5]
    assert mask is None
    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    logits = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    out = (logits.softmax(-1) @ value).permute(0, 2, 1, 3)
    return (out, logits.logsumexp(-1).transpose(1, 2)) if return_lse else out


def tensor_parallel(transformer: Any) -> None:
    config = diffusers.TensorParallelConfig(tp_degree=dist.get_world_size())
    transformer.enable_parallelism(config=config)


def blocks_of(transformer: Any) -> list[nn.Module]:
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def fsdp(transformer: Any) -> None:
    for part in [*blocks_of(transformer), transformer]:
        fully_shard(part)


def hsdp(transformer: Any) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "cut"))
    for part in [*blocks_of(transformer), transformer]:
        fully_shard(part, mesh=mesh)


# Starting and waiting.


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def prepare() -> None:
    """What a process needs before any of this runs on a CPU."""
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    # Diffusers divides by the number of accelerators, and knows tensor parallelism on those only.
    torch.accelerator.device_count = lambda: 1
    from diffusers.hooks import tensor_parallel

    tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)


def _process(
    rank: int, world: int, port: int, folder: Path, timeout: float, work: Work, args: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["MAGCACHE_HOME"] = str(folder / "curves")
    prepare()
    seconds = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=seconds)
    try:
        result = work(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Destroying the group would wait for the others.
        os._exit(1)
    torch.save(result, folder / f"{rank}.pt")
    # Those that are dead by now do not come.
    with suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


class Launcher:
    """Runs a function on several ranks; kills what has not ended in time."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        # One server imports everything once, and processes are forked from it.
        self.context.set_forkserver_preload([__name__])
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            from multiprocessing.forkserver import ensure_running

            ensure_running()
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before

    def __call__(
        self,
        world: int,
        folder: Path,
        work: Work,
        *args: Any,
        timeout: float = 30,
        dead: tuple[int, ...] = (),
    ) -> list[Any]:
        """Each rank's result; None for those that are `dead` by the end. timeout: the group's."""
        port = free_port()
        made = [
            self.context.Process(
                target=_process, args=(rank, world, port, folder, timeout, work, args)
            )
            for rank in range(world)
        ]
        for process in made:
            process.start()
        try:
            end = time.monotonic() + 90
            for process in made:
                process.join(max(0, end - time.monotonic()))
            codes = [process.exitcode for process in made]
        finally:
            for process in made:
                if process.is_alive():
                    process.kill()
        alive = [code for rank, code in enumerate(codes) if rank not in dead]
        assert not any(alive), f"exit codes {codes} (None: it hung)"
        return [
            None if rank in dead else torch.load(folder / f"{rank}.pt", weights_only=False)
            for rank in range(world)
        ]


# What ranks do.


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What magcache says meanwhile."""
    handler, logger = Heard(), logging.getLogger("magcache")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def rows(pipe: Any) -> list[str]:
    return [stream.happened for stream in magcache.stats(pipe).streams]


def as_planned(pipe: Any) -> bool:
    return all(stream.as_planned for stream in magcache.stats(pipe).streams)


def spread_and_cached(spread: Work, names: tuple[str, ...], orders: tuple[str, ...]) -> Any:
    """Draws as one process does and spread over the ranks, enabled in each order."""
    seen = []
    for name in names:
        build, draw = MODELS[name]
        single = build()
        plain = draw(single)
        with magcache.enable(single, CONFIG):
            expected = draw(single)
            plan = rows(single)
        for order in orders:
            pipe = build()
            if order == "parallel first":
                spread(pipe.transformer)
            enabled = magcache.enable(pipe, CONFIG)
            if order == "after a run":
                draw(pipe)
            if order != "parallel first":
                spread(pipe.transformer)
            off = float((draw(pipe) - expected).abs().max())
            row, went = rows(pipe), as_planned(pipe)
            enabled.disable()
            off_plain = float((draw(pipe) - plain).abs().max())
            seen.append((f"{name}, {order}", off, row == plan and went, row, off_plain))
    return seen


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called meanwhile."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "_wrap" not in str(func) and "wait" not in str(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def collectives(spread: Work) -> Any:
    """Collectives of each step, plain and cached, the cached run's row, and rounds of the store."""
    said = [0]
    plain_say = _Circle.say

    def counted_say(self: _Circle, text: str) -> int:
        said[0] += 1
        return plain_say(self, text)

    _Circle.say = counted_say  # type: ignore[method-assign]
    pipe = flux_pipeline()
    spread(pipe.transformer)

    def counted() -> list[int]:
        counts = [0]
        with Collectives() as mode:

            def ended(_: Any, step: int, t: Any, kwargs: Any) -> Any:
                counts.append(mode.count)
                return kwargs

            flux(pipe, callback_on_step_end=ended, true_cfg_scale=1.0)
        return [after - before for before, after in pairwise(counts)]

    flux(pipe)
    plain = counted()
    magcache.enable(pipe, CONFIG)
    flux(pipe)
    first = said[0]
    cached = counted()
    return plain, cached, rows(pipe)[0], first, said[0]


Streams = dict[str, Any]


def streams_of(curve: MagnitudeCurve) -> Streams:
    return curve.model_dump()["streams"]


def measured_alone(seeds: tuple[int, ...], folder: str) -> list[Streams]:
    """Each seed's curve in one process, that the ranks' shared folder knows nothing of."""
    found = []
    for seed in seeds:
        pipe = flux_pipeline()
        with magcache.enable(pipe, MEASURING, curves=f"{folder}/{dist.get_rank()} {seed}"):
            flux(pipe, seed)
            found.append(streams_of(cache_of(pipe.transformer).curve))
    return found


def first_runs(spread: Work, own_prompts: bool, folder: str) -> dict[str, Any]:
    """A run that measures, and one that is cached, as every rank sees them."""
    seeds = tuple(range(dist.get_world_size())) if own_prompts else (0,)
    alone = measured_alone(seeds, folder)
    pipe = flux_pipeline()
    plain_fingerprint = fingerprint(pipe.transformer)
    spread(pipe.transformer)
    seed = dist.get_rank() if own_prompts else 0
    with heard(logging.INFO) as lines:
        magcache.enable(pipe, MEASURING)
        flux(pipe, seed)
        first = rows(pipe)
        curve = streams_of(cache_of(pipe.transformer).curve)
        again = []
        for _ in range(2):
            flux(pipe, seed)
            again.append(rows(pipe))
    return {
        "alone": alone,
        "first": first,
        "again": again,
        "curve": curve,
        "lines": lines,
        "same fingerprint": fingerprint(pipe.transformer) == plain_fingerprint,
        "files": sorted(path.name for path in Path(os.environ["MAGCACHE_HOME"]).iterdir()),
        "file": curve_path(flux_pipeline().transformer).name,
    }


def split_guidance(folder: str) -> dict[str, Any]:
    """Each rank runs one of the two guidance passes; beside it, one process runs both."""
    names = ("cond", "uncond")
    inputs = {
        name: {
            "encoder_hidden_states": normal(100 + i, 1, TEXT, 8),
            "pooled_projections": normal(200 + i, 1, 8),
            "img_ids": grid(4, 3),
            "txt_ids": torch.zeros(TEXT, 3),
        }
        for i, name in enumerate(names)
    }

    @torch.no_grad()
    def draw(transformer: Any, scheduler: Any, own: tuple[str, ...]) -> Tensor:
        latents = normal(0, 1, 16, 4)
        scheduler.set_timesteps(STEPS)
        for t in scheduler.timesteps:
            made = []
            for name in own:
                with transformer.cache_context(name):
                    made.append(
                        transformer(latents, timestep=t.expand(1) / 1000, **inputs[name])[0]
                    )
            if len(own) == 1:
                alone = made[0].contiguous()
                made = [torch.empty_like(alone) for _ in names]
                dist.all_gather(made, alone)
            prediction = 3 * made[0] - 2 * made[1]
            latents = scheduler.step(prediction, t, latents, return_dict=False)[0]
        return latents

    rank = dist.get_rank()
    results = []
    for own, group in ((names, None), (names[rank : rank + 1], dist.group.WORLD)):
        pipe = flux_pipeline()
        transformer, scheduler = pipe.transformer, pipe.scheduler
        where = f"{folder}/{len(own)} {rank}"
        magcache.enable(transformer, speedup=2.0, scheduler=scheduler, curves=where, group=group)
        draw(transformer, scheduler, own)
        picture = draw(transformer, scheduler, own)
        curve = streams_of(cache_of(transformer).curve)
        results.append((picture, curve, rows(transformer)))
    (expected, alone, plan), (picture, curve, row) = results
    return {
        "off": float((picture - expected).abs().max()),
        "alone": alone,
        "curve": curve,
        "plan": plan,
        "row": row,
    }


def many_prompts(folder: str) -> dict[str, Any]:
    """Calibrates over prompts of the rank's own, two on the first rank and one on the second."""
    alone = measured_alone((0, 1, 2), folder)
    seeds = {0: (0, 1), 1: (2,)}[dist.get_rank()]
    pipe = flux_pipeline()
    left = iter(seeds)

    def call(prompt: str, **kwargs: Any) -> Tensor:
        return flux(pipe, next(left), **kwargs)

    target = _Prompted(pipe, call)
    prompts = [str(seed) for seed in seeds]
    curve = magcache.calibrate(target, prompts, group=dist.group.WORLD)
    return {
        "alone": alone,
        "curve": streams_of(curve),
        "prompts": curve.provenance["prompts"],
        "runs": curve.provenance["runs"],
        "saved": streams_of(MagnitudeCurve.load(curve_path(pipe.transformer))),
    }


class _Prompted:
    """A pipeline that draws what its prompt is the seed of."""

    def __init__(self, pipe: Any, call: Work) -> None:
        self.transformer, self.scheduler = pipe.transformer, pipe.scheduler
        self._call = call

    def __call__(self, prompt: str) -> Tensor:
        return self._call(prompt)


# What goes wrong.


class BrokenError(Exception):
    pass


def breaking(_: Any, step: int, t: Any, kwargs: Any) -> Any:
    if step == 3:
        raise BrokenError
    return kwargs


def dying(_: Any, step: int, t: Any, kwargs: Any) -> Any:
    if step == 3:
        os._exit(3)
    return kwargs


def one_dies() -> Any:
    pipe = flux_pipeline()
    magcache.enable(pipe, MEASURING, group=dist.group.WORLD)
    began = time.monotonic()
    try:
        flux(pipe, callback_on_step_end=dying if dist.get_rank() == 1 else None)
    except RanksError as error:
        return str(error), time.monotonic() - began


def host_dies() -> Any:
    """The rank that hosts the store ends before the other, which looks late at what was said."""
    ranks._LOOK = 0.5 * dist.get_rank() or ranks._LOOK
    pipe = flux_pipeline()
    magcache.enable(pipe, MEASURING, group=dist.group.WORLD)
    if dist.get_rank() == 0:
        # It has been heard by then.
        os._exit(3)
    try:
        flux(pipe)
    except RanksError as error:
        return str(error)


def one_aborts() -> Any:
    pipe = flux_pipeline()
    seen = []
    with heard() as lines:
        magcache.enable(pipe, MEASURING, group=dist.group.WORLD)
        for run in range(3):
            broken = run == 0 and dist.get_rank() == 1
            with suppress(BrokenError):
                flux(pipe, dist.get_rank(), callback_on_step_end=breaking if broken else None)
            known = cache_of(pipe.transformer).curve
            seen.append((rows(pipe), None if known is None else streams_of(known)))
    return seen, lines


def one_fails_to_calibrate() -> Any:
    pipe = flux_pipeline()
    broken = dist.get_rank() == 1

    def call(prompt: str) -> Tensor:
        return flux(pipe, callback_on_step_end=breaking if broken else None)

    began = time.monotonic()
    try:
        magcache.calibrate(_Prompted(pipe, call), ["a"], group=dist.group.WORLD)
    except (BrokenError, RanksError) as error:
        left = cache_of(pipe.transformer)
        return type(error).__name__, str(error), time.monotonic() - began, left is None


def other_settings(asked: bool) -> Any:
    pipe = flux_pipeline()
    if not asked:
        ulysses(pipe.transformer)
    settings = MagCacheConfig(0.1 + dist.get_rank(), mag_ratios=RATIOS)
    try:
        magcache.enable(pipe, settings, group=dist.group.WORLD if asked else None)
        flux(pipe)
    except ConfigError as error:
        return str(error), asked and cache_of(pipe.transformer) is not None


def one_knows(folder: str) -> Any:
    """Only one rank finds a curve, as on machines with disks of their own."""
    rank = dist.get_rank()
    measured_alone((0,), folder)
    pipe = flux_pipeline()
    fsdp(pipe.transformer)
    known = f"{folder}/1 0" if rank == 1 else f"{folder}/nothing {rank}"
    magcache.enable(pipe, MEASURING, curves=known)
    flux(pipe)
    return rows(pipe), streams_of(cache_of(pipe.transformer).curve)


def one_has_no_cache() -> Any:
    pipe = flux_pipeline()
    ulysses(pipe.transformer)
    try:
        if dist.get_rank() == 0:
            magcache.enable(pipe, CONFIG)
        flux(pipe)
    except RuntimeError as error:
        return type(error).__name__, str(error)


def on_their_own() -> Any:
    """Ranks that share nothing: one draws, and the other does not."""
    pipe = flux_pipeline()
    magcache.enable(pipe, MEASURING, curves=f"{os.environ['MAGCACHE_HOME']}{dist.get_rank()}")
    if dist.get_rank() == 0:
        flux(pipe)
        flux(pipe)
    return magcache.stats(pipe).streams and rows(pipe)


def guarded() -> Any:
    pipe = flux_pipeline()
    ulysses(pipe.transformer)
    with heard() as lines:
        budget = magcache.Budget(speedup=2.0, drift_guard=True)
        magcache.enable(pipe, MagCacheConfig(budget=budget))
        for _ in range(3):
            flux(pipe)
    return rows(pipe), as_planned(pipe), lines, cache_of(pipe.transformer)._guard is None


def other_weights() -> Any:
    pipe = flux_pipeline()
    fsdp(pipe.transformer)
    with heard(logging.INFO) as lines:
        magcache.enable(pipe, MEASURING)
        for _ in range(3):
            flux(pipe)
        before, said = rows(pipe), list(lines)
        with torch.no_grad():
            for weight in pipe.transformer.state_dict().values():
                weight.mul_(1.25)
        flux(pipe)
        after = rows(pipe)
    return before, said, after, lines[len(said) :]


def many_writers(path: str) -> int:
    """Every rank writes the same file, and reads it meanwhile; how often that was done."""
    curve = MagnitudeCurve.from_ratios([1.0 + 1e-3 * i for i in range(200)])
    dist.barrier()
    for _ in range(50):
        curve.save(path)
        assert MagnitudeCurve.load(path).streams == curve.streams
    return len(list(Path(path).parent.iterdir()))


def distributed_activations() -> Any:
    """A model whose hidden states are DTensors with the tokens split over ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = odd_pipeline()
    with magcache.enable(expected, MEASURING, curves=f"{os.environ['MAGCACHE_HOME']} alone"):
        expected(STEPS)
        alone = streams_of(cache_of(expected.transformer).curve)
        picture = expected(STEPS)
        plan = rows(expected)
    pipe = odd_pipeline()
    distribute_module(pipe.transformer, mesh)

    def spread(model: nn.Module, args: Any, kwargs: Any) -> Any:
        kwargs = {
            key: distribute_tensor(value, mesh, [Replicate()]) for key, value in kwargs.items()
        }
        return tuple(distribute_tensor(arg, mesh, [Shard(1)]) for arg in args), kwargs

    pipe.transformer.register_forward_pre_hook(spread, with_kwargs=True)
    pipe.transformer.register_forward_hook(lambda model, args, output: output.full_tensor())
    magcache.enable(pipe, MEASURING)
    pipe(STEPS)
    curve = streams_of(cache_of(pipe.transformer).curve)
    off = float((pipe(STEPS) - picture).abs().max())
    return off, rows(pipe) == plan, plan, alone, curve


def main() -> None:
    """Under torchrun: draws cached with Ulysses, and compares with one process."""
    prepare()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    seen = spread_and_cached(ulysses, ("wan",), ("parallel first",))
    assert seen[0][1] < 1e-5, seen
    assert seen[0][2], seen
    Path(sys.argv[1], f"{dist.get_rank()}").write_text(seen[0][3][0])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
