"""How a skipped step's residual is made of computed ones: pure functions, one a rule.

A rule takes the inner products of a run's residuals and says, for many cases at once, with which
coefficients the residuals at hand are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["RULES", "Reuse", "Rule", "RuleName", "as_is", "fitted", "linear", "scaled"]

Array = npt.NDArray[np.float64]
Steps = npt.NDArray[np.intp]
RuleName = Literal["as_is", "scaled", "linear", "fitted"]

# (inner products [steps, steps], places [steps], steps at hand [n, m], skipped steps [n])
# -> coefficients [n, m]; the newest residual at hand stands last.
Rule = Callable[[Array, Array, Steps, Steps], Array]

# What rounding a residual to bfloat16 adds to it, as a share of its square: coefficients that
# would amplify more than that are not worth what they gain.
_RIDGE = 1e-5


def as_is(inner: Array, places: Array, held: Steps, step: Steps) -> Array:
    """The newest residual as it is (MagCache, arXiv 2506.09045)."""
    coefficients = np.zeros(held.shape)
    coefficients[:, -1] = 1
    return coefficients


def scaled(inner: Array, places: Array, held: Steps, step: Steps) -> Array:
    """The newest residual times the factor that fits best."""
    newest = held[:, -1]
    coefficients = np.zeros(held.shape)
    coefficients[:, -1] = inner[newest, step] / np.maximum(inner[newest, newest], _TINY)
    return coefficients


def linear(inner: Array, places: Array, held: Steps, step: Steps) -> Array:
    """On the line through the newest two over the noise level; as is where there is one."""
    coefficients = as_is(inner, places, held, step)
    if held.shape[1] >= 2:
        newest, before = places[held[:, -1]], places[held[:, -2]]
        apart = newest - before
        ahead = np.divide(places[step] - newest, apart, where=apart != 0, out=np.zeros(len(step)))
        coefficients[:, -1] += ahead
        coefficients[:, -2] -= ahead
    return coefficients


def fitted(inner: Array, places: Array, held: Steps, step: Steps) -> Array:
    """Least squares over the calibration's residuals, with a ridge that bounds coefficients."""
    products = inner[held[:, :, None], held[:, None, :]]
    count = held.shape[1]
    ridge = _RIDGE * np.trace(products, axis1=1, axis2=2) / count
    products = products + np.maximum(ridge, _TINY)[:, None, None] * np.eye(count)
    wanted = inner[held, step[:, None]]
    return np.asarray(np.linalg.solve(products, wanted[..., None])[..., 0])


RULES: dict[RuleName, Rule] = {
    "as_is": as_is,
    "scaled": scaled,
    "linear": linear,
    "fitted": fitted,
}
_TINY = 1e-30


@dataclass(frozen=True)
class Reuse:
    """A rule on one run: what it knows of the run, and how many residuals it is given at most."""

    rule: RuleName
    inner: Array
    places: Array
    most: int

    def coefficients(self, held: Sequence[int], step: int) -> tuple[float, ...]:
        """One number per step in `held`, for the residual of the skipped `step`."""
        rule = RULES[self.rule]
        held_steps, skipped = np.array([held], dtype=np.intp), np.array([step], dtype=np.intp)
        return tuple(rule(self.inner, self.places, held_steps, skipped)[0].tolist())

    def relative_error(
        self, held: Sequence[int], step: int, coefficients: Sequence[float]
    ) -> float:
        """Mean square error of a combination, over the mean square of what it stands for."""
        c, at = np.asarray(coefficients), list(held)
        error = self.inner[step, step] - 2 * c @ self.inner[at, step]
        error += c @ self.inner[np.ix_(at, at)] @ c
        return float(max(error, 0.0) / max(self.inner[step, step], _TINY))

    def errors(self, held: Steps, step: Steps) -> Array:
        """Mean square error of each case: held [n, m], step [n] -> [n]."""
        c = RULES[self.rule](self.inner, self.places, held, step)
        wanted = self.inner[held, step[:, None]]
        products = self.inner[held[:, :, None], held[:, None, :]]
        error = self.inner[step, step] - 2 * (c * wanted).sum(1)
        error += np.einsum("ni,nij,nj->n", c, products, c)
        return np.asarray(np.maximum(error, 0.0))
