"""Engines in processes of their own, so that each is really gone when its test goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from leftovers import MARKER, Scene, wait_until

HERE = Path(__file__).parent
TOKEN = secrets.token_hex(16)
"""Shared by the clusters and the engines of one test run."""
START_SECONDS = float(os.environ.get("RAY_HETERO_TEST_START_S", "600"))
"""Longest wait for one engine to start: on two cores with nothing cached, beside others that start,
on a host that gives this machine a part of its time."""
STOP_SECONDS = 120.0
"""Longest wait for an engine to stop."""
INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "USER",
    "TORCHINDUCTOR_CACHE_DIR",
)

Json = dict[str, Any]
Model = Callable[..., Path]
"""The fixture `model`: the folder of a demo model of an architecture and dtype."""
Stock = Callable[[str], list[list[int]]]
"""The fixture `stock`: the greedy tokens of stock vLLM."""


def environment_of(scene: Scene, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a test's processes: marked, offline, with directories of their own.

    Nothing else of this process's environment is handed on; a RAY_ADDRESS or VLLM_PLUGINS of the
    developer's shell would change what is tested.
    """
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return environment | {
        MARKER: scene.marker,
        "TMPDIR": str(scene.temporary),
        "RAY_HETERO_CLAIM_DIR": str(scene.claims),
        "RAY_USAGE_STATS_ENABLED": "0",
        # As `ray-hetero ray-args` has it: at Ray's own niceness of 15, processes beside whatever
        # else computes take minutes to import vLLM.
        "RAY_worker_niceness": "0",
        # Ray authenticates with a token; one of this run's own leaves the user's alone.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }  # fmt: skip


@dataclass
class Child:
    """A running process, its output in a file."""

    process: subprocess.Popen[bytes]
    log_path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    """How long after its start something was seen, such as its end."""
    _began: float = field(default_factory=time.monotonic)

    def saw(self, what: str) -> None:
        """Note the time of something."""
        self.seconds[what] = time.monotonic() - self._began

    @property
    def log(self) -> str:
        """Everything that it has written so far, standard error included."""
        return self.log_path.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        """The end of its output, for messages, with the errors that it has named before that."""
        written = self.log.splitlines()
        earlier = [line for line in written[:-lines] if re.search(r"(Error|Exception)\b", line)]
        return "\n".join([*earlier[:lines], "…", *written[-lines:]])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this one process, as a terminal's user or an init system does."""
        self.process.send_signal(number)

    def wait(self, limit_s: float) -> int:
        """Its exit status; fails the test when it does not end in time."""
        try:
            status = self.process.wait(limit_s)
            self.saw("ended")
            return status
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {limit_s:g} s; the end of its output:\n{self.tail()}"
            ) from None


def start(
    scene: Scene, command: Sequence[str], log: Path, extra: Mapping[str, str] | None = None
) -> Child:
    """Start a command of this environment in a session of its own."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment_of(scene, extra),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    scene.sessions.add(process.pid)
    return Child(process, log)


def hetero(**keys: Any) -> Json:
    """Arguments that choose the backend, with one CPU rank a share of this machine's socket."""
    own = {
        "cpu": {"kv_cache_gib": 0.5, **keys.pop("cpu", {})},
        "startup": {"actor_timeout_s": START_SECONDS, **keys.pop("startup", {})},
    }
    return {
        "distributed_executor_backend": "ray_hetero",
        "additional_config": {"ray_hetero": own | keys},
    }


def engine(model: Path, pipeline: int = 1, tensor: int = 1, **arguments: Any) -> Json:
    """Arguments of an engine over CPU ranks; one rank without a backend of ours is stock vLLM."""
    world = pipeline * tensor
    ours = hetero(cpu={"ranks_per_socket": world}) if world > 1 else {}
    return {
        "model": str(model),
        "pipeline_parallel_size": pipeline,
        "tensor_parallel_size": tensor,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        **ours,
        **arguments,
    }


def prompts(count: int = 16, vocabulary: int = 600) -> list[list[int]]:
    """Token prompts of mixed length, from 1 to 200 tokens, the same on each call."""
    lengths = [1, 200, 2, 129, 3, 128, 5, 127, 8, 100, 13, 89, 21, 64, 34, 55]
    return [
        [(7919 * (place + 1) * (at + 1) + 31 * at) % vocabulary + 8 for at in range(length)]
        for place, length in enumerate(lengths[:count])
    ]


def long_prompt(length: int) -> list[int]:
    """A token prompt of this length; it begins as none of `prompts` does, so nothing is cached."""
    again = prompts()[1][::-1]
    return [again[at % len(again)] for at in range(length)]


def batch(given: Sequence[Sequence[int]], **sampling: Any) -> Json:
    """Prompts with one set of sampling parameters, greedy unless said otherwise."""
    defaults = {"temperature": 0.0, "max_tokens": 24, "detokenize": False, "ignore_eos": True}
    return {"prompts": [list(one) for one in given], "sampling": {**defaults, **sampling}}


REFUSED: Json = {"refused": [100_000, -1, 2**40]}
"""A batch in which each of these tokens comes behind prompts that are right, and is refused; its
answer is how many requests the engine has then, each time."""


def metrics(prefix: str) -> Json:
    """A batch that is answered by the engine's metrics of such names, one entry each.

    The engine needs `disable_log_stats=False`.
    """
    return {"metrics": prefix}


TOTALS: Json = {"totals": True}
"""A batch that is answered by what the step clock of each rank has added up."""


IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""For `run_engines`: no process of its own for an engine, where vLLM would be imported again."""


def run_engines(
    scene: Scene,
    directory: Path,
    runs: Sequence[tuple[Json, Sequence[Json]]],
    *,
    extra: Mapping[str, str] | None = None,
    ray: Json | None = None,
    limit_s: float | None = None,
) -> list[list[list[Json]]]:
    """Run engines one after the other in one process.

    Args:
        scene: where the process belongs.
        directory: for its files.
        runs: arguments of an engine with the batches it is to answer.
        extra: added to its environment.
        ray: arguments of `ray.init` before the first engine; None leaves Ray to the engine.
        limit_s: longest wait for all.

    Returns:
        By engine, batch and prompt: {"tokens": [one list a sample], "logprobs": [one list of
        {token: value} a sample, if asked for], "prompt_logprobs": [{token: value}, …]}; of an
        engine with the argument "fails", {"error": what it said, "left": [Ray's processes]}.  One
        with the argument "left" is not dropped, but left to the end of the process.

    """
    directory.mkdir(parents=True, exist_ok=True)
    request, answer = directory / "request.json", directory / "answer.json"
    request.write_text(
        json.dumps({"ray": ray, "runs": [{"engine": e, "batches": b} for e, b in runs]})
    )
    command = [sys.executable, str(HERE / "engine_process.py"), str(request), str(answer)]
    child = start(scene, command, directory / "log", extra)
    status = child.wait(limit_s or START_SECONDS * len(runs))
    assert status == 0, f"exit status {status}:\n{child.tail()}"
    answers: list[list[list[Json]]] = json.loads(answer.read_text())
    return answers


def tokens(answers: Sequence[Json]) -> list[list[int]]:
    """The first sample of each prompt."""
    return [answer["tokens"][0] for answer in answers]


NEAR_TIE = 0.1
"""Of logprobs in bfloat16: a rounding may exchange tokens that are nearer to each other."""


def compared_until_near_ties(left: Json, right: Json) -> bool:
    """Whether greedy tokens are the same, but for where two are likely alike."""
    rows = zip(left["tokens"][0], right["tokens"][0], left["logprobs"][0], strict=True)
    for one, other, values in rows:
        if one != other:
            first, second = sorted(values.values(), reverse=True)[:2]
            return bool(first - second < NEAR_TIE)
    return True


@dataclass
class Server:
    """A running `vllm serve`."""

    child: Child
    url: str

    def ctrl_c(self) -> None:
        """What a terminal does: SIGINT to the command and to all its children in the group."""
        os.killpg(self.child.process.pid, signal.SIGINT)

    def get(self, path: str) -> httpx.Response:
        """GET a path of the server."""
        return httpx.get(f"{self.url}{path}", trust_env=False, timeout=30)

    def client(self) -> openai.OpenAI:
        """The official client."""
        web = openai.DefaultHttpxClient(
            trust_env=False, limits=httpx.Limits(max_connections=100), timeout=180
        )
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", http_client=web)

    @property
    def running(self) -> float:
        """Requests that the engine works on."""
        found = re.findall(
            r"^vllm:num_requests_running\{.*\} (.*)$", self.get("/metrics").text, re.M
        )
        return sum(map(float, found))


VLLM = str(Path(sys.executable).with_name("vllm"))


def tokens_of_engine(client: openai.OpenAI, number: str) -> list[list[int]]:
    """Greedy tokens of one engine of a data-parallel server, for `prompts()`."""
    answer = client.completions.create(
        model=NAME, prompt=prompts(), temperature=0, max_tokens=24,
        extra_headers={"X-data-parallel-rank": number},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    return [choice.token_ids for choice in answer.choices]


def vllm_command() -> list[str]:
    """The `vllm` command of this environment; wheels that were only unpacked bring none."""
    if Path(VLLM).exists():
        return [VLLM]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def ray_command() -> list[str]:
    """The `ray` command of this environment, as `vllm_command`."""
    script = Path(sys.executable).with_name("ray")
    return [str(script)] if script.exists() else [sys.executable, "-m", "ray.scripts.scripts"]


NAME = "demo"
"""Name that servers give their model."""


def free_port() -> int:
    """A TCP port that nobody listens on now, and that no connection is given before it is used.

    Not one of those that the system hands out by itself (32768 and above), nor of Ray's workers
    (10002 to 19999): a server binds its port many seconds after this, with other tests beside it.
    """
    for port in random.sample(range(20000, 32768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports between 20000 and 32767 are taken")


def serve(
    scene: Scene,
    log: Path,
    model: Path,
    *arguments: str,
    extra: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> Server:
    """Start `vllm serve`, `within` a command that executes it; `wait_until_healthy` tells when it
    answers.
    """
    port = free_port()
    command = [
        *within, *vllm_command(), "serve", str(model), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *arguments,
    ]  # fmt: skip
    return Server(start(scene, command, log, extra), f"http://127.0.0.1:{port}")


def is_healthy(url: str) -> bool:
    """Whether a server answers and is well."""
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def wait_until_healthy(server: Server) -> None:
    """Wait until the server answers; fails the test when it ends or is too late."""

    def ended_or_healthy() -> bool:
        return server.child.process.poll() is not None or is_healthy(server.url)

    in_time = wait_until(ended_or_healthy, START_SECONDS, 0.5)
    assert in_time and server.child.process.poll() is None, server.child.tail()  # noqa: PT018


def backend(pipeline: int, tensor: int = 1, **keys: Any) -> list[str]:
    """Options of `vllm serve` that choose the backend, for a pipeline on this machine's socket."""
    config = hetero(cpu={"ranks_per_socket": pipeline, **keys.pop("cpu", {})}, **keys)
    return [
        "--distributed-executor-backend", "ray_hetero",
        "--pipeline-parallel-size", str(pipeline),
        "--tensor-parallel-size", str(tensor),
        "--additional-config", json.dumps(config["additional_config"]),
    ]  # fmt: skip
