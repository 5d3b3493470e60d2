"""What this backend cannot do, refused in one line before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ray_hetero.config import HeteroConfig
from ray_hetero.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def refuse_unsupported(engine_args: EngineArgs, config: HeteroConfig) -> None:
    """Raise for the first option that cannot work.

    Raises:
        UnsupportedError: the option does not work with CPU ranks or with this backend at all.
        ConfigError: the sizes asked for contradict each other.

    """
    _check_model_path(engine_args.model)
    stages = engine_args.pipeline_parallel_size
    ranks = engine_args.tensor_parallel_size
    _check_layout(config, stages, ranks)
    _check_layers(config, stages)
    for option, value, why in (
        ("--speculative-config", engine_args.speculative_config, "drafts run on one kind only"),
        ("--kv-transfer-config", engine_args.kv_transfer_config, "KV blocks live on two kinds"),
        ("--enable-sleep-mode", engine_args.enable_sleep_mode, "CPU ranks cannot sleep"),
        ("--prefill-context-parallel-size",
         engine_args.prefill_context_parallel_size > 1, "CPU ranks have no such group"),
        ("--decode-context-parallel-size",
         engine_args.decode_context_parallel_size > 1, "CPU ranks have no such group"),
        ("--nnodes", engine_args.nnodes > 1, "Ray places the ranks; leave it at 1"),
    ):  # fmt: skip
        if value:
            raise UnsupportedError(f"{option} does not work with ray_hetero: {why}. Leave it out.")


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
    if given != [ranks] * stages:
        raise ConfigError(
            f"layout: {len(given)} stages of {given[0]} ranks, but vLLM was asked for "
            f"--pipeline-parallel-size {stages} --tensor-parallel-size {ranks}. "
            f"Type: --pipeline-parallel-size {len(given)} --tensor-parallel-size {given[0]}"
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
