"""A drafter with weights of eight bits, by compressed-tensors, whose format vLLM loads."""

from pathlib import Path
from typing import Any

from minedraft.distill import checkpoint

SCHEMES = {"int8": "W8A8"}
"""By name of ours, the preset of compressed-tensors: symmetric integers, weights by output channel
rounded to the nearest, activations by token as they come."""


def quantise(model_dir: Path, out_dir: Path, name: str) -> None:
    """Write the model in ``model_dir`` to ``out_dir`` with the linear layers quantised.

    Embeddings and output layer stay as they are: a drafter shares them with its target, and they
    decide between near ties.
    """
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    scheme = preset_name_to_scheme(SCHEMES[name], ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is None:
                continue
            low, high = torch.aminmax(module.weight, dim=1, keepdim=True)
            scale, _ = calculate_qparams(low, high, module.quantization_scheme.weights)
            module.weight_scale.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    dtype = checkpoint.dtype(model_dir)
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not name.endswith("weight_scale"):
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    checkpoint.copy_all_but_weights(model_dir, out_dir)
    with checkpoint.saving():
        model.save_pretrained(out_dir)
    compressor.update_config(str(out_dir))
