"""Random batches of pictures, noise levels and prompts."""

from typing import Final, NamedTuple

import torch
from data import IGNORED, SIZE, PictureSet
from torch import Tensor, nn

from magcache.demo.text_encoder import EmojiTextEncoder

SHIFT: Final = 1


class Batch(NamedTuple):
    """Everything a training step needs."""

    clean: Tensor
    noise: Tensor
    levels: Tensor
    input_ids: Tensor


class Sampling(NamedTuple):
    """How batches are drawn; levels are logit-normal."""

    size: int
    level_mean: float
    level_std: float
    drop_prompt: float
    drop_style: float


class Batches:
    """Batches that depend on the seed of a draw only, so that a resumed run repeats."""

    def __init__(self, data: PictureSet, sampling: Sampling) -> None:
        encoder = EmojiTextEncoder(vocabulary=data.vocabulary, ignored=IGNORED)
        self.pictures = nn.functional.pad(data.pictures, (SHIFT,) * 4, value=1.0)
        self.ids = encoder.tokenize(data.prompts)
        self.ids_without_style = encoder.tokenize(
            [prompt.split(maxsplit=1)[1] for prompt in data.prompts]
        )
        self.null = encoder.tokenize([""])
        self.sampling = sampling

    def draw(self, seed: int) -> Batch:
        """A batch of shifted and mirrored pictures, some without style or prompt."""
        size, mean, std, drop_prompt, drop_style = self.sampling
        random = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.ids), (size,), generator=random)
        corners = torch.randint(2 * SHIFT + 1, (size, 2), generator=random).tolist()
        flips = torch.rand(size, generator=random) < 0.5
        clean = torch.stack(
            [
                self.pictures[index, :, y : y + SIZE, x : x + SIZE]
                for index, (y, x) in zip(chosen.tolist(), corners, strict=True)
            ]
        )
        clean = torch.where(flips[:, None, None, None], clean.flip(-1), clean)
        drop = torch.rand(size, generator=random)[:, None]
        ids = torch.where(drop < drop_style, self.ids_without_style[chosen], self.ids[chosen])
        ids = torch.where(drop > 1 - drop_prompt, self.null, ids)
        noise = torch.randn(clean.shape, generator=random)
        levels = (torch.randn(size, generator=random) * std + mean).sigmoid()
        return Batch(clean, noise, levels, ids)
