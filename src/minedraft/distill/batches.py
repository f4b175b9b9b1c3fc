"""Answers as batches of about the same number of tokens, the same ones for the same seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minedraft.distill.answers import Answer

WINDOW = 64
"""So many batches' answers are put in the order of their lengths together."""


@dataclass(frozen=True)
class Batch:
    """Answers side by side, filled up on the right; n positions are those of answer tokens."""

    input_ids: torch.Tensor
    """[rows, tokens]."""
    attention_mask: torch.Tensor
    """[rows, tokens]."""
    positions: torch.Tensor
    """bool [rows, tokens]: those after which a token of an answer comes."""
    labels: torch.Tensor
    """[n]: that token."""
    top_ids: torch.Tensor
    """[n, k]."""
    top_logprobs: torch.Tensor
    """[n, k]."""
    lengths: list[int]
    """Of the answers; n together."""


def order(answers: Sequence[Answer], most_tokens: int, rng: random.Random) -> list[list[int]]:
    """Batches as indices of answers: all of them once, at random, few to be filled up.

    A batch has ``most_tokens`` at most, prompts and filling included, or one answer.
    """
    shuffled = list(range(len(answers)))
    rng.shuffle(shuffled)
    sizes = [len(answer.prompt) + len(answer.tokens) for answer in answers]
    mean = max(1, sum(sizes) // max(1, len(sizes)))
    window = max(1, WINDOW * most_tokens // mean)
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), window):
        batch: list[int] = []
        for index in sorted(shuffled[start : start + window], key=lambda i: sizes[i]):
            if batch and (len(batch) + 1) * sizes[index] > most_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        if batch:
            batches.append(batch)
    rng.shuffle(batches)
    return batches


def make(answers: Sequence[Answer]) -> Batch:
    """A batch of these."""
    width = max(len(a.prompt) + len(a.tokens) for a in answers)
    shape = (len(answers), width)
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    positions = np.zeros(shape, bool)
    for row, answer in enumerate(answers):
        start, end = len(answer.prompt), len(answer.prompt) + len(answer.tokens)
        ids[row, :start], ids[row, start:end] = answer.prompt, answer.tokens
        mask[row, :end] = 1
        positions[row, start - 1 : end - 1] = True

    def together(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(a, name) for a in answers]))

    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(mask),
        torch.from_numpy(positions),
        together("tokens").long(),
        together("top_ids").long(),
        together("top_logprobs").float(),
        [len(answer.tokens) for answer in answers],
    )
