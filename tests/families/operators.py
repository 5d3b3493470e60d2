"""vLLM's compiled operators that a CPU rank calls, found by running small models.

    cd tests && python -m families.operators [ARCHITECTURE …]

Each model has random weights and is computed in bfloat16 by one rank with this project's kernels,
in a process of its own.  A profiler of PyTorch names what is called through its dispatcher: before
the first step, in a step with prompts, and in steps in which each request has one token.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from families.configurations import small_config
from families.one_engine import prompts
from families.stock import stock_arguments
from ray_hetero.compat.models.fused_architectures import ARCHITECTURES

Json = dict[str, Any]
Operators = dict[str, list[str]]
"""By kind of step, `PROMPT` or `DECODE`, and of all before the first one, `START`: names of
operators."""

START, PROMPT, DECODE = "start", "prompt", "decode"
RESULTS = Path(__file__).with_suffix(".json")
LINEAR_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
MAMBA_2 = "GraniteMoeHybridForCausalLM"
"""Stands for all models with mixers of Mamba 2, whose layers have no row of their own."""
CHANGED = {
    "Qwen3NextForCausalLM": LINEAR_HEADS,
    MAMBA_2: {"hidden_size": 256, "mamba_n_heads": 32, "mamba_d_head": 16},
}
"""By architecture: sizes that vLLM's operators and this project's ask for, in the place of small
ones."""
MINUTES = 10


def architectures() -> list[str]:
    """The first architecture of each row that the page marks *yes* or *attention*, and one with
    mixers of Mamba 2."""
    return [*(one.names[0] for one in ARCHITECTURES if not one.why_not), MAMBA_2]


def arguments(directory: Path) -> Json:
    """Arguments of the engine of one rank."""
    given = stock_arguments(directory) | {"dtype": "bfloat16", "kv_cache_memory_bytes": 128 << 20}
    for of_float32 in ("attention_backend", "compilation_config"):
        given.pop(of_float32, None)
    return given | {"worker_cls": "families.operator_worker.Worker"}


def _config(architecture: str) -> Json:
    config = small_config(architecture)
    assert not isinstance(config, str), config
    return config | CHANGED.get(architecture, {})


def called(architecture: str) -> Operators:
    """Operators that one model's steps call, run in this process.

    Args:
        architecture: a name of vLLM's registry.

    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    from vllm import LLM, SamplingParams

    from families.operator_worker import CALLED

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(_config(architecture)))
        engine = LLM(**arguments(directory))
        # Dummy steps compute nothing else.
        for kind in (PROMPT, DECODE):
            CALLED.pop(kind, None)
        sampling = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False, ignore_eos=True)
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
        engine.generate(given, sampling, use_tqdm=False)
    return {kind: sorted(names) for kind, names in sorted(CALLED.items())}


def _child(architecture: str, answer: Any) -> None:
    try:
        found: Any = called(architecture)
    # Whatever a model ends with is its row.
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    answer.send(found)
    answer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # An engine ends with its process.
    os._exit(0)


def in_own_process(architecture: str) -> Json:
    """`called` in a process that is forked from this one, which must not have computed anything.

    Returns:
        As `called`, or {"error"}.

    """
    mine, its = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(architecture, its))
    child.start()
    its.close()
    try:
        found: Json = mine.recv() if mine.poll(60 * MINUTES) else {"error": "it takes too long"}
    except EOFError:
        found = {"error": "its process ended"}
    if child.is_alive() and "error" in found:
        child.kill()
    child.join()
    return found


def main(asked: Sequence[str]) -> None:
    """Run the architectures named, or all, and keep what is found."""
    import vllm.entrypoints.llm  # noqa: F401

    results: Json = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for architecture in asked or architectures():
        results[architecture] = in_own_process(architecture)
        print(architecture, json.dumps(results[architecture]), flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
