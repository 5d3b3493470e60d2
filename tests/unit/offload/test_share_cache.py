"""Shares of decode steps that are kept between starts."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from placement.host.bandwidth_cache import KEPT_SECONDS, MEASURE_AGAIN, cached_bandwidth  # noqa: E402
from placement.host.topology import Gpu, GpuDetails  # noqa: E402
from ray_hetero.kernels.step_route import StepLimits  # noqa: E402
from ray_hetero.offload.decode import share_cache  # noqa: E402
from ray_hetero.offload.decode.share_cache import PREFIX, ShareCache, key_of  # noqa: E402
from ray_hetero.offload.decode.share_choice import Share, Shares  # noqa: E402
from ray_hetero.offload.prefill import offload_gpu  # noqa: E402

SHARES = Shares((Share(1, 2, gain_s=0.002), Share(8), Share(32, 10, gain_s=0.01)))
ASKED = [1, 8, 32]


def kept(directory: Path, key: str = PREFIX + "a") -> ShareCache:
    return ShareCache(key, directory=directory)


def file_of(directory: Path) -> Path:
    (file,) = directory.iterdir()
    return file


def test_what_is_kept_is_known_to_the_next_start(tmp_path: Path) -> None:
    assert kept(tmp_path).known(ASKED) is None
    kept(tmp_path).keep(SHARES)
    known = kept(tmp_path).known(ASKED)
    assert known == SHARES
    assert [one.gain_s for one in known.measured] == [0.002, 0.0, 0.01]
    assert kept(tmp_path, PREFIX + "b").known(ASKED) is None
    # Other sizes of steps are measured now.
    assert kept(tmp_path).known([1, 8]) is None


def test_it_is_beside_the_other_figures_of_the_host(tmp_path: Path) -> None:
    cached_bandwidth((0,), "X", directory=tmp_path, probe=lambda cpus: 1e9)
    kept(tmp_path).keep(SHARES)
    kept(tmp_path, PREFIX + "b").keep(Shares((Share(1),)))
    assert len(json.loads(file_of(tmp_path).read_text())) == 3
    assert kept(tmp_path).known(ASKED) == SHARES


def test_no_key_keeps_nothing(tmp_path: Path) -> None:
    kept(tmp_path, "").keep(SHARES)
    assert kept(tmp_path, "").known(ASKED) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "shares",
    [
        None, 5, [], "x", {"1": 2},
        [[1, 2, 0.01], [8, 0, 0.01]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, 10]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, 99, 0.01]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, -1, 0.01]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, 0.5, 0.01]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, "10", 0.01]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, True, 0.01]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, 10, -0.01]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, 10, math.nan]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, 10, math.inf]],
        [[1, 2, 0.01], [8, 0, 0.01], [32, 10, None]],
        [["1", 2, 0.01], [8, 0, 0.01], [32, 10, 0.01]],
    ],
)  # fmt: skip
def test_a_damaged_entry_is_none(tmp_path: Path, shares: Any) -> None:
    kept(tmp_path).keep(SHARES)
    entry = {"measured_at": time.time(), "shares": shares}
    file_of(tmp_path).write_text(json.dumps({PREFIX + "a": entry}))
    assert kept(tmp_path).known(ASKED) is None
    kept(tmp_path).keep(SHARES)
    assert kept(tmp_path).known(ASKED) == SHARES


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, json.dumps({PREFIX + "a": 5}).encode(),
     json.dumps({PREFIX + "a": {"measured_at": "x", "shares": []}}).encode()],
)  # fmt: skip
def test_a_damaged_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    kept(tmp_path).keep(SHARES)
    file_of(tmp_path).write_bytes(content)
    assert kept(tmp_path).known(ASKED) is None
    kept(tmp_path).keep(SHARES)
    assert kept(tmp_path).known(ASKED) == SHARES


def test_a_place_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    kept(below).keep(SHARES)
    assert kept(below).known(ASKED) is None


def test_old_shares_are_measured_again_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path).keep(SHARES)
    later = time.time() + KEPT_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert kept(tmp_path).known(ASKED) is None
    kept(tmp_path, PREFIX + "b").keep(SHARES)
    assert list(json.loads(file_of(tmp_path).read_text())) == [PREFIX + "b"]


def test_a_variable_has_all_figures_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([1e9, 2e9, 3e9])

    def asked() -> float:
        return cached_bandwidth(
            (0,), "X", directory=tmp_path, probe=lambda _: next(rates), is_busy=lambda: False
        )

    kept(tmp_path, PREFIX + "b").keep(SHARES)
    kept(tmp_path).keep(SHARES)
    asked()
    monkeypatch.setenv(MEASURE_AGAIN, "1")
    assert kept(tmp_path).known(ASKED) is None
    assert asked() == 2e9
    kept(tmp_path).keep(Shares((Share(1),)))
    monkeypatch.delenv(MEASURE_AGAIN)
    # What was measured then counts from then on, and other entries stay.
    assert asked() == 2e9
    assert kept(tmp_path).known([1]) == Shares((Share(1),))
    assert kept(tmp_path, PREFIX + "b").known(ASKED) == SHARES


def test_ranks_of_a_group_take_what_the_first_one_has(tmp_path: Path) -> None:
    kept(tmp_path).keep(SHARES)
    told: list[Shares | None] = []

    def agree(found: Shares | None) -> Shares | None:
        told.append(found)
        return told[0]

    first = ShareCache(PREFIX + "a", agree, tmp_path)
    other = ShareCache("", agree, tmp_path)
    assert [first.known(ASKED), other.known(ASKED)] == [SHARES, SHARES]
    assert told == [SHARES, None]


def layer(shape: tuple[int, int] = (64, 32), name: str = "compact", **facts: Any) -> Any:
    data = torch.zeros(shape, dtype=torch.uint8)
    linear = SimpleNamespace(weight=SimpleNamespace(name=name, shape=shape, data=data, facts=facts))
    return SimpleNamespace(
        input=SimpleNamespace(qkv=linear), parts=SimpleNamespace(linears=(linear, linear)),
        attention=SimpleNamespace(shape="8 heads"), calls="residual",
    )  # fmt: skip


def test_the_key_has_all_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = SimpleNamespace(level=SimpleNamespace(name="amx"), limits=StepLimits(128))
    columns: Any = SimpleNamespace(about="GPU H100 driver 1", tokens=128)

    def key(layers: Any = None, kernel: Any = kernel, columns: Any = columns,
            place: str = "Xeon, CPUs 0-7") -> str:  # fmt: skip
        return key_of(layers or [layer()] * 2, kernel, columns, place)

    usual = key()
    assert usual == key()
    assert usual.startswith(PREFIX + "Xeon, CPUs 0-7, GPU H100 driver 1, layers and code ")
    assert key(place="") == ""
    others = [
        key([layer()]),
        key([layer(), layer((64, 64))]),
        key([layer(name="packed")] * 2),
        key([layer(group=128)] * 2),
        key(kernel=SimpleNamespace(level=SimpleNamespace(name="avx2"), limits=StepLimits(128))),
        key(kernel=SimpleNamespace(level=SimpleNamespace(name="amx"), limits=StepLimits(64))),
        key(columns=SimpleNamespace(about="GPU H100 driver 2", tokens=128)),
        key(columns=SimpleNamespace(about="GPU H100 driver 1", tokens=64)),
        key(place="Xeon, CPUs 0-6"),
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    others.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(share_cache, "_code", lambda: "other kernels")
    others.append(key())
    assert len({usual, *others}) == len(others) + 1


def test_the_code_is_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    source, compiled = tmp_path / "kernels" / "a.py", tmp_path / "_streaming_linear.abi3.so"
    found = []
    monkeypatch.setattr(share_cache, "PACKAGE", tmp_path)
    monkeypatch.setattr(share_cache, "SOURCES", ("kernels",))
    for one, other in (("1", "1"), ("2", "1"), ("2", "2")):
        source.write_text(one)
        compiled.write_text(other)
        found.append(share_cache._code.__wrapped__())
    assert len(set(found)) == 3


def test_the_files_that_are_looked_at_are_there() -> None:
    assert all((share_cache.PACKAGE / name).exists() for name in share_cache.SOURCES)
    assert (share_cache.PACKAGE / "offload/decode/shared_decode.py").exists()


def test_a_gpu_is_told_by_name_place_link_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offload_gpu.gpu_of(torch.device("cpu")) == "GPU cpu"
    bus = {"pci_domain_id": 0, "pci_bus_id": 0x65, "pci_device_id": 0}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="H100", **bus)
    )
    details = GpuDetails(driver="580.1", link_generation=1, link_generation_max=5, link_width=16)
    there = [
        Gpu(0, pci_address="0000:17:00.0"),
        Gpu(1, pci_address="0000:65:00.0", details=details),
    ]
    monkeypatch.setattr(offload_gpu, "read_gpus", lambda: there)
    device = torch.device("cuda", 1)
    assert offload_gpu.gpu_of(device) == (
        "GPU H100 at 0000:65:00.0 with 16 lanes of generation 5, driver 580.1"
    )
    there.pop()
    assert offload_gpu.gpu_of(device) == (f"GPU H100 at 0000:65:00.0 for CUDA {torch.version.cuda}")
