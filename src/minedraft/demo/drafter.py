"""The demo's drafter: layers of its target that `minedraft distill` has taught.

    python -m minedraft.demo.drafter RUN

keeps what a run of distill made in the file beside this one: the layers and the last norm.
Embeddings and output layer are the target's. `make drafter` has the command of the run.
"""

import sys
from pathlib import Path

from minedraft.distill.recipe import RunFolder
from minedraft.distill.slicing import keep_layers

FILE = Path(__file__).with_name("drafter.safetensors")
_WEIGHTS = "model.safetensors"
_LAYERS = "model.layers."
_LAST_NORM = "model.norm."


def assemble(target: Path, out: Path, file: Path = FILE) -> None:
    """Write to ``out`` the drafter kept in ``file``, for the target that it was made of."""
    import torch
    from gguf import GGMLQuantizationType, dequantize
    from safetensors.numpy import load_file

    taught = load_file(file)
    numbers = {int(name.split(".")[2]) for name in taught if name.startswith(_LAYERS)}
    weights = {
        name: torch.from_numpy(
            dequantize(weight, GGMLQuantizationType.Q8_0) if weight.ndim > 1 else weight
        )
        for name, weight in taught.items()
    }
    # Which layers of the target are kept does not matter: all their weights are replaced.
    keep_layers(target, out, sorted(numbers), weights)


def pack(run: RunFolder, file: Path = FILE) -> None:
    """Keep in ``file`` what a finished run of distill has taught layers of its target.

    Matrices as llama.cpp's Q8_0: 32 weights in a row share a scale, and take 34 bytes.
    """
    from gguf import GGMLQuantizationType, quantize
    from safetensors.numpy import load_file, save_file

    taught = {}
    for name, weight in load_file(run.drafter / _WEIGHTS).items():
        if name.startswith((_LAYERS, _LAST_NORM)):
            is_matrix = weight.ndim > 1
            taught[name] = quantize(weight, GGMLQuantizationType.Q8_0) if is_matrix else weight
    save_file(taught, file)


if __name__ == "__main__":
    pack(RunFolder(Path(sys.argv[1])))
