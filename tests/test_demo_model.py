"""The shipped demo model draws, repeats, and survives a round trip through a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ImagePipelineOutput
from torch import Tensor

from magcache.demo import (
    DEMO_PROMPTS,
    MODEL_PATH,
    EmojiPipeline,
    load_demo_pipeline,
    prompts,
)

MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def pipe() -> Iterator[EmojiPipeline]:
    pipe = load_demo_pipeline()
    pipe.set_progress_bar_config(disable=True)
    # At this size a second thread gains nothing, and on a busy machine it costs much.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield pipe
    torch.set_num_threads(threads)


def draw(pipe: EmojiPipeline, prompt: str | list[str], seed: int = 0, steps: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    images: Tensor = pipe(
        prompt,
        num_inference_steps=steps,
        generator=generator,
        output_type="pt",
        return_dict=False,
    )[0]
    return images


def test_draws_a_batch_of_prompts(pipe: EmojiPipeline) -> None:
    images = draw(pipe, ["noto red heart", "fluent frog"])
    assert images.shape == (2, 3, 48, 48)
    assert images.dtype == torch.float32
    assert images.min() >= 0
    assert images.max() <= 1
    assert not torch.equal(images[0], images[1])


def test_pt_output_is_not_rounded(pipe: EmojiPipeline) -> None:
    levels = draw(pipe, "noto red heart") * 255
    assert (levels - levels.round()).abs().max() > 0.1


def test_pil_output_has_the_canvas_size(pipe: EmojiPipeline) -> None:
    output = pipe("noto red heart", num_inference_steps=2, num_images_per_prompt=2)
    assert isinstance(output, ImagePipelineOutput)
    images = output.images
    assert [image.size for image in images] == [(48, 48)] * 2


def test_a_red_heart_is_red_on_white(pipe: EmojiPipeline) -> None:
    image = draw(pipe, "noto red heart", steps=8)[0]
    red, green, blue = image[:, 20:28, 20:28].mean(dim=(1, 2))
    assert red > 0.6
    assert max(green, blue) < 0.5
    assert image[:, :3, :3].min() > 0.85


def test_same_seed_repeats_and_another_differs(pipe: EmojiPipeline) -> None:
    first = draw(pipe, "noto panda", seed=1)
    torch.testing.assert_close(draw(pipe, "noto panda", seed=1), first)
    assert (draw(pipe, "noto panda", seed=2) - first).abs().max() > 0.01


def test_own_latents_replace_the_generator(pipe: EmojiPipeline) -> None:
    noise = torch.randn((1, 3, 48, 48), generator=torch.Generator().manual_seed(0))
    output = pipe("noto panda", num_inference_steps=2, latents=noise, output_type="pt")
    assert isinstance(output, ImagePipelineOutput)
    torch.testing.assert_close(output.images, draw(pipe, "noto panda", seed=0))


def test_round_trip_through_a_folder(pipe: EmojiPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    again = EmojiPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    torch.testing.assert_close(draw(again, "fluent star"), draw(pipe, "fluent star"))


@pytest.mark.parametrize(("guidance", "calls_per_step"), [(1.0, 1), (3.0, 2)])
def test_transformer_calls_per_step(
    pipe: EmojiPipeline, guidance: float, calls_per_step: int
) -> None:
    batches: list[int] = []
    handle = pipe.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: batches.append(len(kwargs["hidden_states"])),
        with_kwargs=True,
    )
    with handle:
        pipe(["star", "frog"], num_inference_steps=3, guidance_scale=guidance, output_type="pt")
    assert batches == [2] * 3 * calls_per_step


def test_callback_can_interrupt(pipe: EmojiPipeline) -> None:
    steps: list[int] = []

    def stop(
        pipe: EmojiPipeline, step: int, timestep: Tensor, tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        steps.append(step)
        pipe._interrupt = step == 1
        return tensors

    pipe("star", num_inference_steps=4, output_type="pt", callback_on_step_end=stop)
    assert steps == [0, 1]


def test_unknown_word_is_named_and_a_known_one_suggested(pipe: EmojiPipeline) -> None:
    with pytest.raises(ValueError, match=r"'strawbery'.*strawberry.*prompts\(\)"):
        pipe("noto strawbery")


def test_order_case_and_stop_words_do_not_matter(pipe: EmojiPipeline) -> None:
    ids = pipe.text_encoder.tokenize(["noto red heart", "A red Heart in the Noto style"])
    assert sorted(ids[0].tolist()) == sorted(ids[1].tolist())


def test_too_long_prompt_is_refused(pipe: EmojiPipeline) -> None:
    with pytest.raises(ValueError, match="5 words"):
        pipe("red red red red red")


@pytest.mark.parametrize("prompt", [[], 3, [1]])
def test_prompt_of_the_wrong_type_is_refused(pipe: EmojiPipeline, prompt: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="`prompt`"):
        pipe(prompt)


def test_every_listed_prompt_is_readable(pipe: EmojiPipeline) -> None:
    listed = prompts()
    assert len(set(listed)) == len(listed) > 100
    assert set(DEMO_PROMPTS) <= set(listed)
    assert len({tuple(sorted(ids)) for ids in pipe.text_encoder.tokenize(listed).tolist()}) == len(
        listed
    )


def test_model_stays_small_and_deep_enough(pipe: EmojiPipeline) -> None:
    size = sum(file.stat().st_size for file in MODEL_PATH.rglob("*") if file.is_file())
    assert size < 25 * MEBIBYTE
    assert len(pipe.transformer.transformer_blocks) >= 12
