import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import magcache
from magcache import presets
from magcache.cli import app
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve, StreamCurve
from magcache.demo import DEMO_PROMPTS, EmojiPipeline, load_demo_pipeline, prompts
from magcache.demo_run import WAYS, run_demo
from magcache.metrics import psnr

PROMPTS = DEMO_PROMPTS[:2]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    places = tuple(1 - i / 10 for i in range(10))
    streams = {
        "cond": StreamCurve(places=places, ratios=(1.0, *[0.98] * 9)),
        "uncond": StreamCurve(places=places, ratios=(1.0, *[0.9] * 9)),
    }
    curve = MagnitudeCurve(axis="noise", streams=streams, provenance={"model": "a [bold] model"})
    return curve.save(tmp_path / "curve.json")


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def succeeded(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_version() -> None:
    assert succeeded("--version") == f"magcache {magcache.__version__}\n"


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(args: list[str]) -> None:
    said = succeeded(*args)
    assert all(command in said for command in ("demo", "plan", "curve"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["demo", "--prompt", ""], "the prompt '' names nothing"),
        (["demo", "--prompt", PROMPTS[0], "--prompt", "the"], "the prompt 'the' names nothing"),
        (["demo", "--prompt", PROMPTS[0], "--prompt", "a flurble"], "'flurble'"),
        (["demo", "--steps", "0"], "steps is 0; it must be from 1"),
        (["demo", "--steps", "-3"], "steps is -3"),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--threshold", "nan"], "threshold is nan; it must be a finite number"),
        (["demo", "--threshold", "-0.1"], "threshold is -0.1"),
        (["demo", "--max-skip", "-1"], "max_skip_steps is -1"),
        (["demo", "--retention", "1.5"], "retention_ratio is 1.5"),
        (["demo", "--speedup", "0.5"], "speedup is 0.5; it must be a number, 1 or more"),
        (["demo", "--quality", "best"], "quality is 'best'; it must be one of high"),
        (["demo", "--speedup", "2", "--max-error", "1"], "found speedup and max_error"),
        (["demo", "--speedup", "2", "--threshold", "1"], "belongs to the greedy rule"),
        (["plan", "flux-dev", "--speedup", "2"], "this curve knows ratios only"),
        (["frontier", "flux-dev"], "this curve knows ratios only"),
        (["demo", "--guidance", "inf"], "guidance is inf"),
        (["demo", "--seed", "-1"], "seed is -1; it must be from 0"),
        (["demo", "--no-such-option"], "--no-such-option"),
        (["plan"], "CURVE"),
        (["plan", "no-such-curve"], "no-such-curve: no such file or preset"),
        (["curve"], "Missing command"),
        (["curve", "show", "no-such-curve"], "magcache curve list"),
        (["dem"], "dem"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_code_2(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("magcache: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert not (tmp_path / "magcache-demo").exists()


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run("demo", "--out", tmp_path / "file" / "folder")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "cannot write to" in result.stderr
    assert "--out" in result.stderr


def test_a_broken_curve_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    result = run("plan", tmp_path / "broken.json")
    assert result.exit_code == 2
    assert "not a magcache curve" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(
    curve: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(magcache, "plan", broken)
    assert isinstance(run("plan", curve).exception, ZeroDivisionError)


def test_plan_prints_the_streams_row_and_bound(curve: Path) -> None:
    """One plan for both guidance passes: they are decided together."""
    said = succeeded("plan", curve, "--steps", 10, "--threshold", 0.1, "--max-skip", 4)
    config = MagCacheConfig(threshold=0.1, max_skip_steps=4)
    plan = magcache.plan(MagnitudeCurve.load(curve), config, steps=10)
    assert f"cond, uncond: {plan.computed_steps} of 10 steps computed" in said
    assert f"at most {plan.speedup:.2f}x" in said
    # Errors of 0.02, 0.06 are skipped, 0.12 is not.
    assert str(plan) == "CC..C..C.."
    assert f"\n  {plan}\n" in said


def test_plan_for_a_budget() -> None:
    said = succeeded("plan", "demo-emoji", "--steps", 20, "--speedup", 2)
    assert "planned for speedup 2" in said
    assert "10 of 20 steps computed, at most 2.00x" in said
    high, fast = (
        succeeded("plan", "demo-emoji", "--steps", 20, "--quality", name)
        for name in ("high", "fast")
    )
    assert high.count("C") > fast.count("C")


def test_frontier_has_a_row_for_every_number_of_computed_steps() -> None:
    said = succeeded("frontier", "demo-emoji", "--steps", 12)
    best = magcache.frontier("demo-emoji", 12)
    for count, error in zip(best.counts, best.errors, strict=True):
        row = [str(count), f"{12 / count:.2f}x", f"{error:.5f}", str(best.plan(count))]
        assert row in [line.split() for line in said.splitlines()]


def test_plan_of_many_steps_is_not_broken_into_lines(curve: Path) -> None:
    said = succeeded("plan", curve, "--steps", 200, "--threshold", 0)
    assert said.count("\n  " + "C" * 200 + "\n") == 1


def test_plan_table_has_the_figures_of_every_step(curve: Path) -> None:
    said = succeeded("plan", curve, "--steps", 10, "--threshold", 0.1, "--table")
    third = ["3", "0.800", "0.9800", "0.9800", "0.0200", "."]
    fifth = ["5", "0.600", "0.9800", "0.9412", "0.1184", "C"]
    rows = [line.split() for line in said.splitlines()]
    assert third in rows
    assert fifth in rows
    # All but the first line, which has a path.
    assert max(map(len, said.splitlines()[1:])) <= 80


def test_curve_show_tells_streams_and_origin(curve: Path) -> None:
    said = succeeded("curve", "show", curve)
    rows = [line.split() for line in said.splitlines()]
    assert ["cond", "10", "1.000", "0.100", "0.980", "1.000", f"{0.98**9:.3f}"] in rows
    assert "model: a [bold] model" in said


def test_presets_are_listed_and_can_be_planned() -> None:
    names = succeeded("curve", "list").split()
    assert names == list(presets.names())
    assert "steps computed" in succeeded("plan", names[0])


def test_a_misspelt_preset_is_guessed() -> None:
    name = presets.names()[0]
    assert f"did you mean {name}" in run("plan", f"{name}x").stderr


def test_list_prompts_has_all_that_the_model_knows() -> None:
    assert succeeded("demo", "--list-prompts").splitlines() == list(prompts())


@pytest.fixture(scope="module")
def pipe() -> EmojiPipeline:
    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def demo_args(out: Path) -> list[object]:
    named = [arg for prompt in PROMPTS for arg in ("--prompt", prompt)]
    return ["demo", *named, "--steps", 6, "--threshold", 0.5, "--seed", 5, "--out", out]


def test_demo_draws_measures_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    said = succeeded(*demo_args(out))
    assert sorted(path.name for path in out.iterdir()) == ["pairs.png", "plan.png", "result.json"]
    for name in ("pairs.png", "plan.png"):
        with Image.open(out / name) as image:
            assert image.width == 1200
            assert len(image.convert("RGB").getcolors(2**24) or ()) > 50

    data = json.loads((out / "result.json").read_text(encoding="utf-8"))
    plain, cached, fewer = data["ways"]
    assert [way["name"] for way in data["ways"]] == list(WAYS)
    assert data["prompts"] == list(PROMPTS)
    assert data["settings"]["steps"] == 6
    assert data["settings"]["seed"] == 5
    assert plain["computed_steps"] == 6
    assert plain["psnr_db"]["mean"] == "inf"
    assert 1 <= cached["computed_steps"] < 6
    assert fewer["steps"] == fewer["computed_steps"] == math.ceil(cached["computed_steps"])
    assert cached["speedup_bound"] == 6 / cached["computed_steps"]
    assert 5 < cached["psnr_db"]["mean"] < 100
    assert len(cached["seconds"]) == len(cached["ssim"]["each"]) == 2
    assert data["machine"]["torch"] == torch.__version__
    assert data["machine"]["cores"] == os.cpu_count()

    for stream in data["streams"]:
        assert f" {stream['happened']}\n" in said
        assert stream["happened"] == stream["plan"]
    for way in (cached, fewer):
        assert f"{way['psnr_db']['mean']:.1f} ± {way['psnr_db']['std']:.1f}" in said
        assert f"{way['computed_steps']:g} of {way['steps']}" in said
    assert str(out) in said


def test_demo_output_is_plain_text_of_80_columns_when_piped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "magcache", "demo", "--steps", "3", "--prompt", PROMPTS[0]]
    command += ["--out", str(tmp_path / "out")]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    said = done.stdout.decode("utf-8")
    assert not [c for c in said if ord(c) < 32 and c != "\n"]
    table = [line for line in said.splitlines() if "Written to" not in line]
    assert max(map(len, table)) <= 80


def test_demo_without_skipping_is_identical(tmp_path: Path) -> None:
    arguments = ["--prompt", PROMPTS[0], "--steps", 2, "--threshold", 0, "--out", tmp_path]
    succeeded("demo", *arguments)
    _, cached, _ = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["ways"]
    assert cached["computed_steps"] == 2
    assert cached["psnr_db"]["mean"] == "inf"
    assert cached["ssim"]["min"] == 1.0


def test_ways_take_turns_from_the_same_noise_and_leave_the_pipe_plain(
    pipe: EmojiPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, int, bool]] = []
    plain_call = EmojiPipeline.__call__

    def call(self: EmojiPipeline, prompt: str, num_inference_steps: int, **kwargs: Any) -> Any:
        cached = "forward" in vars(self.transformer)
        drawn.append((prompt, num_inference_steps, cached))
        return plain_call(self, prompt, num_inference_steps, **kwargs)

    before = dict(vars(pipe.transformer))
    monkeypatch.setattr(EmojiPipeline, "__call__", call)
    seen: list[None] = []
    result = run_demo(
        pipe,
        PROMPTS,
        MagCacheConfig(threshold=0.5),
        steps=6,
        guidance=3.0,
        seed=5,
        on_picture=lambda: seen.append(None),
    )
    plain, cached, fewer = result.ways
    warm_up, *turns = drawn
    assert warm_up == (PROMPTS[0], 6, True)
    assert turns == [
        turn for p in PROMPTS for turn in ((p, 6, False), (p, 6, True), (p, fewer.steps, False))
    ]
    assert len(seen) == len(WAYS) * len(PROMPTS)
    assert dict(vars(pipe.transformer)) == before

    noise = torch.Generator().manual_seed(5)
    alone = plain_call(pipe, PROMPTS[1], 6, generator=noise, output_type="pt").images
    assert torch.equal(plain.pictures[1], alone[0])
    assert result.psnr(cached).mean == pytest.approx(
        psnr(cached.pictures, plain.pictures).mean().item()
    )
    for name, plan in result.plans.items():
        happened = next(s.happened for s in result.streams if s.stream == name)
        assert str(plan) == happened
        skipped = [e for e, c in zip(plan.errors, plan.computed, strict=True) if not c]
        assert skipped
        assert max(skipped) <= 0.5
    assert result.noise[0] == pytest.approx(1.0)
    assert list(result.noise) == sorted(result.noise, reverse=True)
