"""Trains the demo model by rectified flow; README.md has the commands that were used."""

import copy
import logging
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from arguments import parse_arguments
from batches import Batch, Batches, Sampling
from data import load
from model import DemoModel
from muon import Muon
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

LOG_EVERY: Final = 50
logger = logging.getLogger("train")


class Trainer:
    """Holds what a checkpoint holds, and takes steps."""

    def __init__(self, args: Namespace, rank: int, world: int) -> None:
        torch.manual_seed(args.seed)
        self.args, self.rank, self.world = args, rank, world
        data = load(args.data)
        sampling = Sampling(
            args.batch, args.level_mean, args.level_std, args.drop_prompt, args.drop_style
        )
        self.batches = Batches(data, sampling)
        self.model = DemoModel(data, args.layers, args.width)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.params = list(self.model.parameters())
        self.rates: dict[Optimizer, float] = make_optimizers(self.model, args)
        self.iteration = 0
        self.seconds = 0.0
        self.losses: list[float] = []

    def step(self) -> None:
        """One batch in each process."""
        scale = rate_scale(self.iteration, self.args)
        for optimizer, rate in self.rates.items():
            optimizer.param_groups[0]["lr"] = rate * scale
        draw = self.args.seed * 1_000_003 + self.iteration
        loss = flow_loss(self.model, self.batches.draw(draw * self.world + self.rank))
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append(average_gradients(self.params, loss.detach(), self.world))
        nn.utils.clip_grad_norm_(self.params, 1.0)
        for optimizer in self.rates:
            optimizer.step()
            optimizer.zero_grad()
        keep = min(self.args.ema, (1 + self.iteration) / (10 + self.iteration))
        with torch.no_grad():
            for average, param in zip(self.average.parameters(), self.params, strict=True):
                average.lerp_(param, 1 - keep)
        self.iteration += 1

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.rates],
            "iteration": self.iteration,
            "seconds": self.seconds,
            "curve": self.losses,
            "arguments": {name: str(value) for name, value in vars(self.args).items()},
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.rename(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.rates, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.iteration, self.seconds = state["iteration"], state["seconds"]
        self.losses = state["curve"]

    def log(self, seconds: float) -> None:
        logger.info(
            "%5d  %6.1f min  loss %.4f  rate x%.3f  %.1f pictures/s",
            self.iteration,
            self.seconds / 60,
            sum(self.losses[-LOG_EVERY:]) / LOG_EVERY,
            rate_scale(self.iteration - 1, self.args),
            LOG_EVERY * self.args.batch * self.world / seconds,
        )


def make_optimizers(model: DemoModel, args: Namespace) -> dict[Optimizer, float]:
    """Muon for the matrices of the blocks except their modulation, AdamW for the rest."""
    blocks = model.transformer.transformer_blocks.named_parameters()
    matrices = [p for name, p in blocks if p.ndim == 2 and "norm1" not in name]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    adamw = AdamW(rest, lr=args.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return {adamw: args.adamw_lr, Muon(matrices, lr=args.muon_lr): args.muon_lr}


def rate_scale(iteration: int, args: Namespace) -> float:
    """Warm-up, constant, then linear decay to zero at the last iteration."""
    warm_up = min(1.0, (iteration + 1) / args.warm_up)
    decay = min(1.0, (args.iterations - iteration) / max(1, args.decay))
    return float(warm_up * decay)


def flow_loss(model: DemoModel, batch: Batch) -> Tensor:
    """Mean square error of the velocity on the straight path from picture to noise."""
    sigma = batch.levels[:, None, None, None]
    noisy = (1 - sigma) * batch.clean + sigma * batch.noise
    with torch.autocast("cpu", torch.bfloat16):
        velocity: Tensor = model(noisy, batch.levels * 1000, batch.input_ids)
    return (velocity.float() - (batch.noise - batch.clean)).square().mean()


def average_gradients(params: list[nn.Parameter], loss: Tensor, world: int) -> float:
    """Averages the gradients of all processes in place; returns their mean loss."""
    if world == 1:
        return float(loss)
    gradients = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients] + [loss.view(1)])
    dist.all_reduce(flat)
    flat /= world
    *parts, mean = torch.split(flat, [g.numel() for g in gradients] + [1])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return float(mean)


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)

    trainer = Trainer(args, rank, world)
    if args.resume is not None:
        trainer.resume(args.resume)
    for block in trainer.model.transformer.transformer_blocks:
        block.compile(dynamic=False)
    began = time.monotonic() - trainer.seconds
    logged = trainer.seconds
    while trainer.iteration < args.iterations:
        trainer.step()
        trainer.seconds = time.monotonic() - began
        if trainer.iteration % LOG_EVERY == 0:
            trainer.log(trainer.seconds - logged)
            logged = trainer.seconds
        last = trainer.iteration == args.iterations
        if rank == 0 and (last or trainer.iteration % args.checkpoint_every == 0):
            trainer.save(args.out / f"{trainer.iteration:05d}.pt")


if __name__ == "__main__":
    main()
