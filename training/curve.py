"""Writes the loss curve of a checkpoint to curve.json and curve.png."""

import argparse
import json
from pathlib import Path
from typing import Final

import torch
from matplotlib.figure import Figure

EVERY: Final = 50
HERE: Final = Path(__file__).parent


def means(losses: list[float]) -> list[tuple[int, float]]:
    """Iteration and mean loss of the iterations since the point before."""
    ends = range(EVERY, len(losses) + 1, EVERY)
    return [(end, round(sum(losses[end - EVERY : end]) / EVERY, 5)) for end in ends]


def plot(points: list[tuple[int, float]], decay_start: int) -> Figure:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True))
    axes.axvline(decay_start, color="grey", linestyle=":", label="start of the decay")
    axes.set(yscale="log", xlabel="iteration", ylabel="mean square error of the velocity")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="the last one of a run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--decay-start", type=int, default=1800)
    args = parser.parse_args()
    state = torch.load(args.checkpoint, weights_only=True, mmap=True)
    arguments = state["arguments"]
    record = {
        "iterations": state["iteration"],
        "pictures": state["iteration"] * int(arguments["batch"]) * args.processes,
        "minutes": round(state["seconds"] / 60, 1),
        "arguments": arguments,
        "mean_loss_of_iterations_up_to": means(state["curve"]),
    }
    (HERE / "curve.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(means(state["curve"]), args.decay_start).savefig(HERE / "curve.png", dpi=110)
