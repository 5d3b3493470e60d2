"""vLLM in the process of a rank: worker, model runner, groups and KV cache."""
