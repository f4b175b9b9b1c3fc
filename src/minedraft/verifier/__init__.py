"""The verifier: what lives inside vLLM's EngineCore and workers."""
