"""A curve fitted to measured passes, and how well it fits. Plain Python and numpy."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minedraft.config import ConfigError
from minedraft.costmodel.curve import Curve

MIN_MEASUREMENTS = 5
"""As many as a curve has coefficients."""
MIN_S, MAX_S = 1e-9, 3600.0
"""No pass is shorter or longer."""
MAX_SIZE = 1e12
ROUNDS = 20
"""Of reweighting; the outliers have lost their weight after a few."""
EXACT = 1e-3
"""Errors below this share of a pass are all alike."""
INDEPENDENT = 1e-9
"""Least determinant of columns, of length one, that are taken for different ones."""
KNEES = 12
"""Tried at first, between the fewest and the most tokens; then as many around the best, twice."""

Floats = NDArray[np.float64]

# Which of the four columns a solution uses: few before many, the first before the last.
_USES = np.array(sorted(itertools.product((True, False), repeat=4), key=sum)[1:])
_USES_BOTH = _USES[:, :, None] & _USES[:, None, :]


class Measurement(NamedTuple):
    """A pass that was timed; what the sizes mean says ``Curve.seconds``."""

    tokens: float
    requests: float
    context: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A fitted curve beside the measurements."""

    curve: Curve
    measurements: tuple[Measurement, ...]

    @cached_property
    def residuals(self) -> tuple[float, ...]:
        """Of each measurement, by what share of the fitted time it took longer (or shorter)."""
        return tuple(
            m.seconds / max(MIN_S, self.curve.seconds(*m[:3])) - 1 for m in self.measurements
        )

    @property
    def median_error(self) -> float:
        """The median of the residuals without their signs."""
        return statistics.median(map(abs, self.residuals))

    def table(self) -> list[tuple[str, ...]]:
        """The residuals in a few rows of text, one for each doubling of tokens, after a heading."""
        rows: list[tuple[str, ...]] = [
            ("tokens", "passes", "measured ms", "fitted ms", "residual", "9 in 10 within")
        ]
        measured = sorted(zip(self.measurements, self.residuals, strict=True))
        groups = itertools.groupby(measured, key=lambda pair: int(pair[0].tokens).bit_length())
        for _, pairs in groups:
            passes, residuals = zip(*pairs, strict=True)
            seconds = statistics.median(p.seconds for p in passes)
            fitted = statistics.median(self.curve.seconds(*p[:3]) for p in passes)
            rows.append(
                (
                    f"{passes[0].tokens:g} to {passes[-1].tokens:g}",
                    str(len(passes)),
                    f"{seconds * 1e3:.3f}",
                    f"{fitted * 1e3:.3f}",
                    f"{statistics.median(residuals):+.1%}",
                    f"{np.quantile(np.abs(residuals), 0.9):.1%}",
                )
            )
        return rows


def fit(measurements: Sequence[Measurement], source: str) -> Fit:
    """The curve with the least sum of absolute logarithms of measured over fitted seconds.

    A pass that took ten times too long, as on a machine that others use too, then counts little,
    and short passes as much as long ones. Coefficients are never negative. Where measurements do
    not tell two of them apart (requests always with as many tokens) one of them gets all, requests
    last. Raises ConfigError if there are fewer than five measurements, or one that cannot be.
    """
    if len(measurements) < MIN_MEASUREMENTS:
        raise ConfigError(
            f"{len(measurements)} measured passes are too few for a curve: "
            f"give {MIN_MEASUREMENTS} or more"
        )
    for m in measurements:
        sizes = m.tokens >= 1 and all(0 <= size <= MAX_SIZE for size in m[:3])
        if not (sizes and MIN_S <= m.seconds <= MAX_S):
            raise ConfigError(
                f"{m} cannot be: give a token or more, sizes from 0 to {MAX_SIZE:g}, "
                f"and seconds from {MIN_S:g} to {MAX_S:g}"
            )
    tokens, requests, context, seconds = np.array(measurements, dtype=np.float64).T

    def solve(knee: float) -> tuple[float, Floats]:
        linear = np.maximum(tokens, knee)
        return _least_absolute(
            np.stack([np.ones_like(tokens), linear, context, requests], axis=1), seconds
        )

    # Once it is known for how many tokens computing takes as long as reading the weights, the
    # others are found directly. Zero first, so that weights_s stays 0 where it does not help.
    knees = np.array([0.0, *np.unique(np.geomspace(tokens.min(), tokens.max(), KNEES))])
    for _ in range(3):
        tried = [(*solve(knee), knee) for knee in knees]
        best = min(range(len(tried)), key=lambda index: tried[index][0])
        _, coefficients, knee = tried[best]
        around = knees[max(0, best - 1)], knees[min(best + 1, len(knees) - 1)]
        knees = np.unique([knee, *np.linspace(*around, KNEES)])
    return Fit(
        Curve(
            source=source,
            overhead_s=float(coefficients[0]),
            weights_s=float(coefficients[1] * knee),
            per_token_s=float(coefficients[1]),
            per_context_token_s=float(coefficients[2]),
            per_request_s=float(coefficients[3]),
        ),
        tuple(measurements),
    )


def _least_absolute(columns: Floats, seconds: Floats) -> tuple[float, Floats]:
    """Mean absolute logarithm of measured over fitted, and the coefficients, by reweighting."""
    weights = 1 / seconds**2
    for _ in range(ROUNDS):
        coefficients = _nonnegative(columns, seconds, weights)
        fitted = np.maximum(MIN_S, columns @ coefficients)
        weights = 1 / (fitted * np.maximum(np.abs(seconds - fitted), EXACT * fitted))
    return float(np.abs(np.log(seconds / fitted)).mean()), coefficients


def _nonnegative(columns: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Weighted least squares without negative coefficients: the best of all subsets of columns."""
    gram = (columns.T * weights) @ columns
    length = np.sqrt(np.where(gram.diagonal() > 0, gram.diagonal(), 1))
    gram /= np.outer(length, length)
    moment = columns.T @ (weights * seconds) / length
    grams = np.where(_USES_BOTH, gram, np.eye(4))
    possible = np.linalg.det(grams) > INDEPENDENT
    grams[~possible] = np.eye(4)
    solutions = np.linalg.solve(grams, (_USES * moment)[:, :, None])[:, :, 0]
    possible &= (solutions >= 0).all(axis=1)
    explained = np.where(possible, solutions @ moment, -1)
    best = np.argmax(explained >= (1 - INDEPENDENT) * explained.max())
    return np.asarray(solutions[best] / length)
