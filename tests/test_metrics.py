import math
import time

import pytest
import torch

from magcache.metrics import Spread, psnr, ssim, timed


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_psnr_by_hand() -> None:
    reference = torch.full((3, 3, 4, 4), 0.5)
    pictures = reference.clone()
    pictures[1] += 0.1  # mean square 0.01: 20 dB
    pictures[2, :, :, :2] += 0.5  # mean square 0.125: 9.03 dB
    assert psnr(pictures, reference).tolist() == pytest.approx(
        [math.inf, 20.0, -10 * math.log10(0.125)], rel=1e-6
    )


def test_psnr_is_symmetric_and_black_against_white_is_zero() -> None:
    black, white = torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4)
    assert str(psnr(black, white).item()) == str(psnr(white, black).item()) == "0.0"


def test_psnr_of_uniform_noise_is_not_flattered() -> None:
    # Two independent uniforms differ by a mean square of 1/6: 7.78 dB (wrapped integers: 27.9).
    found = psnr(noise(1, 3, 256, 256), noise(1, 3, 256, 256, seed=1)).item()
    assert found == pytest.approx(-10 * math.log10(1 / 6), abs=0.1)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_integer_pictures_are_refused_on_either_side(metric) -> None:  # type: ignore[no-untyped-def]
    floats = noise(1, 3, 16, 16)
    integers = (floats * 255).to(torch.uint8)
    with pytest.raises(TypeError, match=r"pictures are torch\.uint8.*divide by 255"):
        metric(integers, floats)
    with pytest.raises(TypeError, match=r"reference are torch\.uint8"):
        metric(floats, integers)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (noise(1, 3, 16, 16) * 255, "range from"),
        (noise(1, 3, 16, 16) * 2 - 1, r"\[-1, 1\] by"),
        (torch.full((1, 3, 16, 16), math.nan), "nan"),
        (torch.full((1, 3, 16, 16), math.inf), "inf"),
        (noise(3, 16, 16), "expected .n, channels"),
        (torch.empty(0, 3, 16, 16), "expected .n, channels"),
        (noise(1, 3, 16, 12), "same pictures"),
    ],
)
def test_pictures_that_cannot_be_compared_are_refused(bad: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        psnr(bad, noise(1, 3, 16, 16))


def test_a_rounding_error_outside_the_range_is_let_pass() -> None:
    assert psnr(torch.full((1, 3, 4, 4), 1 + 1e-4), torch.ones(1, 3, 4, 4)).item() > 70


def test_half_precision_pictures_are_compared_in_double() -> None:
    picture = noise(1, 3, 16, 16).half()
    assert psnr(picture, picture.float()).item() == math.inf


def test_ssim_of_constant_pictures_by_hand() -> None:
    # No variance: (2ab + c1) / (a^2 + b^2 + c1), with c1 = 0.01^2.
    a, b = 0.25, 0.75
    found = ssim(torch.full((2, 3, 16, 16), a), torch.full((2, 3, 16, 16), b))
    assert found.shape == (2,)
    assert found.tolist() == pytest.approx([(2 * a * b + 1e-4) / (a * a + b * b + 1e-4)] * 2)


def test_ssim_orders_by_damage() -> None:
    reference = noise(1, 3, 32, 32)
    mild = 0.9 * reference + 0.1 * noise(1, 3, 32, 32, seed=1)
    harsh = 0.5 * reference + 0.5 * noise(1, 3, 32, 32, seed=1)
    assert ssim(reference, reference).item() == pytest.approx(1.0)
    assert 1 > ssim(mild, reference).item() > ssim(harsh, reference).item()


def test_ssim_refuses_pictures_smaller_than_its_window() -> None:
    with pytest.raises(ValueError, match=r"16 x 8.*11 x 11"):
        ssim(noise(1, 3, 8, 16), noise(1, 3, 8, 16))


def test_spread_by_hand() -> None:
    spread = Spread.of(torch.tensor([1.0, 2.0, 3.0]))
    assert spread == Spread(mean=2.0, std=1.0, min=1.0, max=3.0, n=3)
    assert f"{Spread.of([38.2, 44.2])} dB" == "41.2 ± 4.2 dB"
    assert f"{Spread.of([0.9, 0.8]):.3f}" == "0.850 ± 0.071"


def test_spread_of_one_value_prints_no_spread() -> None:
    assert Spread.of([3.0]).std == 0.0
    assert str(Spread.of([3.0])) == "3.0"


def test_spread_of_identical_pictures() -> None:
    assert str(Spread.of([math.inf, math.inf])) == "inf"
    assert str(Spread.of([math.inf, 40.0])) == "inf"
    assert Spread.of([math.inf, 40.0]).min == 40.0


def test_spread_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_timed_returns_the_result_and_the_wall_time() -> None:
    result, seconds = timed(lambda: time.sleep(0.05) or "done")
    assert result == "done"
    assert 0.05 <= seconds < 1.0
