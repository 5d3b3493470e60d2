"""The keys of a cluster description.

    links:                        # optional; what is not given is assumed
      network: {bandwidth_gb_s: 12.5, latency_us: 50}
    nodes:
      - name: a
        count: 1                  # so many alike
        gpus: {part: H100 SXM, count: 1}
        sockets: {part: Xeon 8480+, count: 2, cores: 56, memory_gib: 512}

A `part` is a name of the table of known parts; every figure given beside it wins over the table's,
and without a part all figures must be given.

Figures are those that programs reach.  From a datasheet, take 85 % of a GPU's memory bandwidth and
75 % of a socket's, 60 % of a GPU's dense bf16 FLOP/s and 40 % of a socket's, and 80 % of a link's
bandwidth in one direction; the table does the same for a `part`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from placement.host.row_costs import ROWS, are_ratios
from placement.plan.parts import known_part, known_parts

Positive = Annotated[float, Field(ge=1e-6, le=1e9)]
Count = Annotated[int, Field(ge=1, le=4096)]
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^\p{C}]*$")]
"""Text on one line, for tables and pictures."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class LinkSection(_Section):
    """One way between ranks."""

    bandwidth_gb_s: Positive
    """10^9 bytes per second."""
    latency_us: Positive


class LinksSection(_Section):
    """Ways between ranks that are known; the others keep assumed values."""

    nccl: LinkSection | None = None
    shm: LinkSection | None = None
    shared_sums: LinkSection | None = None
    boundary: LinkSection | None = None
    handover: LinkSection | None = None
    gloo: LinkSection | None = None
    network: LinkSection | None = None


class DevicesSection(_Section):
    """Devices of one kind on a node, all alike."""

    part: str | None = None
    """A name of the table of known parts."""
    name: Name | None = None
    """Name of the device; the part's name where it is left out."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    memory_gib: Positive | None = None
    """Memory of one device."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    """Share of that memory for the engine."""
    read_gb_s: Positive | None = None
    """Bandwidth of reading its own memory that programs reach, 10^9 bytes per second: 85 % of a
    GPU's datasheet, 75 % of a socket's."""
    bf16_tflop_s: Positive | None = None
    """Dense bf16 compute that matrix products reach, 10^12 FLOP per second: 60 % of a GPU's
    datasheet, 40 % of a socket's."""
    layer_latency_us: Annotated[float, Field(ge=0, le=1e9)] = 0
    """Cost of a layer beside its bytes, in microseconds: kernel launches, thread barriers."""
    runtime_gib: Positive = 1
    """Memory of process, libraries, CUDA context and graphs."""

    @model_validator(mode="after")
    def _is_complete(self) -> DevicesSection:
        if self.part is not None and known_part(self.part) is None:
            raise ValueError(
                f"part {self.part!r} is unknown; known: {', '.join(known_parts())}. For another "
                "one leave part out and give memory_gib, read_gb_s and bf16_tflop_s"
            )
        needed = (self.memory_gib, self.read_gb_s, self.bf16_tflop_s)
        if self.part is None and None in needed:
            raise ValueError("without a part, memory_gib, read_gb_s and bf16_tflop_s are needed")
        return self


class GpusSection(DevicesSection):
    """GPUs of a node."""

    host_link_gb_s: Positive | None = None
    """Bandwidth between GPU and host memory in one direction that copies reach, 10^9 bytes per
    second: 80 % of the nominal one, 51 for PCIe 5 with 16 lanes; default: the part's, or 25."""


class SocketsSection(DevicesSection):
    """CPU sockets of a node."""

    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of a socket's memory for the engine."""
    cores: Count = 1
    """Physical cores of one socket."""
    instruction_sets: list[Annotated[str, Field(pattern=r"^[a-z0-9_]+$", max_length=40)]] = []
    """Instruction sets of the processor, by the names of /proc/cpuinfo: with amx_bf16, CPU ranks
    are planned with the kernels that need it."""
    kv_cache_gib: Positive | None = None
    """Largest KV cache of one CPU rank."""
    row_costs: list[Annotated[float, Field(ge=1, le=1e6)]] | None = None
    """Cost of products of 1, 2, 4, 8, 16 and 32 rows relative to one row; predicted from the
    socket's compute where this is left out."""

    @field_validator("row_costs")
    @classmethod
    def _are_costs(cls, given: list[float] | None) -> list[float] | None:
        if given is not None and not are_ratios(given):
            rows = ", ".join(map(str, ROWS))
            raise ValueError(f"expected {len(ROWS)} ascending numbers from 1 on, for {rows} rows")
        return given


class NodeSection(_Section):
    """One node, or several alike."""

    name: Name = "server"
    count: Count = 1
    gpus: GpusSection | None = None
    sockets: SocketsSection | None = None


class ClusterSection(_Section):
    """The whole file."""

    nodes: Annotated[list[NodeSection], Field(min_length=1)]
    links: LinksSection = LinksSection()
