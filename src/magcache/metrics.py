"""How alike two batches of pictures are, and how long a call took.

Pictures are float tensors of shape [n, channels, height, width] in [0, 1], unrounded. Integer
pictures are refused: their differences wrap, which turns a black picture against a white one from
0 dB into 48 dB.

There is no LPIPS here, because nothing that can be installed beside a plain CPU build of torch
computes it: `lpips`, `piq`, `pyiqa` and the metric of torchmetrics take their ImageNet trunk from
torchvision and a download; `stlpips-pytorch` ships whole weights, but its code imports torchvision
and is in part licensed for non-commercial use only. Where torchvision and its weights are at hand,
`torchmetrics.functional.image.learned_perceptual_image_patch_similarity` takes these same pictures
(with `normalize=True`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torchmetrics.functional.image import structural_similarity_index_measure

__all__ = ["Spread", "psnr", "ssim", "timed"]

T = TypeVar("T")

# Decoders overshoot by a rounding error; anything further off is another scale (0..255, -1..1).
_SLACK = 1e-3
_SSIM_WINDOW = 11


def psnr(pictures: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in dB, one number a picture; identical pictures give inf."""
    pictures, reference = _checked(pictures, reference)
    error = (pictures - reference).square().flatten(1).mean(1)
    return 10 * error.reciprocal().log10()


def ssim(pictures: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Structural similarity (Wang et al. 2004: Gaussian window, 11 x 11), one number a picture."""
    pictures, reference = _checked(pictures, reference)
    height, width = pictures.shape[-2:]
    if min(height, width) < _SSIM_WINDOW:
        raise ValueError(
            f"pictures are {width} x {height}, SSIM's window needs {_SSIM_WINDOW} x {_SSIM_WINDOW} "
            "or more; compare larger pictures, or use psnr"
        )
    each = structural_similarity_index_measure(
        pictures, reference, data_range=1.0, reduction="none"
    )
    assert isinstance(each, torch.Tensor)
    return each.reshape(len(pictures))


@dataclass(frozen=True)
class Spread:
    """Mean and spread of some numbers. Prints as `41.2 ± 3.0`; a format gives the digits."""

    mean: float
    std: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: torch.Tensor | Iterable[float]) -> Spread:
        """From at least one value; `std` is that of a sample, 0 for a single value."""
        numbers = [float(value) for value in values]
        if not numbers:
            raise ValueError("no values to take a mean of; give at least one")
        mean = statistics.fmean(numbers)
        if len(set(numbers)) == 1:
            std = 0.0
        else:
            std = statistics.stdev(numbers) if math.isfinite(mean) else math.inf
        return cls(mean, std, min(numbers), max(numbers), len(numbers))

    def __format__(self, spec: str) -> str:
        spec = spec or ".1f"
        mean = format(self.mean, spec)
        return mean if self.n == 1 or math.isinf(self.mean) else f"{mean} ± {self.std:{spec}}"

    def __str__(self) -> str:
        return format(self)


def timed(call: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, float]:
    """What `call` returns, and its seconds on the clock, work queued on `device` included."""
    device = torch.device(device)
    _wait(device)
    start = time.perf_counter()
    result = call()
    _wait(device)
    return result, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _checked(pictures: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as float64 on the CPU, or an error that says what is wrong with which."""
    for name, batch in (("pictures", pictures), ("reference", reference)):
        if not batch.is_floating_point():
            raise TypeError(
                f"{name} are {batch.dtype}, expected floats in [0, 1]: differences of integers "
                "wrap; divide by 255, or ask the pipeline for output_type='pt'"
            )
        if batch.ndim != 4 or not batch.numel():
            raise ValueError(
                f"{name} have shape {tuple(batch.shape)}, expected [n, channels, height, width]"
            )
        low, high = batch.min().item(), batch.max().item()
        # Written so that a NaN fails it too.
        if not (low >= -_SLACK and high <= 1 + _SLACK):
            raise ValueError(
                f"{name} range from {low:.4g} to {high:.4g}, expected [0, 1]; "
                "divide by 255, or map [-1, 1] by x / 2 + 0.5"
            )
    if pictures.shape != reference.shape:
        raise ValueError(
            f"pictures have shape {tuple(pictures.shape)}, reference {tuple(reference.shape)}; "
            "both must be of the same pictures"
        )
    return pictures.detach().cpu().double(), reference.detach().cpu().double()
