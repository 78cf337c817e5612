"""Rules that make a skipped step's residual, against their plainest forms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magcache.residual import ResidualParts, combined
from magcache.reuse import RULES, Reuse, damping_for
from magcache.sketch import Sketcher, principal

Array = np.ndarray


def path_of(seed: int, steps: int = 10, width: int = 40) -> Array:
    """A smooth path with some noise, [steps, width]."""
    random = np.random.default_rng(seed)
    t = np.linspace(0, 1, steps)[:, None]
    waves = [np.sin((k + 1) * t + k) @ random.normal(size=(1, width)) / (k + 1) for k in range(4)]
    return np.sum(waves, axis=0) + 0.01 * random.normal(size=(steps, width))


def reuse_of(path: Array, rule: str, most: int = 3) -> Reuse:
    return Reuse(rule, path @ path.T, np.linspace(1, 0, len(path)), most)  # type: ignore[arg-type]


def distance(path: Array, held: tuple[int, ...], step: int, coefficients: Array) -> float:
    return float(((path[step] - coefficients @ path[list(held)]) ** 2).sum())


seeds = st.integers(0, 10_000)
helds = st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True).map(
    lambda steps: tuple(sorted(steps))
)


@given(seeds, helds, st.sampled_from(sorted(RULES)))
def test_a_predicted_error_is_that_of_the_combination(
    seed: int, held: tuple[int, ...], rule: str
) -> None:
    path, step = path_of(seed), 9
    reuse = reuse_of(path, rule)
    coefficients = np.array(reuse.coefficients(held, step))
    predicted = reuse.errors(np.array([held]), np.array([step]))[0]
    error = distance(path, held, step, coefficients)
    damped = replace(reuse, damping=0.0).errors(np.array([held]), np.array([step]))[0]
    if rule != "fitted":
        assert damped == pytest.approx(error, rel=1e-6, abs=1e-9)
    if rule in ("fitted", "linear"):
        # With what the damping is against.
        error += damping_of(path, held) * float((coefficients[:-1] ** 2).sum())
    assert predicted == pytest.approx(error, rel=1e-6, abs=1e-9)


def affine_least_squares(path: Array, held: tuple[int, ...], step: int) -> Array:
    """The best combination whose coefficients add up to 1, without a ridge."""
    *others, newest = held
    apart = (path[others] - path[newest]).T
    found = np.linalg.lstsq(apart, path[step] - path[newest], rcond=None)[0] if others else []
    return np.array([*found, 1 - np.sum(found)])


def damping_of(path: Array, held: tuple[int, ...]) -> float:
    """A hundredth of the mean square distance of the others from the newest."""
    *others, newest = held
    return float(1e-2 * ((path[others] - path[newest]) ** 2).sum(1).mean()) if others else 0.0


def spread_of(path: Array, held: tuple[int, ...]) -> float:
    """What the ridge weighs: the damping, and what rounding adds."""
    return damping_of(path, held) + 1e-5 * float((path[held[-1]] ** 2).sum())


@given(seeds, helds)
def test_fitted_is_least_squares_among_combinations_of_sum_one(
    seed: int, held: tuple[int, ...]
) -> None:
    path, step = path_of(seed), 9
    best = affine_least_squares(path, held, step)
    found = np.array(reuse_of(path, "fitted").coefficients(held, step))
    assert found.sum() == pytest.approx(1)
    ridge = spread_of(path, held)

    def penalised(c: Array) -> float:
        return distance(path, held, step, c) + ridge * float((c[:-1] ** 2).sum())

    # It is the least of all under the ridge: of the best without, of the others, of its neighbours.
    others = [best, np.eye(len(held))[-1]]
    others.append(np.array(reuse_of(path, "linear").coefficients(held, step)))
    random = np.random.default_rng(seed)
    for nudge in 0.01 * random.normal(size=(5, len(held))):
        others.append(found + nudge - nudge.mean())
    for other in others:
        assert penalised(found) <= penalised(other) * (1 + 1e-6) + 1e-9


@given(seeds, helds, st.floats(1e-7, 1.0))
def test_coefficients_are_bounded(seed: int, held: tuple[int, ...], apart: float) -> None:
    """However alike the residuals at hand are."""
    random = np.random.default_rng(seed)
    path = random.normal(size=(1, 40)) + apart * random.normal(size=(10, 40))
    found = np.array(reuse_of(path, "fitted").coefficients(held, 9))
    assert np.isfinite(found).all()
    # A ridge of r bounds the norm by |target| / (2 sqrt(r)).
    target = np.linalg.norm(path[9] - path[held[-1]])
    assert np.linalg.norm(found[:-1]) <= 1.01 * target / (2 * np.sqrt(spread_of(path, held)))


def test_fitted_finds_a_combination_that_is_there() -> None:
    path = path_of(1)
    path[9] = 2.5 * path[8] - 2 * path[6] + 0.5 * path[3]
    found = np.array(reuse_of(path, "fitted").coefficients((3, 6, 8), 9))
    assert distance(path, (3, 6, 8), 9, found) < 0.02 * ((path[9] - path[8]) ** 2).sum()


def test_linear_is_exact_on_a_line() -> None:
    random = np.random.default_rng(0)
    places = np.linspace(1, 0, 10) ** 2
    path = random.normal(size=(1, 40)) + places[:, None] * random.normal(size=(1, 40))
    reuse = Reuse("linear", path @ path.T, places, 3)
    found = np.array(reuse.coefficients((2, 5), 9))
    assert distance(path, (2, 5), 9, found) < 1e-12
    assert reuse.coefficients((5,), 9) == (1.0,)


def test_much_damping_is_reuse_as_it_is() -> None:
    path = path_of(4)
    rather, wholly = (replace(reuse_of(path, "fitted"), damping=d) for d in (1.0, 1e9))
    assert wholly.coefficients((1, 3, 7), 9) == pytest.approx((0, 0, 1), abs=1e-6)
    little = reuse_of(path, "fitted").coefficients((1, 3, 7), 9)
    damped = rather.coefficients((1, 3, 7), 9)
    assert 0 < np.linalg.norm(damped[:-1]) < 0.8 * np.linalg.norm(little[:-1])


def test_damping_rises_with_guidance_and_with_the_way_between_computed_steps() -> None:
    strides = [(1 / c, g) for c in (4, 7, 9, 14, 25, 50) for g in (None, 0.0, 1.0, 3.0, 7.0)]
    usual = [damping_for(apart, 3.5) for apart, _ in strides]
    assert usual == [damping_for(apart, None) for apart, _ in strides]
    assert [damping_for(apart, 0.0) for apart, _ in strides] == [
        damping_for(apart, 1.0) for apart, _ in strides
    ]
    for first, second in itertools.pairwise(np.linspace(0, 1, 60)):
        assert damping_for(first, 3.0) <= damping_for(second, 3.0)
        assert damping_for(first, 3.0) <= damping_for(first, 7.0)
    assert damping_for(1 / 14, 3.0) == pytest.approx(10**-2.5)
    assert damping_for(1 / 14, 7.0) == pytest.approx(10**-0.5)
    assert damping_for(1 / 4, 7.0) == 1.0


def test_as_is_and_scaled_take_the_newest_only() -> None:
    path = path_of(2)
    assert reuse_of(path, "as_is").coefficients((1, 3, 7), 9) == (0, 0, 1)
    scaled = reuse_of(path, "scaled").coefficients((1, 3, 7), 9)
    assert scaled == (0, 0, pytest.approx(path[7] @ path[9] / (path[7] @ path[7])))


def test_residuals_that_do_not_change_are_reused_as_they_are() -> None:
    path = np.ones((10, 1)) @ np.random.default_rng(0).normal(size=(1, 40))
    assert reuse_of(path, "fitted").coefficients((1, 4, 6), 9) == pytest.approx((0, 0, 1))


def parts(*tensors: torch.Tensor) -> ResidualParts:
    return ResidualParts(tensors, tuple(t.dtype for t in tensors), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combined_adds_up_every_part(dtype: torch.dtype) -> None:
    one = parts(torch.randn(2, 3, 4).to(dtype), torch.randn(2, 5, 4).to(dtype))
    two = parts(torch.randn(2, 3, 4).to(dtype), torch.randn(2, 5, 4).to(dtype))
    found = combined([one, two], (-0.5, 1.5))
    for a, b, c in zip(one.tensors, two.tensors, found.tensors, strict=True):
        assert torch.allclose(c, 1.5 * b.float() - 0.5 * a.float(), atol=1e-6)
    assert found.dtypes == two.dtypes


def test_combined_leaves_its_residuals_alone() -> None:
    one, two = parts(torch.ones(3)), parts(torch.full((3,), 2.0))
    combined([one, two], (1.0, 1.0))
    assert one.tensors[0].tolist() == [1, 1, 1]
    assert two.tensors[0].tolist() == [2, 2, 2]
    assert combined([two], (1.0,)) is two


def test_residuals_of_other_shapes_are_not_alike() -> None:
    assert parts(torch.ones(3)).form == parts(torch.zeros(3)).form
    assert parts(torch.ones(3)).form != parts(torch.ones(4)).form
    assert parts(torch.ones(3)).form != parts(torch.ones(3).bfloat16()).form


def test_a_sketch_is_linear_and_keeps_lengths() -> None:
    sketcher = Sketcher()
    one, two = torch.randn(2, 500, 256), torch.randn(2, 500, 256)
    a, b = sketcher.sketch([one]), sketcher.sketch([two])
    assert torch.allclose(sketcher.sketch([2 * one - two]), 2 * a - b, atol=1e-5)
    for tensor in (one, one + 3 * two):
        true = tensor.square().mean().sqrt()
        assert sketcher.sketch([tensor]).norm() == pytest.approx(float(true), rel=0.05)
    assert a.numel() == 4096
    assert a.dtype == torch.float32


def test_a_sketch_of_few_tokens_is_exact() -> None:
    tensor = torch.randn(1, 7, 16)
    assert Sketcher().sketch([tensor]).norm() == pytest.approx(
        float(tensor.square().mean().sqrt()), rel=1e-5
    )


def test_scale_is_the_deviation_over_the_hidden_dimension() -> None:
    tensor = 5 + 3 * torch.randn(1, 200, 4096)
    assert float(Sketcher().scale([tensor])) == pytest.approx(3, rel=0.02)


@given(seeds)
def test_principal_coordinates_keep_inner_products(seed: int) -> None:
    path = path_of(seed, steps=12, width=200)
    found = principal(path)
    assert found.shape[1] <= 20
    assert np.allclose(found @ found.T, path @ path.T)
