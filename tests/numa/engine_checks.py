"""Runs as the only program of a QEMU guest with two NUMA nodes; see boot_engine.py.

An engine with a CPU rank on each node serves a tiny model.  Its tokens must be those that stock
vLLM gave on the machine outside, and the pages of each rank must be on its own node.  With expert
ranks, a pretended GPU has attention, and an expert rank on each node a half of each expert.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIVEN = Path("/given")
NODES = (0, 1)
"""The guest's NUMA nodes, each a socket, in the order of the ranks."""
CORES = 2
"""Of each node; the first ones are node 0's."""
LARGE = 1 << 16
"""Bytes from which a tensor has pages of its own; smaller ones lie among other objects."""
OWN = 0.99
"""Smallest share of a rank's pages that must be on its own node."""
PATIENCE = {
    "RAY_agent_register_timeout_ms": "900000",
    "RAY_gcs_server_request_timeout_seconds": "900",
    "RAY_health_check_failure_threshold": "100",
    "RAY_worker_register_timeout_seconds": "900",
}
"""Limits that are made for real processors."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One process less, and nothing that asks for a network or a compiler."""
PRETENDED = {"RAY_HETERO_PRETEND_GPU": "1", "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'}
"""A GPU whose rank computes on the CPU, for expert ranks to stand beside."""
AT_ONCE = 0.5
"""Smallest share of the moments in which an expert rank computes that must be moments of both."""
GLANCE_S = 0.01
"""Pause between two looks at the threads of expert ranks."""
RAY_ATTEMPTS = 6
"""Ray gives its processes half a minute to start, which no setting changes.  What they import is
read and translated for the first time in the first attempt, and is faster afterwards."""
KEEP_RAY = """
import signal
from ray_hetero.runtime import local_ray
print(local_ray.start(), flush=True)
signal.pause()
"""
"""Program of a process that starts Ray, says its address and keeps it until it is ended."""


def machine() -> str:
    """This machine has the two nodes that QEMU was given, each with a socket of its own."""
    from placement.host.instruction_sets import level_of
    from placement.host.sockets import sockets_of
    from placement.host.sysfs import read_host

    host = read_host()
    seen = [(socket.package, socket.numa_nodes, socket.cpus) for socket in sockets_of(host)]
    assert seen == [(0, (0,), (0, 1)), (1, (1,), (2, 3))], seen
    return f"{seen}, kernels for {level_of(host.instruction_sets)}"


def ray_starts() -> str:
    """A Ray of this machine starts, and this process connects to it."""
    import ray

    for attempt in range(1, RAY_ATTEMPTS + 1):
        keeper = subprocess.Popen(
            [sys.executable, "-c", KEEP_RAY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert keeper.stdout is not None
        address = keeper.stdout.readline().decode().strip()
        if address:
            ray.init(address=address)
            return f"attempt {attempt}, {address}"
        keeper.wait()
    raise AssertionError(f"Ray has not started in {RAY_ATTEMPTS} attempts")


@functools.cache
def engine() -> Any:
    """The engine that is asked for."""
    from vllm import LLM

    return LLM(**_given()["engine"])


def engine_starts() -> str:
    """An engine starts, and has chosen a rank on each socket by itself."""
    config = engine().llm_engine.vllm_config.parallel_config
    sizes = config.pipeline_parallel_size, config.tensor_parallel_size
    assert sizes == (1, 1 if _given()["has_experts"] else len(NODES)), sizes
    return f"{sizes[0]} stage, {sizes[1]} tensor-parallel ranks"


def tokens() -> str:
    """Greedy tokens are those of stock vLLM outside."""
    from vllm import SamplingParams

    given = _given()
    outputs = engine().generate(
        [{"prompt_token_ids": prompt} for prompt in given["prompts"]],
        SamplingParams(**given["sampling"]),
        use_tqdm=False,
    )
    found = [list(output.outputs[0].token_ids) for output in outputs]
    different = [at for at, pair in enumerate(zip(found, given["tokens"], strict=True))
                 if pair[0] != pair[1]]  # fmt: skip
    assert not different, f"prompts {different}: {found}, expected {given['tokens']}"
    return f"{len(found)} prompts, {sum(map(len, found))} tokens, the same"


def pages_of_tensors() -> str:
    """Pages of weights and KV cache are on the rank's own node."""
    found = _ranks()
    for node, rank in zip(NODES, found, strict=True):
        for what in ("weights", "kv_cache"):
            pages = rank[what]
            assert pages.get(node, 0) >= OWN * sum(pages.values()) > 0, found
    return "\n      ".join(
        f"rank {number}: weights {rank['weights']}, KV cache {rank['kv_cache']}"
        for number, rank in enumerate(found)
    )


def pages_of_processes() -> str:
    """The memory of each rank's process is on the rank's own node, as the kernel counts it."""
    from placement.host import numa_maps

    found = [numa_maps.anonymous_pages(pid=str(rank["pid"])) for rank in _ranks()]
    for node, pages in zip(NODES, found, strict=True):
        assert pages.get(node, 0) >= OWN * sum(pages.values()) > 0, found
    return ", ".join(f"rank {number}: {pages}" for number, pages in enumerate(found))


def threads() -> str:
    """Each rank computes with the cores of its own node."""
    found = [rank["bound"] for rank in _ranks()]
    assert found == [[0, 1], [2, 3]], found
    return str(found)


def pages_of_experts() -> str:
    """The memory of each expert rank, its experts included, is on the rank's own node."""
    from placement.host import numa_maps

    pids = _expert_processes()
    found = [numa_maps.anonymous_pages(f".{pid}", pid=str(pid)) for pid in pids]
    for node, pages in zip(NODES, found, strict=True):
        assert pages.get(node, 0) >= OWN * sum(pages.values()) > 0, found
    return ", ".join(f"node {node}: {pages}" for node, pages in zip(NODES, found, strict=True))


def experts_at_once() -> str:
    """While a long prompt is computed, threads of both expert ranks run at once, on own nodes."""
    from vllm import SamplingParams

    pids, seen, is_over = _expert_processes(), Counter[frozenset[int]](), threading.Event()

    def watch() -> None:
        while not is_over.wait(GLANCE_S):
            seen[frozenset(node for node in NODES if _runs_on(node, pids[node]))] += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        engine().generate(
            [{"prompt_token_ids": max(_given()["prompts"], key=len)}],
            SamplingParams(**_given()["sampling"] | {"max_tokens": 1}),
            use_tqdm=False,
        )
    finally:
        is_over.set()
        watcher.join()
    any_runs = sum(count for nodes, count in seen.items() if nodes)
    both = seen[frozenset(NODES)]
    assert both >= AT_ONCE * any_runs > 0, seen
    return f"both in {both} of {any_runs} moments, {sum(seen.values())} looks"


def _runs_on(node: int, pid: int) -> bool:
    """Whether a thread of a process runs on a CPU of a node at this moment."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        if fields[0] == "R" and int(fields[36]) // CORES == node:
            return True
    return False


@functools.cache
def _expert_processes() -> tuple[int, ...]:
    """Process of the expert rank on each node, told by the cores that its threads are bound to."""
    import psutil

    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if not any("ExpertActor" in word for word in process.info["cmdline"] or ()):
            continue
        bound = sorted(
            {
                allowed[0]
                for thread in process.threads()
                if len(allowed := sorted(os.sched_getaffinity(thread.id))) == 1
            }
        )
        found[tuple(bound)] = process.pid
    assert sorted(found) == [(0, 1), (2, 3)], found
    return found[0, 1], found[2, 3]


@functools.cache
def _given() -> Any:
    return json.loads((GIVEN / "request.json").read_text())


@functools.cache
def _ranks() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine().collective_rpc(_looked_at)
    return found


def _looked_at(worker: Any) -> dict[str, Any]:
    """Runs in a rank: its process, pages by node, and the CPUs that threads are bound to."""
    from placement.host import native
    from ray_hetero.worker.placement_proof import flat

    def pages(tensors: Any) -> dict[int, int]:
        counts: Counter[int] = Counter()
        found = {one.data_ptr(): one.nbytes() for one in (t.untyped_storage() for t in tensors)}
        for address, nbytes in found.items():
            if nbytes >= LARGE:
                counts.update(native.pages_per_node(address, nbytes, sample=0))
        # Pages that nobody has written to yet are nowhere.
        return {node: pages for node, pages in sorted(counts.items()) if node >= 0}

    runner = worker.model_runner
    alone = [allowed[0] for allowed in native.thread_cpus().values() if len(allowed) == 1]
    return {
        "pid": os.getpid(),
        "weights": pages(runner.model.parameters()),
        "kv_cache": pages(flat(runner.kv_caches)),
        "bound": sorted(set(alone)),
    }


NEEDED: tuple[Callable[[], str], ...] = (machine, ray_starts, engine_starts)
"""Without one of these there is nothing to check."""
CHECKS = (*NEEDED, tokens, pages_of_tensors, pages_of_processes, threads)
EXPERT_CHECKS = (*NEEDED, tokens, pages_of_experts, experts_at_once)


def main() -> None:
    """Run the checks, and say how each went."""
    has_experts = _given()["has_experts"]
    checks = EXPERT_CHECKS if has_experts else CHECKS
    os.environ.update(PATIENCE | QUIET | (PRETENDED if has_experts else {}))
    kernel = os.uname()
    print(f"\nLinux {kernel.release}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}")
    failed = 0
    for check in checks:
        began = time.monotonic()
        try:
            seen = check()
        except Exception:  # noqa: BLE001 -- the last program of the machine reports everything
            failed += 1
            print(f"FAILED  {check.__name__}: {check.__doc__}", flush=True)
            traceback.print_exc(file=sys.stdout)
            if check in NEEDED:
                break
        else:
            seconds = time.monotonic() - began
            print(f"ok  {check.__name__}: {check.__doc__} ({seconds:.0f} s)", flush=True)
            print(f"      {seen}", flush=True)
    print(f"{failed} checks failed" if failed else f"all {len(checks)} checks passed", flush=True)


if __name__ == "__main__":
    main()
