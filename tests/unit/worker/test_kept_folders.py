"""Folders of packed experts that several hosts share, and file systems that do less than a disk."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from kept_case import LAYERS, Case, stale, warnings  # noqa: E402
from native_module import native as NATIVE  # noqa: E402, N812

from ray_hetero.worker import expert_files, kept_experts, kept_writer  # noqa: E402

if NATIVE is None:
    pytest.skip("needs the native module", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("at_least_info")


def test_hosts_with_other_processors_keep_their_own(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [case.load(level=level, kept=False) for level in (0, -1)]
    assert [case.load(level=level) for level in (0, -1)] == expected
    times = {path: path.stat().st_mtime_ns for path in case.files}
    assert len(times) == 2 * LAYERS
    assert [case.load(level=level) for level in (0, -1)] == expected
    # Neither has written again over what the other one had.
    assert {path: path.stat().st_mtime_ns for path in case.files} == times
    assert warnings(caplog) == []
    assert len({level.name for level in NATIVE.levels()}) > 1


def test_two_processes_of_one_number_write_one_key_at_once(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two hosts, or in two containers, processes have the same number."""
    expected, sync, inside = case.load(kept=False), os.fsync, [False]

    def sync_while_another_writes(descriptor: int) -> None:
        sync(descriptor)
        if not inside[0]:
            inside[0] = True
            assert case.load() == expected
            inside[0] = False

    monkeypatch.setattr(os, "fsync", sync_while_another_writes)
    assert case.load() == expected
    assert warnings(caplog) == []
    monkeypatch.undo()
    assert [path.suffix for path in case.files] == [".packed"] * LAYERS
    assert case.load() == expected
    assert warnings(caplog) == []


def test_a_file_that_another_host_replaces_while_it_is_read(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS finds that the file it reads is gone."""
    case.load()
    expected = case.load(kept=False)

    def stale_handle(descriptor: int, views: Any, begin: int) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", stale_handle)
        assert case.load() == expected
    (said,) = warnings(caplog)
    assert said.endswith("Stale file handle")


def test_a_file_that_shrinks_while_it_is_read(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.load()
    submit = expert_files.FileReader.submit

    def cut(reader: Any, function: Any, *args: Any) -> Any:
        for path in case.files:
            os.truncate(path, 4096)
        return submit(reader, function, *args)

    with monkeypatch.context() as patched:
        patched.setattr(expert_files.FileReader, "submit", cut)
        assert case.load() == case.load(kept=False)
    said = warnings(caplog)
    assert any("a digest is not that of its bytes" in one for one in said)


@pytest.mark.parametrize("call", ["open", "rename"])
def test_a_folder_that_becomes_read_only(
    call: str, case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.load()
    for path in case.files:
        path.write_bytes(b"not whole")
    opened = os.open

    def refused(path: Any, *more: Any, **named: Any) -> int:
        if call == "rename" or str(path).endswith(".tmp"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, *more, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, *(("open", refused) if call == "open" else ("replace", refused)))
        assert case.load() == case.load(kept=False)
    said = warnings(caplog)
    assert ["packed again" in said[0], "Read-only file system" in said[1]] == [True, True]
    assert len(said) == 2
    assert not [path for path in case.files if path.suffix == ".tmp"]


def test_leftovers_that_belong_to_others_stay_and_hinder_nothing(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.load()
    other = case.files[0].with_name(f"x.packed.{kept_writer.host_id()}-{2**31 - 1}-1a.tmp")
    other.write_text("of another user, in a folder of everyone's")
    case.files[0].unlink()
    unlink = Path.unlink

    def refused(path: Path, *more: Any) -> None:
        if path == other:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, *more)

    monkeypatch.setattr(Path, "unlink", refused)
    case.load()
    assert warnings(caplog) == []
    assert len(case.files) == LAYERS + 1


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_file_systems_that_reserve_no_room_and_sync_no_folder(
    number: int, case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def refused(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    def of_files_only(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return refused() if target.is_dir() else sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refused)
        patched.setattr(os, "fsync", of_files_only)
        case.load()
    assert warnings(caplog) == []
    assert len(case.files) == LAYERS


@pytest.mark.parametrize("change", ["key", "bytes", "format", "facts", "shape"])
def test_a_description_of_another_program(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Digests are right, and what is said is not what this code would say."""
    case = Case(tmp_path, "mxfp4" if change == "facts" else "bf16")
    case.load()
    path = case.files[0]
    content = path.read_bytes()
    with path.open("rb") as file:
        about, data = kept_experts.description(file.fileno())
    if change == "key":
        del about["key"]
    else:
        about["weights"][0][1][change] = {"bytes": "1", "format": "new", "facts": [1]}.get(
            change, 7
        )
    digests = about.pop("digests")
    path.write_bytes(content[:data] + kept_experts.file_end(about, digests))
    assert "its description is of another kind" in stale(case, caplog)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.load()
    path = case.files[0]
    path.unlink()
    os.mkfifo(path)
    assert "it is no file" in stale(case, caplog)


def test_a_checkpoint_of_the_same_sizes_and_times(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """Images of containers give all files one time, whatever is in them."""
    case.load()
    file = case.model / "model.safetensors"
    content, times = bytearray(file.read_bytes()), file.stat()
    begin = 8 + int.from_bytes(content[:8], "little")
    weights = torch.frombuffer(content, dtype=torch.bfloat16, offset=begin)
    weights *= 1.5
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "it is of another checkpoint" in stale(case, caplog)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system that does not answer until the event is set."""
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait())
    yield answers
    answers.set()


def test_a_file_system_that_does_not_answer(
    case: Case, hanging: threading.Event, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kept_writer, "STALL_S", 0.2)
    assert case.load() == case.load(kept=False)
    (said,) = warnings(caplog)
    assert "the packed experts are not kept in" in said
    assert "nothing was written in 0.2 s, 0.0 of 0.0 GiB are written" in said
    assert "stat -f " in said
    hanging.set()


def test_the_limit_of_a_start_is_not_used_up(
    case: Case, hanging: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    case.startup = {"load_timeout_s": 0.5}
    case.load()
    (said,) = warnings(caplog)
    assert "it takes longer than nine tenths of startup.load_timeout_s (0.5 s)" in said


def test_a_load_that_fails_waits_for_no_file(
    case: Case, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_writer, "STOP_S", 0.1)
    held = expert_files._held

    def fail_at_last(experts: Any, source: Any) -> Any:
        made.append(held(experts, source))
        if len(made) == LAYERS:
            raise MemoryError("no room")
        return made[-1]

    made: list[Any] = []
    monkeypatch.setattr(expert_files, "_held", fail_at_last)
    ended = threading.Event()

    def load() -> None:
        with pytest.raises(MemoryError, match="no room"):
            case.load()
        ended.set()

    threading.Thread(target=load, daemon=True).start()
    assert ended.wait(60)


def test_a_process_ends_while_a_file_system_does_not_answer(tmp_path: Path) -> None:
    program = f"""
import os, threading, time
from pathlib import Path
import torch
from ray_hetero.worker.kept_writer import KeptWriter
began = threading.Event()
os.fsync = lambda _: (began.set(), threading.Event().wait())
folder, weights = Path({str(tmp_path)!r}), torch.zeros(64, dtype=torch.uint8)
writer = KeptWriter(folder, time.monotonic() + 60, "a minute")
writer.add(folder / "a.packed", [weights], lambda _: b"")
assert began.wait(30)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, json.dumps(done.stderr)
