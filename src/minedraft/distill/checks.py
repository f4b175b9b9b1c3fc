"""What a run needs, asked before it takes hours."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from minedraft import vocabulary
from minedraft.config import ConfigError
from minedraft.distill import checkpoint
from minedraft.distill.recipe import Recipe, RunFolder

STAMP = "complete.json"
"""In the folder of answers when no more are wanted."""
OF_ANSWERS = (
    "version", "target", "prompts", "transcripts", "max_prompts", "max_prompt_tokens",
    "answer_tokens", "samples", "held_out", "seed",
)  # fmt: skip
"""What of a recipe decides the answers."""


def check_student(recipe: Recipe, target: Path, student: Path) -> None:
    """Raises ConfigError if what is to become the drafter does not fit its target."""
    if not recipe.student:
        checkpoint.check_layers(target, recipe.layers)
    if "quantization_config" in checkpoint.config(student):
        raise ConfigError(f"{student}: its weights are quantised and cannot learn; take others")
    if recipe.student and (why := vocabulary.disagreement(*_tokens(target), *_tokens(student))):
        raise ConfigError(f"{recipe.student}: {why}")


def _tokens(folder: Path) -> tuple[str, int]:
    """Fingerprint and size of a vocabulary. Raises ConfigError."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        known = AutoTokenizer.from_pretrained(folder).get_vocab()
        size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    return vocabulary.fingerprint(known), size


def need_packages(recipe: Recipe) -> None:
    """Raises ConfigError if a library is missing, before hours of work have gone by."""
    needed = ["accelerate", "matplotlib", *(["peft"] if recipe.lora_rank else [])]
    needed += ["compressed_tensors"] if recipe.quantise else []
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ConfigError(f"distill needs {', '.join(missing)}: pip install 'minedraft[distill]'")


def copy_answers(source: RunFolder, folder: RunFolder, recipe: Recipe) -> None:
    """Takes over what the target answered in a run that is done with that.

    Raises ConfigError, OSError.
    """
    if (folder.answers / STAMP).exists():
        return
    if not (source.answers / STAMP).exists():
        raise ConfigError(f"{source.path}: no run that has all its answers")
    if differences := Recipe.read(source.recipe).differences(recipe, OF_ANSWERS):
        raise ConfigError(f"{source.path}: its answers are others, by {differences}")
    # The stamp last: without it the run is not done with its answers.
    for file in sorted(source.answers.iterdir(), key=lambda file: file.name == STAMP):
        shutil.copyfile(file, folder.answers / file.name)


def need_space(folder: Path, needed: float) -> None:
    """Raises ConfigError if the disk has not so many bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{folder}: about {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
        )
