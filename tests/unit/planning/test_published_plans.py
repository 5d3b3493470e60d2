"""Published models on five machines are planned, or refused for the right reason."""

from __future__ import annotations

import json
import re

import pytest
from published_plans import MACHINES, MODELS, PLANS, lines, models

from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus, sparse_attention


def written() -> list[str]:
    return PLANS.read_text(encoding="utf-8").splitlines()


def test_plans_are_those_of_the_file() -> None:
    assert list(lines(models())) == written(), "type: python tests/unit/published_plans.py"


def test_the_file_has_many_models_on_every_machine() -> None:
    pairs = [tuple(line.split(" | ")[:2]) for line in written()]
    names = [path.stem for path in models()]
    assert len(names) >= 24
    assert pairs == [(model, name) for model in names for name in MACHINES]


def test_models_with_sparse_attention_have_no_stage_on_a_socket() -> None:
    for line in written():
        model, _, answer = line.split(" | ")
        config = json.loads((MODELS / f"{model}.json").read_text())
        if sparse_attention(CheckpointOnCpus.of_config(config, "auto")) is None:
            continue
        stages = answer.partition(", experts of")[0]
        assert answer.startswith("refused: ") or "socket" not in stages, line


def test_what_is_refused_says_why() -> None:
    reasons = [line.split(" | ")[2] for line in written() if " | refused: " in line]
    assert reasons
    assert [
        one for one in reasons if "does not fit" not in one and "does not work" not in one
    ] == []


def test_what_does_not_fit_has_the_memory_of_the_device_that_is_named() -> None:
    # vLLM's 92 % of a GPU, 95 % of a socket's memory.
    parts = {"GPU": ("gpus", 0.92), "socket": ("sockets", 0.95)}
    number = r"([\d,.]+) GiB"
    checked = set()
    for line in written():
        _, name, answer = line.split(" | ")
        found = re.search(f"{number} needed, {number} available on (GPU|socket) 0 of host$", answer)
        assert ("does not fit" in answer) == (found is not None), line
        if found is None:
            continue
        needed, available = (float(part.replace(",", "")) for part in found.groups()[:2])
        part, share = parts[found[3]]
        assert available == pytest.approx(share * MACHINES[name][part]["memory_gib"], abs=0.06)
        assert needed > available
        checked.add((name, found[3]))
    assert {kind for _, kind in checked} == parts.keys()
