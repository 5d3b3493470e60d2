"""Experts on sockets beside stages of GPUs; the GPUs are pretended, as in test_kinds."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from engines import (
    STOP_SECONDS,
    Json,
    Model,
    Stock,
    batch,
    engine,
    hetero,
    prompts,
    run_engines,
    tokens,
)
from faulty_server import Client, FaultyServer, errors_of
from leftovers import Scene

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

RAY: Json = {
    "num_cpus": 2, "num_gpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
PRETENDED = {"RAY_HETERO_PRETEND_GPU": "1"}
CASES: dict[str, tuple[str, list[list[str]], Json]] = {
    "two expert ranks": ("mixtral", [["gpu"]], {"ranks": 2}),
    "experts of some layers": ("qwen3_moe", [["gpu"]], {"ranks": 2, "layers": 2}),
    "two stages": ("qwen3_moe", [["gpu"], ["gpu"]], {"ranks": 1}),
    "tensor parallel": ("mixtral", [["gpu", "gpu"]], {"ranks": 1}),
}


def arguments(model: Path, layout: list[list[str]], experts: Json, **more: Any) -> Json:
    keys = {
        "layout": layout, "experts": experts, "cpu": {"ranks_per_socket": experts["ranks"]},
        "warmup": {"step_timeout_s": 60},
    }  # fmt: skip
    sizes = (len(layout), len(layout[0]))
    return engine(model, *sizes, dtype="float32", **hetero(**keys), **more)


@pytest.fixture(scope="module")
def answers(scene: Scene, logs: Path, model: Model) -> dict[str, list[list[int]]]:
    runs = [
        (arguments(model(architecture, "f32"), layout, experts), [batch(prompts())])
        for architecture, layout, experts in CASES.values()
    ]
    found = run_engines(scene, logs / "experts", runs, ray=RAY, extra=PRETENDED)
    return {name: tokens(one[0]) for name, one in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_stock(
    name: str, answers: dict[str, list[list[int]]], stock: Stock
) -> None:
    assert answers[name] == stock(f"{CASES[name][0]}-f32")


def test_stages_hold_no_experts_that_expert_ranks_hold(
    answers: dict[str, list[list[int]]], logs: Path
) -> None:
    log = (logs / "experts" / "log").read_text()
    assert answers
    # By engine: all four layers, the last two, and of each stage those that it has.
    for layers in (4, 2):
        assert f"experts of {layers} layers are computed by rank 1 (experts, socket" in log


LIMIT_S = 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_expert_rank_that_ends_or_stops_ends_the_engine_and_is_named(
    number: signal.Signals, scene: Scene, logs: Path, model: Model
) -> None:
    layout = [["gpu"]]
    server = FaultyServer(
        scene, logs / f"fault-{number.name}", model("mixtral"), sizes=(1, 1),
        extra=PRETENDED | {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'},
        layout=layout, experts={"ranks": 2}, cpu={"ranks_per_socket": 2},
        exchange={"timeout_s": LIMIT_S},
    )  # fmt: skip
    clients = server.wait_until_in("decode")
    pid = server.send(number, 2)
    if number is signal.SIGSTOP:
        clients.append(Client(server.server, {"prompt": prompts()[1], "max_tokens": 4}))
    assert server.server.child.wait(STOP_SECONDS) == 1
    assert errors_of(clients)
    assert "rank 2 (experts, socket 1" in server.last_line()
    if number is signal.SIGKILL:
        assert f"pid {pid}" in server.last_line()
    else:
        limit = f"did not compute a layer's experts in {LIMIT_S} s (exchange.timeout_s)"
        assert limit in server.last_line()
    server.scene.assert_clean()
