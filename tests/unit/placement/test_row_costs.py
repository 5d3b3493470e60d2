"""What steps of several rows cost a socket: measured, kept, described and planned with."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import (
    LLAMA_8B,
    MIXTRAL_8X22B,
    config_of,
    device,
    request_for,
    split_of,
    stage,
    unmeasured,
)
from typer.testing import CliRunner
from worlds import layout, node

from placement.cluster import ray_cluster
from placement.cluster.assignment import assign
from placement.errors import NativeError, TopologyError
from placement.host.row_costs import ROWS, RowCosts, cached_row_costs
from placement.host.topology import Host
from placement.model.reading import shape_from_config
from placement.plan import cost
from placement.plan.described import described
from placement.plan.devices import Links, StageDevices
from placement.plan.drafts import Acceptance, Drafter
from placement.plan.passes import Pass, decode_pass, prefill_pass
from placement.plan.split import price_drafts
from placement.plan.step_time import PICO
from ray_hetero.cli.main import commands
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.kernels.formats import FORMATS, SCALED_FORMATS
from ray_hetero.kernels.linear import row_timing
from ray_hetero.planning import cluster_measurements, socket_rows
from ray_hetero.planning.cluster_measurements import rows_probe
from ray_hetero.planning.engine_facts import EngineFacts, facts_of_checkpoint
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.machine import Machine
from ray_hetero.planning.model_plan import plan_model
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.socket_rows import RowKernel, kernel_of, rows_probe_here

FLAT = RowCosts((1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
STEEP = RowCosts((1.0, 1.5, 2.5, 4.0, 7.0, 13.0))
AMX = frozenset({"amx_bf16", "avx512f"})


def socket_with(costs: RowCosts | None) -> StageDevices:
    rank = device("Xeon 8480+")
    return stage(replace(rank, figures=replace(rank.figures, row_costs=costs)))


def test_costs_lie_on_lines_between_the_measured_ones() -> None:
    assert [STEEP.of(rows) for rows in ROWS] == list(STEEP.ratios)
    assert STEEP.of(3) == pytest.approx(2.0)
    assert STEEP.of(24) == pytest.approx(10.0)
    # Beyond the last one as between the last two.
    assert STEEP.of(64) == pytest.approx(13 + 32 * 6 / 16)


def test_more_rows_never_take_less() -> None:
    costs = RowCosts.of_times([2.0, 1.9, 2.2, 2.1, 3.0, 5.0])
    assert costs.ratios == pytest.approx((1, 1, 1.1, 1.1, 1.5, 2.5))
    assert str(costs) == (
        "1, 2, 4, 8, 16 and 32 rows cost 1.00, 1.00, 1.10, 1.10, 1.50 and 2.50 times one row"
    )


def layer_s(shape: Any, costs: RowCosts | None, run: Pass) -> tuple[float, float]:
    """Seconds that a layer reads weights, and that it computes beside that."""
    step = cost.layer_step(shape, shape.layers[0], socket_with(costs), run, Links())
    return step.weights / PICO, step.compute / PICO


def test_a_step_of_several_rows_takes_the_measured_ratio_of_reading_its_weights() -> None:
    run = decode_pass(1, 1, drafts=3)
    weights, compute = layer_s(LLAMA_8B, STEEP, run)
    assert compute == pytest.approx(1.5 * weights, rel=1e-3)
    assert layer_s(LLAMA_8B, FLAT, run)[1] == pytest.approx(0, abs=1e-3 * weights)
    # Four requests that verify one draft each have eight rows too.
    assert layer_s(LLAMA_8B, STEEP, decode_pass(4, 1, 1))[1] == pytest.approx(
        3.0 * weights, rel=1e-3
    )
    # Prompts, and steps that are no native call, are priced by their operations.
    for other in (prefill_pass(8), decode_pass(129, 1)):
        assert layer_s(LLAMA_8B, STEEP, other) == layer_s(LLAMA_8B, None, other)


def test_quantised_weights_are_priced_by_their_operations() -> None:
    layer = LLAMA_8B.layers[0]
    coded = tuple(replace(tensor, dtype_bytes=1) for tensor in layer.tensors)
    shape = replace(LLAMA_8B, layers=(replace(layer, tensors=coded),))
    run = decode_pass(1, 1, drafts=7)
    assert layer_s(shape, STEEP, run) == layer_s(shape, None, run)


def test_an_expert_has_the_rows_of_the_tokens_that_chose_it() -> None:
    # Eight experts, two a token: 32 tokens wake all and give each eight rows.
    shape, run = MIXTRAL_8X22B, decode_pass(32, 1)
    layer = shape.layers[0]
    only = replace(layer, tensors=tuple(t for t in layer.tensors if t.role == "expert"), kv=None)
    step = cost.layer_step(shape, only, socket_with(STEEP), run, Links())
    assert step.compute / step.weights == pytest.approx(STEEP.of(8) - 1, rel=1e-2)


def test_the_best_number_of_drafts_follows_the_costs() -> None:
    asked: dict[str, Any] = {"batch": 1, "context": 16, "max_sequences": 1}

    def best(costs: RowCosts | None) -> int:
        split = split_of(LLAMA_8B, [socket_with(costs)], drafter=Drafter(3), **asked)
        return price_drafts(LLAMA_8B, split, Drafter(3), Acceptance(0.7)).best.drafts

    assert best(FLAT) == 8
    assert best(STEEP) < 3
    split = split_of(LLAMA_8B, [socket_with(FLAT)], drafter=Drafter(8), **asked)
    lines = list(price_drafts(LLAMA_8B, split, Drafter(8), Acceptance(0.7)).lines())
    assert lines[1] == "best here at this acceptance: 8 drafts, as asked"
    assert lines[2].startswith("steps of several rows on Xeon 8480+ of a, measured: 1, 2, 4, 8")
    split = split_of(LLAMA_8B, [socket_with(None)], drafter=Drafter(3), **asked)
    lines = list(price_drafts(LLAMA_8B, split, Drafter(3), Acceptance(0.7)).lines())
    assert lines[2] == "steps of several rows on Xeon 8480+ of a: predicted, not measured"


class Probe:
    """Answers flat costs, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, cpus: Sequence[int]) -> RowCosts:
        self.calls += 1
        return FLAT


def test_costs_are_kept_beside_the_bandwidth_until_something_differs(tmp_path: Path) -> None:
    probe = Probe()

    def asked(cpus: tuple[int, ...], model: str | None, kernel: str) -> RowCosts:
        return cached_row_costs(
            cpus, model, kernel, directory=tmp_path, probe=probe, is_busy=lambda: False
        )

    assert [asked((0, 1), "X", "compact amx") for _ in range(3)] == [FLAT] * 3
    assert probe.calls == 1
    for other in (((0,), "X", "compact amx"), ((0, 1), "Y", "compact amx"), ((0, 1), "X", "b")):
        asked(*other)
    assert probe.calls == 4
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("bandwidth-")
    for entry in ({"ratios": [1, 2]}, {"ratios": [2, 3, 4, 5, 6, 7]}, [], {"ratios": ["1"] * 6}):
        kept = json.loads(file.read_text())
        broken = {key: {"measured_at": 0, **entry} if entry else [] for key in kept}
        for one in broken.values():
            if one:
                one["measured_at"] = kept[next(iter(kept))]["measured_at"]
        file.write_text(json.dumps(broken))
        calls = probe.calls
        assert asked((0, 1), "X", "compact amx") == FLAT
        assert probe.calls == calls + 1


KERNEL = RowKernel("amx", "compact", "auto", "X")


def test_the_kernel_that_is_measured_is_the_one_that_ranks_stream_with() -> None:
    host = Host("a", (), (), cpu_model="X", instruction_sets=AMX)
    assert kernel_of(CpuConfig(), host) == KERNEL
    assert kernel_of(CpuConfig(compact_weights=False), host) == replace(
        KERNEL, weight_format="packed"
    )
    assert kernel_of(CpuConfig(linear_kernel="vllm"), host) is None
    assert kernel_of(CpuConfig(), replace(host, instruction_sets=frozenset())) is None
    if socket_rows.importlib.util.find_spec("ray_hetero._streaming_linear"):
        assert KERNEL.version.startswith("compact amx, OpenMP auto, kernels ")


class Ended:
    """A process that has ended."""

    def __init__(self, stdout: str = "", stderr: str = "", returncode: int = 0) -> None:
        self.stdout, self.stderr, self.returncode = stdout, stderr, returncode


def test_a_process_of_its_own_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], **how: Any) -> Ended:
        seen.update(command=command, **how)
        return Ended('{"bytes": 8, "seconds": [2, 2, 2, 3, 4, 8]}\n')

    monkeypatch.setattr(subprocess, "run", run)
    nbytes, seconds = socket_rows.timed((2, 3), KERNEL)
    assert nbytes == 8
    assert RowCosts.of_times(seconds).ratios == (1, 1, 1, 1.5, 2, 4)
    assert seen["command"][-3:] == ["ray_hetero.kernels.linear.row_timing", "amx", "compact"]
    environment = seen["env"]
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"
    assert environment["PYTHONPATH"].split(":")[0] == str(Path(__file__).parents[3])
    assert seen["timeout"] == socket_rows.LIMIT_S


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        (Ended(stderr="Traceback\nwrong level", returncode=1), "wrong level"),
        (Ended(returncode=-9), "status -9"),
        (Ended(), "."),
        (Ended("no JSON"), "."),
        (subprocess.TimeoutExpired("x", 60), "no answer in 60 s"),
        (OSError("no memory"), "no memory"),
    ],
)
def test_a_process_that_does_not_answer_is_an_error(
    ended: Ended | Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **how: Any) -> Ended:
        if isinstance(ended, Exception):
            raise ended
        return ended

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(NativeError, match=message):
        socket_rows.timed((0,), KERNEL)


def amx_node(name: str = "a") -> Any:
    made = node(name, sockets=2, is_driver=True)
    host = replace(made.host, cpu_model="X", instruction_sets=AMX)
    return replace(made, host=host)


def test_a_place_is_measured_once_and_a_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, ...]] = []

    def here(cpus: tuple[int, ...], kernel: RowKernel) -> RowCosts:
        asked.append(cpus)
        if cpus == (2,):
            raise NativeError("no compiler")
        return FLAT

    monkeypatch.setattr(socket_rows, "costs_here", here)
    place = amx_node()
    seats = assign(layout("c", "c"), [place])
    probe = rows_probe_here(place.host, CpuConfig())
    for _ in range(3):
        assert probe(seats, {0: (0, 1), 1: (2,)}) == {0: FLAT}
    assert asked == [(0, 1), (2,)]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["node a: the cost of several rows is predicted, not measured: no compiler"]
    # Linear layers that are vLLM's are not measured.
    stock = rows_probe_here(place.host, CpuConfig(linear_kernel="vllm"))
    assert stock(seats, {0: (0, 1), 1: (2,)}) == {}
    assert len(asked) == 2


def test_nodes_of_a_cluster_measure_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [amx_node(), replace(amx_node("b"), is_driver=False)]
    current = ""

    class Context:
        def get_node_id(self) -> str:
            return current

    def on_nodes(function: Any, node_ids: Any, timeout_s: float) -> dict[str, Any]:
        nonlocal current
        answers = {}
        for current in node_ids:
            answers[current] = function()
        # Two sockets of a node are measured one after the other.
        assert timeout_s == 5 + 2 * socket_rows.LIMIT_S
        return answers

    def here(cpus: tuple[int, ...], kernel: RowKernel) -> RowCosts:
        if current == "id-b":
            raise NativeError("no compiler")
        return STEEP

    monkeypatch.setattr(ray_cluster, "on_nodes", on_nodes)
    monkeypatch.setattr(cluster_measurements.ray, "get_runtime_context", Context)
    monkeypatch.setattr(cluster_measurements, "costs_here", here)
    seats = assign(layout("cc", "cc"), nodes)
    threads = {seat.rank: (seat.rank,) for seat in seats}
    found = rows_probe(nodes, CpuConfig(), 5)(seats, threads)
    assert found == {seat.rank: STEEP for seat in seats if seat.node_id == "id-a"}
    assert found


def test_weights_are_larger_than_the_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2048K", "491520K")):
        folder = tmp_path / "cpu0" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert row_timing.last_cache_bytes(tmp_path) == 480 << 20
    assert row_timing.last_cache_bytes(tmp_path / "none") == 0
    assert row_timing.bytes_wanted(480 << 20) == 960 << 20
    assert row_timing.bytes_wanted(0) == row_timing.LEAST_BYTES
    assert row_timing.bytes_wanted(8 << 30) == row_timing.MOST_BYTES


@pytest.mark.parametrize("name", [*FORMATS, *SCALED_FORMATS])
def test_the_program_measures_with_the_kernels_of_this_processor(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = pytest.importorskip("ray_hetero._streaming_linear")
    level = native.levels()[-1].name
    monkeypatch.setattr(row_timing, "INPUTS", 256)
    monkeypatch.setattr(row_timing, "OUTPUTS", 512)
    monkeypatch.setattr(row_timing, "bytes_wanted", lambda cache: 1)
    runs, nbytes = row_timing.passes(level, name)
    seconds = row_timing.seconds_of(runs)
    assert 256 * 512 / 4 < nbytes <= 2 * 256 * 512
    assert len(seconds) == len(ROWS)
    assert min(seconds) > 0
    with pytest.raises(SystemExit, match="expected kernels for none"):
        row_timing.passes("none", name)


MODEL = config_of("llama", 32, 4096, 14336, (32, 8), 128256, max_position_embeddings=8192)
XEON = {
    "part": "Xeon 8480+", "cores": 56, "memory_gib": 512, "count": 2,
    "instruction_sets": ["amx_bf16", "avx512f"],
}  # fmt: skip
SMALL_GPU = {"part": "H100 SXM", "memory_gib": 12}


THREE = Drafter(3)


def facts(nodes: Any, drafter: Drafter | None = THREE) -> EngineFacts:
    return facts_of_checkpoint(MODEL, shape_from_config(MODEL), nodes, drafter=drafter)


def costs_of_all(seats: Any, threads: Any) -> dict[int, RowCosts]:
    return dict.fromkeys(threads, STEEP)


def test_the_engine_and_the_command_price_drafts_with_the_same_costs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    topology = tmp_path / "cluster.yaml"
    costs = {"row_costs": list(STEEP.ratios)}
    content = {"nodes": [{"name": "a", "gpus": SMALL_GPU, "sockets": XEON | costs}]}
    topology.write_text(json.dumps(content))
    answer = CliRunner().invoke(
        commands,
        ["plan", str(tmp_path), "--topology", str(topology), "--speculative", "3,0.7", "--json"],
    )
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    nodes = described(content).as_nodes()
    machine = Machine(nodes, unmeasured, measure_rows=costs_of_all)
    request = PlanRequest(HeteroConfig(), machine, facts(nodes))
    plan = plan_model("8B", request, acceptance=Acceptance(0.7))
    assert plan.layers.world.has_cpu
    of_engine = request.with_layout(plan.layers.world.layout)
    engine = plan_layers(of_engine)
    assert engine.split is not None
    assert found["decode_step_s"] == plan.plan.split.step_s == engine.split.step_s
    assert tuple(found["layer_partition"]) == plan.layers.world.layers == engine.world.layers
    assert plan.plan.speculation is not None
    assert found["speculation"]["best"]["drafts"] == plan.plan.speculation.best.drafts
    assert found["speculation"]["rows"][0]["costs"]["ratios"] == list(STEEP.ratios)
    assert not found["speculation"]["rows"][0]["costs"]["is_measured"]
    without = plan_layers(replace(of_engine, machine=replace(machine, measure_rows=None)))
    assert without.split is not None
    assert without.split.step_s < engine.split.step_s


def test_nothing_is_measured_where_nothing_drafts_or_nothing_streams() -> None:
    def never(seats: Any, threads: Any) -> dict[int, RowCosts]:
        raise AssertionError("measured")

    nodes = described({"nodes": [{"name": "a", "gpus": SMALL_GPU, "sockets": XEON}]}).as_nodes()

    def planned(known: EngineFacts, stages: list[list[str]]) -> None:
        request = request_for(HeteroConfig.model_validate({"layout": stages}), nodes, known)
        plan_layers(replace(request, machine=replace(request.machine, measure_rows=never)))

    both = [["cpu"], ["gpu"]]
    planned(facts(nodes, None), both)
    planned(replace(facts(nodes), is_bf16=False), both)
    with pytest.raises(AssertionError, match="measured"):
        planned(facts(nodes), both)


@pytest.mark.parametrize("given", [[1.0, 1.1], [1.1] * 6, [1.0, 2.0, 1.5, 3.0, 3.0, 3.0]])
def test_a_description_gives_six_ascending_numbers(given: list[float]) -> None:
    content = {"nodes": [{"name": "a", "sockets": XEON | {"row_costs": given}}]}
    with pytest.raises(TopologyError, match="6 ascending numbers from 1 on, for 1, 2, 4, 8, 16"):
        described(content)
