"""Facts of the model and of the engine that planning needs, from vLLM's configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.cluster.assignment import Node
from placement.model.config import Config, UnknownModelError, decoder_section
from placement.model.shape import ModelShape
from placement.plan.drafts import Drafter
from placement.units import GIB
from ray_hetero.planning.activation_dtype import BFLOAT16, dtype_of_config
from ray_hetero.planning.drafters import drafter_asked, drafter_in
from ray_hetero.planning.sizes.hub_headers import hub_model
from ray_hetero.planning.sizes.model_sizes import sizes_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs


DEFAULT_LENGTH = 2048
"""Tokens of a sequence where a model's config.json does not say; vLLM's own."""
GEMMA_3_LENGTH = 131_072
"""The same of Gemma 3, by its class in Transformers."""
DEFAULT_GPU_SHARE = 0.92
"""Share of a GPU's memory that an engine takes; vLLM's own --gpu-memory-utilization."""
LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Keys of a config.json that may tell the longest sequence, as vLLM's ModelConfig reads them."""
MOST_LENGTH = 1_000_000_000
"""Limit of a sequence's tokens in a config.json; some tokenisers' files say 10 ** 30 for none."""
CPU_BLOCK_SIZE = 128
"""Tokens of a KV block on CPU ranks; vLLM's own default there, and every GPU backend takes it."""


@dataclass(frozen=True)
class EngineFacts:
    """One engine as the planner sees it."""

    shape: ModelShape | None
    why_no_shape: str
    """Why sizes of the model are not known; empty where they are."""
    hidden_layers: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    is_eager: bool = False
    is_bf16: bool = False
    """Whether what is not quantised is computed in bfloat16 where there are CPU ranks."""
    per_rank: frozenset[str] = frozenset()
    """Names of the limits of sequences and tokens that are for each rank of the world: vLLM's
    defaults on a driver without a GPU."""
    drafter: Drafter | None = None
    """Drafter of speculative decoding; None without it."""

    @property
    def drafts_behind_states(self) -> bool:
        """Whether drafts are verified by layers that keep a state of each sequence."""
        layers = self.shape.layers if self.drafter and self.shape else ()
        return any(layer.kv is not None and layer.kv.state_bytes for layer in layers)

    @property
    def has_draft_model(self) -> bool:
        """Whether a model of its own drafts."""
        drafter = self.drafter
        return drafter is not None and drafter.shape is not None and drafter.has_own_vocabulary

    def in_world(self, ranks: int) -> EngineFacts:
        """The facts once the number of ranks is known."""
        scaled: dict[str, Any] = {name: ranks * getattr(self, name) for name in self.per_rank}
        return replace(self, per_rank=frozenset(), **scaled)


def facts_of(vllm_config: VllmConfig) -> EngineFacts:
    """Read the facts; of the model no weight is read."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    layers = model.get_total_num_hidden_layers()
    shape, why = _shape(model, str(vllm_config.cache_config.cache_dtype), layers)
    return EngineFacts(
        shape=shape,
        why_no_shape=why,
        hidden_layers=layers,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        gpu_memory_utilization=vllm_config.cache_config.gpu_memory_utilization,
        is_eager=bool(model.enforce_eager),
        is_bf16=str(model.dtype) == "torch.bfloat16",
        drafter=drafter_in(vllm_config.speculative_config, shape),
    )


@dataclass(frozen=True)
class EngineOptions:
    """Options of vLLM's that decide its limits; None is vLLM's own choice for a server."""

    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = DEFAULT_GPU_SHARE


DEFAULTS = EngineOptions()


def facts_of_checkpoint(
    config: Mapping[str, Any],
    shape: ModelShape,
    nodes: Sequence[Node],
    options: EngineOptions = DEFAULTS,
    *,
    drafter: Drafter | None = None,
) -> EngineFacts:
    """The same without vLLM, from a checkpoint's config.json and what was asked for.

    Args:
        config: content of config.json.
        shape: sizes of the model.
        nodes: the cluster; vLLM's defaults depend on the driver's devices.
        options: of vLLM.
        drafter: of speculative decoding.

    """
    return EngineFacts(
        shape=shape,
        why_no_shape="",
        hidden_layers=len(shape.layers),
        max_model_len=options.max_model_len or own_length(config) or DEFAULT_LENGTH,
        gpu_memory_utilization=options.gpu_memory_utilization,
        is_bf16=dtype_of_config(config, options.dtype) == BFLOAT16,
        drafter=drafter,
        **server_defaults(nodes).limits(options.max_num_seqs, options.max_num_batched_tokens),
    )


def model_of(engine_args: EngineArgs) -> ModelConfig:
    """Configuration of the model that vLLM's arguments name, as vLLM makes it."""
    # It notes what it has found in the arguments, which are vLLM's to read once more.
    return copy.copy(engine_args).create_model_config()


def facts_of_model(
    engine_args: EngineArgs, model: ModelConfig, defaults: ServerDefaults
) -> EngineFacts:
    """The same before vLLM has built its configuration: what it has of the model, and defaults."""
    layers = model.get_total_num_hidden_layers()
    shape, why = _shape(model, str(engine_args.kv_cache_dtype), layers)
    return EngineFacts(
        shape=shape,
        why_no_shape=why,
        hidden_layers=layers,
        max_model_len=model.max_model_len,
        gpu_memory_utilization=engine_args.gpu_memory_utilization,
        is_eager=bool(model.enforce_eager),
        is_bf16=str(model.dtype) == "torch.bfloat16",
        drafter=drafter_asked(engine_args, shape),
        **defaults.limits(engine_args.max_num_seqs, engine_args.max_num_batched_tokens),
    )


@dataclass(frozen=True)
class ServerDefaults:
    """vLLM's own defaults for a server (EngineArgs.get_batch_defaults)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    are_per_rank: bool = False

    def limits(self, sequences: int | None, tokens: int | None) -> dict[str, Any]:
        """Fields of `EngineFacts` for limits that were asked for, or not."""
        asked = {"max_num_seqs": sequences, "max_num_batched_tokens": tokens}
        per_rank = [name for name, given in asked.items() if self.are_per_rank and not given]
        found = {name: given or getattr(self, name) for name, given in asked.items()}
        return {**found, "per_rank": frozenset(per_rank)}


def server_defaults(nodes: Sequence[Node]) -> ServerDefaults:
    """vLLM's defaults on the driver's node."""
    driver = next((node for node in nodes if node.is_driver), None)
    gpus = driver.host.gpus if driver is not None and driver.gpus else ()
    if not gpus:
        return ServerDefaults(128, 2048, are_per_rank=True)
    memory = gpus[0].memory_bytes or 0
    if memory >= 160 * GIB:
        return ServerDefaults(1024, 16384)
    if memory >= 70 * GIB and "a100" not in (gpus[0].name or "").lower():
        return ServerDefaults(1024, 8192)
    return ServerDefaults(256, 2048)


def own_length(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that a checkpoint's config.json tells; None if it does not.

    Raises:
        UnknownModelError: a length, or what scales it, is no number of a sequence's size.

    """
    text = Config(decoder_section(config), "config.json")
    lengths = [text.number(key, most=MOST_LENGTH) for key in LENGTH_KEYS if text.has(key)]
    if "gemma3" in str(text.values.get("model_type")):
        # Transformers' default, which published files leave out; it is scaled already.
        return min(lengths, default=GEMMA_3_LENGTH)
    if not lengths:
        return None
    shortest = min(lengths)
    original = "original_max_position_embeddings"
    rope = text.section("rope_parameters") or text.section("rope_scaling") or Config({}, "rope")
    kind = rope.values.get("rope_type", rope.values.get("type"))
    if kind in ("longrope", "su"):
        # Longer sequences are computed otherwise, shorter ones then worse: vLLM takes them only
        # where it is told to.
        return text.number(original, most=MOST_LENGTH) if text.has(original) else shortest
    # Those that have their own frequencies leave the length as it is.
    is_scaled = kind in (None, "default", "llama3", "mrope") or "yarn" in str(kind)
    return shortest if is_scaled else int(shortest * rope.factor("factor"))


def _shape(model: ModelConfig, cache_dtype: str, layers: int) -> tuple[ModelShape | None, str]:
    """Sizes of the model as vLLM takes it, or why there are none."""
    directory = Path(model.model)
    try:
        shape = sizes_of(
            model.hf_config.to_dict(),
            directory if directory.is_dir() else None,
            dtype=str(model.dtype),
            kv_dtype=cache_dtype,
            layers=layers,
            hub=None if directory.is_dir() else hub_model(model.model, model.revision),
            trust_remote_code=model.trust_remote_code,
        )
    except UnknownModelError as error:
        return None, str(error)
    if shape.has_encoders and not model.supports_multimodal_inputs:
        # vLLM makes no encoders for --language-model-only, or where no prompt may have an image.
        shape = shape.without_encoders()
    return shape, ""
