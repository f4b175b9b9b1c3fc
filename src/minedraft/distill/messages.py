"""What a run and its answering process say to each other, in JSON lines. Plain Python, no vLLM."""

from typing import Any

import msgspec

from minedraft.distill.questions import Question


class Text(msgspec.Struct, frozen=True, array_like=True):
    """An answer that is there already, as tokens."""

    question: int
    sample: int
    prompt: list[int]
    answer: list[int]


class Job(msgspec.Struct, kw_only=True):
    """What is to be done."""

    model: str
    engine: dict[str, Any]
    """Keywords of vLLM's LLM."""
    folder: str
    top: int
    """Most likely tokens to be kept for each position."""
    questions: list[Question] = []
    wanted: list[tuple[int, int]] = []
    """Numbers of questions and answers, in the order in which they are to be had."""
    texts: list[Text] = []
    """Instead of questions."""
    max_prompt_tokens: int = 0
    answer_tokens: int = 0
    most_tokens: int = 0
    """Of all answers together, beyond which no other is begun; 0: no limit."""
    seed: int = 0


class Progress(msgspec.Struct):
    """How far it is."""

    answers: int
    tokens: int
    left_out: int
    """Questions that are too long, or whose answer cannot be told from its prompt."""
    ended: bool = False
