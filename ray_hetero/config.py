"""The one configuration of this backend, read from vLLM's `--additional-config` and a YAML file.

`--additional-config '{"ray_hetero": {…}}'` wins, key by key, over the file named by
`RAY_HETERO_CONFIG`, which wins over the defaults.  Unknown keys are refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from placement.stage_plan import Objective
from ray_hetero.errors import ConfigError

Kind = Literal["cpu", "gpu"]
Auto = Literal["auto"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GigabytesPerSecond = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Environment = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]

ENVIRONMENT_VARIABLE = "RAY_HETERO_CONFIG"
KEY = "ray_hetero"


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class GpuConfig(_Section):
    """GPU ranks."""

    accelerator_type: str | None = None
    """Ray's accelerator type the GPU bundles ask for, for example H100; None takes any."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for vLLM; None takes vLLM's own --gpu-memory-utilization."""
    bandwidth_gb_s: GigabytesPerSecond | None = None
    """What a GPU reads its memory with, in 10^9 bytes per second, for planning; None looks the GPU
    up in the table of known parts."""
    env: Environment = {}
    """Added to the environment of GPU ranks."""


class CpuConfig(_Section):
    """CPU ranks."""

    unit: Literal["package", "numa"] = "package"
    """What a CPU rank gets: a whole CPU package, or one NUMA node (sub-NUMA clustering)."""
    ranks_per_socket: Annotated[int, Field(ge=1, le=64)] = 1
    """Into how many equal shares of cores each socket is split, one rank a share."""
    cores: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Compute threads of each rank; auto is all cores of the socket less the reserved ones."""
    reserved_cores: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Cores of a socket kept for the engine, the API server and Ray."""
    kv_cache_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = "auto"
    """KV cache of each CPU rank in GiB."""
    bandwidth_gb_s: GigabytesPerSecond | None = None
    """What one CPU rank reads its memory with, in 10^9 bytes per second, for planning; None
    measures it at the first start on a host."""
    openmp: Literal["auto", "gomp", "iomp", "none"] = "auto"
    """OpenMP library to preload; none leaves threads and binding to the environment."""
    strict: Annotated[float, Field(ge=0, le=1)] | None = None
    """Largest share of a rank's memory on foreign NUMA nodes; more is an error. None only logs."""
    env: Environment = {}
    """Added to the environment of CPU ranks."""


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


class PipelineConfig(_Section):
    """Pipeline stages."""

    batches_in_flight: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Batches that are between the first and the last stage at once.  Each one reads every weight
    of a stage again, so auto is 1 where there are both kinds of stage, unless the objective is
    throughput; else one per stage."""


class ExchangeConfig(_Section):
    """Tensor exchange between ranks."""

    interface: str | Auto = "auto"
    """Network interface of Gloo; auto is the one that holds the node's Ray address."""
    timeout_s: Seconds = 600
    """Longest wait for a peer inside one exchange."""


class HeteroConfig(_Section):
    """All settings of the `ray_hetero` backend."""

    layout: Auto | list[list[Kind]] = "auto"
    """A list of stages, each the kinds of its ranks in tensor-parallel order."""
    layers: Auto | list[Annotated[int, Field(ge=1)]] = "auto"
    """Layers of each pipeline stage; auto plans them where there are both GPUs and sockets, and
    shares them out equally where there is one kind."""
    objective: Objective = "latency"
    """What planned layers make best: the decode step of one sequence, or tokens per second with a
    batch in every stage."""
    gpu: GpuConfig = GpuConfig()
    cpu: CpuConfig = CpuConfig()
    placement: PlacementConfig = PlacementConfig()
    startup: StartupConfig = StartupConfig()
    warmup: WarmupConfig = WarmupConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    pipeline: PipelineConfig = PipelineConfig()

    @field_validator("layout")
    @classmethod
    def _stages_are_equal(cls, layout: Auto | list[list[Kind]]) -> Auto | list[list[Kind]]:
        if layout != "auto" and (not layout or len({len(stage) for stage in layout}) != 1):
            sizes = [len(stage) for stage in layout]
            raise ValueError(f"every stage needs the same number of ranks, got {sizes}")
        return layout


def load_config(additional_config: object) -> HeteroConfig:
    """Merge the file and the command line into one configuration.

    Args:
        additional_config: vLLM's `additional_config`; its key `ray_hetero` is read.

    Raises:
        ConfigError: a file that is not there or not YAML, an unknown key, a wrong type or value.

    """
    settings = _from_file(os.environ.get(ENVIRONMENT_VARIABLE))
    given = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
    return _validate(_merged(settings, _mapping(given, f"--additional-config key {KEY!r}")))


def _from_file(path: str | None) -> dict[str, Any]:
    if not path:
        return {}
    where = f"{ENVIRONMENT_VARIABLE}={path}"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: the file cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {error}") from None
    return _mapping({} if content is None else content, where)


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: expected keys and values, got {value!r}")
    return value


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _validate(settings: dict[str, Any]) -> HeteroConfig:
    try:
        return HeteroConfig.model_validate(settings)
    except ValidationError as error:
        problems = "; ".join(_problem(dict(detail)) for detail in error.errors())
        raise ConfigError(f"ray_hetero configuration: {problems}") from None


def _problem(detail: dict[str, Any]) -> str:
    # Names of pydantic's union members are no keys.
    tags = ("[", "constrained-")
    names = [str(part) for part in detail["loc"] if not any(tag in str(part) for tag in tags)]
    key = ".".join(names)
    if detail["type"] == "extra_forbidden":
        names = [str(part) for part in detail["loc"]]
        key = ".".join(names)
        section: Any = HeteroConfig
        for name in names[:-1]:
            section = section.model_fields[name].annotation
        return f"{key}: unknown key; known here: {', '.join(section.model_fields)}"
    return f"{key}: {detail['msg']}, got {detail['input']!r}"
