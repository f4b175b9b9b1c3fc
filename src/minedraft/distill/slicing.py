"""A model made of some layers of another one, as a checkpoint that vLLM and Transformers load."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minedraft.config import ConfigError
from minedraft.distill import checkpoint
from minedraft.weights import safetensors

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..+)")


def keep_layers(
    model_dir: Path,
    out_dir: Path,
    layers: Sequence[int],
    instead: dict[str, Any] | None = None,
) -> None:
    """Write to ``out_dir`` the model in ``model_dir`` with these layers only, in this order.

    Embeddings, head and all else are the same, but for tensors that are given ``instead``, by their
    names in the result. Works on any safetensors checkpoint that names its layers
    ``model.layers.N.``, in its own dtype. Raises ConfigError.
    """
    from safetensors.torch import save_file

    checkpoint.check_layers(model_dir, tuple(layers))
    checkpoint.copy_all_but_weights(model_dir, out_dir)
    config = _kept_config(model_dir, layers)
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = _kept_weights(safetensors(model_dir), layers) | (instead or {})
    with checkpoint.saving():
        save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})


def _kept_config(model_dir: Path, kept: Sequence[int]) -> dict[str, Any]:
    config = checkpoint.config(model_dir)
    total = config["num_hidden_layers"]
    if (types := _layer_types(model_dir)) is not None:
        config["layer_types"] = types
    for name, value in config.items():
        if isinstance(value, list) and len(value) == total:  # one entry for each layer
            config[name] = [value[layer] for layer in kept]
    return config | {"num_hidden_layers": len(kept)}


def _layer_types(model_dir: Path) -> list[str] | None:
    """Of a model whose layers are not alike: some derive it from the number of a layer."""
    from transformers import AutoConfig

    types = getattr(AutoConfig.from_pretrained(model_dir), "layer_types", None)
    return list(types) if types and len(set(types)) > 1 else None


def _kept_weights(files: Sequence[Path], kept: Sequence[int]) -> dict[str, Any]:
    """By the names that they will have. Raises ConfigError."""
    from safetensors import safe_open

    renumbered = {old: new for new, old in enumerate(kept)}
    weights = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if (layer := _LAYER.fullmatch(name)) is None:
                    weights[name] = opened.get_tensor(name)
                elif int(layer[2]) in renumbered:
                    renamed = f"{layer[1]}{renumbered[int(layer[2])]}{layer[3]}"
                    weights[renamed] = opened.get_tensor(name)
    if not any(_LAYER.fullmatch(name) for name in weights):
        raise ConfigError(
            "the target has no safetensors with layers named model.layers.N; give --student, a "
            "small model of the same tokenizer"
        )
    return weights
