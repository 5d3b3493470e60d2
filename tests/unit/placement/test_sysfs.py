"""Hosts read from the files of real machines, and what becomes of files that make no sense."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from machines import NAMES, load, write_tree
from rich.console import Console

from placement.errors import TopologyError
from placement.host.cpulist import format_cpulist, parse_cpulist
from placement.host.describe import host_from_json, host_table, to_json
from placement.host.gpus import parse_nvidia_smi
from placement.host.sysfs import read_host
from placement.host.topology import Gpu
from placement.host.tree import Tree

NODE0 = "sys/devices/system/node/node0"
CPU = "sys/devices/system/cpu"


@pytest.mark.parametrize("name", NAMES)
def test_host_is_what_was_written_down(name: str, tmp_path: Path) -> None:
    host = read_host(write_tree(name, tmp_path))
    expected = load(name)["expected"]
    assert [
        {
            "id": node.id,
            "package": node.package,
            "cores": len(node.cores),
            "cpus": format_cpulist(cpu for core in node.cores for cpu in core.cpus),
            "memory_kib": node.memory_bytes // 1024,
            "free_kib": node.free_bytes // 1024,
            "distances": list(node.distances),
        }
        for node in host.numa_nodes
    ] == expected["nodes"]
    assert [list(core.cpus) for core in host.cores[:2]] == expected["first_cores"]
    assert host.name == expected["name"]
    assert host.cpu_model == expected["cpu_model"]
    assert sorted(host.instruction_sets) == expected["instruction_sets"]
    assert host.memory_limit_bytes == expected["memory_limit_bytes"]
    assert host.cpu_limit == expected.get("cpu_limit")
    assert format_cpulist(host.offline_cpus) == expected["offline_cpus"]
    assert host.gpus == tuple(Gpu(**gpu) for gpu in expected["gpus"])


@pytest.mark.parametrize("name", NAMES)
def test_json_keeps_every_field(name: str, tmp_path: Path) -> None:
    host = read_host(write_tree(name, tmp_path))
    assert host_from_json(to_json(host)) == host


@pytest.mark.parametrize("name", NAMES)
def test_table_shows_every_node(name: str, tmp_path: Path) -> None:
    host = read_host(write_tree(name, tmp_path))
    shown = io.StringIO()
    Console(width=160, file=shown).print(host_table(host))
    rows = re.findall(r"^│ +(\d+) │", shown.getvalue(), re.MULTILINE)
    assert [int(row) for row in rows[: len(host.numa_nodes)]] == [n.id for n in host.numa_nodes]


def test_this_machine_has_cpus_and_memory() -> None:
    host = read_host()
    assert host.cores
    assert all(node.memory_bytes > 0 for node in host.numa_nodes if node.cores)


MALFORMED = [
    (f"{CPU}/online", "0-x\n", "'0-x' is neither a number nor a range"),
    (f"{CPU}/online", "0-4000000000\n", "below 65536"),
    (f"{CPU}/online", "55-0\n", "ascending"),
    (f"{CPU}/online", "\n", "at least one CPU"),
    (f"{CPU}/online", None, "expected the list of online CPUs, no file"),
    (f"{CPU}/online", "0-255\n", "no node has the online CPUs 224-255"),
    (f"{CPU}/cpu3/topology/core_cpus_list", "4,116\n", "a list with CPU 3 itself"),
    (f"{CPU}/cpu3/topology/core_cpus_list", "2-3,115\n", "CPU 2 is on several cores"),
    (f"{CPU}/cpu7/topology/physical_package_id", "zero\n", "one integer, found 'zero'"),
    ("sys/devices/system/node/online", "0-2\n", "node2 is listed but not there"),
    ("sys/devices/system/node/online", "\n", "no node is listed"),
    ("sys/devices/system/node/online", "-1\n", "neither a number"),
    (f"{NODE0}/cpulist", "0-56,112-167\n", "CPU 56 is on node 0 and on node 1"),
    (f"{NODE0}/cpulist", "\x00\ufffd\n", "neither a number"),
    (f"{NODE0}/meminfo", "Node 0 MemTotal: much kB\n", "lines MemTotal and MemFree in kB"),
    (f"{NODE0}/meminfo", None, "expected a file, found none"),
    (
        f"{NODE0}/meminfo",
        "Node 0 MemTotal: 10 kB\nNode 0 MemFree: 20 kB\n",
        "no more memory free than there is",
    ),
    (f"{NODE0}/distance", "10\n", "2 distances, one for each online node"),
    (f"{NODE0}/distance", "10 far\n", "2 distances, one for each online node"),
    ("proc/self/status", "Cpus_allowed_list:\t0-\n", "neither a number"),
    ("proc/self/status", "Cpus_allowed_list:\t400-401\n", "in the cpuset or affinity"),
    ("proc/self/cgroup", "nonsense\n", "lines such as 0::/user.slice"),
    ("sys/fs/cgroup/user.slice/memory.max", "lots\n", "bytes or max, found 'lots'"),
    ("sys/fs/cgroup/user.slice/cpu.max", "100 0\n", "quota and period"),
]


@pytest.mark.parametrize(("path", "content", "message"), MALFORMED)
def test_malformed_file_is_named(
    path: str, content: str | None, message: str, tmp_path: Path
) -> None:
    write_tree("xeon-8480-two-sockets", tmp_path)
    if content is None:
        (tmp_path / path).unlink()
    else:
        (tmp_path / path).write_text(content)
    with pytest.raises(TopologyError) as caught:
        read_host(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_long_garbage_is_cut_in_the_message(tmp_path: Path) -> None:
    write_tree("xeon-8480-two-sockets", tmp_path)
    (tmp_path / NODE0 / "cpulist").write_text("x" * 100_000)
    with pytest.raises(TopologyError) as caught:
        read_host(tmp_path)
    assert "..." in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_directory_in_place_of_a_file(tmp_path: Path) -> None:
    write_tree("xeon-8480-two-sockets", tmp_path)
    (tmp_path / NODE0 / "cpulist").unlink()
    (tmp_path / NODE0 / "cpulist").mkdir()
    with pytest.raises(TopologyError, match=r"cpulist: the file cannot be read: Is a dir"):
        read_host(tmp_path)


def test_sandbox_that_lists_a_node_without_its_folder(tmp_path: Path) -> None:
    write_tree("no-numa-sandbox", tmp_path)
    before = read_host(tmp_path)
    (tmp_path / "sys/devices/system/node").mkdir()
    (tmp_path / "sys/devices/system/node/online").write_text("0\n")
    assert read_host(tmp_path) == before


def test_gpus_are_left_out_when_not_asked_for(tmp_path: Path) -> None:
    assert read_host(write_tree("xeon-8480-two-sockets", tmp_path), gpus=False).gpus == ()


def test_nvidia_smi_table(tmp_path: Path) -> None:
    write_tree("xeon-8480-two-sockets", tmp_path)
    table = (
        "0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 00000000:1A:00.0\n"
        "1, GPU-b, NVIDIA GB10, [N/A], 00010000:01:00.0\n"
    )
    assert parse_nvidia_smi(table, Tree(tmp_path)) == (
        Gpu(0, "GPU-a", "NVIDIA H100 80GB HBM3", 81559 << 20, "0000:1a:00.0", 0),
        Gpu(1, "GPU-b", "NVIDIA GB10", None, "10000:01:00.0", None),
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0, GPU-a, H100\n", "expected index,uuid,name"),
        ("0, GPU-a, H100, 81559, somewhere\n", "expected a PCI address such as 0000:65:00.0"),
    ],
)
def test_nvidia_smi_nonsense(table: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_nvidia_smi(table, Tree(tmp_path))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", ()), ("0\n", (0,)), ("0-2,8", (0, 1, 2, 8)), (" 3,1-2 ,\n", (1, 2, 3))],
)
def test_cpulist(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == numbers
    assert parse_cpulist(format_cpulist(numbers)) == numbers


@pytest.mark.parametrize("text", ["-", "1-", "-1", "a", "1--2", "٣", "0x1", "1.5", "0:3"])
def test_cpulist_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number"):
        parse_cpulist(text)


@pytest.mark.parametrize("text", ["", "[]", '{"name": 3}', '{"name": "a", "numa_nodes": 1}'])
def test_json_nonsense(text: str) -> None:
    with pytest.raises(TopologyError, match="host as JSON"):
        host_from_json(text)


def test_the_only_node_has_all_the_memory_of_the_machine(tmp_path: Path) -> None:
    root = write_tree("vm-four-packages", tmp_path)
    meminfo = root / "proc/meminfo"
    meminfo.write_text("MemTotal: 64000000 kB\nMemFree: 60000000 kB\n")
    (node,) = read_host(root).numa_nodes
    assert (node.memory_bytes, node.free_bytes) == (64000000 * 1024, 60000000 * 1024)
    meminfo.write_text("MemTotal: 8000000 kB\nMemFree: 6000000 kB\n")
    (node,) = read_host(root).numa_nodes
    assert node.memory_bytes == 16000000 * 1024
