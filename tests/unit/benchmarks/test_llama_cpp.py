"""llama.cpp beside the other contenders: its output is read, its model has the same weights.

Scripts stand for llama.cpp's programs, which are not there.  One prints what they have printed for
`tiny-moe`, built for a processor (data/llama-*), the other what has the same form, with figures
that can be checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gguf_file  # noqa: E402
import side_by_side  # noqa: E402
from contenders import LlamaCpp, Split  # noqa: E402
from handover_engine import ALONE, compared  # noqa: E402
from heavy_tailed import write_checkpoint  # noqa: E402
from llama_cpp import results  # noqa: E402

PROGRAM = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({seen!r}, "a") as seen:
    seen.write(json.dumps(sys.argv) + "\\n")
if "-npl" in given:
    # One result a line, among others of the log.
    print("main: a warning")
    pp, tg = int(given["-npp"]), int(given["-ntg"])
    for turn, batch in enumerate(map(int, given["-npl"].split(","))):
        print(json.dumps({{"n_kv_max": int(given["-c"]), "n_batch": 2048, "n_ubatch": 512,
            "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": int(given["-ngl"]),
            "n_threads": int(given["-t"]), "n_threads_batch": int(given["-t"]), "pp": pp, "tg": tg,
            "pl": batch, "n_kv": batch * (pp + tg), "t_pp": 9.0 if turn == 0 else 0.4,
            "speed_pp": 1.0, "t_tg": 9.0 if turn == 0 else 0.02 * tg, "speed_tg": 1.0, "t": 1.0,
            "speed": 1.0}}))
    sys.exit()
prompt, answer, repeats = int(given["-p"]), int(given["-n"]), int(given["-r"])
ns = 100_000_000 if prompt else 10_000_000 * answer
print(json.dumps([{{"build_commit": "b1", "build_number": 1, "cpu_info": "a CPU", "gpu_info": "",
    "backends": "CPU", "model_filename": given["-m"], "model_type": "qwen3moe ?B BF16",
    "model_size": 1, "model_n_params": 1, "n_batch": 2048, "n_ubatch": 512,
    "n_threads": int(given["-t"]), "n_gpu_layers": int(given["-ngl"]),
    "n_cpu_moe": int(given["-ncmoe"]), "n_prompt": prompt, "n_gen": answer,
    "n_depth": int(given.get("-d", 0)), "test_time": "2026-11-25T00:00:00Z", "avg_ns": ns,
    "stddev_ns": 0, "avg_ts": 1.0, "stddev_ts": 0.0, "samples_ns": [ns] * repeats,
    "samples_ts": [1.0] * repeats}}], indent=2))
"""


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """Stand-ins for `llama-bench` and the program beside it; calls go into the file `seen`."""
    for name in ("llama-bench", "llama-batched-bench"):
        program = tmp_path / name
        program.write_text(PROGRAM.format(python=sys.executable, seen=str(tmp_path / "seen")))
        program.chmod(0o755)
    return tmp_path / "llama-bench"


def run(bench: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, str(BENCHMARKS / "llama_cpp.py"), "--llama-bench", str(bench),
        "--gguf", "m.gguf", "--threads", "3", "--n-cpu-moe", "5", "--repeats", "2", *more,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_one_request_and_several_are_measured_as_by_the_other_contenders(bench: Path) -> None:
    done = run(bench, "--points", "1x64x11,8x64x11")
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    one, several = (json.loads(text) for kind, text in lines if kind == "RESULT")
    assert (one["batch"], one["prompt"], one["output"]) == (1, 64, 11)
    # A prompt's step brings the first token; each of ten more takes 10 ms.
    assert (one["prefill_s"], one["decode_ms"]) == (0.1, 10.0)
    assert one["tokens_per_s"] == pytest.approx(11 / 0.2)
    assert one["llama_cpp"]["n_cpu_moe"] == 5
    # The first round, which is slow, is not counted.
    assert (several["prefill_s"], several["decode_ms"]) == (0.4, 20.0)
    assert several["decode_ms_all"] == [20.0, 20.0]
    assert several["tokens_per_s"] == pytest.approx(8 * 11 / 0.6, abs=0.01)
    # The third of four results is the last one that is needed: the program may lose the fourth.
    assert [kind for kind, _ in lines].count("RAW") == 2 + 4
    seen = [json.loads(line)[1:] for line in (bench.parent / "seen").read_text().splitlines()]
    for command in seen:
        given = dict(zip(command[::2], command[1::2], strict=True))
        assert (given["-m"], given["-t"], given["-ncmoe"]) == ("m.gguf", "3", "5")
    # Each of the requests has cells of its own, in blocks of 256.
    assert given["-c"] == str(8 * 256)


RECORDED = """#!/bin/sh
case "$*" in
  *-npl*) cat {data}/llama-batched-bench.jsonl ;;
  *"-n 0"*) cat {data}/llama-bench-prompt.json ;;
  *) cat {data}/llama-bench-tokens.json ;;
esac
"""


def test_what_the_programs_print_is_understood(bench: Path) -> None:
    data = Path(__file__).parents[1] / "data"
    for program in (bench, bench.with_name("llama-batched-bench")):
        program.write_text(RECORDED.format(data=data))
    done = run(bench, "--points", "1x16x9,2x16x9")
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    one, several = (json.loads(text) for kind, text in lines if kind == "RESULT")
    (prompt,), (answer,) = (
        json.loads((data / f"llama-bench-{part}.json").read_text()) for part in ("prompt", "tokens")
    )
    assert one["prefill_s_all"] == [round(1e-9 * ns, 4) for ns in prompt["samples_ns"]]
    assert one["decode_ms_all"] == [round(1e-6 * ns / 8, 3) for ns in answer["samples_ns"]]
    assert one["llama_cpp"]["model_type"].startswith("qwen3moe")
    rows = list(results((data / "llama-batched-bench.jsonl").read_text()))
    assert several["decode_ms_all"] == [round(1000 * row["t_tg"] / 8, 3) for row in rows[1:3]]


def test_it_measures_when_it_is_told(bench: Path) -> None:
    command = [
        sys.executable, str(BENCHMARKS / "llama_cpp.py"), "--llama-bench", str(bench),
        "--gguf", "m.gguf", "--threads", "3", "--points", "1x8x3", "--repeats", "1", "--turns",
    ]  # fmt: skip
    done = subprocess.run(
        command, input="\n\n", capture_output=True, text=True, timeout=120, check=True
    )
    kinds = [line.split(" ")[0] for line in done.stdout.splitlines()]
    turn = ["RAW", "RAW", "RESULT", "DONE"]
    assert kinds == ["DONE", *turn, *turn]


def test_without_the_program_for_batches_the_error_says_what_to_build(bench: Path) -> None:
    bench.with_name("llama-batched-bench").unlink()
    done = run(bench, "--points", "8x64x11")
    assert done.returncode == 1
    assert "--target llama-batched-bench" in done.stderr


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "ended with 3"), ("echo '[]'", "printed no results"),
     ("echo '[{\"n_prompt\": 1, \"n_gen\": 0}]'", "expected one result with")],
)  # fmt: skip
def test_a_program_that_fails_is_named(script: str, said: str, bench: Path) -> None:
    bench.write_text(f"#!/bin/sh\n{script}\n")
    done = run(bench, "--points", "1x64x11")
    assert done.returncode == 1
    assert said in done.stderr


def test_results_are_a_list_or_lines() -> None:
    assert list(results('\n[\n {"a": 1},\n {"a": 2}\n]\n')) == [{"a": 1}, {"a": 2}]
    assert list(results('a log\n{"a": 1}\n\n{"a": 2}\nllama: {')) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("shape", "has_gpu", "expected"),
    [
        ("30b-a3b-16", True, ["--n-cpu-moe", "8"]),
        # The output matrix, and half of the layers.
        ("8b", True, ["--n-gpu-layers", "25"]),
        ("1b", False, ["--n-gpu-layers", "0"]),
    ],
)
def test_the_same_layers_are_outside(shape: str, has_gpu: bool, expected: list[str]) -> None:
    given = LlamaCpp(Path("llama-bench"), None, 14)
    command = list(given.contender(Split(shape, 8), has_gpu=has_gpu).command)
    at = command.index(expected[0])
    assert command[at : at + 2] == expected
    assert command[-2:] == ["--threads", "14"]
    asked = LlamaCpp(Path("llama-bench"), Path("m.gguf"), 14, cpu_experts=3)
    command = list(asked.contender(Split("30b-a3b-16", 8), has_gpu=True).command)
    assert command[command.index("--n-cpu-moe") + 1] == "3"
    assert command[command.index("--gguf") + 1] == "m.gguf"


def test_it_is_a_contender_where_its_program_is_given(tmp_path: Path) -> None:
    options = Namespace(
        llama_bench=tmp_path / "llama-bench", gguf=None, llama_threads=None, n_cpu_moe=None,
        case="half",
    )  # fmt: skip
    gpu: dict[str, Any] = {"name": "GPU"}
    split = Split("8b", 16)
    (one,) = side_by_side.of_llama_cpp(options, split, gpu, [(2, 3, 4)])
    assert one.command[-1] == "3"
    options.case = "drafts"
    assert side_by_side.of_llama_cpp(options, split, gpu, [(2, 3, 4)]) == []
    options.case, options.llama_bench = "half", None
    assert side_by_side.of_llama_cpp(options, split, gpu, [(2, 3, 4)]) == []


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_gguf_file_has_every_weight_of_the_checkpoint_once(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path / name)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = list(gguf_file.tensors_of(name))
    sources = [part for tensor in tensors for part in tensor.parts]
    assert sorted(sources) == sorted(index)
    for tensor in tensors:
        parts = gguf_file.read(folder, tensor.parts)
        values = tensor.values(parts)
        assert tuple(values.shape) == tensor.shape
        if not tensor.heads:
            whole = torch.stack(parts) if len(parts) > 1 else parts[0]
            same = values if tensor.is_float32 else values.view(torch.bfloat16)
            assert torch.equal(same.view(whole.shape).to(whole.dtype), whole)


def test_rows_that_are_rotated_together_become_neighbours() -> None:
    # Two heads of four: checkpoints rotate row i with row i + 2, llama.cpp with row i + 1.
    rows = torch.arange(8).bfloat16().view(8, 1)
    query = gguf_file.Tensor("blk.0.attn_q", ("q",), (8, 1), heads=2)
    found = query.values([rows]).view(torch.bfloat16).flatten().tolist()
    assert found == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_written_gguf_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "heavy_tailed_folder", lambda name: tmp_path / name)
    path = gguf_file.write_gguf("tiny-moe", tmp_path / "tiny-moe.gguf")
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert set(found) == {f"{one.name}.weight" for one in gguf_file.tensors_of("tiny-moe")}
    # The innermost size comes first there.
    assert list(found["blk.0.ffn_gate_exps.weight"].shape) == [256, 128, 16]
    key = "model.layers.1.self_attn.o_proj.weight"
    with safe_open(tmp_path / "tiny-moe" / "layer-1.safetensors", "pt") as opened:
        expected = opened.get_tensor(key)
    data = torch.from_numpy(found["blk.1.attn_output.weight"].data.copy())
    assert torch.equal(data.view(torch.bfloat16).view(expected.shape), expected)


def test_experts_are_rounded_to_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "heavy_tailed_folder", lambda name: tmp_path / name)
    path = gguf_file.write_gguf("tiny-moe", tmp_path / "tiny-moe.gguf", "mxfp4")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kinds = {name.split(".")[-2]: tensor.tensor_type.name for name, tensor in found.items()}
    assert {name for name, kind in kinds.items() if kind == "MXFP4"} == {
        "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
    }  # fmt: skip
    assert kinds["attn_q"] == "BF16"
    down = found["blk.1.ffn_down_exps.weight"]
    assert list(down.shape) == [128, 256, 16]
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    with safe_open(tmp_path / "tiny-moe" / "layer-1.safetensors", "pt") as opened:
        given = opened.get_tensor("model.layers.1.mlp.experts.9.down_proj.weight").float().numpy()
    # Four bits with a scale for 32 weights: a few per cent of a weight's size.
    error = np.linalg.norm(values[9] - given) / np.linalg.norm(given)
    assert 0.01 < error < 0.2


def test_a_layer_costs_what_a_round_takes_more_than_the_gpu_alone() -> None:
    def turn(ms: float) -> list[dict[str, Any]]:
        return [{"batch": 1, "prompt": 16, "decode_ms": ms}]

    # The second round of both was disturbed.
    steps = {ALONE: [turn(2.0), turn(4.0), turn(2.0)], "ours": [turn(2.5), turn(4.6), turn(2.4)]}
    (found,) = compared("ours", steps, layers=50)
    assert (found["step_ms"], found["us_a_layer"]) == (2.5, 10.0)
    assert found["us_a_layer_all"] == [10.0, 12.0, 8.0]
    (alone,) = compared(ALONE, steps, layers=50)
    assert "us_a_layer" not in alone
