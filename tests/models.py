"""Tiny random transformers: real diffusers classes, and plain modules with odd habits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    DiTTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from torch import Tensor, nn

Inputs = dict[str, Any]


def randomised(module: nn.Module, seed: int = 0) -> Any:
    """Every weight random and of a size that makes each block count, zero-initialised ones too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise / (weight[0].numel() ** 0.5))
            else:
                weight.copy_((1.0 if "norm" in name and "weight" in name else 0.0) + 0.2 * noise)
    return module.eval().requires_grad_(False)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Real classes.


def flux(double: int = 2, single: int = 2, seed: int = 0, channels: int = 4) -> Any:
    return randomised(
        FluxTransformer2DModel(
            patch_size=1,
            in_channels=channels,
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            axes_dims_rope=(2, 2, 4),
        ),
        seed,
    )


def flux_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {
        "hidden_states": normal(seed, batch, size * size, 4),
        "encoder_hidden_states": normal(seed + 1, batch, 3, 8),
        "pooled_projections": normal(seed + 2, batch, 8),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": grid(size, 3),
        "txt_ids": torch.zeros(3, 3),
    }


def grid(size: int, axes: int) -> Tensor:
    ids = torch.zeros(size, size, axes)
    ids[..., 1] += torch.arange(size)[:, None]
    ids[..., 2] += torch.arange(size)[None, :]
    return ids.reshape(-1, axes)


def flux2() -> Any:
    return randomised(
        Flux2Transformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=8,
            timestep_guidance_channels=8,
            axes_dims_rope=(2, 2, 2, 2),
        )
    )


def flux2_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {
        "hidden_states": normal(seed, batch, size * size, 4),
        "encoder_hidden_states": normal(seed + 1, batch, 3, 8),
        "timestep": torch.full((batch,), 0.5),
        "guidance": torch.full((batch,), 4.0),
        "img_ids": grid(size, 4),
        "txt_ids": torch.zeros(3, 4),
    }


def sd3(layers: int = 3, seed: int = 0) -> Any:
    return randomised(
        SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=layers,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_projection_dim=16,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            out_channels=4,
            pos_embed_max_size=16,
        ),
        seed,
    )


def sd3_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {
        "hidden_states": normal(seed, batch, 4, 2 * size, 2 * size),
        "encoder_hidden_states": normal(seed + 1, batch, 3, 8),
        "pooled_projections": normal(seed + 2, batch, 8),
        "timestep": torch.full((batch,), 500.0),
    }


WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 16,
    "rope_max_seq_len": 32,
}


def wan(layers: int = 3, seed: int = 0, **config: Any) -> Any:
    return randomised(WanTransformer3DModel(**{**WAN, **config}, num_layers=layers), seed)


def wan_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {
        "hidden_states": normal(seed, batch, 4, 2, 2 * size, 2 * size),
        "encoder_hidden_states": normal(seed + 1, batch, 3, 8),
        "timestep": torch.full((batch,), 500),
    }


def wan_inputs_per_token(seed: int, batch: int, size: int) -> Inputs:
    """A timestep for each token; those of the first frame are given, not denoised."""
    timestep = torch.full((batch, 2 * size * size), 500.0)
    timestep[:, : size * size] = 0
    return {**wan_inputs(seed, batch, size), "timestep": timestep}


def wan_vace() -> Any:
    return randomised(
        WanVACETransformer3DModel(**WAN, num_layers=3, vace_layers=[0, 2], vace_in_channels=4)
    )


def wan_vace_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {
        **wan_inputs(seed, batch, size),
        "control_hidden_states": normal(seed + 3, batch, 4, 2, 2 * size, 2 * size),
        "control_hidden_states_scale": torch.tensor([1.0, 0.7]),
    }


def qwen(seed: int = 0) -> Any:
    return randomised(
        QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=8,
            axes_dims_rope=(4, 2, 2),
        ),
        seed,
    )


def qwen_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {
        "hidden_states": normal(seed, batch, size * size, 16),
        "encoder_hidden_states": normal(seed + 1, batch, 3, 8),
        "encoder_hidden_states_mask": torch.ones(batch, 3, dtype=torch.int64),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [(1, size, size)] * batch,
    }


def pixart() -> Any:
    return randomised(
        PixArtTransformer2DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=8,
            in_channels=4,
            cross_attention_dim=16,
            out_channels=8,
            use_additional_conditions=False,
        )
    )


def pixart_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {
        "hidden_states": normal(seed, batch, 4, 2 * size, 2 * size),
        "encoder_hidden_states": normal(seed + 1, batch, 3, 8),
        "timestep": torch.full((batch,), 500),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def dit(out_channels: int = 4, seed: int = 0) -> Any:
    return randomised(
        DiTTransformer2DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            in_channels=4,
            out_channels=out_channels,
            num_embeds_ada_norm=1000,
        ),
        seed,
    )


def dit_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {
        "hidden_states": normal(seed, batch, 4, 2 * size, 2 * size),
        "timestep": torch.full((batch,), 500),
        "class_labels": torch.arange(seed, seed + batch) % 1000,
    }


# Plain modules.

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x))) + self.mix(x.mean(dim=1, keepdim=True))


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.mix(self.norm(x)))
        return x


class TwoStreamBlock(Block):
    def forward(self, hidden: Tensor, encoder: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mix(self.norm(encoder)).mean(dim=1, keepdim=True)
        return hidden + mean + self.mix(hidden), encoder - self.mix(hidden.mean(1, keepdim=True))


class Plain(nn.Module):
    """Embeds, walks its blocks, normalises, projects."""

    block: type[Block] = Block
    layers = 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks: Any = nn.ModuleList(self.block() for _ in range(self.layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, timestep: Tensor, injected: Tensor | None = None) -> Any:
        del injected
        x = self.embed(x) + timestep[:, None, None]
        return self.head(self.norm(self.walk(x)))


class Enumerated(Plain):
    def walk(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) * (1 if index else 2)
        return x


class ByIndex(Plain):
    def walk(self, x: Tensor) -> Tensor:
        for index in range(len(self.blocks)):
            x = self.blocks[index](x)
        return x


class Zipped(Plain):
    """Walks a second list, of bare layers, beside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.layers))

    def walk(self, x: Tensor) -> Tensor:
        for gate, block in zip(self.gates, self.blocks, strict=False):
            x = block(x) + gate(x)
        return x


class Sliced(Plain):
    """Walks one list in two parts, with a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(WIDTH, WIDTH)

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        x = self.middle(x)
        for block in self.blocks[2:]:
            x = block(x)
        return x


class AsUnit(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def walk(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


class InPlace(Plain):
    block = InPlaceBlock


class SingleBlock(Plain):
    layers = 1


class SharedNorm(Plain):
    """Calls a child between its blocks that it calls once more past them."""

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return x


class AddsAfterStack(Plain):
    """Adds its own input to the stack's output before the norm, in place."""

    def walk(self, x: Tensor) -> Tensor:
        out = super().walk(x)
        out += 0.5 * x
        return out


class TwoTails(Plain):
    """Takes the stack's output on at two places."""

    def forward(self, x: Tensor, timestep: Tensor, injected: Tensor | None = None) -> Any:
        x = self.walk(self.embed(x) + timestep[:, None, None])
        return self.head(x) + self.head(self.norm(x)).flip(1)


class Injected(Plain):
    """Adds tensors of the caller between its blocks, as ControlNets do."""

    def forward(self, x: Tensor, timestep: Tensor, injected: Tensor | None = None) -> Any:
        x = self.embed(x) + timestep[:, None, None]
        for index, block in enumerate(self.blocks):
            x = block(x)
            if injected is not None:
                x = x + injected[index]
        return self.head(self.norm(x))


class InjectedAfter(Plain):
    """Adds the caller's tensors past its stack."""

    def walk_with(self, x: Tensor, injected: Tensor | None) -> Tensor:
        x = self.walk(x)
        return x if injected is None else x + injected.sum(0)

    def forward(self, x: Tensor, timestep: Tensor, injected: Tensor | None = None) -> Any:
        x = self.walk_with(self.embed(x) + timestep[:, None, None], injected)
        return self.head(self.norm(x))


class LoopVariable(Plain):
    """Returns what its last block returned, in the container that the test asks for."""

    def forward(self, x: Tensor, timestep: Tensor, injected: Tensor | None = None) -> Any:
        return self.contain(self.walk(self.embed(x) + timestep[:, None, None]))

    @staticmethod
    def contain(x: Tensor) -> Any:
        return x


class LoopTuple(LoopVariable):
    @staticmethod
    def contain(x: Tensor) -> Any:
        return (x, "aside", None)


class LoopDict(LoopVariable):
    @staticmethod
    def contain(x: Tensor) -> Any:
        return {"sample": x, "aside": 3}


class LoopList(LoopVariable):
    @staticmethod
    def contain(x: Tensor) -> Any:
        return [x, 2 * x]


class TwoStreams(Plain):
    """Both streams leave the stack and are used past it, by two children."""

    block = TwoStreamBlock

    def __init__(self) -> None:
        super().__init__()
        self.embed_text = nn.Linear(4, WIDTH)
        self.norm_text = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, timestep: Tensor, injected: Tensor | None = None) -> Any:
        hidden, encoder = self.embed(x) + timestep[:, None, None], self.embed_text(x[:, :2])
        for block in self.blocks:
            hidden, encoder = block(hidden, encoder)
        return self.tail(hidden, encoder)

    def tail(self, hidden: Tensor, encoder: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.norm(hidden)), self.norm_text(encoder)


class Joiner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, encoder_hidden_states: Tensor, hidden_states: Tensor) -> Tensor:
        return self.mix(torch.cat([encoder_hidden_states, 2 * hidden_states], dim=1))


class JoinedTail(TwoStreams):
    """One child takes both streams, the encoder's first."""

    def __init__(self) -> None:
        super().__init__()
        self.join = Joiner()

    def tail(self, hidden: Tensor, encoder: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.join(encoder_hidden_states=encoder, hidden_states=hidden)
        return joined, joined.mean()


def plain_inputs(seed: int, batch: int, size: int) -> Inputs:
    return {"x": normal(seed, batch, size * size, 4), "timestep": torch.full((batch,), 0.5)}


def injected_inputs(seed: int, batch: int, size: int) -> Inputs:
    injected = [normal(seed + i, batch, size * size, WIDTH) for i in range(3, 6)]
    return {**plain_inputs(seed, batch, size), "injected": torch.stack(injected)}


def with_injection(
    inputs: Callable[[int, int, int], Inputs], argument: str, width: int, count: int
) -> Callable[[int, int, int], Inputs]:
    """Inputs with a ControlNet's tensors, one a block or fewer."""

    def make(seed: int, batch: int, size: int) -> Inputs:
        samples = [normal(seed + 10 + i, batch, size * size, width) for i in range(count)]
        return {**inputs(seed, batch, size), argument: samples}

    return make


def with_flux_injection(seed: int, batch: int, size: int) -> Inputs:
    double = with_injection(flux_inputs, "controlnet_block_samples", 16, 2)
    return with_injection(double, "controlnet_single_block_samples", 16, 1)(seed, batch, size)


@dataclass(frozen=True)
class Case:
    """A model, its inputs for (seed, batch, size), and the lists that make up its stack."""

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int, int, int], Inputs]
    lists: Sequence[str] = ("transformer_blocks",)

    def __str__(self) -> str:
        return self.name


FLUX_LISTS = ("transformer_blocks", "single_transformer_blocks")
REAL = (
    Case("flux", flux, flux_inputs, FLUX_LISTS),
    Case("flux_one_block", lambda: flux(1, 0), flux_inputs),
    Case("flux_one_single_block", lambda: flux(0, 1), flux_inputs, FLUX_LISTS[1:]),
    Case("flux_controlnet", flux, with_flux_injection, FLUX_LISTS),
    Case("flux2", flux2, flux2_inputs, FLUX_LISTS),
    Case("sd3", sd3, sd3_inputs),
    Case("sd3_one_block", lambda: sd3(1), sd3_inputs),
    Case(
        "sd3_controlnet",
        sd3,
        with_injection(sd3_inputs, "block_controlnet_hidden_states", 16, 2),
    ),
    Case("sd3_skip_layers", sd3, lambda *a: {**sd3_inputs(*a), "skip_layers": [1]}),
    Case("wan", wan, wan_inputs, ("blocks",)),
    Case("wan_per_token", wan, wan_inputs_per_token, ("blocks",)),
    Case("wan_vace", wan_vace, wan_vace_inputs, ("blocks", "vace_blocks")),
    Case("qwen", qwen, qwen_inputs),
    Case("qwen_controlnet", qwen, with_injection(qwen_inputs, "controlnet_block_samples", 16, 1)),
    Case("pixart", pixart, pixart_inputs),
    Case("dit", dit, dit_inputs),
)
PLAIN = (
    *(
        Case(kind.__name__, lambda kind=kind: randomised(kind()), plain_inputs, ("blocks",))
        for kind in (
            Plain,
            Enumerated,
            ByIndex,
            Zipped,
            Sliced,
            AsUnit,
            InPlace,
            SingleBlock,
            SharedNorm,
            AddsAfterStack,
            TwoTails,
            LoopVariable,
            LoopTuple,
            LoopDict,
            LoopList,
            TwoStreams,
            JoinedTail,
        )
    ),
    Case("InjectedAfter", lambda: randomised(InjectedAfter()), injected_inputs, ("blocks",)),
    Case("Injected", lambda: randomised(Injected()), injected_inputs, ("blocks",)),
)
CASES = REAL + PLAIN


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors inside `value` in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(cast(v, dtype) for v in value)
    if isinstance(value, dict):
        return {k: cast(v, dtype) for k, v in value.items()}
    return value


def tensors(output: Any) -> list[Tensor]:
    """Every tensor of an output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [t for member in output for t in tensors(member)]
    return []


def same_container(a: Any, b: Any) -> bool:
    """Same type, length and keys, and the same members besides tensors."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_container(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_container, a, b))
    return bool(a == b)


def distance(a: Any, b: Any) -> float:
    """Largest relative difference between the tensors of two outputs."""
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    assert pairs
    return max(float((x - y).double().norm() / y.double().norm()) for x, y in pairs)
