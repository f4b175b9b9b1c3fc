"""Curves from the shape of a model and the data sheet of a device. Plain Python, no vLLM."""

from dataclasses import dataclass

from minedraft.costmodel.curve import Curve

BF16 = 2.0
"""Bytes."""


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder."""

    name: str
    source: str
    parameters: int
    """Read in each pass: without an input embedding that is not the output's as well."""
    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_weight: float = BF16
    bytes_per_kv: float = BF16


@dataclass(frozen=True)
class Device:
    """What a data sheet says, and what is assumed to be reached of it."""

    name: str
    source: str
    flops_per_s: float
    """Dense matrix products in the type of the weights, at the peak."""
    bytes_per_s: float
    """Of its memory, at the peak."""
    compute_share: float = 0.6
    memory_share: float = 0.85
    layer_s: float = 20e-6
    """Of a layer, while memory is not at work: kernels of a CUDA graph that start and end."""
    parallel_layer_s: float = 80e-6
    """The same where devices share each layer, with two all-reduces over NVLink.

    With it and ``memory_share`` a pass for one request on four H100 takes 10.7 ms with Qwen3-32B
    and 18.6 ms with Llama-3.3-70B. Speculative Speculative Decoding (arXiv 2603.03251) reports 88.8
    and 54.7 tokens/s of plain decoding there, 11.3 and 18.3 ms a step.
    """


def derive(model: ModelShape, device: Device, count: int = 1) -> Curve:
    """The curve of a model on so many devices, each of which has a part of every layer.

    weights_s           = parameters * bytes_per_weight / (count * bytes_per_s * memory_share)
    per_token_s         = 2 * parameters / (count * flops_per_s * compute_share)
    per_context_token_s = 2 * layers * kv_heads * head_dim * bytes_per_kv
                          / (count * bytes_per_s * memory_share)
    overhead_s          = layers * (layer_s, or parallel_layer_s on several devices)

    A parameter is multiplied and added for each token, two operations; keys and values are two.
    Sampling, the bytes that all-reduces move, and work of the CPU are not in it.
    """
    bytes_per_s = count * device.bytes_per_s * device.memory_share
    flops_per_s = count * device.flops_per_s * device.compute_share
    layer_s = device.layer_s if count == 1 else device.parallel_layer_s
    kv_bytes = 2 * model.layers * model.kv_heads * model.head_dim * model.bytes_per_kv
    return Curve(
        source=(
            f"{model.name} ({model.source}) on {count} x {device.name} ({device.source}); assumed: "
            f"{device.memory_share:.0%} of the bandwidth and {device.compute_share:.0%} of the "
            f"FLOPS are reached, {layer_s * 1e6:g} us of each layer are overhead, "
            "a request by itself costs nothing"
        ),
        overhead_s=_short(model.layers * layer_s),
        weights_s=_short(model.parameters * model.bytes_per_weight / bytes_per_s),
        per_token_s=_short(2 * model.parameters / flops_per_s),
        per_request_s=0.0,
        per_context_token_s=_short(kv_bytes / bytes_per_s),
    )


def _short(value: float) -> float:
    """Four digits: more than the assumptions are good for."""
    return float(f"{value:.4g}")


H100_SXM = Device(
    "H100 SXM",
    "NVIDIA H100 data sheet: 989 TFLOPS bf16 dense, 3.35 TB/s",
    flops_per_s=989e12,
    bytes_per_s=3.35e12,
)
L40S = Device(
    "L40S",
    "NVIDIA L40S data sheet: 362 TFLOPS bf16 dense, 864 GB/s",
    flops_per_s=362e12,
    bytes_per_s=864e9,
)


def _published(name: str, parameters: int, layers: int) -> ModelShape:
    """All the models below have 8 heads of keys and values, of 128 numbers."""
    source = f"its config.json: {parameters / 1e9:.3g} B parameters read in a pass, bf16"
    return ModelShape(name, source, parameters, layers, kv_heads=8, head_dim=128)


QWEN3_32B = _published("Qwen3-32B", 31_984_210_944, 64)
QWEN3_4B = _published("Qwen3-4B", 4_022_468_096, 36)
QWEN3_1_7B = _published("Qwen3-1.7B", 1_720_574_976, 28)
QWEN3_0_6B = _published("Qwen3-0.6B", 596_049_920, 28)
LLAMA_3_3_70B = _published("Llama-3.3-70B", 69_503_033_344, 80)
LLAMA_3_1_8B = _published("Llama-3.1-8B", 7_504_924_672, 32)
