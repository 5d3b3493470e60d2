"""The files of configs/: they parse, and on the machine that they are for they give these seats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from plan_cases import LLAMA_70B, LLAMA_405B, request_for

from placement.cluster.assignment import NODE_SLIVER, bundle_of
from placement.model.shape import ModelShape
from placement.plan.described import read_described
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layer_plan import plan_layers

CONFIGS = Path(__file__).parents[3] / "configs"
DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Case:
    """A machine, a model and what comes of a configuration there."""

    machine: str
    shape: ModelShape
    pipeline: int
    tensor: int
    seats: list[str]
    """Stage, kind, node, and socket or local GPU of each rank."""
    layers: tuple[int, ...]


def cpu_bundle() -> dict[str, float]:
    """Of a described node, which has no address."""
    return {"node:": NODE_SLIVER, "CPU": 56}


def gpu_bundle(accelerator: str | None = None) -> dict[str, float]:
    """Of a described node, which has no address."""
    kind = {f"accelerator_type:{accelerator}": NODE_SLIVER} if accelerator else {}
    return {"node:": NODE_SLIVER, "GPU": 1, **kind}


# Layers by hand, for room of 32768 tokens.  H200: 125.1 GiB of 139 less 1 of runtime, 2.0 of output
# matrix and 0.5 of activations = 121.6; a layer has 1.594 + 0.125 of KV: 70 fit.  Half of 405B on
# an H100: 72.7 less 1, 2.0 and 0.6 = 69.2; a layer has 2.969 + 0.063: 22 fit.
CASES = {
    "one-gpu-one-socket": (
        Case("one_gpu_one_socket", LLAMA_70B, 2, 1,
             ["0 cpu server 0", "1 gpu server 0"], (10, 70)),
        [cpu_bundle(), gpu_bundle()],
    ),
    "two-h100-two-8480": (
        Case("two_h100_two_8480", LLAMA_405B, 2, 2,
             ["0 cpu server 0", "0 cpu server 1", "1 gpu server 0", "1 gpu server 1"], (104, 22)),
        [cpu_bundle(), cpu_bundle(), gpu_bundle("H100"), gpu_bundle("H100")],
    ),
    "two-h100-two-8480-mixed-tp4": (
        Case("two_h100_two_8480", LLAMA_70B, 1, 4,
             ["0 gpu server 0", "0 gpu server 1", "0 cpu server 0", "0 cpu server 1"], (80,)),
        [gpu_bundle("H100"), gpu_bundle("H100"), cpu_bundle(), cpu_bundle()],
    ),
    "two-sockets": (
        Case("two_sockets", LLAMA_70B, 1, 2, ["0 cpu server 0", "0 cpu server 1"], (80,)),
        [cpu_bundle(), cpu_bundle()],
    ),
    "two-nodes": (
        Case("gpu_node_and_cpu_node", LLAMA_405B, 3, 2,
             # The stage of the other node first: the activations cross the network once.
             ["0 cpu cpus 0", "0 cpu cpus 1", "1 cpu gpus 0", "1 cpu gpus 1",
              "2 gpu gpus 0", "2 gpu gpus 1"], (52, 52, 22)),
        [cpu_bundle(), cpu_bundle(), cpu_bundle(), cpu_bundle(),
         gpu_bundle("H100"), gpu_bundle("H100")],
    ),
}  # fmt: skip


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> HeteroConfig:
    monkeypatch.setenv("RAY_HETERO_CONFIG", str(CONFIGS / f"{name}.yaml"))
    return load_config({})


def test_every_file_is_tested_and_says_what_it_is_for() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(CASES)
    for path in CONFIGS.glob("*.yaml"):
        text = path.read_text()
        assert text.startswith("# For "), path.name
        assert f"RAY_HETERO_CONFIG=configs/{path.name} \\\n#   vllm serve MODEL" in text


@pytest.mark.parametrize("name", CASES)
def test_seats_bundles_and_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, bundles = CASES[name]
    config = loaded(name, monkeypatch)
    shape = case.shape
    nodes = read_described(DATA / f"{case.machine}.yaml").as_nodes()
    facts = EngineFacts(shape, "", len(shape.layers), 8192, 256, 2048, 0.9)
    plan = plan_layers(request_for(config, nodes, facts, case.pipeline, case.tensor))
    seats = plan.world.seats
    assert [
        f"{seat.stage} {seat.kind} {seat.node_name} "
        f"{seat.socket.id if seat.socket else seat.local_rank}"
        for seat in seats
    ] == case.seats
    assert [seat.rank for seat in seats] == list(range(len(seats)))
    assert [bundle_of(seat, config.gpu.accelerator_type) for seat in seats] == bundles
    assert plan.world.layers == case.layers
    assert plan.warning == ""


@pytest.mark.parametrize("name", CASES)
def test_the_sizes_in_the_comment_are_those_of_the_test(name: str) -> None:
    case, _ = CASES[name]
    text = (CONFIGS / f"{name}.yaml").read_text()
    for option, size in (("pipeline", case.pipeline), ("tensor", case.tensor)):
        assert (f"--{option}-parallel-size {size}" in text) == (size > 1)
