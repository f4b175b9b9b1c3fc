"""Answers of the target, with the tokens that it found likely: files of many, whole or absent.

Plain Python and numpy, no vLLM.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

GREEDY = 0
"""The number of the greedy answer to a question; those at temperature 1 count from 1 on. What is
taken from a transcript has this number too."""


@dataclass(frozen=True)
class Answer:
    """One answer, and what the target thought at each of its n tokens."""

    question: int
    sample: int
    """Which answer to the question, see GREEDY."""
    prompt: IntArray
    tokens: IntArray
    """[n]."""
    top_ids: IntArray
    """[n, k]: the tokens that the target found most likely, before each of its own."""
    top_logprobs: FloatArray
    """[n, k]: natural logarithms of their probabilities at temperature 1."""


def write(folder: Path, answers: Sequence[Answer]) -> None:
    """Adds a file with these answers to the folder. Raises OSError."""
    number = 1 + max((int(file.stem) for file in _files(folder)), default=-1)
    unfinished = folder / f".{os.getpid()}.unfinished"
    try:
        with unfinished.open("wb") as file:
            np.savez(
                file,
                keys=np.array([(a.question, a.sample) for a in answers], np.int32),
                lengths=np.array([(len(a.prompt), len(a.tokens)) for a in answers], np.int32),
                prompts=np.concatenate([a.prompt for a in answers]),
                tokens=np.concatenate([a.tokens for a in answers]),
                top_ids=np.concatenate([a.top_ids for a in answers]),
                top_logprobs=np.concatenate([a.top_logprobs for a in answers]),
            )
        unfinished.rename(folder / f"{number:06}.npz")
    finally:
        unfinished.unlink(missing_ok=True)


def read(folder: Path) -> Iterator[Answer]:
    """All answers in a folder."""
    for file in _files(folder):
        with np.load(file) as found:
            stored = {name: found[name] for name in found.files}
        prompt_at = token_at = 0
        pairs = zip(stored["keys"], stored["lengths"], strict=True)
        for (question, sample), (prompt_length, length) in pairs:
            part = slice(token_at, token_at + length)
            yield Answer(
                int(question),
                int(sample),
                stored["prompts"][prompt_at : prompt_at + prompt_length],
                stored["tokens"][part],
                stored["top_ids"][part],
                stored["top_logprobs"][part],
            )
            prompt_at, token_at = prompt_at + prompt_length, token_at + length


def done(folder: Path) -> tuple[set[tuple[int, int]], int]:
    """The questions and numbers of the answers that are there, and their tokens together."""
    keys: set[tuple[int, int]] = set()
    tokens = 0
    for file in _files(folder):
        with np.load(file) as found:
            keys |= {(int(question), int(sample)) for question, sample in found["keys"]}
            tokens += int(found["lengths"][:, 1].sum())
    return keys, tokens


def likely_tokens(answers: Iterable[Answer], most: int) -> IntArray:
    """So many tokens at most that have the most of the target's probability in all answers."""
    mass: dict[int, float] = {}
    for answer in answers:
        ids, where = np.unique(answer.top_ids, return_inverse=True)
        sums = np.bincount(where.ravel(), np.exp(answer.top_logprobs).ravel(), len(ids))
        for token, share in zip(ids.tolist(), sums.tolist(), strict=True):
            mass[token] = mass.get(token, 0.0) + share
    likeliest = sorted(mass, key=lambda token: (-mass[token], token))[:most]
    return np.array(sorted(likeliest), np.int32)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))
