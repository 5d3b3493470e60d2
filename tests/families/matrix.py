"""All architectures of vLLM's registry, asked with stock vLLM and with each kind of ranks.

    python -m families.matrix --results results.json --work DIR [ARCHITECTURE …]

What is in the results already is not asked again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from families import forked_workers
from families.configurations import architectures, small_config
from families.one_engine import KINDS, STAGES, TRANSFORMERS, WRITE, ask
from families.stages import StockError

Json = dict[str, Any]

EQUAL, REFUSED, STOCK_FAILS, STOCK_WRONG, FAILS, WRONG, NONE = (
    "equal", "refused", "stock fails too", "stock differs", "fails", "wrong", "none",
)  # fmt: skip
NEAR_TIE = 1e-3
"""Of logprobs in float32: tokens that are nearer to each other may change places."""
REFUSALS = ("UnsupportedError", "ConfigError", "PlacementError")
VLLM_REFUSES = ("Pipeline parallelism is not supported for this model",)

KEEPER = """
import sys, ray
from pathlib import Path
from ray_hetero.runtime import local_ray
sys.executable = sys.argv[1]
local_ray.init_in(
    Path(sys.argv[2]), num_cpus=2, num_gpus=4, object_store_memory=100 << 20,
    include_dashboard=False,
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
FORKS = "from families.forked_workers import serve; import sys; serve(sys.argv[1])"


@contextlib.contextmanager
def kept_ray(folder: Path) -> Iterator[None]:
    """A Ray cluster with pretended GPUs that all engines share; its address is in RAY_ADDRESS.

    Args:
        folder: for the program that Ray starts, and a socket; its path is short.

    """
    socket = str(folder / "forks")
    program = forked_workers.write_program(folder, socket)
    with (
        _first_line([sys.executable, "-c", FORKS, socket], "ready"),
        _first_line([sys.executable, "-c", KEEPER, str(program), str(folder)], ":") as address,
    ):
        os.environ["RAY_ADDRESS"] = address
        yield


@contextlib.contextmanager
def _first_line(command: Sequence[str], mark: str) -> Iterator[str]:
    """A program, from its first line with a mark on; its input is closed, and it is ended."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        lines = (line.strip() for line in program.stdout)
        try:
            yield next(line for line in lines if mark in line and " " not in line)
        finally:
            program.stdin.close()
            program.terminate()


def environment(work: Path) -> dict[str, str]:
    """Variables of all engines."""
    for name in ("claims", "tmp"):
        (work / name).mkdir(parents=True, exist_ok=True)
    return {
        "HF_HUB_OFFLINE": "1",
        # Threads of so small a model would only wait for each other.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.urandom(16).hex(),
        "RAY_HETERO_CLAIM_DIR": str(work / "claims"),
        "RAY_HETERO_PRETEND_GPU": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TMPDIR": tempfile.mkdtemp(prefix="families-", dir="/tmp"),
    }


def first_sentence(error: str) -> str:
    """The line of an error that tells most: the last that names one, else the first."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return (lines or ["no message"])[0][:300]


def compared(stock: Json, ours: Json) -> Json:
    """Outcome of one engine beside stock vLLM's."""
    if "error" in ours:
        if ours["type"] == StockError.__name__:
            return {"outcome": STOCK_FAILS, "sentence": first_sentence(ours["error"])}
        refused = ours["type"] in REFUSALS or any(text in ours["error"] for text in VLLM_REFUSES)
        return {
            "outcome": REFUSED if refused else FAILS,
            "sentence": f"{ours['type']}: {first_sentence(ours['error'])}",
        }
    if "tokens" not in ours:
        return {"outcome": EQUAL}
    for place, (left, right) in enumerate(zip(stock["tokens"], ours["tokens"], strict=True)):
        for at, (one, other) in enumerate(zip(left, right, strict=True)):
            if one == other:
                continue
            best = sorted(stock["logprobs"][place][at].values(), reverse=True)
            if best[0] - best[1] < NEAR_TIE:
                break
            return {
                "outcome": WRONG,
                "sentence": f"prompt {place}, token {at}: {other} where stock has {one}",
            }
    return {"outcome": EQUAL}


def has_experts(directory: Path) -> bool:
    """Whether a checkpoint has routed experts."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config") or config
    names = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
    return any(config.get(name) for name in names) or "ffn_config" in config


def without_checkpoint(architecture: str, why: str, work: Path, limit_s: float) -> Json:
    """Row of an architecture whose weights cannot be written: whether vLLM computes it at all."""
    config = small_config(architecture)
    if isinstance(config, str):
        return {NONE: config}
    directory = work / "checkpoints" / architecture
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    stock = ask("stock", directory, work / "logs" / architecture, limit_s)
    if "error" in stock:
        return {"stock": f"{stock['type']}: {first_sentence(stock['error'])}"}
    return {NONE: f"no checkpoint: {why}"}


def row(architecture: str, kinds: Sequence[str], known: Json, work: Path, limit_s: float) -> Json:
    """Outcomes of one architecture, those that are known included."""
    directory, logs = work / "checkpoints" / architecture, work / "logs" / architecture
    if not any(directory.glob("*.safetensors")):
        written = ask(WRITE, directory, logs, limit_s)
        if "error" in written:
            return without_checkpoint(architecture, first_sentence(written["error"]), work, limit_s)
    wanted = [
        kind
        for kind in kinds
        if kind not in known and (kind != "experts" or has_experts(directory))
    ]
    if not wanted:
        return known
    stock = ask("stock", directory, logs, limit_s) if set(wanted) - {STAGES} else {}
    if "error" in stock:
        sentence = f"{stock['type']}: {first_sentence(stock['error'])}"
        stock = ask(TRANSFORMERS, directory, logs, limit_s)
        if "error" in stock:
            return known | {"stock": sentence}
        known = known | {"in_place_of_stock": sentence}
    for kind in wanted:
        ours = ask(kind, directory, logs, limit_s)
        found = compared(stock, ours)
        if found["outcome"] == WRONG:
            found = judged(stock, ours, found, ask(TRANSFORMERS, directory, logs, limit_s))
        known = known | {kind: found | {"seconds": ours["seconds"]}}
    return known


def judged(stock: Json, ours: Json, found: Json, reference: Json) -> Json:
    """Outcome of an engine that differs from stock vLLM's, beside Transformers."""
    if "tokens" not in reference:
        return found
    if compared(reference, ours)["outcome"] == EQUAL:
        return {
            "outcome": STOCK_WRONG,
            "sentence": "tokens are those of Transformers, and stock vLLM's on a CPU are not",
        }
    if compared(reference, stock)["outcome"] != EQUAL:
        found["sentence"] += "; stock vLLM's tokens on a CPU are not those of Transformers either"
    return found


def main() -> int:
    """Ask what is not known yet, and write it down after each architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--work", type=Path, default=Path(".demo/families"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS[1:], default=list(KINDS[1:]))
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--again", action="store_true", help="ask what is known, too")
    given = parser.parse_args()
    work = given.work.resolve()
    os.environ.update(environment(work))
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    results: Json = json.loads(given.results.read_text()) if given.results.exists() else {}
    folder = Path(os.environ["TMPDIR"])
    with kept_ray(folder) if set(given.kinds) - {STAGES} else contextlib.nullcontext():
        for name in given.architectures or architectures():
            known = {} if given.again else results.get(name, {})
            if NONE in known or "stock" in known:
                continue
            results[name] = row(name, given.kinds, known, work, given.limit_s)
            print(name, json.dumps(results[name]), flush=True)
            given.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
