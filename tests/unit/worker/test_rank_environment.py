"""The environment a rank's process starts with: binding and preload together, nothing foreign."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_hetero.errors import ConfigError
from ray_hetero.runtime.openmp_environment import PreloadLibraries, find_preload_libraries
from ray_hetero.worker.rank_environment import (
    PER_RANK,
    cpu_rank_environment,
    gpu_rank_environment,
    propagated,
)

ALL = PreloadLibraries(gomp="/x/libgomp.so.1", iomp="/x/libiomp5.so", tcmalloc="/x/libtcmalloc.so")
NONE = PreloadLibraries()


def test_a_cpu_rank_sees_no_gpu_and_the_cpu_platform() -> None:
    environment = cpu_rank_environment((0, 1), NONE)
    assert environment["VLLM_TARGET_DEVICE"] == "cpu"
    # Not empty: vLLM then takes Triton for usable.
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"
    assert "LD_PRELOAD" not in environment
    assert "PYTHONPATH" not in environment


def test_auto_prefers_torchs_gomp_and_binds_it() -> None:
    environment = cpu_rank_environment((2, 3, 5), ALL)
    assert environment["LD_PRELOAD"] == "/x/libtcmalloc.so:/x/libgomp.so.1"
    assert environment["GOMP_CPU_AFFINITY"] == "2 3 5"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert not any(name.startswith("KMP_") for name in environment)


def test_iomp_is_bound_its_own_way() -> None:
    environment = cpu_rank_environment((2, 3), ALL, openmp="iomp")
    assert environment["LD_PRELOAD"] == "/x/libtcmalloc.so:/x/libiomp5.so"
    assert environment["KMP_AFFINITY"] == "granularity=fine,explicit,proclist=[2,3]"
    assert "GOMP_CPU_AFFINITY" not in environment
    only = PreloadLibraries(iomp="/x/libiomp5.so")
    assert cpu_rank_environment((0,), only)["LD_PRELOAD"] == "/x/libiomp5.so"


def test_without_a_library_places_bind_the_threads() -> None:
    environment = cpu_rank_environment((4, 6), PreloadLibraries(tcmalloc="/x/libtcmalloc.so"))
    assert environment["OMP_PLACES"] == "{4},{6}"
    assert environment["OMP_PROC_BIND"] == "true"
    assert environment["LD_PRELOAD"] == "/x/libtcmalloc.so"


def test_none_leaves_openmp_to_the_environment() -> None:
    environment = cpu_rank_environment((0, 1), ALL, openmp="none")
    assert set(environment) == {
        "VLLM_TARGET_DEVICE", "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK",
        "THP_MEM_ALLOC_ENABLE",
    }  # fmt: skip


@pytest.mark.parametrize("openmp", ["gomp", "iomp"])
def test_a_library_that_is_not_there_is_told(openmp: str) -> None:
    with pytest.raises(ConfigError, match=f"'{openmp}' was asked for.*pip install"):
        cpu_rank_environment((0,), NONE, openmp=openmp)  # type: ignore[arg-type]


def test_the_cpu_site_comes_first() -> None:
    environment = cpu_rank_environment((0,), NONE, cpu_site="/site", python_path="/a:/b")
    assert environment["PYTHONPATH"] == "/site:/a:/b"
    assert cpu_rank_environment((0,), NONE, cpu_site="/site")["PYTHONPATH"] == "/site"


def test_a_gpu_rank_gets_no_cpu_settings() -> None:
    environment = gpu_rank_environment()
    assert environment == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def test_the_drivers_own_settings_do_not_travel() -> None:
    driver = {
        "VLLM_LOGGING_LEVEL": "DEBUG", "HF_HOME": "/hf", "RAY_HETERO_CLAIM_DIR": "/c",
        "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "9", "LD_PRELOAD": "/y", "PATH": "/bin",
        "GLOO_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "3",
    } | dict.fromkeys(PER_RANK, "x")  # fmt: skip
    assert set(propagated(driver)) == {"VLLM_LOGGING_LEVEL", "HF_HOME", "RAY_HETERO_CLAIM_DIR"}


def test_libraries_of_this_installation_exist_and_load() -> None:
    found = find_preload_libraries()
    # torch always brings a libgomp of its own on Linux.
    assert found.gomp is not None
    assert "torch" in found.gomp
    assert Path(found.gomp).is_file()
    environment = os.environ | cpu_rank_environment((0,), found)
    script = "print([line for line in open('/proc/self/maps') if 'libgomp' in line][0])"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert Path(found.gomp).name in ran.stdout
    assert "cannot be preloaded" not in ran.stderr
