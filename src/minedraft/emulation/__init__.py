"""Language models with a set speed and a set agreement, to compare systems without a GPU."""

ARCHITECTURE = "MineDraftEmulatedForCausalLM"
"""Of these models, in config.json and in vLLM's registry."""
MODEL_CLASS = "minedraft.emulation.model:EmulatedForCausalLM"
