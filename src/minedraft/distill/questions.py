"""What the target is asked, and what is known of the answers: from workloads and transcripts."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from minedraft import json_lines
from minedraft.bench import workloads
from minedraft.config import ConfigError
from minedraft.distill.recipe import Recipe


class Message(msgspec.Struct, frozen=True):
    """As chat templates take it."""

    role: str
    content: str


class Question(msgspec.Struct, frozen=True):
    """A conversation up to the answer that is to be learned, or that is there already."""

    messages: tuple[Message, ...]
    answer: str | None = None
    held_out: bool = False
    """Not trained on."""


class _Transcript(msgspec.Struct):
    """A line of a file: what is asked, and the answer last."""

    messages: list[Message]


def questions(recipe: Recipe) -> list[Question]:
    """All questions of a recipe, each once. Their places in the list are their names.

    Raises ConfigError if a file cannot be read or there is nothing to train on.
    """
    found: dict[tuple[Message, ...], Question] = {}
    for source in recipe.prompts:
        drawn = workloads.shuffled(source, seed=recipe.seed)
        for conversation in drawn[: recipe.max_prompts or None]:
            messages = (Message("user", conversation.turns[0]),)
            found.setdefault(messages, Question(messages))
    for file in recipe.transcripts:
        read = list(_transcripts(Path(file)))
        random.Random(recipe.seed).shuffle(read)
        for question in read[: recipe.max_prompts or None]:
            found.setdefault(question.messages, question)
    listed = list(found.values())
    if len(listed) <= recipe.held_out:
        raise ConfigError(
            f"{len(listed)} different prompts, of which {recipe.held_out} are held out: none are "
            "left to train on; give more, or a smaller --held-out"
        )
    held_out = [msgspec.structs.replace(q, held_out=True) for q in listed[: recipe.held_out]]
    others = listed[recipe.held_out :]
    # Not one file after the other: the target may not come to the end of all.
    random.Random(recipe.seed).shuffle(others)
    return held_out + others


def _transcripts(file: Path) -> Iterator[Question]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"transcripts {file}: {error.strerror}") from error
    for place, transcript in json_lines.read(lines, _Transcript, str(file)):
        messages = transcript.messages
        if len(messages) < 2 or messages[-1].role != "assistant" or not messages[-1].content:
            raise ConfigError(f"{place}: does not end with an answer (assistant)")
        yield Question(tuple(messages[:-1]), messages[-1].content)


def digest(listed: Sequence[Question]) -> str:
    """Of all questions: answers belong to these and to no others."""
    return hashlib.sha256(msgspec.msgpack.encode(listed)).hexdigest()
