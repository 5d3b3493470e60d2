"""Hybrids with layers of Mamba 2 over CPU ranks answer as stock vLLM in one process does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engines import IN_THIS_PROCESS, batch, engine, hetero, metrics, run_engines
from leftovers import Scene

sys.path.append(str(Path(__file__).parents[1]))

from families.checkpoints import write_checkpoint

pytestmark = pytest.mark.timeout(900)
LENGTH = 1024


def prompt(length: int, seed: int) -> list[int]:
    """Tokens of the small vocabulary, as many as asked for."""
    return [(7919 * (seed + 1) * (at + 1) + 31 * at) % 490 + 8 for at in range(length)]


@pytest.mark.slow
def test_prefixes_are_kept(scene: Scene, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "GraniteMoeHybridForCausalLM")
    base = prompt(900, 1)
    # Of the whole, of a part, beside others, and shorter than what is kept.
    asked = [
        batch(given, max_tokens=12)
        for given in (
            [base[:700]],
            [base[:700]],
            [base, base[:640] + prompt(60, 3), prompt(50, 4)],
            [base[:600] + prompt(40, 5), base[:700] + prompt(3, 6), base[:32], base[:513]],
        )
    ]
    given = {"dtype": "float32", "max_model_len": LENGTH}
    cpu = {"ranks_per_socket": 2, "linear_kernel": "vllm"}
    runs = [
        # Stock vLLM keeps none on CPUs.
        (engine(path, **given, enable_prefix_caching=False), asked),
        (
            engine(path, 2, **given, enable_prefix_caching=True, disable_log_stats=False,
                   **hetero(cpu=cpu)),
            [*asked, metrics("vllm:prefix_cache_hits")],
        ),
    ]  # fmt: skip
    theirs, (*ours, (hits,)) = run_engines(scene, tmp_path / "run", runs, extra=IN_THIS_PROCESS)
    assert ours == theirs
    assert hits["vllm:prefix_cache_hits"] > 3 * 512
