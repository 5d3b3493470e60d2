"""vLLM's ModelConfig: which layers a rank counts as its own."""

from __future__ import annotations

from typing import Any

from ray_hetero.compat.patching import original


def use_stage(stage: int) -> None:
    """In a rank's process: tell ModelConfig.get_layers_start_end_indices the rank's stage.

    Replaces: `ModelConfig.get_layers_start_end_indices`.
    Uses: `utils.get_pp_indices` of vllm.distributed.
    Why: it takes the stage for rank // tensor_parallel_size, which is wrong where stages differ in
    size.
    Can go when: it asks the pipeline's group, as the model code does.
    """
    from vllm.config import ModelConfig
    from vllm.distributed import utils

    original(ModelConfig, "get_layers_start_end_indices")
    pp_indices = original(utils, "get_pp_indices")

    def get_layers_start_end_indices(self: Any, parallel_config: Any) -> tuple[int, int]:
        layers = self.get_total_num_hidden_layers()
        stages = parallel_config.pipeline_parallel_size
        # A draft model is whole on its stage.
        start, end = pp_indices(layers, min(stage, stages - 1), stages)
        return start, end

    ModelConfig.get_layers_start_end_indices = get_layers_start_end_indices
