"""A target that says what its drafter says, and costs as much as one with more layers.

    python benchmarks/padded_target.py DRAFTER LAYERS FOLDER

The drafter's layers are followed by others that compute as much and add nothing. With its drafter
every draft token is accepted (but for near ties), which no real pair reaches: it shows what the
modes cost and what `auto` makes of them where drafting pays, not what a user will gain.
"""

import argparse
import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def padded(model: torch.nn.Module, layers: int) -> torch.nn.Module:
    """The model with copies of its layers behind them, whose outputs are zero."""
    own = list(model.model.layers)
    for index in range(len(own), layers):
        layer = copy.deepcopy(own[index % len(own)])
        layer.self_attn.layer_idx = index
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
        model.model.layers.append(layer)
    model.config.num_hidden_layers = layers
    return model


def main() -> None:
    """Writes the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter")
    parser.add_argument("layers", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.drafter, dtype=torch.float32)
    padded(model, options.layers).save_pretrained(options.folder)
    AutoTokenizer.from_pretrained(options.drafter).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
