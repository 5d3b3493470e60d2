"""Claims between real processes: held, refused, and free again however the holder dies."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from placement.cluster import claims, lockfiles
from placement.cluster.claims import claim, claim_socket, default_directory, held, key_of
from placement.errors import ClaimError
from placement.host.topology import Core, Socket

HOLD = """
import sys, time
from pathlib import Path
from placement.cluster.claims import claim
keep = claim(Path(sys.argv[1]), sys.argv[2], sys.argv[3], map(int, sys.argv[4:]))
{then}
print("held", flush=True)
time.sleep(60)
"""
FORK = """
import os
done, tell = os.pipe()
child = os.fork()
if not child:
    os.write(tell, b".")
    time.sleep(60)
# What a child does after a fork, it does some time later.
os.read(done, 1)
print(child, flush=True)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def run(key: str, owner: str = "other", *cpus: int, then: str = "") -> subprocess.Popen[str]:
        code = HOLD.format(then=then)
        command = [sys.executable, "-c", code, str(tmp_path), key, owner, *map(str, cpus)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        if not then:
            assert process.stdout.readline() == "held\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_second_claim_names_the_holder(start: Start, tmp_path: Path) -> None:
    holder = start("socket-0", "engine-a")
    with pytest.raises(ClaimError) as caught:
        claim(tmp_path, "socket-0", "engine-b")
    message = str(caught.value)
    assert f"pid {holder.pid} ({sys.executable}" in message
    assert "engine 'engine-a'" in message


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_free_when_the_holder_dies(number: int, start: Start, tmp_path: Path) -> None:
    holder = start("socket-0", "engine-a", 0, 1)
    assert [h.pid for h in held(tmp_path)] == [holder.pid]
    holder.send_signal(number)
    holder.wait()
    assert held(tmp_path) == ()
    with claim(tmp_path, "socket-0", "engine-b", (0, 1)) as mine:
        assert [h.pid for h in held(tmp_path)] == [mine.holder.pid] == [os.getpid()]


def test_free_when_the_holder_dies_but_its_forked_child_lives(start: Start, tmp_path: Path) -> None:
    holder = start("socket-0", then=FORK)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        claim(tmp_path, "socket-0", "engine-b").release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_release_frees(tmp_path: Path) -> None:
    first = claim(tmp_path, "socket-0", "engine-a", (0,))
    with pytest.raises(ClaimError, match=f"pid {os.getpid()}"):
        claim(tmp_path, "socket-0", "engine-a", (0,))
    first.release()
    first.release()
    claim(tmp_path, "socket-0", "engine-a", (0,)).release()


def test_other_key_with_the_same_cpus_is_refused_to_another_engine(tmp_path: Path) -> None:
    with claim(tmp_path, "package", "engine-a", range(56)):
        with pytest.raises(ClaimError, match=r"CPUs 28-41 are held by .*engine 'engine-a'"):
            claim(tmp_path, "node", "engine-b", range(28, 42))
        claim(tmp_path, "node", "engine-b", range(56, 70)).release()
        claim(tmp_path, "node", "engine-a", range(28, 42)).release()


def test_claim_socket_covers_siblings(tmp_path: Path) -> None:
    socket = Socket(1, 0, (0,), (Core((2, 6)), Core((3, 7))))
    assert key_of(socket) == "socket-1-cpu-2"
    with claim_socket(socket, "engine-a", tmp_path):
        assert held(tmp_path)[0].cpus == (2, 3, 6, 7)


def test_many_processes_at_once_get_one_claim(tmp_path: Path) -> None:
    code = HOLD.format(then="")
    command = [sys.executable, "-c", code, str(tmp_path), "socket-0", "race"]
    racers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(5)
    ]
    try:
        deadline = time.monotonic() + 50
        while sum(racer.poll() is None for racer in racers) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        winners = [racer for racer in racers if racer.poll() is None]
        assert len(winners) == 1
        assert winners[0].stdout is not None
        assert winners[0].stdout.readline() == b"held\n"
        assert [h.pid for h in held(tmp_path)] == [winners[0].pid]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_directory_is_private_and_made_when_missing(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    claim(directory, "socket-0", "engine-a").release()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "socket-0.claim").stat().st_mode) == 0o600


def test_no_directory_has_no_claims(tmp_path: Path) -> None:
    assert held(tmp_path / "nothing") == ()
    assert not (tmp_path / "nothing").exists()


def test_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClaimError, match=r"not a link or file; set RAY_HETERO_CLAIM_DIR to"):
        claim(tmp_path / "file", "socket-0", "engine-a")


def test_directory_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClaimError, match=r"Not a directory; set RAY_HETERO_CLAIM_DIR to"):
        claim(tmp_path / "file" / "locks", "socket-0", "engine-a")


def test_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ClaimError, match="not a link"):
        claim(tmp_path / "link", "socket-0", "engine-a")
    target = tmp_path / "precious"
    target.write_text("keep me")
    (tmp_path / "real" / "socket-0.claim").symlink_to(target)
    with pytest.raises(ClaimError, match="symbolic link"):
        claim(tmp_path / "real", "socket-0", "engine-a")
    assert target.read_text() == "keep me"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make another user's directory")
def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(ClaimError, match=r"belongs to user 12345, not to you; set RAY_HETERO"):
        claim(tmp_path, "socket-0", "engine-a")


def test_read_only_directory_says_what_to_set() -> None:
    # Root may write anywhere, so the child gives that up; not below tmp_path, which is root's own.
    code = (
        "import os, sys; from pathlib import Path\n"
        "from placement.cluster.claims import claim; from placement.errors import ClaimError\n"
        "os.getuid() or (os.chown(sys.argv[1], 4321, -1), os.setuid(4321))\n"
        "try: claim(Path(sys.argv[1]), 'socket-0', 'engine-a')\n"
        "except ClaimError as error: print(error)\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o500)
        command = [sys.executable, "-c", code, directory]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot be used for claims: Permission denied" in answer.stdout
    assert "set RAY_HETERO_CLAIM_DIR to" in answer.stdout


def test_stale_garbage_is_free_but_locked_garbage_is_not(tmp_path: Path) -> None:
    (tmp_path / "socket-0.claim").write_text("not JSON")
    mine = claim(tmp_path, "socket-0", "engine-a")
    (tmp_path / "socket-0.claim").write_text("not JSON")
    with pytest.raises(ClaimError, match="its content is not that of a claim"):
        held(tmp_path)
    mine.release()


def test_stuck_mutex_is_named(tmp_path: Path) -> None:
    with (
        lockfiles.mutex(tmp_path),
        pytest.raises(ClaimError, match=r"mutex: locked by another process for 0\.1 s"),
        lockfiles.mutex(tmp_path, timeout_s=0.1),
    ):
        pytest.fail("the mutex was given twice")


@pytest.mark.parametrize("key", ["", "../socket", "a/b", "x" * 300])
def test_keys_that_are_no_file_names(key: str, tmp_path: Path) -> None:
    with pytest.raises(ClaimError, match="expected letters, digits"):
        claim(tmp_path, key, "engine-a")


def test_default_directory_does_not_depend_on_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(claims.DIRECTORY_VARIABLE, raising=False)
    before = default_directory()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/somewhere")
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert default_directory() == before
    assert str(os.getuid()) in before.name


def test_directory_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(claims.DIRECTORY_VARIABLE, "/locks")
    assert default_directory() == Path("/locks")
    monkeypatch.setenv(claims.DIRECTORY_VARIABLE, "locks")
    with pytest.raises(ClaimError, match="RAY_HETERO_CLAIM_DIR=locks: expected an absolute path"):
        default_directory()
