"""What makes an emulated model, as it stands in its config.json."""

import math
from typing import Annotated, Any, Self

import msgspec

from minedraft.config import ConfigError
from minedraft.costmodel.curve import Curve
from minedraft.emulation.law import NUM_SPECIAL, Law

KEY = "emulation"
"""Of the entry in config.json."""

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Emulation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model's speed, its text, and how often it says what its target says."""

    curve: Curve
    """How long a forward pass lasts."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """Of the text; a drafter has that of its target."""
    agreement: Rate | Annotated[tuple[Rate, ...], msgspec.Meta(min_length=1)] = 1.0
    """Of a drafter: the chance that it gives its target's token; 1 for a target itself.

    Of n rates position p of the text has the p mod n-th, so that many rates make easy and hard
    stretches of text. A model does not see how far a draft has come: that has no rates.
    """
    top_probability: Annotated[float, msgspec.Meta(ge=0.05, lt=1)] = 0.9
    """Of the greedy token, at temperature 1; the other tokens share the rest."""

    @classmethod
    def parse(cls, entry: Any, where: str) -> Self:
        """The emulation in an entry of ``where``'s config.json. Raises ConfigError."""
        try:
            return msgspec.convert(entry, cls)
        except msgspec.ValidationError as error:
            fields = ", ".join(cls.__struct_fields__)
            raise ConfigError(
                f"{where}: {KEY} in config.json: {error}; its fields are {fields}"
            ) from error

    def logit_gap(self, vocab_size: int) -> float:
        """How far the greedy token's logit is above the others'."""
        others = vocab_size - NUM_SPECIAL - 1
        return math.log(others * self.top_probability / (1 - self.top_probability))

    def law(self, vocab_size: int) -> Law:
        """Which token comes next, in a vocabulary of this size."""
        rates = self.agreement if isinstance(self.agreement, tuple) else (self.agreement,)
        return Law(self.seed, vocab_size, rates)
