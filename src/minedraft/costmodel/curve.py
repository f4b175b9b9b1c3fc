"""V and t as curves, and the file that holds a pair of them. Plain Python, no vLLM."""

from pathlib import Path
from typing import Literal, Self

import msgspec

from minedraft.config import ConfigError

MAX_COEFFICIENT_S = 3600.0
"""More than any part of a forward pass takes."""


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a forward pass, by what is in it.

        seconds = overhead_s + max(weights_s, per_token_s * tokens)
                + per_request_s * requests + per_context_token_s * context

    This is the roofline model (Williams, Waterman and Patterson, "Roofline: an insightful visual
    performance model for multicore architectures", CACM 52(4), 2009) of the kernels of a decoder
    one after the other. The linear layers take as long as the slower of reading their weights and
    computing on their tokens. Attention reads the keys and values of the context, which bounds it
    as long as a request has few tokens in the pass: prompts of thousands of tokens take longer than
    this says, by a part that grows with their square.

    Raises ConfigError if a coefficient is not from 0 to 3600 seconds, or without a source.
    """

    source: str
    """Where the coefficients come from, or what they assume."""
    overhead_s: float
    """Of each pass: launches, waiting for each other."""
    weights_s: float
    """Reading the weights once."""
    per_token_s: float
    """Computing on a token that is in the pass."""
    per_request_s: float
    per_context_token_s: float
    """Reading the keys and values of a token."""

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ConfigError("source is empty: say where the coefficients come from")
        for name in self.__struct_fields__[1:]:
            value = getattr(self, name)
            if not 0 <= value <= MAX_COEFFICIENT_S:  # False for NaN too
                raise ConfigError(f"{name}={value}: give seconds, from 0 to {MAX_COEFFICIENT_S:g}")

    def seconds(self, tokens: float, requests: float, context: float) -> float:
        """Seconds of a pass.

        ``tokens`` are computed in it, for so many ``requests``; ``context`` is the number of tokens
        whose keys and values are read, summed over the requests.
        """
        linear = self.per_token_s * tokens
        if linear < self.weights_s:
            linear = self.weights_s
        return (
            self.overhead_s
            + linear
            + self.per_request_s * requests
            + self.per_context_token_s * context
        )


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A target and its drafter, each on devices of its own."""

    version: Literal[1]
    """Of the file's format."""
    name: str
    target: Curve
    drafter: Curve

    def verification_s(self, num_drafts: float, requests: float, context: float) -> float:
        """V: one pass of the target over the drafts of so many requests and a token more each.

        ``context`` as in ``Curve.seconds``.
        """
        return self.target.seconds(requests * (num_drafts + 1), requests, context)

    def drafting_s(self, num_drafts: float, requests: float, context: float) -> float:
        """t: a pass of the drafter for each draft token, and a token of each request in it.

        ``context`` is that of the first pass; catching up with what was verified is not counted.
        """
        mean_context = context + requests * max(0.0, num_drafts - 1) / 2
        return num_drafts * self.drafter.seconds(requests, requests, mean_context)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The pair in a JSON file that ``save`` wrote or a user. Raises ConfigError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"cost model {path}: {error.strerror}; give a JSON file") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            curve = ", ".join(Curve.__struct_fields__)
            raise ConfigError(
                f"cost model {path}: {error}; it has the keys version (1), name, target and "
                f"drafter, the last two with {curve}"
            ) from error

    def save(self, path: Path) -> None:
        """Writes what ``load`` reads."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
