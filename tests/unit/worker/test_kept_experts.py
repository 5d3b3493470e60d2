"""Packed experts that are kept on disk are read where they fit, and packed again elsewhere."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from kept_case import FORMS, LAYERS, Case, stale, warnings  # noqa: E402
from native_module import native as NATIVE  # noqa: E402, N812

from ray_hetero.worker import expert_files, kept_experts, kept_writer  # noqa: E402

if NATIVE is None:
    pytest.skip("needs the native module", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("at_least_info")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compact", [False, True])
def test_what_was_kept_is_read_and_nothing_is_packed(
    tmp_path: Path, form: str, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, form)
    first = case.load(compact=compact)
    assert first == case.load(compact=compact, kept=False)
    names = [path.name for path in case.files]
    assert names == [f"model.layers.{n}.mlp.experts.packed" for n in range(LAYERS)]

    def begin(*_: Any) -> None:
        raise AssertionError("the checkpoint is not read")

    monkeypatch.setattr(expert_files._Maker, "_begin", begin)
    assert case.load(compact=compact) == first


def test_each_slice_has_its_own(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    both = [case.load(ranks=2, number=number) for number in range(2)]
    assert both[0] != both[1]
    assert [case.load(ranks=2, number=number) for number in range(2)] == both
    case.load()
    folders = {path.parent.name for path in case.files}
    level = NATIVE.levels()[-1].name
    assert folders == {f"slice-{one}-{level}" for one in ("1-of-2", "2-of-2", "1-of-1")}
    assert warnings(caplog) == []


def test_other_checkpoint_format_slice_and_release(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.load()
    file = case.model / "model.safetensors"
    later = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(later, later))
    assert "it is of another checkpoint" in stale(case, caplog)
    assert "another format (packed, expected compact)" in stale(case, caplog, compact=True)
    monkeypatch.setattr(kept_experts, "installed_version", lambda _: "7.0")
    said = stale(case, caplog, compact=True)
    assert "another release (" in said
    assert said.endswith(", expected 7.0)")
    whole = case.files[0]
    for path in case.files:
        other = Path(str(path).replace("1-of-1", "1-of-2"))
        other.parent.mkdir(exist_ok=True)
        path.rename(other)
    assert not whole.exists()
    said = stale(case, caplog, compact=True, ranks=2)
    assert "it is of another slice (1 of 1, expected 1 of 2)" in said


@pytest.mark.parametrize("form", ["mxfp4", "bf16"])
def test_bytes_that_are_wrong_or_missing(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(tmp_path, form)
    case.load()
    path = case.files[1]
    content = path.read_bytes()
    for at, said in (
        (0, "a digest is not that of its bytes"), (len(content) // 3, "a digest is not that"),
        (len(content) - 200, "the digest of its description is not that of its bytes"),
        (len(content) - 1, "it is not whole, or not of this release"),
    ):  # fmt: skip
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert said in stale(case, caplog)
        assert path.read_bytes() == content
    for cut in (content[:-1], content[:3], b"", content[1:]):
        path.write_bytes(cut)
        stale(case, caplog)
        assert path.read_bytes() == content


def test_a_description_that_belongs_to_other_bytes(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.load()
    path = case.files[0]
    content = path.read_bytes()
    about, data = kept_experts.description(os.open(path, os.O_RDONLY))
    assert about["halves"][0] + about["halves"][1] + about["beside"] == data
    path.write_bytes(content[:64] + content)
    assert f"it has {data + 64} bytes of weights, expected {data}" in stale(case, caplog)


def test_a_full_disk_is_said_once_and_leaves_nothing(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert case.load() == case.load(kept=False)
    (said,) = warnings(caplog)
    assert "the packed experts are not kept in " in said
    assert said.endswith(": No space left on device")
    assert case.files == []

    def late(descriptor: int, view: memoryview, begin: int) -> int:
        return write(descriptor, view, begin) if begin == 0 else full(descriptor, begin, 0)

    write: Any = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", late)
        case.load()
    assert len(warnings(caplog)) == 1
    assert case.files == []
    case.load()
    assert len(case.files) == LAYERS


def test_a_folder_that_cannot_be_written(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    case.folder.write_text("a file")
    assert case.load() == case.load(kept=False)
    said = warnings(caplog)
    assert len(said) == 2
    assert all("Not a directory" in one or "File exists" in one for one in said)


def test_leftovers_of_processes_that_are_gone(case: Case) -> None:
    case.load()
    host = kept_writer.host_id()
    gone, running, foreign, old = (
        case.files[0].with_name(f"x.packed.{name}.tmp")
        for name in (
            f"{host}-{2**31 - 1}-1a", f"{host}-{os.getpid()}-1a", f"00000000-{2**31 - 1}-1a",
            f"00000000-{os.getpid()}-1a",
        )
    )  # fmt: skip
    for path in (gone, running, foreign, old):
        path.write_text("half a file")
    long_ago = old.stat().st_mtime - 2 * kept_writer.LEFT_S
    os.utime(old, (long_ago, long_ago))
    case.files[0].unlink()
    case.load()
    # Another host's process may still write.
    assert [path.exists() for path in (gone, running, foreign, old)] == [False, True, True, False]
    assert math.prod(path.stat().st_size for path in case.files) > 0


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_checkpoint_that_is_written_while_it_is_read(
    case: Case, is_renamed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before = case.model / "model.safetensors", case.load(kept=False)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # a byte of the last layer's last expert
    keep = kept_experts.KeptExperts.keep

    def written(kept: Any, layer: str, *given: Any) -> None:
        # All that is read is there.
        if f".{LAYERS - 1}." in layer:
            if is_renamed:
                other = file.with_name("other")
                other.write_bytes(content)
                other.rename(file)
            else:
                file.write_bytes(content)
        keep(kept, layer, *given)

    monkeypatch.setattr(kept_experts.KeptExperts, "keep", written)
    assert case.load() == before
    monkeypatch.undo()
    said = warnings(caplog)
    assert len(said) == (0 if is_renamed else 1)
    assert all("files of the checkpoint have changed while they were read" in one for one in said)
    after = case.load()
    assert after == case.load(kept=False)
    assert after != before
