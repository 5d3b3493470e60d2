"""More than two GPUs beside sockets; the GPUs are pretended, as in test_kinds."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from engines import (
    STOP_SECONDS,
    TOTALS,
    Json,
    Model,
    Stock,
    backend,
    batch,
    compared_until_near_ties,
    engine,
    hetero,
    prompts,
    run_engines,
    serve,
    tokens,
    tokens_of_engine,
    wait_until_healthy,
)
from faulty_server import FaultyServer, answers, errors_of, lives_through
from leftovers import Scene

from placement.cluster.claims import held
from ray_hetero.cli.demo.model import DemoShape

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

GPUS = 8
PRETENDED = {"RAY_HETERO_PRETEND_GPU": "1", "RAY_DEDUP_LOGS": "0"}
MANY = PRETENDED | {"RAY_OVERRIDE_RESOURCES": '{"GPU": 8}'}
"""For servers, which start a Ray of their own."""
RAY: Json = {
    "num_cpus": 2, "num_gpus": GPUS, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
HEADS = 8
"""Query heads; four of keys and values, which eight ranks of a group hold twice."""


def group(size: int) -> list[str]:
    return ["gpu"] * size


LAYOUTS: dict[str, tuple[list[list[str]], int]] = {
    "four in a group, one expert rank": ([group(4)], 1),
    "four in a group, two expert ranks": ([group(4)], 2),
    "eight in a group, two expert ranks": ([group(8)], 2),
    "four stages, one expert rank": ([group(1)] * 4, 1),
    "two stages of two, two expert ranks": ([group(2)] * 2, 2),
    "two stages of four, two expert ranks": ([group(4)] * 2, 2),
}
"""Stages and expert ranks."""
WITH_SOCKETS: dict[str, list[list[str]]] = {
    "a socket before four GPUs": [["cpu"], group(4)],
    "a socket before three stages": [["cpu"], group(1), group(1), group(1)],
    "a socket in a group of four": [["cpu", *group(3)]],
    "stages of one, one and two": [["cpu"], group(1), group(2)],
}
"""Stages of both kinds, of a dense model."""


def arguments(model: object, layout: list[list[str]], **more: object) -> Json:
    sizes = (len(layout), max(map(len, layout)))
    keys = {"layout": layout, "warmup": {"step_timeout_s": 120}, **more}
    return engine(model, *sizes, dtype="float32", **hetero(**keys))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_beside_many_gpus_answer_what_stock_does(
    name: str, scene: Scene, logs: Path, model: Model
) -> None:
    layout, ranks = LAYOUTS[name]
    path = model("mixtral", "f32", shape=DemoShape(heads=HEADS))
    ours = arguments(path, layout, experts={"ranks": ranks}, cpu={"ranks_per_socket": ranks})
    runs = [(one, [batch(prompts())]) for one in (engine(path, dtype="float32"), ours)]
    directory = logs / re.sub(r"\W+", "-", name)
    (expected,), (found,) = run_engines(scene, directory, runs, ray=RAY, extra=PRETENDED)
    assert tokens(found) == tokens(expected)
    log = (directory / "log").read_text()
    assert len(re.findall(r"experts of \d layers are computed by", log)) == len(layout)


@pytest.mark.parametrize("name", WITH_SOCKETS)
def test_sockets_beside_many_gpus_answer_what_stock_does(
    name: str, scene: Scene, logs: Path, model: Model
) -> None:
    path = model("llama", "f32", shape=DemoShape(heads=HEADS))
    runs = [
        (one, [batch(prompts())])
        for one in (engine(path, dtype="float32"), arguments(path, WITH_SOCKETS[name]))
    ]
    directory = logs / re.sub(r"\W+", "-", name)
    (expected,), (found,) = run_engines(scene, directory, runs, ray=RAY, extra=PRETENDED)
    assert tokens(found) == tokens(expected)


LINK_TOKENS = 64
"""Tokens of a step from which on GPUs read experts."""


@pytest.mark.parametrize("size", [2, 4])
def test_every_gpu_of_a_stage_reads_a_part_of_the_experts(
    size: int, scene: Scene, logs: Path, model: Model
) -> None:
    path = model("qwen3_moe", shape=DemoShape(heads=HEADS))
    link = {"prefill_on_gpu": True, "prefill_on_gpu_tokens": LINK_TOKENS}
    runs = []
    for keys in ({"prefill_on_gpu": False}, link, {**link, "prefill_gpu_share": 0.4}):
        given = arguments(
            path, [group(size)], experts={"ranks": 2, **keys},
            cpu={"ranks_per_socket": 2, "linear_kernel": "streaming", "compact_weights": True},
        ) | {"dtype": "bfloat16", "max_num_batched_tokens": 256}  # fmt: skip
        # One prompt at a time, so that each is by itself on one side.
        runs.append((given, [*(batch([one], logprobs=2) for one in prompts(12)), TOTALS]))
    directory = logs / f"link-{size}"
    (*cores, (neither, *_)), *linked = run_engines(scene, directory, runs, ray=RAY, extra=PRETENDED)
    over_link = sum(len(one) for one in prompts(12) if len(one) >= LINK_TOKENS)
    assert neither["linked_expert_tokens"] == 0
    for *found, (totals, *_) in linked:
        # The first layer has no experts.
        assert totals["linked_expert_tokens"] == 3 * over_link
        for (one,), (other,) in zip(cores, found, strict=True):
            assert compared_until_near_ties(one, other)
    log = (directory / "log").read_text()
    assert log.count(f"are computed by the {size} GPUs of the stage") == 2


def test_any_rank_is_killed_and_all_start_again(scene: Scene, logs: Path, model: Model) -> None:
    path = model("mixtral", "f32", shape=DemoShape(heads=HEADS))
    server = FaultyServer(
        scene, logs / "killed", path, sizes=(1, 4), max_restarts=3, extra=MANY,
        more=("--dtype", "float32"), layout=[group(4)], experts={"ranks": 2},
        cpu={"ranks_per_socket": 2},
    )  # fmt: skip
    wait_until_healthy(server.server)
    wanted = answers(server)
    for rank, kind in ((0, "gpu"), (3, "gpu"), (5, "experts")):
        lives_through(server, signal.SIGKILL, rank, kind)
        assert answers(server) == wanted
    clients = server.wait_until_in("decode")
    pid = server.send(signal.SIGKILL, 2)
    assert server.server.child.wait(STOP_SECONDS) == 1
    assert errors_of(clients)
    assert "rank 2 (gpu" in server.last_line()
    assert f"pid {pid}" in server.last_line()
    scene.assert_clean()


def test_engines_with_gpus_share_a_host(
    scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    ours = backend(2, 2, layout=[["cpu"], group(2)], cpu={"ranks_per_socket": 2})
    server = serve(
        scene, logs / "shared", model("llama", "f32"), "--dtype", "float32", *ours,
        "--data-parallel-size", "2", extra=MANY,
    )  # fmt: skip
    wait_until_healthy(server)
    claims = held(scene.claims)
    assert len(claims) == len({claim.owner for claim in claims}) == 2
    assert not set(claims[0].cpus) & set(claims[1].cpus)
    with server.client() as client:
        for number in "01":
            assert tokens_of_engine(client, number) == stock("llama-f32")
    server.child.signal(signal.SIGTERM)
    server.child.wait(STOP_SECONDS)
    scene.assert_clean()
