from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from magcache.curve import MagnitudeCurve, StreamCurve
from magcache.planning import greedy_plan
from magcache.report import law_figure, pairs_figure, plan_figure

NOISE = tuple(1 - i / 12 for i in range(12))


def saved(figure: Figure, path: Path) -> np.ndarray:
    figure.savefig(path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def pictures(n: int, colour: tuple[float, float, float]) -> torch.Tensor:
    return torch.tensor(colour).reshape(1, 3, 1, 1).expand(n, 3, 32, 32).clone()


def share(image: np.ndarray, colour: tuple[int, int, int], within: int = 6) -> float:
    """Share of the pixels that have this colour."""
    return float((np.abs(image - colour).max(-1) <= within).mean())


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 12])
def test_sheet_shows_both_pictures_of_every_prompt(n: int, tmp_path: Path) -> None:
    plain, cached = pictures(n, (1.0, 0.0, 0.0)), pictures(n, (0.0, 0.0, 1.0))
    prompts = [f"prompt {i}" for i in range(n)]
    figure = pairs_figure(prompts, plain, cached, titles=("one", "two"), heading="A heading")
    image = saved(figure, tmp_path / "pairs.png")
    assert image.shape[1] == 1200
    red, blue = share(image, (255, 0, 0)), share(image, (0, 0, 255))
    assert red > 0.1
    assert red == pytest.approx(blue, rel=0.02)
    said = texts(figure)
    assert all(prompt in said for prompt in prompts)
    # (1 + 0 + 1) / 3 is the mean square between red and blue: 1.76 dB.
    assert said.count("1.8 dB") == n
    assert "A heading" in said
    assert "one   |   two   |   their difference, 1 times amplified" in said


def test_sheet_amplifies_a_small_difference_and_says_by_how_much(tmp_path: Path) -> None:
    plain, cached = pictures(1, (0.5, 0.5, 0.5)), pictures(1, (0.5, 0.5, 0.5))
    quiet = saved(pairs_figure(["a"], plain, cached), tmp_path / "quiet.png")
    assert "identical" in texts(pairs_figure(["a"], plain, cached))
    cached[:, :, :16] += 0.015
    figure = pairs_figure(["a"], plain, cached)
    loud = saved(figure, tmp_path / "loud.png")
    assert "50 times amplified" in texts(figure)
    # Half of the difference square turned from white to the colour of 0.75; nothing else is so far.
    assert 0.01 < float((np.abs(loud - quiet).max(-1) > 100).mean()) < 0.1


def test_sheet_cuts_a_long_prompt_and_takes_half_precision() -> None:
    plain = pictures(3, (0.5, 0.5, 0.5)).half()
    said = texts(pairs_figure(["word " * 40] * 3, plain, plain))
    assert "…" in said
    assert max(len(line) for line in said.splitlines()) < 80


def test_sheet_needs_a_pair_per_prompt() -> None:
    plain = pictures(2, (0, 0, 0))
    with pytest.raises(ValueError, match="1 prompts, 2 plain and 2 cached"):
        pairs_figure(["a"], plain, plain)


def plans(threshold: float):  # type: ignore[no-untyped-def]
    return {
        name: greedy_plan(
            [0.97] * 12, 12, threshold=threshold, max_skip_steps=k, retention_ratio=0.2
        )
        for name, k in (("cond", 4), ("uncond", 1))
    }


def test_plan_fills_the_computed_steps_only(tmp_path: Path) -> None:
    image = saved(plan_figure(plans(0.2), NOISE, threshold=0.2), tmp_path / "plan.png")
    every = saved(plan_figure(plans(0), NOISE, threshold=0), tmp_path / "every.png")
    blue, orange = (0x25, 0x63, 0xC9), (0xE0, 0x7A, 0x1F)
    assert image.shape == every.shape == (130 + 92 + 48 + 250 + 64, 1200, 3)
    rows, rows_of_every = image[130 : 130 + 92], every[130 : 130 + 92]
    for colour, plan in zip((blue, orange), plans(0.2).values(), strict=True):
        assert 0 < plan.computed_steps < 12
        found = share(rows, colour) / share(rows_of_every, colour)
        assert found == pytest.approx(plan.computed_steps / 12, rel=0.02)


def test_a_plan_for_a_budget_has_predicted_errors_and_no_threshold() -> None:
    figure = plan_figure(plans(0.2), NOISE, threshold=None)
    assert "predicted error" in [axes.get_ylabel() for axes in figure.axes]
    assert "threshold" not in texts(figure)


def test_plan_tells_counts_noise_and_threshold() -> None:
    figure = plan_figure(plans(0.2), NOISE, threshold=0.2)
    said = texts(figure)
    for name, plan in plans(0.2).items():
        assert f"stream {name}\n{plan.computed_steps} of 12" in said
    assert "threshold 0.2" in said
    ticks = [tick.get_text() for axes in figure.axes for tick in axes.get_xticklabels()]
    assert "1.00" in ticks
    assert "0.08" in ticks


def test_plan_needs_one_noise_level_a_step() -> None:
    with pytest.raises(ValueError, match="noise 3; they must be equal"):
        plan_figure(plans(0.2), NOISE[:3], threshold=0.2)


def measured(**extra: tuple[float, ...]) -> StreamCurve:
    return StreamCurve(places=NOISE, ratios=(1.0, *[0.97] * 11), **extra)


def test_law_draws_each_stream_over_falling_noise(tmp_path: Path) -> None:
    full = {"token_std": (0.01,) * 12, "prompt_spread": (0.005,) * 12}
    distance = {"cosine_distance": (0.0, *[0.004] * 11)}
    curve = MagnitudeCurve(
        axis="noise",
        streams={"cond": measured(**full, **distance), "uncond": measured(**distance)},
    )
    figure = law_figure(curve, heading="The law")
    image = saved(figure, tmp_path / "law.png")
    assert image.shape == (640, 1200, 3)
    assert share(image, (255, 255, 255)) < 0.97
    ratio, distances = figure.axes[1:]
    assert ratio.xaxis_inverted()
    assert distances.xaxis_inverted()
    # The first step's ratio of 1 is a convention and not drawn; the line at 1 is the third.
    assert [len(line.get_ydata()) for line in ratio.lines] == [2, 11, 11]
    assert list(distances.lines[0].get_ydata()) == [0.004] * 11
    assert "The law" in texts(figure)


def test_law_of_a_published_table_has_no_distance_panel(tmp_path: Path) -> None:
    figure = law_figure(MagnitudeCurve.from_ratios([1.0, 0.99, 0.98]))
    assert saved(figure, tmp_path / "law.png").shape == (440, 1200, 3)
    assert not figure.axes[1].xaxis_inverted()
    assert figure.axes[1].get_xlabel() == "share of the run"
