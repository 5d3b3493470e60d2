"""vLLM's layers of each pipeline stage: an environment variable, which it reads when it is asked.

Replaces: nothing; sets VLLM_PP_LAYER_PARTITION in the processes of the driver and of its ranks.
Why: get_pp_indices knows of no other way to give stages different numbers of layers.
Can go when: the partition is a field of ParallelConfig.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
    """Have vLLM divide layers by itself, for a model that is not the one that was planned."""
    partition = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        restore_partition(partition)
