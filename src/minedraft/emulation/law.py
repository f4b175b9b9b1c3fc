"""Which token comes next: a seeded function of the position and the token there.

Any process can work it out, so that output can be checked without running a model. Two texts that
differ in one token differ in all that follow: the function of the token is one to one at every
position. So a draft that went wrong does not come right by chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_SPECIAL = 3
"""The first ids, of unknown, first and last token: none of them is ever the next one."""

Ints = npt.NDArray[np.int64]

_STEP, _AGREES, _OTHER = 1, 2, 3
"""What a hash is for."""
_BITS = 32


@dataclass(frozen=True)
class Law:
    """The text of a model, and how its drafter departs from it."""

    seed: int
    vocab_size: int
    agreement: Sequence[float] = (1.0,)
    """Position p has the p mod n-th of these n rates: where the next token is the target's."""

    def next_tokens(self, positions: npt.ArrayLike, tokens: npt.ArrayLike) -> Ints:
        """The token after each of ``tokens`` at ``positions``, of one shape."""
        at, token = np.asarray(positions, np.int64), np.asarray(tokens, np.int64)
        choices = self.vocab_size - NUM_SPECIAL
        rank = token - NUM_SPECIAL + self._hash(_STEP, at)
        if min(self.agreement) < 1.0:
            other = 1 + self._hash(_OTHER, at, token) % (choices - 1)
            rank += np.where(self._agrees(at, token), 0, other)
        return NUM_SPECIAL + rank % choices

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The greedy text after a prompt, which is not empty."""
        text = list(prompt)
        for _ in range(num_tokens):
            text.append(int(self.next_tokens(len(text) - 1, text[-1])))
        return text[len(prompt) :]

    def _agrees(self, at: Ints, token: Ints) -> npt.NDArray[np.bool_]:
        rates = np.asarray(self.agreement)
        limits = np.rint(rates * 2.0**_BITS).astype(np.int64)
        agrees: npt.NDArray[np.bool_] = self._hash(_AGREES, at, token) < limits[at % len(rates)]
        return agrees

    def _hash(self, *parts: int | Ints) -> Ints:
        """32 bits that look random, as do those of any other parts."""
        mixed = _mix(np.asarray(self.seed, np.int64))
        for part in parts:
            mixed = _mix(mixed ^ part)
        return mixed


def _mix(x: Ints) -> Ints:
    """A bijection of 32-bit numbers; its factor is small enough for products in 64 bits."""
    for _ in range(2):
        x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return x ^ (x >> 16)
