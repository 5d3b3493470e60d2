"""Settings of an engine that contradict each other, or name what is not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from placement.cluster.layout import sizes_to_type
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import ConfigError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def check_settings(engine_args: EngineArgs, config: HeteroConfig, *, is_stock: bool) -> None:
    """Raise for the first settings that cannot be meant.

    Args:
        engine_args: what vLLM was asked for.
        config: what this backend was asked for.
        is_stock: whether the ranks are known to be GPUs in stages of one size.

    Raises:
        ConfigError: says which, and what to type.

    """
    stages = engine_args.pipeline_parallel_size
    _check_model_path(engine_args.model)
    _check_layout(config, stages, engine_args.tensor_parallel_size)
    _check_layers(config, stages)
    _check_experts(config, is_stock=is_stock)


def _check_model_path(model: str) -> None:
    """A name on a hub has at most one slash and does not start like a path."""
    is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if is_path and "://" not in model and not Path(model).expanduser().exists():
        raise ConfigError(
            f"model: there is no {model!r} on this host. Give an existing directory, the name of "
            "a model on the hub (owner/name), or make one: ray-hetero demo-model DIR"
        )


def _check_layout(config: HeteroConfig, stages: int, ranks: int) -> None:
    if config.layout == "auto":
        return
    given = [len(stage) for stage in config.layout]
    if (len(given), max(given)) != (stages, ranks):
        of = " and ".join(map(str, sorted(set(given))))
        raise ConfigError(
            f"layout: {len(given)} stages of {of} ranks, but vLLM was asked for "
            f"--pipeline-parallel-size {stages} --tensor-parallel-size {ranks}. "
            f"{sizes_to_type(given)}"
        )


def _check_layers(config: HeteroConfig, stages: int) -> None:
    if config.layers != "auto" and len(config.layers) != stages:
        raise ConfigError(
            f"layers: {len(config.layers)} numbers {config.layers} for {stages} pipeline stages; "
            "give one number a stage"
        )
    partition = os.environ.get("VLLM_PP_LAYER_PARTITION")
    if config.layers != "auto" and partition:
        given = ",".join(map(str, config.layers))
        if partition.replace(" ", "") != given:
            raise ConfigError(
                f"layers {given} contradicts VLLM_PP_LAYER_PARTITION={partition}; keep one of them"
            )


def _check_experts(config: HeteroConfig, *, is_stock: bool) -> None:
    ranks, layers = config.experts.ranks, config.experts.layers
    if ranks not in (0, "auto") and not is_stock:
        raise ConfigError(
            f"experts.ranks: {ranks} sockets can hold experts only for stages of GPUs, all of one "
            f"size, but layout is {config.layout}. Write a layout of GPUs, for example "
            '"layout": [["gpu"]], or leave experts.ranks out.'
        )
    if layers != "auto" and not ranks:
        raise ConfigError(
            f"experts.layers: the experts of {layers} layers are to lie on expert ranks, but there "
            "are none; give experts.ranks too"
        )
