"""The one configuration of this backend: every key with its type, default and meaning.

`--additional-config '{"ray_hetero": {…}}'` wins, key by key, over the YAML or JSON file named by
`RAY_HETERO_CONFIG`, which wins over the defaults (`ray_hetero.config_sources`).  Unknown keys are
refused; keys that once had another name are taken by that too, with a line in the log.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
)

from placement.given import key_of, listed, shown
from placement.plan.stage_plan import Objective
from ray_hetero.config_sources import Merged, as_written, merged, read_sources
from ray_hetero.errors import ConfigError

Kind = Literal["cpu", "gpu"]
Auto = Literal["auto"]
Seconds = Annotated[float, Field(gt=0, le=86400)]
GigabytesPerSecond = Annotated[float, Field(ge=0.001, le=100_000)]
Gibibytes = Annotated[float, Field(ge=0.001, le=100_000)]
Word = Annotated[str, Field(pattern=r"^[!-~]+$")]
"""Text that is no setting by accident: not empty, no spaces, no line breaks."""
Environment = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
    Annotated[str, Field(pattern=r"^[^\x00]*$")],
]
_WIDE = ("amx", "avx512_bf16", "avx512")
"""Kernels for vectors of 512 bits."""
_STAGES = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "array", "minItems": 1, "items": {"type": "string", "enum": ["cpu", "gpu"]}},
}
Stages = Annotated[list[list[Kind]], WithJsonSchema(_STAGES)]
"""The kinds of the ranks of each stage; no stage is without one."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class GpuConfig(_Section):
    """GPU ranks."""

    accelerator_type: Word | None = None
    """Ray's accelerator type the GPU bundles ask for, for example H100; null takes any."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for vLLM; null takes vLLM's own --gpu-memory-utilization."""
    bandwidth_gb_s: GigabytesPerSecond | None = None
    """What a GPU reads its memory with, in 10^9 bytes per second, for planning; null looks the GPU
    up in the table of known parts."""
    in_mixed_groups: Literal["eager", "compiled", "graphs"] = "graphs"
    """How GPU ranks run in a tensor-parallel group with CPU ranks: operator by operator, compiled
    between the collectives, or captured as CUDA graphs between them too."""
    env: Environment = {}
    """Added to the environment of GPU ranks."""


class CpuConfig(_Section):
    """CPU ranks."""

    unit: Literal["package", "numa"] = "package"
    """What a CPU rank gets: a whole CPU package, or one NUMA node (sub-NUMA clustering)."""
    ranks_per_socket: Annotated[int, Field(ge=1, le=64)] = 1
    """Into how many equal shares of cores each socket is split, one rank a share."""
    sockets: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | Auto = "auto"
    """Sockets of each node that CPU ranks may take, by number (`ray-hetero topology`), in this
    order; auto is all of them, a rank's own near the GPUs that it exchanges with."""
    cores: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Compute threads of each rank; auto is all cores of the socket less the reserved ones."""
    reserved_cores: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Cores of a socket kept for the engine, the API server and Ray."""
    kv_cache_gib: Gibibytes | Auto = "auto"
    """KV cache of each CPU rank in GiB; auto is room for all sequences at their longest, as far
    as memory is free. vLLM's VLLM_CPU_KVCACHE_SPACE is not read."""
    bandwidth_gb_s: GigabytesPerSecond | None = None
    """What one CPU rank reads its memory with, in 10^9 bytes per second, for planning; null
    measures it at the first start on a host."""
    openmp: Literal["auto", "gomp", "iomp", "none"] = "auto"
    """OpenMP library to preload; none leaves threads and binding to the environment."""
    linear_kernel: Literal["auto", "streaming", "vllm"] = "auto"
    """What computes linear layers, quantised ones too, and unquantised experts in bfloat16: kernels
    that read the weights at the socket's bandwidth, or vLLM's own; auto takes the former where
    there is AVX2 or more, and where vLLM has none for a quantised layer."""
    fuse_layers: bool = True
    """Whether the layers of a stage are one operator, where linear layers stream and the model is
    one it is known for."""
    compact_weights: bool | Auto = "auto"
    """Whether linear layers and experts that stream hold their weights in 12 bits instead of 16,
    without loss, where their values allow that; auto does where there is AVX-512 or AMX."""
    prefill_on_gpu: bool | Auto = "auto"
    """Whether a CPU rank has a GPU of its node compute its layers in steps of many tokens,
    reading the weights over its link; auto does beside a GPU rank where linear layers stream."""
    prefill_on_gpu_tokens: Annotated[int, Field(ge=1)] = 96
    """Minimum tokens of a step before a GPU computes the layers of CPU ranks."""
    decode_gpu_share: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Share of a CPU rank's layers whose output and MLP matrices that GPU computes in decode steps
    too, while the cores compute the other layers; auto measures at the start, for several numbers
    of tokens, which share is fastest; 0 leaves decode steps to the cores."""
    install_kernels: bool = False
    """Whether nodes that lack the CPU kernels beside a CUDA install fetch them at start-up, as
    `ray-hetero install-cpu-kernels` does; else the engine names these nodes and ends."""
    max_remote_memory_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Largest share of a CPU rank's memory on foreign NUMA nodes; more is an error. null only logs
    the share."""
    env: Environment = {}
    """Added to the environment of CPU ranks."""

    def streams(self, level: str | None) -> bool:
        """Whether linear layers stream their weights on a processor.

        Args:
            level: the best of its sets of instructions: amx, avx512_bf16, avx512, avx2; None is
                none of them, or not known.

        """
        if self.linear_kernel != "auto":
            return self.linear_kernel == "streaming"
        return level in (*_WIDE, "avx2")

    def weight_format(self, level: str | None) -> str:
        """Name of the format (weight_formats/) that linear layers that stream are to hold.

        Args:
            level: as of `streams`.

        """
        # Vectors of 256 bits expand more slowly than steps of a few tokens are read.
        is_compact = level in _WIDE if self.compact_weights == "auto" else self.compact_weights
        return "compact" if is_compact else "packed"


class ExpertsConfig(_Section):
    """Expert ranks: CPU sockets beside stages of GPUs, which hold and compute routed experts."""

    ranks: Annotated[int, Field(ge=0, le=64)] | Auto = "auto"
    """Sockets, or shares of them, that hold routed experts, each a slice of every one. 0 leaves all
    experts to the stages; auto takes all sockets of a node for a model with experts that does not
    fit on the GPUs alone, where that is predicted to be faster than a CPU stage."""
    layers: Annotated[int, Field(ge=1)] | Literal["all"] | Auto = "auto"
    """Of how many layers, the model's last ones, the experts lie on expert ranks; auto plans as few
    as leave room on the GPUs."""
    prefill_on_gpu: bool | Auto = "auto"
    """Whether a stage's GPU computes experts of steps of many tokens itself, reading them over its
    link from the expert ranks' memory; auto does where they are held in a format of this project's
    kernels, and where that is measured to be faster than the sockets."""
    prefill_on_gpu_tokens: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Minimum tokens of a step before it does; auto measures link and sockets at the start."""
    prefill_gpu_share: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Share of a layer's experts that it computes in such a step, while the sockets compute the
    others. auto is the share with which both are expected to end together, by the number of tokens;
    and 1, all of them, where prefill_on_gpu_tokens is a number."""
    prefill_gpu_gib: Gibibytes | Auto = "auto"
    """Memory of a GPU, in GiB, for the experts that are read at a time; auto is 1, or what one
    expert takes if that is more."""


class PlacementConfig(_Section):
    """Discovery and reservation."""

    timeout_s: Seconds = 120
    """Longest wait for the placement group, and for one node to describe itself."""


class WarmupConfig(_Section):
    """The warm-up schedule."""

    step_timeout_s: Seconds = 600
    """Longest wait for one warm-up step on every rank."""


class StartupConfig(_Section):
    """Actors on their way up."""

    actor_timeout_s: Seconds = 180
    """Longest wait for an actor's process to start and answer."""
    load_timeout_s: Seconds = 3600
    """Longest wait for a rank to join its groups and load its weights."""


class ServingConfig(_Section):
    """The engine while it serves."""

    step_timeout_s: Seconds | None = None
    """Longest wait for one step of the engine on every rank; null takes vLLM's
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, which is 300 unless set."""


class PipelineConfig(_Section):
    """Pipeline stages."""

    batches_in_flight: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Batches that are between the first and the last stage at once.  Each one reads every weight
    of a stage again, so auto is 1 where there are both kinds of stage, unless the objective is
    throughput, and 1 with speculative decoding; else one per stage.  With a number, or for
    throughput, requests that decode are divided among the batches."""


class ExchangeConfig(_Section):
    """Tensor exchange between ranks."""

    interface: Word | Auto = "auto"
    """Network interface of Gloo; auto is the one that holds the node's Ray address."""
    timeout_s: Seconds = 600
    """Longest wait for a peer inside one exchange."""


class HeteroConfig(_Section):
    """All settings of the `ray_hetero` backend."""

    layout: Auto | Stages = "auto"
    """A list of stages, each the kinds of its ranks in tensor-parallel order; stages may differ in
    size.  vLLM's sizes of pipeline and tensor parallelism are taken from it unless given."""
    layers: Auto | list[Annotated[int, Field(ge=1)]] = "auto"
    """Layers of each pipeline stage; auto plans them where there are both GPUs and sockets, and
    shares them out equally where there is one kind."""
    objective: Objective = "latency"
    """What planned layers make best: the decode step of one sequence, or tokens per second with a
    batch in every stage."""
    gpu: GpuConfig = GpuConfig()
    cpu: CpuConfig = CpuConfig()
    experts: ExpertsConfig = ExpertsConfig()
    placement: PlacementConfig = PlacementConfig()
    startup: StartupConfig = StartupConfig()
    warmup: WarmupConfig = WarmupConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    pipeline: PipelineConfig = PipelineConfig()
    serving: ServingConfig = ServingConfig()
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often, in all, the engine starts its ranks again after one has died or hangs; requests
    in flight get an error. 0 ends the engine instead, for a supervisor to start it again."""

    @field_validator("layout")
    @classmethod
    def _stages_have_ranks(cls, layout: Auto | list[list[Kind]]) -> Auto | list[list[Kind]]:
        if layout == "auto":
            return layout
        sizes = [len(stage) for stage in layout]
        if not sizes or 0 in sizes:
            raise ValueError(f"every stage needs at least one rank, got {shown(sizes)}")
        return layout


def load_config(additional_config: object) -> HeteroConfig:
    """Merge the file and the command line into one configuration.

    Args:
        additional_config: vLLM's `additional_config`; its key `ray_hetero` is read, or the keys of
            this backend where they stand there by themselves.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a wrong type or value.

    """
    return validated(read_settings(additional_config))


def read_settings(additional_config: object) -> Merged:
    """What the file and the command line say, with the source of each value; not validated yet.

    Raises:
        ConfigError: a file that cannot be read, or keys where nobody reads them.

    """
    return merged(read_sources(additional_config, HeteroConfig.model_fields))


def validated(given: Merged) -> HeteroConfig:
    """The configuration that settings make.

    Raises:
        ConfigError: an unknown key, a wrong type or value.

    """
    try:
        return HeteroConfig.model_validate(given.settings)
    except ValidationError as error:
        problems = listed([_problem(dict(detail), given) for detail in error.errors()])
        raise ConfigError(f"ray_hetero configuration: {problems}") from None


def _problem(detail: dict[str, Any], given: Merged) -> str:
    # Names of pydantic's union members are no keys.
    tags = ("[", "constrained-")
    names = [str(part) for part in detail["loc"] if not any(tag in str(part) for tag in tags)]
    if detail["type"] == "extra_forbidden":
        names = [str(part) for part in detail["loc"]]
        section: Any = HeteroConfig
        for name in names[:-1]:
            section = section.model_fields[name].annotation
        found = f"unknown key; known here: {', '.join(section.model_fields)}"
    else:
        found = f"{detail['msg']}, got {as_written(detail['input'])}"
    source = given.origin(tuple(map(str, detail["loc"])))
    return f"{key_of(tuple(names))}: {found}" + (f" (in {source.name})" if source else "")
