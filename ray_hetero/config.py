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
from placement.host.instruction_sets import LEVELS
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
FROM_TOKENS = 96
"""Tokens of a step from which a GPU computes it where none are given and its link is not slow."""
READ_SHARES = {"packed": 1.0, "compact": 0.75}
"""Format of bfloat16 weights (kernels/formats/) → bytes that a step reads of them, as a share of
two bytes a weight."""
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
    """Ray's accelerator type that GPU bundles request, for example H100; null accepts any."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each GPU's memory that vLLM may use; null means vLLM's own
    --gpu-memory-utilization."""
    bandwidth_gb_s: GigabytesPerSecond | None = None
    """Memory bandwidth that a GPU reaches in 10^9 bytes per second, used for planning (85 % of a
    datasheet's); null measures it at the first start on a host, or computes it from the memory's
    bus and clock."""
    link_gb_s: GigabytesPerSecond | None = None
    """Bandwidth that copies between a GPU and its host's memory reach in one direction in 10^9
    bytes per second, used for planning (80 % of the nominal one: 51 for PCIe 5 with 16 lanes); null
    measures it at the first start on a host, or computes it from generation and width of the
    link."""
    in_mixed_groups: Literal["eager", "compiled", "graphs"] = "graphs"
    """Mode of GPU ranks in a tensor-parallel group with CPU ranks: eager runs operator by operator,
    compiled compiles the code between collectives, graphs also captures it as CUDA graphs."""
    env: Environment = {}
    """Environment variables that GPU ranks get in addition."""


class CpuConfig(_Section):
    """CPU ranks."""

    unit: Literal["package", "numa"] = "package"
    """Unit that counts as a socket: a whole CPU package, or one NUMA node of it (sub-NUMA
    clustering)."""
    ranks_per_socket: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of CPU ranks per socket; each gets an equal share of its cores."""
    sockets: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | Auto = "auto"
    """Numbers of the sockets of each node that CPU ranks may use, in this order (`ray-hetero
    topology` shows them); auto allows all, and prefers those near the GPUs that a rank exchanges
    data with."""
    cores: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Number of compute threads of each CPU rank; auto uses all cores of the socket except the
    reserved ones."""
    reserved_cores: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Number of cores of each socket that are kept free for the engine, the API server and Ray.
    auto keeps at least one, two in all on the engine's node, and none of sockets with fewer than
    8."""
    kv_cache_gib: Gibibytes | Auto = "auto"
    """Size of the KV cache of each CPU rank in GiB; auto makes room for all sequences at their
    maximum length, as far as memory is free. vLLM's VLLM_CPU_KVCACHE_SPACE is not read."""
    bandwidth_gb_s: GigabytesPerSecond | None = None
    """Memory bandwidth of one CPU rank in 10^9 bytes per second, used for planning; null measures
    it at the first start on a host."""
    openmp: Literal["auto", "gomp", "iomp", "none"] = "auto"
    """OpenMP library that CPU ranks preload; none leaves threads and their binding to the
    environment."""
    linear_kernel: Literal["auto", "streaming", "vllm"] = "auto"
    """Kernels for linear layers (quantised or not) and for unquantised experts in bfloat16:
    streaming selects this project's kernels, which read weights at the socket's bandwidth, and vllm
    selects vLLM's own; auto selects streaming with AVX2 or newer, and for quantised layers that
    vLLM has no kernel for."""
    model_runner: Literal["v1", "v2"] = "v1"
    """vLLM's model runner on CPU ranks: v1, or v2, which dense models of text can have in layouts
    of CPU ranks alone, without drafts and adapters."""
    fuse_layers: bool = True
    """Whether all layers of a stage are computed by one operator, if the linear layers use the
    streaming kernels and the architecture is supported."""
    compact_weights: bool | Auto = "auto"
    """Whether the streaming kernels store bfloat16 weights in 12 bits without loss, where the
    values allow it; auto does so with AVX-512 or AMX."""
    prefill_on_gpu: bool | Auto = "auto"
    """Whether a GPU of the same node computes a CPU rank's layers in steps of many tokens, reading
    the weights over its link; auto does so beside a GPU rank if the linear layers use the streaming
    kernels."""
    prefill_on_gpu_tokens: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Minimum number of tokens in a step for which a GPU computes the layers of CPU ranks; auto is
    96, or more if the link is measured to be slow at start-up."""
    decode_gpu_share: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Share of the gate and up columns of every MLP of a CPU rank that the same GPU multiplies in
    decode steps, in sixteenths, while the cores compute the others; auto measures at start-up, for
    several numbers of tokens, which share takes the least time; 0 leaves decode steps to the
    cores."""
    install_kernels: bool = False
    """Whether nodes with a CUDA build of vLLM that lack the CPU kernels download them at start-up,
    as `ray-hetero install-cpu-kernels` does; if false, the engine stops and names these nodes."""
    max_remote_memory_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Largest share of a CPU or expert rank's memory that may lie on NUMA nodes other than its own;
    a larger share is an error. null only logs the share."""
    env: Environment = {}
    """Environment variables that CPU ranks get in addition."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a step from which a GPU computes it where its link is not slow."""
        return FROM_TOKENS if self.prefill_on_gpu_tokens == "auto" else self.prefill_on_gpu_tokens

    def streams(self, level: str | None) -> bool:
        """Whether linear layers stream their weights on a processor.

        Args:
            level: the best of its sets of instructions, a name of `instruction_sets.LEVELS`; None
                is none of them, or not known.

        """
        if self.linear_kernel != "auto":
            return self.linear_kernel == "streaming"
        return level in LEVELS and level != "portable"

    def weight_format(self, level: str | None) -> str:
        """Name of the format (kernels/formats/) that linear layers that stream are to hold.

        Args:
            level: as of `streams`.

        """
        # Vectors of 256 bits expand more slowly than steps of a few tokens are read.
        is_wide = level in LEVELS and LEVELS[level].is_wide
        is_compact = is_wide if self.compact_weights == "auto" else self.compact_weights
        return "compact" if is_compact else "packed"


class ExpertsConfig(_Section):
    """Expert ranks: CPU sockets beside stages of GPUs, which hold and compute routed experts."""

    ranks: Annotated[int, Field(ge=0, le=64)] | Auto = "auto"
    """Number of sockets (or shares of sockets) that hold routed experts, each a slice of every
    expert. 0 leaves all experts to the stages; auto uses all sockets of a node if the model has
    experts, does not fit on the GPUs alone, and this is predicted to be faster than a CPU stage."""
    layers: Annotated[int, Field(ge=1)] | Literal["all"] | Auto = "auto"
    """Number of layers, counted from the last one, whose experts are on expert ranks; auto plans
    the smallest number that leaves enough room on the GPUs."""
    prefill_on_gpu: bool | Auto = "auto"
    """Whether a GPU computes the experts itself in steps of many tokens, reading them over its link
    from the memory of the expert ranks; auto does so if this project's kernels hold them and it is
    measured to be faster than the sockets."""
    prefill_on_gpu_tokens: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Minimum number of tokens in a step for which the GPU reads experts; auto measures link and
    sockets at start-up."""
    prefill_gpu_share: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Share of a layer's experts that the GPU computes in such a step, while the sockets compute
    the others. auto selects, by the number of tokens, the share with which both are expected to
    finish at the same time; it is 1 if prefill_on_gpu_tokens is a number."""
    prefill_gpu_gib: Gibibytes | Auto = "auto"
    """Memory of each GPU, in GiB, for experts that are being read; auto is 1 GiB, or the size of
    one expert if that is more."""
    prefill_step_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Most tokens of a step while no request decodes, for prompts that would otherwise have the
    GPU read each layer's experts once for every --max-num-batched-tokens. Beside requests that
    decode, a step keeps to that limit (8192 if it is not given). All ranks need memory for such a
    step, which is missing for the KV cache. null is --max-num-batched-tokens."""
    slots_gib: Annotated[float, Field(ge=0, le=100_000)] = 0
    """Memory of the GPU of each stage, in GiB, for slots with experts in bf16 that it computes
    itself in steps of up to 64 tokens, while the sockets compute the others; 0 for none. What it
    takes is missing for the KV cache. Their speed on a GPU has not been measured."""
    slots: Literal["auto", "always", "fixed"] = "auto"
    """Use of the slots. auto uses them while steps are measured to be faster with them; always
    uses them in any case; fixed keeps the first experts of each layer in them, and copies none."""
    trace: str = ""
    """Path of a file on the node of the expert ranks, into which the first of them writes the
    experts that tokens have chosen, in steps of up to 64 tokens; empty for none. The file is
    replaced."""
    trace_mib: Annotated[int, Field(ge=1, le=65536)] = 64
    """Largest size of that file, in MiB; it ends when it is reached."""
    keep_packed: str = ""
    """Path of a folder on the nodes of the expert ranks, in which each rank keeps its experts in
    the order of its kernels, to read them from there at the next start; empty for none. It takes
    about as much room as the experts do in memory."""

    @property
    def is_read_by_gpus(self) -> bool:
        """Whether GPUs may read experts from the memory of expert ranks."""
        return bool(self.prefill_on_gpu or self.slots_gib)

    def check_limits(self, **given: int | None) -> None:
        """Refuse limits of vLLM's that are larger than `prefill_step_tokens`, unless it is null.

        Args:
            given: values of vLLM's options by name, such as `max_num_batched_tokens`; None where
                one is not given.

        Raises:
            ConfigError: one of them is larger.

        """
        asked = self.prefill_step_tokens
        for name, value in given.items():
            if asked is not None and value is not None and value > asked:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"experts.prefill_step_tokens: steps of {asked} tokens while no request "
                    f"decodes, fewer than {option} ({value}). Type: {option} {asked}, or raise "
                    f"experts.prefill_step_tokens, or leave it out"
                )


class WorkloadConfig(_Section):
    """Load that the engine is planned for: its steps, and requests at the same time."""

    users: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = "auto"
    """Number of sequences that are decoded together, for which layout and layers are planned; auto
    is 1, or 8 for the objective throughput."""
    context: Annotated[int, Field(ge=1, le=1_000_000_000)] | Auto = "auto"
    """Number of tokens of each of these sequences; auto is 4096, or the longest length if that is
    less. If users or context is a number, the KV cache must have room for users x context
    tokens; otherwise it gets room for 32768 tokens if they fit, and always for one sequence of the
    longest length."""
    sequences: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = "auto"
    """Number of sequences of the longest length (--max-model-len) that the KV cache must have room
    for; auto is what users and context need."""
    first_token_s: Annotated[float, Field(gt=0, le=86400)] = 10
    """Longest acceptable time in seconds until the first token of a prompt of 4096 tokens. A layout
    that is predicted to take longer is not chosen for its decode step if another one does not."""


class PlacementConfig(_Section):
    """Discovery and reservation."""

    timeout_s: Seconds = 120
    """Longest wait in seconds for the placement group, and for each node's description of
    itself."""


class WarmupConfig(_Section):
    """The warm-up schedule."""

    step_timeout_s: Seconds = 600
    """Longest wait in seconds until every rank has finished a warm-up step."""


class StartupConfig(_Section):
    """Actors on their way up."""

    actor_timeout_s: Seconds = 180
    """Longest wait in seconds until an actor's process has started and answers."""
    load_timeout_s: Seconds = 3600
    """Longest wait in seconds until a rank has joined its groups and loaded its weights."""


class ServingConfig(_Section):
    """The engine while it serves."""

    step_timeout_s: Seconds | None = None
    """Longest wait in seconds until every rank has finished a step of the engine; null means vLLM's
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, whose default is 300."""
    heartbeat_timeout_s: Seconds = 30
    """Longest time in seconds that the engine's process may not move, as when it is stopped, before
    `/health` and new requests get 503.  A step may take as long as `serving.step_timeout_s`."""


class PipelineConfig(_Section):
    """Pipeline stages."""

    batches_in_flight: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Number of batches that the stages of the pipeline work on at the same time.  A stage reads
    all of its weights for each batch, so auto is 1 with both kinds of stage, unless the objective
    is throughput, and with speculative decoding; otherwise it is one per stage.  With a number, or
    for throughput, decoding requests are divided among the batches."""


class ExchangeConfig(_Section):
    """Tensor exchange between ranks."""

    interface: Word | Auto = "auto"
    """Network interface that Gloo uses; auto selects the one with the node's Ray address."""
    timeout_s: Seconds = 600
    """Longest wait in seconds for another rank during an exchange."""


class HeteroConfig(_Section):
    """All settings of the `ray_hetero` backend."""

    layout: Auto | Stages = "auto"
    """List of stages, each a list of the kinds of its ranks in tensor-parallel order; stages may
    differ in size.  It sets vLLM's pipeline and tensor parallel sizes unless they are given."""
    layers: Auto | list[Annotated[int, Field(ge=1)]] = "auto"
    """Number of layers of each pipeline stage; auto plans it if there are both GPUs and sockets,
    and divides the layers equally if there is only one kind."""
    objective: Objective = "latency"
    """Goal of the plan: latency minimises the decode step of one sequence, throughput maximises
    tokens per second with a batch in every stage."""
    gpu: GpuConfig = GpuConfig()
    cpu: CpuConfig = CpuConfig()
    experts: ExpertsConfig = ExpertsConfig()
    workload: WorkloadConfig = WorkloadConfig()
    placement: PlacementConfig = PlacementConfig()
    startup: StartupConfig = StartupConfig()
    warmup: WarmupConfig = WarmupConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    pipeline: PipelineConfig = PipelineConfig()
    serving: ServingConfig = ServingConfig()
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """Total number of times that the engine restarts its ranks after one has died or hangs;
    requests in flight fail with an error. With 0, the engine ends instead, so that a supervisor can
    start it again."""

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
    """Settings of file and command line, with the source of each value, not yet validated.

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
