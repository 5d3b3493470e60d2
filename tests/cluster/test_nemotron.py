"""Nemotron-H over CPU ranks: Mamba 2, attention, MLPs and experts with relu², without gates.

Stock vLLM refuses such experts on CPUs, on a pretended GPU too; Transformers stands for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import (
    IN_THIS_PROCESS,
    Json,
    batch,
    compared_until_near_ties,
    engine,
    hetero,
    run_engines,
    tokens,
)
from leftovers import Scene
from test_tokens import differences

sys.path.append(str(Path(__file__).parents[1]))

from families.checkpoints import write_checkpoint

pytestmark = pytest.mark.timeout(1800)

TESTS = Path(__file__).parents[1]
SIZES: Json = {
    "layers_block_type": [
        "linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe",
        "linear_attention", "moe",
    ],
    # All experts are chosen: rounding alone changes a choice otherwise.
    "num_experts_per_tok": 8,
    # Linear layers of whole blocks of outputs.
    "hidden_size": 256, "mamba_num_heads": 32, "mamba_head_dim": 16,
}  # fmt: skip
LENGTHS = (1, 150, 2, 97, 5, 64, 13, 33)
TOKENS = 16
REFERENCE = """
import json, sys
from pathlib import Path
from families.reference import greedy
print(json.dumps(greedy(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))))
"""


def prompts() -> list[list[int]]:
    """Tokens of the small vocabulary."""
    return [
        [(7919 * (place + 1) * (at + 1) + 31 * at) % 490 + 8 for at in range(length)]
        for place, length in enumerate(LENGTHS)
    ]


def of_transformers(path: Path) -> list[Json]:
    """Answers of Transformers, each step computed from the whole sequence."""
    command = [sys.executable, "-c", REFERENCE, str(path), json.dumps(prompts()), str(TOKENS)]
    said = subprocess.run(
        command, cwd=TESTS, stdout=subprocess.PIPE, text=True, check=True, timeout=600
    ).stdout
    found = json.loads(said.splitlines()[-1])
    pairs = zip(found["tokens"], found["logprobs"], strict=True)
    return [{"tokens": [answer], "logprobs": [likely]} for answer, likely in pairs]


@pytest.mark.slow
def test_cpu_stages_answer_as_transformers_does(scene: Scene, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "NemotronHForCausalLM", changed=SIZES)
    asked = [batch(prompts(), max_tokens=TOKENS, logprobs=2)]
    shares = {"cpu": {"ranks_per_socket": 2}, "warmup": {"step_timeout_s": 120}}
    given = {"dtype": "float32", "max_model_len": 512}
    made = [
        engine(path, **given, **hetero(layout=[["cpu"]])),
        engine(path, 2, **given, **hetero(layout=[["cpu"], ["cpu"]], **shares)),
    ]
    runs = [(one, asked) for one in made]
    answered = run_engines(scene, tmp_path / "run", runs, extra=IN_THIS_PROCESS)
    found = [one for (one,) in answered]
    assert tokens(found[1]) == tokens(found[0])
    # Not a test if every prompt ends in the same rut.
    assert len({tuple(answer[-4:]) for answer in tokens(found[0])}) > 6
    expected = of_transformers(path)
    for ours, theirs in zip(found[0], expected, strict=True):
        assert compared_until_near_ties(theirs, ours)
        assert max(differences(ours, theirs)) < 0.05
