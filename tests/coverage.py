"""Writes docs/models.md and docs/models.json from runs of every transformer and pipeline class.

`python tests/coverage.py` runs the sweep (some minutes) and ends with 1 if anything is wrong;
`python tests/coverage.py --check` runs nothing and ends with 1 if the page lacks an entry.
"""

from __future__ import annotations

import datetime
import inspect
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from pipes.base import ENTRIES as PIPELINES
from pipes.base import Entry
from typing import Any

import diffusers
import test_pipes
import test_zoo
import torch
import zoo
from diffusers import FlowMatchEulerDiscreteScheduler
from zoo.base import Made
from zoo.oracle import ALWAYS_SKIP, distance, try_entry

import magcache
from magcache import MagCacheStrategyRegistry

DOCS = Path(__file__).parent.parent / "docs"
MARKDOWN, JSON = DOCS / "models.md", DOCS / "models.json"

Page = dict[str, Any]

U_NET_PART = "a part of U-Nets, called here as a model"
KV_CACHE = "a skipped call fills no KV cache: the calls that fill one are computed"
NOTES = {
    "AnyFlowFARTransformer3DModel": KV_CACHE,
    "DreamLiteTransformer2DModel": U_NET_PART,
    "Flux2Transformer2DModel cached reference": KV_CACHE,
    "GlmImageTransformer2DModel cached reference": KV_CACHE,
    "MiniMaxMusic3RVQDepthDecoder": "no denoiser: it takes no timestep, a cache is of no use",
    "QwenImage21Transformer2DModel cached prefix": KV_CACHE,
    "Transformer2DModel": U_NET_PART,
    "TransformerTemporalModel": U_NET_PART,
    "WanAnimate2Transformer3DModel": KV_CACHE,
}

OTHER_MODEL = "its denoiser is none of diffusers' transformer classes"
OWN_SCHEDULER = "not built: its prior is stepped by `prior_scheduler`, and that is not followed"
NOT_BUILT = {
    "AmusedImg2ImgPipeline": OTHER_MODEL,
    "AmusedInpaintPipeline": OTHER_MODEL,
    "AmusedPipeline": OTHER_MODEL,
    "Cosmos2_5_TransferPipeline": "its ControlNet needs torchvision, which is not installed",
    "DiffusionGemmaPipeline": "text: its denoiser is a language model of transformers",
    "EasyAnimateControlPipeline": (
        "cannot be called in diffusers 0.42.1: it passes its own `encode_prompt` an argument that "
        "this does not take"
    ),
    "EchoModularPipeline": "has no scheduler; `enable` says so and names the way out",
    "LLaDA2Pipeline": "text: its denoiser is a language model of transformers",
    "RFD4ProteinaPipeline": (
        "has two schedulers and none called `scheduler`; `enable` says so. Some 30 inputs of "
        "protein features: not built"
    ),
    "StableCascadePriorPipeline": OTHER_MODEL,
    "StableUnCLIPPipeline": OWN_SCHEDULER,
    "UnCLIPPipeline": OWN_SCHEDULER,
    "VQDiffusionPipeline": "deprecated, not built",
    "WanAnimate2ModularPipeline": (
        "runs right when tried by hand; not an entry, as its KV cache's stream skips nothing"
    ),
    "WuerstchenPriorPipeline": OTHER_MODEL,
}

# Rows of the sweep that inject something between or into blocks.
INJECTIONS = {
    "ControlNet": "controlnet",
    "VACE hints": "WanVACETransformer3DModel",
    "Image prompt (IP-adapter)": "image prompt",
    "Skip-layer guidance": "skip layers",
    "Spatio-temporal guidance": "perturbed",
}
# Injected arguments that are made to drift, and by how much of their own size a step.
DRIFTING = {
    "SD3Transformer2DModel controlnet": ("block_controlnet_hidden_states",),
    "FluxTransformer2DModel controlnet": (
        "controlnet_block_samples",
        "controlnet_single_block_samples",
    ),
    "WanVACETransformer3DModel": ("control_hidden_states",),
}
DRIFTS = (0.0, 0.01, 0.1)
STEPS = 4


# Runs.


def split(name: str) -> tuple[str, str]:
    """An entry's class and variant."""
    class_name, _, variant = name.partition(" ")
    return class_name, variant


def said(error: Exception) -> str:
    """A failure in one line."""
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300] + f" ({line})"


def model_row(name: str, entry: Made) -> dict[str, Any]:
    class_name, variant = split(name)
    strategy = MagCacheStrategyRegistry.get_if_exists(class_name)
    row = {
        "class": class_name,
        "variant": variant,
        "strategy": strategy.__name__ if strategy else "general rule",
    }
    try:
        tried = try_entry(entry)
    except Exception as error:
        return {**row, "status": said(error)}
    notes = [NOTES[name]] if name in NOTES else []
    if tried.measured:
        notes.append("measured: one stepped-over pass at each computed step")
    if tried.blocks_run:
        notes.append("one part of block 0 runs on a skip: the model takes its embedding from there")
    return {
        **row,
        "status": "; ".join(tried.faults()) or "right",
        "lists": list(tried.lists),
        "error": max(tried.error, tried.error_again),
        "error_dropped": tried.error_dropped,
        "note": "; ".join(notes),
    }


def pipeline_row(entry: Entry) -> dict[str, Any]:
    class_name, variant = split(entry.name)
    row = {
        "class": class_name,
        "variant": variant,
        "streams": {name: list(streams) for name, streams in entry.streams.items()},
        "note": entry.note,
    }
    torch.manual_seed(0)
    try:
        test_pipes.test_pipeline(entry)
    except Exception as error:
        return {**row, "status": said(error)}
    return {**row, "status": "right"}


def changed(value: Any, share: float) -> Any:
    """An injected value moved by `share` of its size, always in the same direction."""
    if isinstance(value, torch.Tensor):
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        return value + share * value.norm() / noise.norm() * noise
    return [changed(member, share) for member in value]


def absent(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return [absent(member) for member in value]


@torch.no_grad()
def injection_row(name: str, drift: float) -> dict[str, Any]:
    """Four steps that differ in the injected value only: one computed, three skipped.

    The error of a skipped step is that against the same call computed.
    """
    model, arguments = zoo.ENTRIES[name]()
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    scheduler.set_begin_index(0)

    def call(change: Any) -> Any:
        args, kwargs = arguments(0)
        injected = {key: change(kwargs[key]) for key in DRIFTING[name]}
        return model(*args, **{**kwargs, **injected})

    def call_at(step: int) -> Any:
        return call(lambda value: changed(value, drift * step))

    plain = [call_at(step) for step in range(STEPS)]
    errors = []
    with magcache.enable(model, ALWAYS_SKIP, scheduler=scheduler):
        for step, t in enumerate(scheduler.timesteps):
            errors.append(distance(call_at(step), plain[step]))
            scheduler.step(torch.zeros(1), t, torch.zeros(1))
        happened = [stream.happened for stream in magcache.stats(model).streams]
    assert happened == ["C..."], happened
    return {
        "entry": name,
        "drift": drift,
        "errors": errors[1:],
        "without": distance(call(absent), plain[0]),
    }


def with_transformer() -> list[str]:
    """The public pipeline classes with a component called transformer or prior."""
    found = []
    for name in dir(diffusers):
        value = getattr(diffusers, name, None)
        if inspect.isclass(value) and issubclass(value, diffusers.DiffusionPipeline):
            parts = inspect.signature(value.__init__).parameters
            if any(part.startswith("transformer") or part == "prior" for part in parts):
                found.append(name)
    return found


def sweep() -> Page:
    start = time.perf_counter()
    models = [model_row(name, make()) for name, make in sorted(zoo.ENTRIES.items())]
    tell(f"{len(models)} ways through models, {time.perf_counter() - start:.0f} s")
    drifts = [injection_row(name, drift) for name in DRIFTING for drift in DRIFTS]
    pipelines = []
    for entry in sorted(PIPELINES.values(), key=lambda entry: entry.name):
        pipelines.append(pipeline_row(entry))
        if pipelines[-1]["status"] != "right":
            tell(f"{entry.name}: {pipelines[-1]['status']}")
    tell(f"{len(pipelines)} pipelines, {time.perf_counter() - start:.0f} s in all")
    built = {row["class"] for row in pipelines}
    known = with_transformer()
    left_out = sorted({*known, *NOT_BUILT} - built)
    return {
        "format": "magcache-coverage-1",
        "diffusers": diffusers.__version__,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "totals": {
            "classes": len(test_zoo.CLASSES),
            "classes_right": sum(
                row["status"] == "right" and row["class"] in test_zoo.CLASSES
                for row in models
                if not row["variant"]
            ),
            "strategies": len({r["strategy"] for r in models} - {"general rule"}),
            "ways": len(models),
            "ways_right": count_right(models),
            "pipeline_classes": len(built),
            "pipelines": len(pipelines),
            "pipelines_right": count_right(pipelines),
            "pipeline_classes_with_transformer": len(known),
            "of_these_run": len(built & set(known)),
        },
        "models": models,
        "injections": drifts,
        "pipelines": pipelines,
        "not_built": {name: NOT_BUILT.get(name, "not tried") for name in left_out},
    }


def count_right(rows: Iterable[dict[str, Any]]) -> int:
    return sum(row["status"] == "right" for row in rows)


# The page.


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    cells = ([cell.replace("|", "/") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def model_cells(row: dict[str, Any]) -> list[str]:
    measured = "error" in row
    return [
        f"{row['class']} {row['variant']}".rstrip(),
        row["status"],
        ", ".join(row.get("lists", ())),
        row["strategy"],
        f"{row['error']:.0e}" if measured else "",
        f"{row['error_dropped']:.2g}" if measured else "",
        row.get("note", ""),
    ]


def pipeline_cells(row: dict[str, Any]) -> list[str]:
    streams = [f"{name}: {', '.join(names)}" for name, names in row["streams"].items()]
    name = f"{row['class']} {row['variant']}".rstrip()
    return [name, "; ".join(streams), row["status"], row["note"]]


def injection_cells(kind: str, mark: str, models: list[dict[str, Any]]) -> list[str]:
    rows = [row for row in models if mark in f"{row['class']} {row['variant']}"]
    names = dict.fromkeys(row["class"] for row in rows)
    errors = [row["error"] for row in rows if "error" in row]
    right = f"{count_right(rows)} of {len(rows)}"
    return [kind, right, f"{max(errors):.0e}" if errors else "", ", ".join(names)]


def drift_cells(row: dict[str, Any]) -> list[str]:
    drift = f"{row['drift']:.0%} a step" if row["drift"] else "none"
    errors = [f"{error:.1e}" for error in row["errors"]]
    return [row["entry"], f"{row['without']:.2f}", drift, *errors]


def page(result: Page) -> str:
    totals, models = result["totals"], result["models"]
    worst = max((row["error"] for row in models if "error" in row), default=0.0)
    own = [row for row in models if not row["variant"]]
    ways = [row for row in models if row["variant"]]
    heads = (
        "class",
        "status",
        "lists walked",
        "strategy",
        "oracle error",
        "error with the residual dropped",
        "note",
    )
    strategies = totals["strategies"] or "None"
    return f"""\
# Models and pipelines

Written by `python tests/coverage.py` on {result["date"]} with diffusers {result["diffusers"]} and
torch {result["torch"]}, on a CPU; the same as data: [models.json](models.json). All instances are
small and have random weights.

- **{totals["classes_right"]} of {totals["classes"]} transformer classes** that diffusers defines
  are right under the oracle.
- **{strategies} of them needs a strategy** beyond the general rule.
- **{totals["pipelines_right"]} of {totals["pipelines"]} pipeline runs**, of
  {totals["pipeline_classes"]} pipeline classes, are right.

## Models

The oracle: the same call, once computed and once skipped, has to give the same output. *Oracle
error* is the largest relative difference of two skipped steps (limit 1e-5; the largest here is
{worst:.0e}); *with the residual dropped* it is what a skip would give that adds nothing, so that
the first number says something. None of the blocks listed may run on a skipped step, computed
steps and calls after `disable` must be bit-equal to plain ones.

{table(heads, map(model_cells, own))}

## Other ways through these models

ControlNets, modes, optional streams and KV caches: {count_right(ways)} of {len(ways)} are right.

{table(heads, map(model_cells, ways))}

## Injections

What is injected between the blocks or into them is part of the residual of the last computed step,
and a skipped step adds it once with that. Under the oracle, where it is the same on both steps:

{
        table(
            ("kind", "right", "largest error", "classes"),
            (injection_cells(kind, mark, models) for kind, mark in INJECTIONS.items()),
        )
    }

Where the injected value itself changes between steps, **a skipped step reuses the last computed
one**. What this costs, measured alone: four steps whose calls differ in the injected value only,
the first computed, three skipped. *Without it* is the difference that the whole injection makes;
the drift is the change of the injected tensors a step, relative to their norm.

{
        table(
            ("model", "without it", "drift", "skipped step 1", "step 2", "step 3"),
            map(drift_cells, result["injections"]),
        )
    }

## Pipelines

Each is run with 8 steps. Right means: at threshold 0 the output is bit-equal to the plain
pipeline's; with a plan that skips, each stream does what was planned, without fallbacks, and skips
at least one step; the run after an aborted one is equal to a fresh one; after `disable` the output
is bit-equal again. Streams go by the names of the pipeline's cache contexts, else by number.

{table(("class", "streams", "status", "note"), map(pipeline_cells, result["pipelines"]))}

## Not run

Of diffusers' {totals["pipeline_classes_with_transformer"]} pipeline classes with a component called
`transformer` or `prior`, {totals["of_these_run"]} run above; the rest, and some others, are these.

{table(("class", "why"), result["not_built"].items())}
"""


def missing(result: Page) -> list[str]:
    """Classes and entries that the sweep knows and the page does not."""
    listed = {
        kind: {f"{row['class']} {row['variant']}".rstrip() for row in result[kind]}
        for kind in ("models", "pipelines")
    }
    models = {*test_zoo.CLASSES, *zoo.ENTRIES} - set(test_zoo.NO_STACK) - listed["models"]
    return sorted(models) + sorted(set(PIPELINES) - listed["pipelines"])


def tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> int:
    if "--check" in sys.argv[1:]:
        lacking = missing(json.loads(JSON.read_text(encoding="utf-8")))
        for name in lacking:
            tell(f"{JSON.name} lacks {name}: run python tests/coverage.py")
        return int(bool(lacking))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Modular pipelines log the exception that the sweep raises in them.
    logging.disable(logging.CRITICAL)
    diffusers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as curves:
        os.environ["MAGCACHE_HOME"] = curves
        result = sweep()
    JSON.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    MARKDOWN.write_text(page(result), encoding="utf-8")
    rows = result["models"] + result["pipelines"]
    return int(count_right(rows) < len(rows))


if __name__ == "__main__":
    sys.exit(main())
