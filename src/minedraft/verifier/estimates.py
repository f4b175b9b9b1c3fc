"""Running estimates of what verification, drafting and acceptance are like just now.

Plain Python, no vLLM. Times are in seconds.
"""

import math
from bisect import bisect_left, insort

SMOOTHING = 0.1
"""Weight of the newest measurement."""
ACCEPTANCE_SMOOTHING = 1 / 256
OUTLIER = 4.0
"""Times the estimate; more of a measurement is not believed at once."""
LATELY = 200
"""So many measurements ago."""
PRIOR_ACCEPTANCE = 0.7
"""Of a position in the draft that was never verified, if no earlier one was."""


class Curve:
    """Seconds by size (tokens or sessions), between and beyond the sizes that were measured.

    What was not measured is taken for as good as it could be: below the smallest size seconds fall
    in proportion, above the largest they stay. A hopeful guess is tried and then known, a gloomy
    one would stand for ever.
    """

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._points: dict[int, tuple[float, float]] = {}  # key: (size, seconds)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, size: float, seconds: float) -> None:
        """A measurement."""
        key = bucket(size)
        known = self._points.get(key)
        if known is None:
            insort(self._keys, key)
            self._points[key] = size, seconds
            return
        seconds = min(seconds, OUTLIER * known[1])
        self._points[key] = (
            known[0] + SMOOTHING * (size - known[0]),
            known[1] + SMOOTHING * (seconds - known[1]),
        )

    def __call__(self, size: float) -> float:
        """The estimate. There must have been a measurement."""
        above = bisect_left(self._keys, bucket(size))
        above = min(above, len(self._keys) - 1)
        if above and self._points[self._keys[above]][0] > size:
            above -= 1
        x0, y0 = self._points[self._keys[above]]
        if size <= x0:
            return y0 * size / x0
        if above + 1 == len(self._keys):
            return y0
        x1, y1 = self._points[self._keys[above + 1]]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


class DraftingTime:
    """t(n, K): seconds from asking for K draft tokens for each of n sessions to having them."""

    def __init__(self) -> None:
        self._by_drafts: dict[int, Curve] = {}
        self._count = 0
        self._latest: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._by_drafts)

    def add(self, sessions: int, num_drafts: int, seconds: float) -> None:
        """A measurement."""
        self._by_drafts.setdefault(num_drafts, Curve()).add(sessions, seconds)
        self._count += 1
        self._latest[num_drafts] = self._count

    def __call__(self, sessions: float, num_drafts: int) -> float:
        """The estimate. There must have been a measurement.

        For a K that was not measured lately the nearest one that was is scaled: K tokens are K
        passes of the drafter, and taking in what was verified is part of the first.
        """
        lately = [k for k, latest in self._latest.items() if self._count - latest < LATELY]
        nearest = min(lately, key=lambda known: (abs(known - num_drafts), known))
        return self._by_drafts[nearest](sessions) * num_drafts / nearest


class Acceptance:
    """How many draft tokens are accepted, by their position in the draft."""

    def __init__(self) -> None:
        self._share: list[float] = []
        self._seen: list[int] = []

    def add(self, num_drafts: int, accepted: int, times: int = 1) -> None:
        """So many of a draft's tokens were accepted, and of others as many: O(accepted)."""
        for position in range(min(accepted + 1, num_drafts)):
            if position == len(self._share):
                self._share.append(self._share[-1] if self._share else PRIOR_ACCEPTANCE)
                self._seen.append(0)
            self._seen[position] += times
            smoothing = 1 - (1 - ACCEPTANCE_SMOOTHING) ** times
            weight = max(smoothing, times / (self._seen[position] + 1))
            self._share[position] += weight * ((position < accepted) - self._share[position])

    def tokens(self, num_drafts: float) -> float:
        """Tokens that a verification of so many draft tokens, a mean perhaps, emits on average."""
        emitted = reached = 1.0
        share = PRIOR_ACCEPTANCE
        for position in range(math.ceil(num_drafts)):
            if position < len(self._share):
                share = self._share[position]
            reached *= share
            emitted += reached * min(1.0, num_drafts - position)
        return emitted


def bucket(size: float) -> int:
    """Sizes that are told apart: all up to 4, then four for each doubling."""
    return round(4 * math.log2(max(size, 1.0)))
