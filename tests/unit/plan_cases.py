"""Models and devices that the planner's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from placement.cluster.assignment import Node, Seat
from placement.model.reading import shape_from_config
from placement.model.shape import ModelShape
from placement.plan.described import DescribedCluster
from placement.plan.devices import Links, RankDevice, StageDevices
from placement.plan.parts import known_part
from placement.plan.plan import Plan
from placement.plan.split import Split, SplitOptions, choose_split
from placement.plan.workload import Workload
from ray_hetero.config import HeteroConfig
from ray_hetero.planning import model_plan
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.machine import Machine, Measure, Threads, described_machine
from ray_hetero.planning.plan_request import PlanRequest


def config_of(
    model_type: str, layers: int, hidden: int, width: int, heads: tuple[int, int], vocab: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **more,
    }


def llama(layers: int, hidden: int, width: int, heads: tuple[int, int]) -> ModelShape:
    return shape_from_config(config_of("llama", layers, hidden, width, heads, 128256))


LLAMA_8B = llama(32, 4096, 14336, (32, 8))
LLAMA_70B = llama(80, 8192, 28672, (64, 8))
LLAMA_405B = llama(126, 16384, 53248, (128, 8))
MIXTRAL_8X22B = shape_from_config(
    config_of(
        "mixtral", 56, 6144, 16384, (48, 8), 32768, num_local_experts=8, num_experts_per_tok=2
    )
)


def split_of(
    shape: ModelShape,
    stages: Sequence[StageDevices],
    *,
    batch: int,
    context: int,
    max_sequences: int,
    max_model_len: int | None = None,
    **more: Any,
) -> Split:
    """The split for work and options given by name; the longest sequence is the context's."""
    work = {name: more.pop(name) for name in ("max_batched_tokens", "max_num_seqs") if name in more}
    options = {name: more.pop(name) for name in ("objective", "order", "layers") if name in more}
    longest = context if max_model_len is None else max_model_len
    asked = Workload(batch, context, max_sequences, longest, **work)
    return choose_split(shape, stages, asked, SplitOptions(**options), **more)


GPU_BANDWIDTH = 0.85 * 3350e9
CPU_BANDWIDTH = 0.75 * 307.2e9


def device(part: str, index: int = 0, *, gib: float | None = None, node: str = "a") -> RankDevice:
    """A device of the table with 90 % of its memory, or so many GiB, for the engine."""
    known = known_part(part)
    assert known is not None
    figures = known.figures
    usable = int(figures.memory_bytes * 0.9) if gib is None else int(gib * 2**30)
    noun = "GPU" if figures.kind == "gpu" else "socket"
    return RankDevice(node, f"{noun} {index}", figures, usable)


def stage(*ranks: RankDevice) -> StageDevices:
    return StageDevices(ranks)


def unmeasured(seats: Sequence[Seat], threads: Threads) -> dict[int, float]:
    return {}


def request_for(
    config: HeteroConfig,
    nodes: Sequence[Node],
    facts: EngineFacts,
    *sizes: int,
    measure: Measure = unmeasured,
    links: Links | None = None,
    **more: Any,
) -> PlanRequest:
    """A request for stages and ranks of each, which are the layout's where none are given."""
    if not sizes and config.layout != "auto":
        sizes = len(config.layout), max(map(len, config.layout))
    return PlanRequest(config, Machine(tuple(nodes), measure, links=links), facts, *sizes, **more)


def plan_model(
    name: str,
    shape: ModelShape,
    cluster: DescribedCluster,
    *,
    pipeline_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    **keys: Any,
) -> Plan:
    """A plan on a described cluster, for sequences of 4096 tokens."""
    facts = EngineFacts(shape, "", len(shape.layers), 4096, 256, 2048, 0.92)
    layers = keys.get("layers")
    request = PlanRequest(
        HeteroConfig(**keys),
        described_machine(cluster),
        facts,
        len(layers) if layers else pipeline_parallel_size,
        tensor_parallel_size,
    )
    return model_plan.plan_model(name, request).plan
