"""The page for who comes from a patched vLLM: each row of its tables is a test."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import write_tree
from typer.testing import CliRunner
from worlds import layout, socket, world

from placement.cluster.layout import auto_layout
from placement.host.describe import to_dict
from placement.host.sysfs import read_host
from ray_hetero import plugin
from ray_hetero.cli.main import commands
from ray_hetero.config import load_config
from ray_hetero.errors import RankError
from ray_hetero.names import BACKEND, OF_A_PATCH
from ray_hetero.observability.world_table import as_text, placement_table
from ray_hetero.planning.world_plan import compute_threads
from ray_hetero.preflight.checks import check_ipex
from ray_hetero.runtime.openmp_environment import PreloadLibraries
from ray_hetero.worker.placement_proof import PlacementProof, check
from ray_hetero.worker.rank_environment import cpu_rank_environment, propagated
from ray_hetero.worker.warmup_schedule import Action, Phase, WarmupSizes, schedule

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / name for name in ("patched-vllm.md", "patched-vllm.ko.md")]
OPT_125M = {
    "model_type": "opt", "num_hidden_layers": 12, "hidden_size": 768, "ffn_dim": 3072,
    "num_attention_heads": 12, "vocab_size": 50272, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768, "do_layer_norm_before": True, "torch_dtype": "float16",
}  # fmt: skip
OPT_6_7B = OPT_125M | {
    "num_hidden_layers": 32, "hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384,
    "num_attention_heads": 32,
}  # fmt: skip
BOTH = PreloadLibraries(gomp="/x/libgomp.so.1", iomp="/x/libiomp5.so")
MIB = 256
"""Pages of one MiB."""


def rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if "`" in row[2]]


def plan(tmp_path: Path, model: dict[str, Any], gpus: int, sockets: int, *options: str) -> Any:
    """Answer of `ray-hetero plan` for a described server; its words where it refuses."""
    config, machine = tmp_path / "config.json", tmp_path / "machine.yaml"
    config.write_text(json.dumps(model))
    parts: dict[str, Any] = {"name": "server", "gpus": {"part": "H100 SXM", "count": gpus}}
    parts["sockets"] = {"part": "Xeon 8480+", "count": sockets, "cores": 56, "memory_gib": 512}
    machine.write_text(yaml.safe_dump({"nodes": [parts]}))
    arguments = ["plan", str(config), "--topology", str(machine), "--json", *options]
    done = CliRunner().invoke(commands, arguments)
    return json.loads(done.stdout) if done.exit_code == 0 else done.output


def devices(answer: Any) -> list[str]:
    return [rank["device"] for stage in answer["stages"] for rank in stage["ranks"]]


def settings_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.findall(r"--additional-config '([^']+)'", text)[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_row_names_a_test_that_exists(page: Path) -> None:
    named = [row[2].strip("`") for row in rows(page)]
    assert named == [row[2].strip("`") for row in rows(PAGES[0])]
    own = {name for name in globals() if name.startswith("test_")}
    elsewhere = [name for name in named if "::" in name]
    of_the_page = {"test_every_row_names_a_test_that_exists"}
    assert own - of_the_page == set(named) - set(elsewhere)
    for name in elsewhere:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_device_is_no_option_of_vllm_and_the_backend_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", "heterogeneous"])
    assert "--device" in capsys.readouterr().err.splitlines()[-1]
    asked = parser.parse_args(["--distributed-executor-backend", BACKEND])
    assert plugin.is_ours(asked.distributed_executor_backend)


def test_four_ranks_of_opt_125m_are_two_gpus_and_two_numa_nodes(tmp_path: Path) -> None:
    refused = plan(tmp_path, OPT_125M, 2, 2, "--tensor-parallel-size", "4")
    settings = settings_of(" ".join(refused.split()))
    for page in PAGES:
        assert settings_of(page.read_text(encoding="utf-8")) == settings
    asked = settings["ray_hetero"]["layout"]
    answer = plan(tmp_path, OPT_125M, 2, 2, "--layout", json.dumps(asked))
    assert devices(answer) == ["GPU 0", "GPU 1", "socket 0", "socket 1"]
    (line,) = [line for line in answer["command"].splitlines() if line.startswith("vllm serve")]
    assert settings_of(line) == settings
    shown = as_text(placement_table(world("ggcc"), {})).splitlines()
    assert [
        re.findall(r"socket (\d) \(NUMA (\d),", line) for line in shown if "socket" in line
    ] == [
        [("0", "0")],
        [("1", "1")],
    ]


def test_two_stages_of_opt_6_7b(tmp_path: Path) -> None:
    two = plan(tmp_path, OPT_6_7B, 2, 2, "--pipeline-parallel-size", "2")
    assert devices(two) == ["GPU 0", "GPU 1"]
    one = plan(tmp_path, OPT_6_7B, 1, 2, "--pipeline-parallel-size", "2")
    assert devices(one) == ["socket 0", "GPU 0"]


def test_no_number_of_ranks_is_typed(tmp_path: Path) -> None:
    answer = plan(tmp_path, OPT_125M, 2, 2)
    assert answer["notes"][0].startswith("Layout (automatic): ")
    assert answer["command"] == "vllm serve MODEL --distributed-executor-backend ray_hetero"
    # Two stages of one kind, though nothing says how many ranks there are.
    assert auto_layout(2, 2, 2, 2) == layout("cc", "gg")


@pytest.mark.parametrize(("value", "lines"), [("1", 1), ("0", 0), (None, 0)])
def test_the_variable_of_the_patch_gets_one_line(
    value: str | None,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.delenv(OF_A_PATCH, raising=False)
    if value is not None:
        monkeypatch.setenv(OF_A_PATCH, value)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    plugin.register()
    # A record that two loggers hand to caplog is there twice.
    records = {id(record): record for record in caplog.records}.values()
    said = [text for record in records if OF_A_PATCH in (text := record.getMessage())]
    assert len(said) == lines
    assert all(f"--distributed-executor-backend {BACKEND}" in line for line in said)
    # No process that this one starts says it again.
    assert OF_A_PATCH not in os.environ


def test_threads_are_bound_without_kmp_affinity() -> None:
    bound = cpu_rank_environment((2, 3), BOTH)
    assert bound["GOMP_CPU_AFFINITY"] == "2 3"
    assert "KMP_AFFINITY" not in bound
    by_intel = cpu_rank_environment((2, 3), BOTH, openmp="iomp")
    assert by_intel["KMP_AFFINITY"] == "granularity=fine,explicit,proclist=[2,3]"


def test_times_of_intels_openmp_are_set() -> None:
    assert not {"KMP_BLOCKTIME", "KMP_TPAUSE"} & set(cpu_rank_environment((2, 3), BOTH))
    by_intel = cpu_rank_environment((2, 3), BOTH, openmp="iomp")
    assert (by_intel["KMP_BLOCKTIME"], by_intel["KMP_TPAUSE"]) == ("5", "0")
    config = load_config({"ray_hetero": {"cpu": {"env": {"KMP_BLOCKTIME": "1"}}}})
    assert config.cpu.env == {"KMP_BLOCKTIME": "1"}


def test_mkl_gets_its_variable_by_cpu_env_only() -> None:
    shell = {"MKL_ENABLE_INSTRUCTIONS": "AVX512", "RAY_HETERO_MAX_CPU_ISA": "avx512"}
    assert propagated(shell) == {"RAY_HETERO_MAX_CPU_ISA": "avx512"}
    config = load_config({"cpu": {"env": {"MKL_ENABLE_INSTRUCTIONS": "AVX512"}}})
    assert config.cpu.env == {"MKL_ENABLE_INSTRUCTIONS": "AVX512"}


def test_the_size_of_the_kv_cache_is_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "512")
    given = '{"ray_hetero": {"cpu": {"kv_cache_gib": 512}}}'
    shown = CliRunner().invoke(commands, ["config", "--json", "--additional-config", given])
    answer = json.loads(shown.stdout)
    assert {row["key"]: row["value"] for row in answer["keys"]}["cpu.kv_cache_gib"] == 512
    (note,) = [note for note in answer["notes"] if "VLLM_CPU_KVCACHE_SPACE" in note]
    assert note.endswith("cpu.kv_cache_gib decides")


def test_threads_are_chosen_for_each_rank() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in propagated({"VLLM_CPU_OMP_THREADS_BIND": "auto"})
    config = load_config({}).cpu
    assert config.cores == "auto"
    ranks = [seat for seat in world("g", "c").seats if seat.kind == "cpu"]
    assert [compute_threads(seat, config) for seat in ranks] == [socket().cpus]
    few = load_config({"cpu": {"reserved_cores": 1}}).cpu
    assert [compute_threads(seat, few) for seat in ranks] == [socket().cpus[1:]]


def test_settings_of_inductor_reach_the_ranks() -> None:
    shell = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCH_COMPILE_DISABLE": "1"}
    assert propagated(shell) == shell


def test_doctor_says_what_to_do_with_ipex() -> None:
    found = check_ipex("2.8.0", "2.13.0")
    assert found.status == "warn"
    assert found.remedy == "pip uninstall --yes intel-extension-for-pytorch"
    assert check_ipex(None, "2.13.0").status == "ok"


def test_topology_tells_processors_and_numa_nodes(tmp_path: Path) -> None:
    write_tree("xeon-8480-two-sockets", tmp_path)
    host = to_dict(read_host(tmp_path, gpus=False))
    assert [len(node["cores"]) for node in host["numa_nodes"]] == [56, 56]
    assert {"cpu_model", "instruction_sets", "gpus"} <= set(host)


def test_the_log_tells_the_numa_node_of_each_rank() -> None:
    proof = PlacementProof((1,), {1: 512 * MIB}, "of its memory", cores=4, bound=4)
    assert str(proof).startswith("100.0% of 512 MiB of its memory on its own NUMA node 1; ")
    assert all("100.0% of 512 MiB of its memory on its own NUMA node 0" in page.read_text("utf-8")
               for page in PAGES)  # fmt: skip


def test_memory_elsewhere_is_an_error() -> None:
    proof = PlacementProof((0,), {0: 9 * MIB, 1: MIB}, "of its memory", cores=4, bound=4)
    check(proof, None)
    with pytest.raises(RankError, match=r"cpu\.max_remote_memory_fraction allows 5\.0%"):
        check(proof, 0.05)


@pytest.mark.parametrize("phase", Phase)
def test_ranks_of_both_kinds_warm_up_in_step(phase: Phase) -> None:
    sizes = WarmupSizes(max_num_batched_tokens=512, max_num_seqs=64, cpu_compiles=True)
    (steps,) = schedule(layout("ggcc"), sizes, phase, has_boundary=False)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    # Only a rank of one kind would answer these.
    assert not {Action.FORWARD, Action.STOCK_WARM_UP} & {step.action for step in steps}
