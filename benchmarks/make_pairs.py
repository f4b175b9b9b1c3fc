"""Writes benchmarks/pairs: the curves of pairs of real models, for emulated ones that last as long.

    python benchmarks/make_pairs.py

None of them was measured. Those of models come from the shapes of the models and the data sheets of
the devices by minedraft.costmodel.datasheet; each file says from what, and what was assumed.
Targets are on as few H100 as hold their weights and the context of 128 requests; drafters on one
GPU, in one pair on a small one. `25ms` is of no model: a target with passes of 25 ms whatever is in
them and a drafter fast enough to hide behind it, for reading off what MineDraft's own work costs a
step.
"""

from pathlib import Path

from minedraft.costmodel.curve import CostModel, Curve
from minedraft.costmodel.datasheet import (
    H100_SXM,
    L40S,
    LLAMA_3_1_8B,
    LLAMA_3_3_70B,
    QWEN3_0_6B,
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN3_32B,
    derive,
)

FOLDER = Path(__file__).with_name("pairs")


def constant(seconds: float) -> Curve:
    """Passes that all last as long."""
    return Curve(
        source=f"no model: every pass lasts {1e3 * seconds:g} ms",
        overhead_s=seconds,
        weights_s=0.0,
        per_token_s=0.0,
        per_request_s=0.0,
        per_context_token_s=0.0,
    )


QWEN3_32B_V = derive(QWEN3_32B, H100_SXM, 2)
LLAMA_3_3_70B_V = derive(LLAMA_3_3_70B, H100_SXM, 4)
PAIRS = [
    CostModel(version=1, name=name, target=target, drafter=drafter)
    for name, target, drafter in (
        ("qwen3-32b-0.6b", QWEN3_32B_V, derive(QWEN3_0_6B, H100_SXM)),
        ("qwen3-32b-0.6b-l40s", QWEN3_32B_V, derive(QWEN3_0_6B, L40S)),
        ("qwen3-32b-1.7b", QWEN3_32B_V, derive(QWEN3_1_7B, H100_SXM)),
        ("qwen3-32b-4b", QWEN3_32B_V, derive(QWEN3_4B, H100_SXM)),
        ("llama-3.3-70b-8b", LLAMA_3_3_70B_V, derive(LLAMA_3_1_8B, H100_SXM)),
        ("25ms", constant(25e-3), constant(1e-3)),
    )
]

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for pair in PAIRS:
        pair.save(FOLDER / f"{pair.name}.json")
