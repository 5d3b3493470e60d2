"""vLLM's models: their classes, layers, experts, kernels and checkpoint formats."""
