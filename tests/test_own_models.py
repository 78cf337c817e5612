"""docs/own-models.md: its code runs and prints what it shows, and what it says of models holds."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from models import distance
from torch import Tensor, nn

import magcache
from magcache import CannotCacheError, ConfigError, MagCacheConfig, MagCacheStrategyRegistry

PAGE = (Path(__file__).parent.parent / "docs/own-models.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ALWAYS_SKIP = MagCacheConfig(1e9, 99, 0.0, mag_ratios=[1.0])


def played() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The names that the page's code defines, and what each block that prints should and did."""
    names: dict[str, Any] = {}
    pairs: list[tuple[str, str]] = []
    printed = ""
    for kind, text in BLOCKS:
        if kind == "text":
            pairs.append((text, printed))
        else:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, "own-models.md", "exec"), names)
            printed = out.getvalue()
    return names, pairs


def test_page_prints_what_it_shows(registry: type[MagCacheStrategyRegistry]) -> None:
    names, pairs = played()
    assert len(pairs) == 3
    for shown, printed in pairs:
        assert printed == shown
        assert "." in printed.splitlines()[-1].split()[-1], "nothing was skipped"
    ran: list[str] = []
    model = names["model"]
    for name in ("refiner", "blocks"):
        model.get_submodule(f"{name}.0").register_forward_pre_hook(lambda *_, n=name: ran.append(n))
    with torch.no_grad():
        for step in range(names["steps"]):
            model(names["noise"], torch.tensor(1000.0 - step))
    assert ran.count("refiner") == names["steps"] > ran.count("blocks")


def test_adding_the_cache_takes_under_15_lines() -> None:
    adding = [text for kind, text in BLOCKS if kind == "python" and "magcache.enable(" in text]
    assert len(adding) == 3
    for text in adding:
        assert len([line for line in text.splitlines() if line.strip()]) < 15


# What the page says of models.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


Walk = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """A model that goes over its blocks as it is told."""

    def __init__(self, blocks: nn.Module, walk: Walk) -> None:
        super().__init__()
        self.blocks = blocks
        self.head = nn.Linear(8, 8)
        self.walk = walk

    def forward(self, x: Tensor, timestep: Tensor | None = None) -> Any:
        return self.head(self.walk(self.blocks, x))


def in_turn(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def by_len(blocks: Any, x: Tensor) -> Tensor:
    for i in range(len(blocks)):
        x = blocks[i](x)
    return x


def by_count(blocks: Any, x: Tensor) -> Tensor:
    for i in range(3):
        x = blocks[i](x)
    return x


def needs_the_last(blocks: Any, x: Tensor) -> Any:
    for block in blocks:
        x, last = block(x), block
    return x + last.mix.weight.sum()


def three(kind: Any = nn.ModuleList) -> nn.Module:
    blocks = [Block() for _ in range(3)]
    return kind(blocks) if kind is nn.ModuleList else kind(*blocks)


def called(blocks: Any, x: Tensor) -> Any:
    return blocks(x)


WAYS: dict[str, tuple[Callable[[], nn.Module], Walk]] = {
    "loop": (three, in_turn),
    "enumerate": (three, lambda blocks, x: in_turn([b for _, b in enumerate(blocks)], x)),
    "zip": (three, lambda blocks, x: in_turn([b for b, _ in zip(blocks, "abc", strict=False)], x)),
    "slice": (three, lambda blocks, x: in_turn(blocks[1:], in_turn(blocks[:1], x))),
    "len": (three, by_len),
    "sequential": (lambda: three(nn.Sequential), called),
    "in a dict": (
        lambda: nn.ModuleDict({"main": three()}),
        lambda blocks, x: in_turn(blocks["main"], x),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_going_over_the_blocks(way: str) -> None:
    make, walk = WAYS[way]
    model, x, ran = Model(make(), walk), torch.randn(1, 4, 8), []
    for part in model.blocks.modules():
        if isinstance(part, Block):
            part.register_forward_pre_hook(lambda *_: ran.append(1))
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(2)
    with torch.no_grad(), magcache.enable(model, ALWAYS_SKIP, scheduler=scheduler):
        computed = model(x)
        assert len(ran) == 3
        scheduler.step(x, scheduler.timesteps[0], x)
        assert distance(model(x), computed) < 1e-5
        assert len(ran) == 3
        assert distance(computed, model.head(x)) > 1e-2


def error_of(model: nn.Module, config: MagCacheConfig, error: type[Exception]) -> str:
    @torch.no_grad()
    def use() -> None:
        magcache.enable(model, config)
        model(torch.randn(1, 4, 8), torch.tensor(999.0))

    with pytest.raises(error) as raised:
        use()
    return str(raised.value)


def test_errors_are_those_on_the_page() -> None:
    config = MagCacheConfig(1e9, 99, 0.0, num_inference_steps=4, mag_ratios=[1.0])
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    errors = [
        error_of(Model(layers, in_turn), config, CannotCacheError),
        error_of(Model(three(), in_turn), ALWAYS_SKIP, ConfigError),
        error_of(Model(three(), by_count), config, CannotCacheError),
        error_of(Model(three(), needs_the_last), config, CannotCacheError),
    ]
    told = re.findall(r"^\| `(.*?)` \| (?:`enable`|first call) \|", PAGE, re.MULTILINE)
    assert len(told) == len(errors)
    for phrase, error in zip(told, errors, strict=True):
        assert phrase in error


def test_gradients_and_what_blocks_write() -> None:
    """Plain with gradients, and before `set_timesteps`; the first step is computed, others not."""
    model, x = Model(three(), in_turn), torch.randn(1, 4, 8)
    written: list[int] = []
    next(model.blocks.children()).register_forward_pre_hook(lambda *_: written.append(1))
    scheduler = FlowMatchEulerDiscreteScheduler()
    with magcache.enable(model, ALWAYS_SKIP, scheduler=scheduler):
        model(x)
        with torch.no_grad():
            model(x)
            assert len(written) == 2
            scheduler.set_timesteps(3)
            for t in scheduler.timesteps:
                model(x)
                scheduler.step(x, t, x)
        stats = magcache.stats(model)
    assert [stream.happened for stream in stats.streams] == ["C.."]
    assert sorted(stats.plain_calls.values()) == [1, 1]
    assert any("gradients" in reason for reason in stats.plain_calls)
    assert len(written) == 3
