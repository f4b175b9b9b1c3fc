"""The demo's drafter is kept without what its target has, and put together again."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny import make_model

from minedraft.demo.drafter import assemble, pack
from minedraft.distill.recipe import RunFolder
from minedraft.distill.slicing import keep_layers

LAYERS = (0, 3)
BOUND = 0.57 / 127
"""Of the largest of 32 weights: half a step, and the rounding of the scale to a float16."""


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_was_learned_is_kept_to_eight_bits_and_the_rest_is_the_targets(
    tmp_path: Path, tied: bool
) -> None:
    target = make_model(tmp_path / "target", seed=1, layers=4, tie_word_embeddings=tied)
    run = RunFolder(tmp_path / "run")
    begun = tmp_path / "begun"
    keep_layers(target, begun, LAYERS)
    make_model(run.drafter, seed=2, base=begun, noise=0.3)

    file = tmp_path / "kept.safetensors"
    pack(run, file)
    assemble(target, tmp_path / "out", file)

    given, taught = (
        load_file(target / "model.safetensors"),
        load_file(run.drafter / "model.safetensors"),
    )
    made = load_file(tmp_path / "out/model.safetensors")
    assert set(made) == set(taught)
    assert sum(weight.nbytes for weight in load_file(file).values()) < 0.3 * sum(
        weight.nbytes for name, weight in taught.items() if "layers" in name
    )
    for name, weight in made.items():
        if not name.startswith(("model.layers.", "model.norm.")):
            assert weight.equal(given[name]), name
        elif weight.ndim == 1:
            assert weight.equal(taught[name]), name
        else:
            blocks = taught[name].reshape(-1, 32)
            error = (weight.reshape(-1, 32) - blocks).abs().amax(1)
            assert (error / blocks.abs().amax(1)).max() <= BOUND, name
