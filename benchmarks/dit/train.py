"""Trains the class-conditional DiT by noise prediction; README.md has the command."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import Final, NamedTuple

import torch
from concepts import CONCEPTS
from data import load
from diffusers import DDIMScheduler, DiTTransformer2DModel
from muon import Muon
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

SIZE: Final = 32
WARM_UP: Final = 100
LOG_EVERY: Final = 100
SAVE_EVERY: Final = 500
SCHEDULE: Final = {"beta_schedule": "linear", "clip_sample": False, "timestep_spacing": "trailing"}
logger = logging.getLogger("train")


class Batch(NamedTuple):
    """Noisy pictures `[n, 3, size, size]`, their timesteps and classes `[n]`, and the noise."""

    noisy: Tensor
    timesteps: Tensor
    labels: Tensor
    noise: Tensor


class Batches:
    """Random pictures with classes, timesteps and noise; a seed tells a batch."""

    def __init__(self, folder: Path, size: int, drop: float) -> None:
        data = load(folder)
        self.pictures = nn.functional.interpolate(
            data.pictures, (SIZE, SIZE), mode="bicubic", antialias=True
        ).clamp(-1, 1)
        names = list(CONCEPTS)
        self.labels = torch.tensor([names.index(p.split(maxsplit=1)[1]) for p in data.prompts])
        self.scheduler = DDIMScheduler(**SCHEDULE)
        self.size, self.drop = size, drop

    def draw(self, seed: int) -> Batch:
        """Pictures of either style, half of them mirrored, some of the null class."""
        random = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.labels), (self.size,), generator=random)
        flips = torch.rand(self.size, generator=random) < 0.5
        clean = self.pictures[chosen]
        clean = torch.where(flips[:, None, None, None], clean.flip(-1), clean)
        null = torch.rand(self.size, generator=random) < self.drop
        labels = torch.where(null, len(CONCEPTS), self.labels[chosen])
        noise = torch.randn(clean.shape, generator=random)
        timesteps = torch.randint(1000, (self.size,), generator=random)
        noisy = self.scheduler.add_noise(clean, noise, timesteps)
        return Batch(noisy, timesteps, labels, noise)


def new_model(layers: int, heads: int) -> DiTTransformer2DModel:
    """The transformer, each block the identity and the output zero at first, as in DiT."""
    model = DiTTransformer2DModel(
        sample_size=SIZE,
        patch_size=4,
        in_channels=3,
        out_channels=3,
        num_layers=layers,
        num_attention_heads=heads,
        attention_head_dim=32,
        num_embeds_ada_norm=len(CONCEPTS),
    )
    zeros = [model.proj_out_1, model.proj_out_2]
    zeros += [block.norm1.linear for block in model.transformer_blocks]
    for linear in zeros:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return model


class Trainer:
    """Holds what a checkpoint holds, and takes steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.args = args
        self.model = new_model(args.layers, args.heads).train()
        # The batches drop labels, by seed; the embeddings would do so by global randomness.
        for module in self.model.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
        self.batches = Batches(args.data, args.batch, args.drop_label)
        self.rates = make_optimizers(self.model, args)
        self.iteration = 0
        self.losses: list[float] = []

    def step(self) -> None:
        """One batch: mean square error of the predicted noise."""
        scale = rate_scale(self.iteration, self.args)
        for optimizer, rate in self.rates.items():
            optimizer.param_groups[0]["lr"] = rate * scale
        batch = self.batches.draw(self.iteration)
        with torch.autocast("cpu", torch.bfloat16):
            predicted: Tensor = self.model(
                batch.noisy,
                timestep=batch.timesteps,
                class_labels=batch.labels,
                return_dict=False,
            )[0]
        loss = (predicted.float() - batch.noise).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.rates:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        self.iteration += 1

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.rates],
            "iteration": self.iteration,
            "losses": self.losses,
            "layers": self.args.layers,
            "heads": self.args.heads,
        }
        torch.save(state, path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.rates, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.iteration, self.losses = state["iteration"], state["losses"]


def make_optimizers(
    model: DiTTransformer2DModel, args: argparse.Namespace
) -> dict[Optimizer, float]:
    """Muon for the matrices of the blocks except their modulation, AdamW for the rest."""
    blocks = model.transformer_blocks.named_parameters()
    matrices = [p for name, p in blocks if p.ndim == 2 and "norm1" not in name]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    adamw = AdamW(rest, lr=args.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return {Muon(matrices, lr=args.muon_lr): args.muon_lr, adamw: args.adamw_lr}


def rate_scale(iteration: int, args: argparse.Namespace) -> float:
    """Warm-up, constant, then linear decay to zero at the last iteration."""
    warm_up = (iteration + 1) / WARM_UP
    decay = (args.iterations - iteration) / max(1, args.decay)
    return float(min(1.0, warm_up, decay))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("/work/scratch/training"))
    parser.add_argument("--out", type=Path, default=Path("/work/scratch/dit"))
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--decay", type=int, default=2000, help="length of the decay at the end")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--drop-label", type=float, default=0.1)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--heads", type=int, default=4, help="each is 32 wide")
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adamw-lr", type=float, default=2e-3)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)

    trainer = Trainer(args)
    logger.info("%.2f M weights", sum(p.numel() for p in trainer.model.parameters()) / 1e6)
    if args.resume is not None:
        trainer.resume(args.resume)
    for block in trainer.model.transformer_blocks:
        block.compile(dynamic=False)
    first, began = trainer.iteration, time.monotonic()
    while trainer.iteration < args.iterations:
        trainer.step()
        if trainer.iteration % LOG_EVERY == 0:
            seconds = time.monotonic() - began
            logger.info(
                "%d  %.1f min  loss %.4f  %.0f pictures/s",
                trainer.iteration,
                seconds / 60,
                sum(trainer.losses[-LOG_EVERY:]) / LOG_EVERY,
                (trainer.iteration - first) * args.batch / seconds,
            )
        if trainer.iteration % SAVE_EVERY == 0 or trainer.iteration == args.iterations:
            trainer.save(args.out / f"{trainer.iteration:05d}.pt")


if __name__ == "__main__":
    main()
