"""How a skipped step's residual is made of computed ones: pure functions, one a rule.

A rule takes what is known of a run's residuals and says, for many cases at once, with which
coefficients those at hand are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "RULES",
    "Reuse",
    "Rule",
    "RuleName",
    "as_is",
    "damping_for",
    "fitted",
    "linear",
    "scaled",
]

Array = npt.NDArray[np.float64]
Steps = npt.NDArray[np.intp]
RuleName = Literal["as_is", "scaled", "linear", "fitted"]

# (what is known of the run, steps at hand [n, m], skipped steps [n]) -> coefficients [n, m]; the
# newest residual at hand stands last.
Rule = Callable[["Reuse", Steps, Steps], Array]

# What rounding a residual to bfloat16 adds to it, as a share of its square.
_ROUNDING = 1e-5
_TINY = 1e-30

# Guidance where nothing tells it.
_USUAL_GUIDANCE = 3.5


def damping_for(noise_apart: float, guidance: float | None) -> float:
    """How far a fit stays at the newest residual; 0.003 to 1.

    noise_apart: mean change of the noise level from one computed step to the next.

    The residuals at hand belong to a sample that skipping has moved, and what a fit makes of that
    is fed back. As for multistep solvers it dies out while guidance times the step is small, and
    grows where it is not: from 0.3 on the best damping rises tenfold with every 0.12 (measured on
    two models, at 8 and 28 steps, guidance 1, 3 and 7). In steps of half a power of ten, so that
    runs of many lengths share a table.
    """
    stride = noise_apart * max(1.0, _USUAL_GUIDANCE if guidance is None else guidance)
    return float(10 ** (round(2 * min(max(8 * stride - 4.6, -2.5), 0.0)) / 2))


def as_is(run: Reuse, held: Steps, step: Steps) -> Array:
    """The newest residual as it is (MagCache, arXiv 2506.09045)."""
    coefficients = np.zeros(held.shape)
    coefficients[:, -1] = 1
    return coefficients


def scaled(run: Reuse, held: Steps, step: Steps) -> Array:
    """The newest residual times the factor that fits best."""
    newest = held[:, -1]
    coefficients = np.zeros(held.shape)
    coefficients[:, -1] = run.inner[newest, step] / np.maximum(run.inner[newest, newest], _TINY)
    return coefficients


def linear(run: Reuse, held: Steps, step: Steps) -> Array:
    """On the line through the newest two over the noise level; as is where there is one."""
    coefficients = as_is(run, held, step)
    if held.shape[1] >= 2:
        newest, before = run.places[held[:, -1]], run.places[held[:, -2]]
        back = newest - before
        ahead = np.divide(run.places[step] - newest, back, where=back != 0, out=np.zeros(len(step)))
        coefficients[:, -1] += ahead
        coefficients[:, -2] -= ahead
    return coefficients


def fitted(run: Reuse, held: Steps, step: Steps) -> Array:
    """Damped least squares over the calibration's residuals, among combinations that add up to 1.

    So residuals that do not change are reused as they are, and what is special about a prompt is
    not shrunk: plain least squares are closer at each step and farther at the end of the run,
    because their errors all point the same way.
    """
    *others, newest = held.T
    if not others:
        return as_is(run, held, step)
    apart = run.apart
    ahead = apart[newest, step]
    lengths = [apart[k, newest] for k in others]
    # Inner products of differences from the newest residual, from the three distances.
    wanted = [(far + ahead - apart[k, step]) / 2 for k, far in zip(others, lengths, strict=True)]
    ridge = run.damping * sum(lengths) / len(others)
    ridge = ridge + _ROUNDING * run.inner[newest, newest] + _TINY
    if len(others) == 1:
        found = [wanted[0] / (lengths[0] + ridge)]
    else:
        a, c = lengths[0] + ridge, lengths[1] + ridge
        b = (lengths[0] + lengths[1] - apart[others[0], others[1]]) / 2
        x, y = wanted
        found = [(c * x - b * y) / (a * c - b * b), (a * y - b * x) / (a * c - b * b)]
    return np.stack([*found, 1 - sum(found)], axis=1)


RULES: dict[RuleName, Rule] = {
    "as_is": as_is,
    "scaled": scaled,
    "linear": linear,
    "fitted": fitted,
}


@dataclass(frozen=True)
class Reuse:
    """A rule on one run: what it knows of the run, and how many residuals it is given at most.

    inner: inner products of the run's residuals, [steps, steps]. places: on the noise scale,
    [steps]. damping: see `damping_for`.
    """

    rule: RuleName
    inner: Array
    places: Array
    most: int
    damping: float = 0.01

    @cached_property
    def apart(self) -> Array:
        """Mean square difference of each two residuals, [steps, steps]."""
        squares = np.diagonal(self.inner)
        return np.asarray(np.maximum(squares[:, None] + squares - 2 * self.inner, 0.0))

    def coefficients(self, held: Sequence[int], step: int) -> tuple[float, ...]:
        """One number per step in `held`, for the residual of the skipped `step`."""
        held_steps, skipped = np.array([held], dtype=np.intp), np.array([step], dtype=np.intp)
        return tuple(RULES[self.rule](self, held_steps, skipped)[0].tolist())

    def relative_error(
        self, held: Sequence[int], step: int, coefficients: Sequence[float]
    ) -> float:
        """Mean square error of a combination, over the mean square of what it stands for."""
        c, at = np.asarray(coefficients), list(held)
        error = self.inner[step, step] - 2 * c @ self.inner[at, step]
        error += c @ self.inner[np.ix_(at, at)] @ c
        return float(max(error, 0.0) / max(self.inner[step, step], _TINY))

    def errors(self, held: Steps, step: Steps) -> Array:
        """Mean square error of each case: held [n, m], step [n] -> [n].

        With what the damping is against: the squares of the older residuals' coefficients.
        """
        coefficients = RULES[self.rule](self, held, step).T
        pairs = list(zip(coefficients, held.T, strict=True))
        error = sum(c * self.apart[at, step] for c, at in pairs)
        if self.rule == "scaled":
            # What is lacking to 1 is the share of a residual of zero.
            squares = np.diagonal(self.inner)
            (c, at), *_ = reversed(pairs)
            error = error + (1 - c) * (squares[step] - c * squares[at])
        newest, at_newest = pairs[-1]
        older = pairs[:-1] if self.rule in ("linear", "fitted") else []
        lengths = [self.apart[at, at_newest] for _, at in older]
        for i, (c, at) in enumerate(older):
            error = error - c * newest * lengths[i]
            error = error + c * c * (self.damping * sum(lengths) / len(older))
            for other, there in older[:i]:
                error = error - c * other * self.apart[at, there]
        return np.asarray(np.maximum(error, 0.0))
