"""A bag-of-words text encoder: enough language to name an emoji."""

import difflib
import re
from collections.abc import Sequence

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

PAD = 0
NULL = 1
FIRST_WORD = 2


class EmojiTextEncoder(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Embeds the known words of a prompt.

    The order of the words does not matter. An empty prompt is the null condition that
    classifier-free guidance is trained with.

    Args:
        vocabulary: Known words, in the order of their embeddings.
        ignored: Words that carry no meaning here, such as "a" and "the".
        prompts: The prompts that the model was trained on.
        width: Size of an embedding.
        max_tokens: Most words in a prompt, ignored words not counted.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        vocabulary: Sequence[str] = ("heart",),
        ignored: Sequence[str] = (),
        prompts: Sequence[str] = (),
        width: int = 128,
        max_tokens: int = 4,
    ) -> None:
        super().__init__()
        self.vocabulary = tuple(vocabulary)
        self.ignored = frozenset(ignored)
        self.prompts = tuple(prompts)
        self.max_tokens = max_tokens
        self._ids = {word: FIRST_WORD + index for index, word in enumerate(vocabulary)}
        self.embedding = nn.Embedding(FIRST_WORD + len(vocabulary), width)

    def tokenize(self, prompts: Sequence[str]) -> Tensor:
        """Token ids of the prompts, `[batch, max_tokens]`.

        Raises:
            ValueError: If a word is unknown or a prompt has too many words.
        """
        return torch.tensor([self._tokenize(prompt) for prompt in prompts])

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings `[batch, tokens, width]` and their mean without padding `[batch, width]`."""
        embeddings: Tensor = self.embedding(input_ids)
        present = (input_ids != PAD).unsqueeze(-1).to(embeddings.dtype)
        pooled = (embeddings * present).sum(dim=1) / present.sum(dim=1)
        return embeddings, pooled

    def _tokenize(self, prompt: str) -> list[int]:
        words = [w for w in re.findall(r"\w+", prompt.lower()) if w not in self.ignored]
        if len(words) > self.max_tokens:
            raise ValueError(
                f"The prompt {prompt!r} has {len(words)} words, the demo model reads at most "
                f"{self.max_tokens}. `magcache.demo.prompts()` lists what it can draw."
            )
        ids = [self._id(word) for word in words] or [NULL]
        return ids + [PAD] * (self.max_tokens - len(ids))

    def _id(self, word: str) -> int:
        if word in self._ids:
            return self._ids[word]
        nearest = difflib.get_close_matches(word, self.vocabulary, n=3, cutoff=0.5)
        hint = f" Nearest known words: {', '.join(nearest)}." if nearest else ""
        raise ValueError(
            f"The demo model does not know the word {word!r}.{hint} "
            "`magcache.demo.prompts()` lists what it can draw."
        )
