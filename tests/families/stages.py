"""The two stages of a pipeline beside the whole model, in one process.

The stages are vLLM's own models, loaded from the checkpoint as ranks load them; only the groups are
pretended.  There is no KV cache: attention and recurrent layers give nothing, as in vLLM's dummy
runs, and what is compared is everything else, the tensors between the stages among it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from families.stock import stock_arguments
from placement.model.config import Config
from placement.model.undivided import barred_cuts, uses_of

STAGES = 2
TOKENS = 7
BOUND = 1e-4
"""Largest difference of hidden states in float32, by their largest value."""


class StockError(Exception):
    """vLLM cannot build, load or compute the whole model either; the message says why."""


class StageError(Exception):
    """The stages are not the whole model; the message says how they differ."""


@dataclass(frozen=True)
class Stage:
    """A pipeline group as a rank of one stage sees it."""

    rank_in_group: int
    world_size: int

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


@contextlib.contextmanager
def _as_stage(directory: Path, stage: int, stages: int) -> Iterator[None]:
    from vllm.distributed import parallel_state

    layers = _layers(directory) if stages > 1 else ""
    with (
        patch.object(parallel_state, "_PP", Stage(stage, stages)),
        patch.dict(os.environ, {"VLLM_PP_LAYER_PARTITION": layers} if layers else {}),
    ):
        yield


def _layers(directory: Path) -> str:
    """Layers of two stages, as vLLM takes them, where it must not cut in the middle."""
    config = json.loads((directory / "config.json").read_text())
    barred, count = barred_cuts(uses_of(Config(config))), config.get("num_hidden_layers")
    if not barred or count is None or count // 2 not in barred:
        return ""
    cut = next((one for one in range(1, count) if one not in barred), 0)
    return f"{cut},{count - cut}" if cut else ""


def _config(directory: Path, stages: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = stock_arguments(directory)
    return EngineArgs(
        **given, pipeline_parallel_size=stages, distributed_executor_backend="mp"
    ).create_engine_config()


def _loaded(directory: Path, stage: int, stages: int) -> tuple[Any, Any]:
    """vLLM's configuration, and the model of one stage with its weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _config(directory, stages)
    with (
        _as_stage(directory, stage, stages),
        set_current_vllm_config(config),
        set_default_torch_dtype(torch.float32),
    ):
        model = initialize_model(config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        parameters = {name: value.clone() for name, value in model.named_parameters()}
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return config, (model.eval(), parameters)


def _run(directory: Path, config: Any, model: Any, stage: int, stages: int, given: Any) -> Any:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    tokens = torch.arange(8, 8 + TOKENS)
    with (
        torch.inference_mode(),
        _as_stage(directory, stage, stages),
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=TOKENS),
        # What layers without a KV cache leave as it is must be the same in all models.
        patch.object(torch, "empty", torch.zeros),
        patch.object(torch, "empty_like", torch.zeros_like),
        # vLLM's runner for CPUs does the same.
        patch.object(torch.accelerator, "empty_cache", lambda: None),
    ):
        # Models without pipelines have no such argument.
        takes = "intermediate_tensors" in inspect.signature(model.forward).parameters
        further = {"intermediate_tensors": given} if takes else {}
        return model(input_ids=tokens, positions=torch.arange(TOKENS), **further)


def _compare_weights(whole: dict[str, Any], stages: list[dict[str, Any]]) -> None:
    import torch

    for name, weight in whole.items():
        found = [one[name] for one in stages if name in one]
        if not found:
            raise StageError(f"no stage has the weight {name}")
        if not all(torch.equal(weight, one) for one in found):
            raise StageError(f"the weight {name} of a stage is another one")
        if len(found) > 1 and ".layers." in name:
            raise StageError(f"{len(found)} stages have the weight {name}")


def check(directory: Path) -> None:
    """Compare the stages of a checkpoint with the whole model.

    Args:
        directory: a small checkpoint in float32.

    Raises:
        StockError: the whole model cannot be had.
        StageError: a weight is on no stage, on two, or differs, a stage does not read what the one
            before sends, or the hidden states differ.
        Exception: whatever vLLM raises where a stage cannot be built, loaded or computed.

    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    from ray_hetero.compat.models import pipeline_models
    from ray_hetero.compat.worker.received_tensors import NotedTensors

    # Compiled parts would keep what is pretended here.
    torch._dynamo.config.disable = True
    try:
        config = _config(directory, 1)
        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as meeting:
            init_distributed_environment(1, 0, f"file://{meeting}/meeting", 0, "gloo")
            initialize_model_parallel(1, 1)
        config, (model, whole) = _loaded(directory, 0, 1)
        expected = _run(directory, config, model, 0, 1, None)
    # Whatever it is, it is not what the stages have.
    except Exception as error:
        raise StockError(f"{type(error).__name__}: {error}") from error
    pipeline_models.prepare_loading()
    found: Any = None
    weights = []
    for stage in range(STAGES):
        config, (model, parameters) = _loaded(directory, stage, STAGES)
        pipeline_models.read_per_layer_inputs()
        weights.append(parameters)
        given = found if found is None else NotedTensors(found.tensors)
        found = _run(directory, config, model, stage, STAGES, given)
        if given is not None and given.unread:
            raise StageError(f"stage {stage} does not read {', '.join(given.unread)}")
    _compare_weights(whole, weights)
    if not isinstance(found, torch.Tensor):
        found, expected = found[0], expected[0]
    scale = float(expected.abs().max())
    differs = float((expected - found).abs().max())
    if not differs <= BOUND * scale:
        raise StageError(f"hidden states of {scale:.3g} differ by {differs:.3g}")
