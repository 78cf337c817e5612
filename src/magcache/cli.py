"""The `magcache` command."""

from __future__ import annotations

import difflib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import diffusers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

import magcache
from magcache import presets, show
from magcache.budget import Budget
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.errors import ConfigError, CurveError, MagCacheError

__all__ = ["app"]


class _OneLineErrors(TyperGroup):
    """What the user got wrong is told in one line on stderr, with exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except typer.Abort:
            code = 130
        except Exception as error:
            # Typer's own errors; their base class has another home in each release of typer.
            if hasattr(error, "format_message"):
                message = error.format_message()
            elif isinstance(error, MagCacheError):
                message = str(error)
            else:
                raise
            typer.echo(f"magcache: {' '.join(message.split())}", err=True)
            code = 2
        sys.exit(code)


def _checked_steps(steps: int) -> int:
    if not 1 <= steps <= 1000:
        raise ConfigError(f"steps is {steps}; it must be from 1 to 1000, 28 is usual")
    return steps


def _checked_seed(seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}; it must be from 0 to 2**63 - 1")
    return seed


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
curve_app = typer.Typer(help="Look at magnitude curves.")
app.add_typer(curve_app, name="curve")

Speedup = Annotated[
    float | None, typer.Option(help="Plan for this speed-up: steps over computed steps.")
]
MaxError = Annotated[float | None, typer.Option(help="Plan for at most this predicted error.")]
QualityName = Annotated[
    str | None, typer.Option(help="Plan for a quality: high, balanced or fast.")
]
Threshold = Annotated[
    float | None, typer.Option(help="Greedy rule: largest error on which a step is still skipped.")
]
MaxSkip = Annotated[int | None, typer.Option(help="Greedy rule: most steps skipped in a row.")]
Retention = Annotated[
    float | None, typer.Option(help="Greedy rule: share of the first steps always computed.")
]
Steps = Annotated[int, typer.Option(help="Denoising steps.", callback=_checked_steps)]
Guidance = Annotated[
    float | None, typer.Option(help="Guidance scale of the runs; a usual one if not given.")
]
CurveName = Annotated[str, typer.Argument(metavar="CURVE", help="A curve's file or preset name.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.")
    ] = False,
) -> None:
    """Make diffusion transformers faster: skip the steps that change little."""
    if show_version:
        typer.echo(f"magcache {magcache.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to draw; may be given more than once.")
    ] = None,
    steps: Steps = 28,
    speedup: Speedup = None,
    max_error: MaxError = None,
    quality: QualityName = None,
    threshold: Threshold = None,
    max_skip: MaxSkip = None,
    retention: Retention = None,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance scale.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of every picture.", callback=_checked_seed)] = 3,
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path("magcache-demo"),
    list_prompts: Annotated[
        bool, typer.Option("--list-prompts", help="Show all that the model can draw.")
    ] = False,
) -> None:
    """Draw the same pictures without and with the cache; tell the time and the quality.

    Planned for twice the speed, unless told otherwise.
    """
    from magcache import demo as model

    console = _console()
    if list_prompts:
        show.columns(console, model.prompts())
        return
    prompts = tuple(prompt or model.DEMO_PROMPTS)
    config = _config(speedup, max_error, quality, threshold, max_skip, retention)
    config = config or MagCacheConfig(budget=Budget(speedup=2.0))
    if not math.isfinite(guidance):
        raise ConfigError(f"guidance is {guidance}; it must be a finite number, 3 is usual")
    diffusers.utils.logging.disable_progress_bar()
    pipe = model.load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    _require_known(prompts, pipe)
    _require_writable(out)

    from magcache.demo_run import WAYS, as_json, run_demo

    settings: dict[str, Any] = {"steps": steps, "guidance": guidance, "seed": seed}
    # On stderr, so that a piped output is the result alone.
    with Progress(
        TextColumn("drawing"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=_console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        task = progress.add_task("drawing", total=len(WAYS) * len(prompts))
        result = run_demo(
            pipe, prompts, config, on_picture=lambda: progress.advance(task), **settings
        )
    show.demo(console, result, config, settings, len(prompts))
    written = {
        "pairs.png": show.pairs(result, prompts),
        "plan.png": show.plans(result, config),
    }
    for name, figure in written.items():
        figure.savefig(out / name)
    data = as_json(result, prompts, config, settings)
    text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)
    (out / "result.json").write_text(text + "\n", encoding="utf-8")
    console.print(f"Written to {out}: {', '.join([*written, 'result.json'])}", soft_wrap=True)


@app.command()
def plan(
    curve: CurveName,
    steps: Steps = 28,
    speedup: Speedup = None,
    max_error: MaxError = None,
    quality: QualityName = None,
    threshold: Threshold = None,
    max_skip: MaxSkip = None,
    retention: Retention = None,
    guidance: Guidance = None,
    table: Annotated[
        bool, typer.Option("--table", help="Show ratio and error of every step.")
    ] = False,
) -> None:
    """Show before any run which steps are skipped, and how much that can gain at most.

    By the greedy rule, unless a speed-up, error or quality is asked for; those need a curve that
    was measured here.
    """
    loaded = _curve(curve)
    config = _config(speedup, max_error, quality, threshold, max_skip, retention)
    config = config or MagCacheConfig()
    # Streams are decided together: one plan is all of them.
    found = magcache.plan(loaded, config, steps=steps, guidance_scale=guidance)
    console = _console()
    console.print(f"{curve}, {steps} steps\n{show.settings(config)}", soft_wrap=True)
    show.plan(console, ", ".join(loaded.streams), found)
    if table:
        places = loaded.places(steps)
        show.plan_table(console, found, places, loaded.ratios(places), loaded.axis)


@app.command()
def frontier(curve: CurveName, steps: Steps = 28, guidance: Guidance = None) -> None:
    """Show the best plan for every number of computed steps: speed-up against predicted error."""
    found = magcache.frontier(_curve(curve), steps, guidance_scale=guidance)
    console = _console()
    console.print(f"{curve}, {steps} steps\n", soft_wrap=True)
    show.frontier(console, found)


@curve_app.command("show")
def curve_show(curve: CurveName) -> None:
    """Show a curve's streams and where it comes from."""
    show.curve(_console(), curve, _curve(curve))


@curve_app.command("list")
def curve_list() -> None:
    """List the presets."""
    for name in presets.names():
        typer.echo(name)


def _console(*, stderr: bool = False) -> Console:
    # Markup off: a prompt or a path may hold square brackets.
    return Console(stderr=stderr, markup=False, highlight=False)


def _config(
    speedup: float | None,
    max_error: float | None,
    quality: str | None,
    threshold: float | None,
    max_skip: int | None,
    retention: float | None,
) -> MagCacheConfig | None:
    """What the options ask for, or None if they ask for nothing."""
    asked = {"speedup": speedup, "max_error": max_error, "quality": quality}
    greedy = {
        "threshold": threshold,
        "max_skip_steps": max_skip,
        "retention_ratio": retention,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    greedy = {name: value for name, value in greedy.items() if value is not None}
    if not asked and not greedy:
        return None
    budget = Budget.from_dict(asked) if asked else None
    return MagCacheConfig.from_dict({**greedy, "budget": budget})


def _curve(name: str) -> MagnitudeCurve:
    known = presets.names()
    if name in known:
        return presets.load(name)
    if Path(name).is_file():
        return MagnitudeCurve.load(name)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise CurveError(f"{name}: no such file or preset; {hint}magcache curve list shows the presets")


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror}); give another folder with --out"
        ) from error


def _require_known(prompts: tuple[str, ...], pipe: Any) -> None:
    try:
        nothing, *known = pipe.text_encoder.tokenize(["", *prompts]).tolist()
    except ValueError as error:
        raise ConfigError(f"{error} (magcache demo --list-prompts)") from error
    for prompt, ids in zip(prompts, known, strict=True):
        if ids == nothing:
            raise ConfigError(
                f"the prompt {prompt!r} names nothing to draw (magcache demo --list-prompts)"
            )
