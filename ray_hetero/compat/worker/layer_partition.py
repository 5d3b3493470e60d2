"""vLLM's layers of each pipeline stage: an environment variable, and which stage a rank is.

Replaces: nothing; sets VLLM_PP_LAYER_PARTITION in the processes of the driver and of its ranks.
Why: get_pp_indices knows of no other way to give stages different numbers of layers.
Can go when: the partition is a field of ParallelConfig.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray_hetero.compat.patching import original

VARIABLE = "VLLM_PP_LAYER_PARTITION"


def given_partition() -> str | None:
    """The layers of each stage as the user gave them to vLLM, with commas; None if not given."""
    import vllm.envs

    value = original(vllm.envs, VARIABLE)
    return None if value is None else str(value)


def set_partition(layers: Sequence[int]) -> None:
    """Tell this process's vLLM the layers of each stage."""
    os.environ[VARIABLE] = ",".join(map(str, layers))


def restore_partition(given: str | None) -> None:
    """Undo `set_partition`: what `given_partition` answered before."""
    if given is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = given


@contextmanager
def without_partition() -> Iterator[None]:
    """Leave the division of layers to vLLM, for a model that is not the planned one."""
    partition = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        restore_partition(partition)


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
