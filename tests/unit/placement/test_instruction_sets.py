"""Instruction sets that a processor has are left alone where the user asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_module import needs_native

from placement.errors import TopologyError
from placement.host.instruction_sets import LEVELS, MAX_ISA, allowed, level_of

MASKED = Path(__file__).parents[2] / "masked"
SAPPHIRE_RAPIDS = {
    "fpu", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "amx_tile",
}  # fmt: skip
TELL = """
import json
from ray_hetero import _streaming_linear
from placement.host.sysfs import read_host
import torch
said = [torch.cpu._is_avx2_supported(), torch.cpu._is_avx512_supported(),
        torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()]
for one in ([level.name for level in _streaming_linear.levels()],
            sorted(read_host(gpus=False).instruction_sets), said):
    print(json.dumps(one))
"""


def told(best: str) -> list[list[str]]:
    """Levels of the native module, flags of the host and answers of torch, in a new process."""
    ended = subprocess.run(
        [sys.executable, "-c", TELL],
        env=os.environ | {MAX_ISA: best, "PYTHONPATH": os.pathsep.join((str(MASKED), *sys.path))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("best", [None, "", "amx"])
def test_all_is_allowed_unless_something_is_asked_for(best: str | None) -> None:
    environment = {} if best is None else {MAX_ISA: best}
    assert allowed(SAPPHIRE_RAPIDS, environment) == SAPPHIRE_RAPIDS - {"fpu"}


def test_better_sets_than_the_one_asked_for_are_left_out() -> None:
    found = {best: sorted(allowed(SAPPHIRE_RAPIDS, {MAX_ISA: best})) for best in LEVELS}
    assert found["portable"] == []
    assert found["avx2"] == ["avx2"]
    assert found["avx512"] == ["avx2", "avx512_vnni", "avx512f"]
    assert found["avx512_bf16"] == ["avx2", "avx512_bf16", "avx512_vnni", "avx512f"]


def test_what_the_processor_lacks_is_not_there_by_asking() -> None:
    assert allowed({"avx2"}, {MAX_ISA: "avx512"}) == {"avx2"}


def test_the_best_level_is_that_of_the_best_flag() -> None:
    found = {best: level_of(allowed(SAPPHIRE_RAPIDS, {MAX_ISA: best})) for best in LEVELS}
    assert found == {level: level for level in LEVELS} | {"portable": None}
    # Tiles for other numbers than bf16 are no level.
    assert level_of({"avx2", "amx_tile", "amx_int8"}) == "avx2"


def test_an_unknown_set_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(TopologyError, match=rf"{MAX_ISA}: expected one of portable, avx2, .*'sse'"):
        allowed(SAPPHIRE_RAPIDS, {MAX_ISA: "sse"})


@pytest.fixture(scope="module")
def here() -> list[str]:
    """All levels of this processor, also where this run hides some."""
    return told("amx")[0]


@needs_native
@pytest.mark.parametrize("best", LEVELS)
def test_kernels_host_and_torch_agree(best: str, here: list[str]) -> None:
    levels, flags, answers = told(best)
    names = list(LEVELS)
    hidden = names[names.index(best) + 1 :]
    assert levels == [level for level in here if level not in hidden]
    assert not {flag for level in hidden for flag in LEVELS[level].flags} & set(flags)
    assert not any(answers[max(0, names.index(best)) :])


@needs_native
def test_the_kernels_name_the_sets_too() -> None:
    code = "from ray_hetero import _streaming_linear as native; native.levels()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {MAX_ISA: "sse"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert "expected portable, avx2, avx512, avx512_bf16 or amx, got sse" in ended.stderr
