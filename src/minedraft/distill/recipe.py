"""What a drafter is made of and how, and the folder in which that happens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from minedraft.config import ConfigError

VERSION = 1
TOP = 20
"""Most likely tokens of the target that are kept for each position: as many as vLLM gives unless it
is told otherwise."""


class Recipe(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All that decides what a run makes. Its budgets are no part of it: a run may be continued."""

    version: int = VERSION
    target: str
    prompts: tuple[str, ...] = ()
    """Names of workloads or files; the target answers them."""
    transcripts: tuple[str, ...] = ()
    """Files of conversations, whose answers are taken as they are."""
    max_prompts: int = 0
    """Of each, drawn by the seed; 0: all."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out."""
    answer_tokens: int = 256
    """An answer ends there."""
    samples: int = 1
    """Answers to each prompt at temperature 1, beside the greedy one; to one held out it is 1."""
    held_out: int = 64
    """Prompts that are not trained on: of the first of `prompts`, or else of `transcripts`."""
    layers: tuple[int, ...] = ()
    """Of the target, those that the student is made of; without: `student`."""
    student: str = ""
    """A small model of the same tokenizer."""
    lora_rank: int = 0
    """Of adapters that are trained in place of the weights; 0: the weights."""
    train_embeddings: bool = False
    loss_vocabulary: int = 8192
    """Tokens that the loss tells apart, those that the target finds likely most often."""
    learning_rate: float = 1e-3
    batch_tokens: int = 512
    """Tokens of a step, prompts included."""
    epochs: int = 4
    quantise: Literal["", "int8"] = ""
    seed: int = 0

    @classmethod
    def read(cls, file: Path) -> Self:
        """The recipe in a file that ``write`` made. Raises ConfigError."""
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{file}: not a recipe of this version: {error}") from error

    def write(self, file: Path) -> None:
        """Writes what ``read`` reads."""
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def differences(self, other: "Recipe", among: Sequence[str] = ()) -> str:
        """Flags of the settings that are not the same, of all or of those named; "" if all are."""
        names = among or self.__struct_fields__
        return ", ".join(_flag(n) for n in names if getattr(self, n) != getattr(other, n))

    def check(self) -> None:
        """Raises ConfigError if it cannot be followed."""
        if not (self.prompts or self.transcripts):
            raise ConfigError("give prompts to learn from: --prompts FILE, or --transcripts FILE")
        if bool(self.layers) == bool(self.student):
            raise ConfigError("give the student: one of --layers, --num-layers and --student")
        least: dict[str, Any] = {
            "max_prompts": 0,
            "max_prompt_tokens": 1,
            "answer_tokens": 2,
            "samples": 0,
            "held_out": 1,
            "lora_rank": 0,
            "loss_vocabulary": 2,
            "batch_tokens": 16,
            "epochs": 1,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{_flag(name)}: give {value} or more")
        if not 0 < self.learning_rate < 1:
            raise ConfigError("--learning-rate: give a number between 0 and 1")
        if self.lora_rank and not self.student:
            raise ConfigError(
                "--lora-rank is for --student; a slice of the target is trained whole"
            )
        if self.lora_rank and self.train_embeddings:
            raise ConfigError("give one of --lora-rank and --train-embeddings")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class RunFolder:
    """Where a run keeps what it made: all of it can be continued by the same command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers = path / "answers"
        self.checkpoint = path / "checkpoint"
        self.drafter = path / "drafter"
        self.unquantised = path / "unquantised"
        self.recipe = path / "recipe.json"
        self.log = path / "log.jsonl"
        self.provenance = path / "provenance.json"
        self.evaluation = path / "evaluation.json"
        """Written last: with it the run is finished."""

    def open(self, recipe: Recipe) -> None:
        """Begins a run or continues it. Raises ConfigError where it is another one's."""
        try:
            if self.recipe.exists():
                self._continue(recipe)
                return
            if self.path.exists() and any(self.path.iterdir()):
                raise ConfigError(
                    f"{self.path}: not empty, and no run of distill; name a new folder"
                )
            self.answers.mkdir(parents=True, exist_ok=True)
            recipe.write(self.recipe)
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error

    def _continue(self, recipe: Recipe) -> None:
        if differences := Recipe.read(self.recipe).differences(recipe):
            raise ConfigError(
                f"{self.path}: a run with other settings ({differences}); name a new folder, or "
                "give the same to continue it"
            )

    def note(self, **event: Any) -> None:
        """Adds a line to the log."""
        with self.log.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
