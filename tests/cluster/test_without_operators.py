"""CPU ranks of a vLLM without compiled operators answer as stock vLLM does with them.

Python files of a supported release that is not installed are taken as they are, and with the
compiled operators of the installed one (docs/upgrading-vllm.md).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from engines import (
    IN_THIS_PROCESS,
    Json,
    Model,
    batch,
    compared_until_near_ties,
    engine,
    hetero,
    prompts,
    run_engines,
    tokens,
)
from leftovers import Scene

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_release  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NATIVE = {"ranks_per_socket": 2, "linear_kernel": "streaming"}


def of_release(folder: Path) -> dict[str, str]:
    """Environment of processes that import a release's Python files."""
    return IN_THIS_PROCESS | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.mark.parametrize("release", vllm_release.others())
def test_pipelines_answer_what_stock_does(
    release: str, scene: Scene, logs: Path, model: Model
) -> None:
    try:
        bare, whole = vllm_release.unpacked(release), vllm_release.with_operators(release)
    except SystemExit as error:
        pytest.skip(str(error))
    asked = [batch(prompts(), logprobs=2)]
    exact: Json = {"model": model("llama", "f32"), "dtype": "float32"}
    native: Json = {"model": model("llama", "bf16"), "dtype": "bfloat16"}
    sliding: Json = {"model": model("gpt_oss", "bf16"), "dtype": "bfloat16"}
    kinds = (exact, native, sliding)
    stock = run_engines(
        scene, logs / "stock", [(engine(**one), asked) for one in kinds], extra=of_release(whole)
    )
    ours = run_engines(
        scene,
        logs / "bare",
        [(engine(**one, pipeline=2, **hetero(cpu=NATIVE)), asked) for one in kinds],
        extra=of_release(bare),
    )
    log = (logs / "bare" / "log").read_text()
    assert "vLLM has no compiled operators for CPUs here: PyTorch computes" in log
    assert "2 layers are computed as one operator" in log
    assert tokens(ours[0][0]) == tokens(stock[0][0])
    same = []
    for (mine,), (theirs,) in zip(ours[1:], stock[1:], strict=True):
        pairs = zip(mine, theirs, strict=True)
        same.append(sum(compared_until_near_ties(left, right) for left, right in pairs))
    # In bfloat16 a router that sees two experts nearly equal may take either.
    assert same[0] == 16
    assert same[1] >= 13
