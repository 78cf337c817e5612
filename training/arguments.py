"""Arguments of a training run; the defaults are those of the shipped model."""

import argparse
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the demo model by rectified flow.")
    parser.add_argument("--data", type=Path, default=Path("/work/scratch/training"))
    parser.add_argument("--out", type=Path, default=Path("/work/scratch/training/run"))
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--iterations", type=int, default=2650)
    parser.add_argument("--decay", type=int, default=0, help="length of the decay at the end")
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="pictures per process")
    parser.add_argument("--adamw-lr", type=float, default=2e-3)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--level-mean", type=float, default=0.3)
    parser.add_argument("--level-std", type=float, default=1.1)
    parser.add_argument("--drop-prompt", type=float, default=0.1)
    parser.add_argument("--drop-style", type=float, default=0.1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--checkpoint-every", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()
