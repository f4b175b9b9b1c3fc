"""Do two models speak of the same tokens? Decided by a fingerprint of their tokenizers.

A draft is a list of token ids, so a drafter may serve a target only where equal ids mean equal
tokens. Rows that a model adds behind its vocabulary for alignment do not count: they are no
tokens. A model without a tokenizer has an empty fingerprint; then only the sizes can be compared.
"""

import hashlib
import json
from collections.abc import Mapping

from minedraft import protocol


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 over the (id, token) pairs of a tokenizer, in the order of ids."""
    pairs = sorted((index, token) for token, index in vocabulary.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def disagreement(target: str, target_size: int, drafter: str, drafter_size: int) -> str | None:
    """Why drafts of the one mean nothing to the other; None if they agree.

    ``target`` and ``drafter`` are fingerprints, the sizes are rows of the output layers.
    """
    if target and drafter:
        if target == drafter:
            return None
        return (
            "the drafter's tokenizer is not the target's: the same ids mean other tokens; "
            "take a drafter of the same model family"
        )
    if target_size == drafter_size:
        return None
    return (
        f"vocabularies of {target_size} (target) and {drafter_size} (drafter) tokens, and no "
        "tokenizer on one side to tell padding from tokens; give both models a tokenizer"
    )


def misfit(verifier: protocol.Hello, drafter: protocol.Welcome, who: str = "it") -> str | None:
    """Why this drafter cannot serve this verifier; None if it can. ``who`` names the drafter."""
    if drafter.version != verifier.version:
        return f"{who} speaks protocol {drafter.version}, this verifier {verifier.version}"
    return disagreement(
        verifier.vocabulary, verifier.vocab_size, drafter.vocabulary, drafter.vocab_size
    )
