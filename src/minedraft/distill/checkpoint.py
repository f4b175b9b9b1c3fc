"""Checkpoints of models: where they are, and what their configuration says. No torch."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minedraft.config import ConfigError

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def local_folder(model: str) -> Path:
    """Where the files of a model are; those of a name of Hugging Face's are fetched first.

    Raises ConfigError.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_FETCHED))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"{model}: no folder here, and not to be had: {first}") from error


def config(folder: Path) -> dict[str, Any]:
    """The configuration. Raises ConfigError."""
    file = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give the folder of a model") from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    return found


def num_layers(folder: Path) -> int:
    """Decoder layers. Raises ConfigError."""
    total: int = config(folder).get("num_hidden_layers", 0)
    if total < 1:
        raise ConfigError(
            f"{folder}: its configuration has no num_hidden_layers; give --student, a small model "
            "of the same tokenizer"
        )
    return total


def check_layers(folder: Path, layers: tuple[int, ...]) -> None:
    """Raises ConfigError if these are not some of the model's layers, each once."""
    total = num_layers(folder)
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(total)):
        raise ConfigError(
            f"layers {', '.join(map(str, layers)) or 'none'}: give some of layers 0 to {total - 1} "
            f"of {folder.name}, each once"
        )


def outer_layers(total: int, count: int) -> tuple[int, ...]:
    """So many layers of a model with ``total``, half of them its first and half its last.

    Raises ConfigError if there are not as many.
    """
    if not 1 <= count <= total:
        raise ConfigError(f"--num-layers: give 1 to {total}, which is what the target has")
    first = (count + 1) // 2
    return (*range(first), *range(total - count + first, total))


def copy_all_but_weights(model_dir: Path, out_dir: Path) -> None:
    """Configuration, tokenizer and the like; not what its makers say of the model."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for file in model_dir.iterdir():
        is_weights = not set(_WEIGHTS).isdisjoint(file.suffixes)  # the files and their index
        if file.is_file() and not is_weights and file.name != "README.md":
            shutil.copyfile(file, out_dir / file.name)


@contextmanager
def saving() -> Iterator[None]:
    """While weights are written. Raises OSError for what their libraries raise instead."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(str(error).splitlines()[0]) from error


def dtype(folder: Path) -> Any:
    """The torch dtype of its weights."""
    import torch

    found = config(folder)
    return getattr(torch, found.get("dtype") or found.get("torch_dtype") or "float32")
