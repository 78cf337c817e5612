"""What keeping residuals in fewer bits costs in quality, on the shipped model.

Every prompt is drawn plainly, and with the cache once for each storage, from the same noise. "host"
keeps every bit and is left out: on a CPU it is "device". Memory is that of the residuals held, at
most, over the run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import magcache
from magcache import Budget, MagCacheConfig
from magcache.demo import load_demo_pipeline, prompts
from magcache.hook import cache_of
from magcache.machine import machine
from magcache.metrics import Spread, psnr
from magcache.storage import Storage

STORED: tuple[Storage, ...] = ("device", "bfloat16", "float8")
RULES = {
    "greedy": MagCacheConfig(threshold=0.12, max_skip_steps=4, retention_ratio=0.2),
    # Adds up several residuals with coefficients of both signs, which amplifies rounding.
    "budget": MagCacheConfig(budget=Budget(speedup=2.0)),
}
STEPS, PICTURES = 28, 8


def draw(pipe: Any, text: str, seed: int, **kwargs: Any) -> torch.Tensor:
    """One picture [1, 3, size, size] in [0, 1]."""
    picture = pipe(
        [text],
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        return_dict=False,
        **kwargs,
    )[0]
    assert isinstance(picture, torch.Tensor)
    return picture


def held_bytes(pipe: Any) -> int:
    cache = cache_of(pipe.transformer)
    assert cache is not None
    kept = [stored for state in cache.states.values() for _, stored in state.held]
    return sum(tensor.nbytes for stored in kept for tensor in stored.tensors)


def measure(
    pipe: Any, texts: list[str], plain: list[torch.Tensor], rule: str, how: Storage
) -> dict[str, Any]:
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, held_bytes(pipe))

    config = replace(RULES[rule], residual_storage=how)
    watch = pipe.transformer.register_forward_pre_hook(look)
    with magcache.enable(pipe, config):
        pictures = [draw(pipe, text, seed) for seed, text in enumerate(texts)]
        row = magcache.stats(pipe).streams[0].happened
    watch.remove()
    quality = Spread.of([float(psnr(a, b)) for a, b in zip(pictures, plain, strict=True)])
    return {
        "rule": rule,
        "storage": how,
        "psnr_db": quality.mean,
        "psnr_db_std": quality.std,
        "held_kib": most / 1024,
        "plan": row,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=folder / "residual_storage.json")
    out = parser.parse_args().out
    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    texts = list(prompts())[:PICTURES]
    plain = [draw(pipe, text, seed) for seed, text in enumerate(texts)]
    rows = [measure(pipe, texts, plain, rule, how) for rule in RULES for how in STORED]
    result = {"machine": machine(), "steps": STEPS, "prompts": texts, "storages": rows}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    Console().print(rows)


if __name__ == "__main__":
    main()
