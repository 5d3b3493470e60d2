"""Of several ranks that end together, the cause is told apart from its consequences."""

from __future__ import annotations

from pathlib import Path
from traceback import format_exception

import pytest
import torch.distributed as dist
from ray.exceptions import RayTaskError

from placement.errors import ClaimError
from ray_hetero.executor import failure
from ray_hetero.executor.actors import RankWatch
from ray_hetero.executor.failure import (
    Ending,
    Failure,
    Severity,
    causes,
    ending,
    ending_of,
    plain,
)

GONE = """The actor died unexpectedly before finishing this task.
\tclass_name: RankActor
\tactor_id: 1a
\tpid: 12
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some \
potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory."""
NODE = """The actor died unexpectedly before finishing this task.
\tclass_name: RankActor
The actor died because its node has died. Node Id: 5f"""
CLAIMED = ClaimError("socket 0 is taken")
PEER = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:31337")


def test_rays_account_of_a_death_is_one_line_of_what_it_knows() -> None:
    assert plain(GONE) == ""
    assert plain(NODE) == "(The actor died because its node has died. Node Id: 5f)"
    killed = GONE.replace("Worker unexpectedly exits with a connection error code 2. End of file.",
                          "Task was killed due to the node running low on memory.")  # fmt: skip
    assert plain(killed) == "(Task was killed due to the node running low on memory.)"


@pytest.mark.parametrize("error", [PEER, dist.DistNetworkError("the client socket has failed")])
def test_a_lost_peer_is_a_consequence(error: Exception) -> None:
    assert ending(1, error).severity is Severity.LOST_A_PEER
    assert ending(1, ValueError("no such kernel")).severity is Severity.FAILED


def test_the_cause_comes_before_what_followed() -> None:
    lost, failed = ending(0, PEER), ending(1, ValueError("no such kernel"))
    died = Ending(2, Severity.DIED, "died")
    assert causes([lost, failed, died]) == [died]
    assert causes([lost, failed]) == [failed]
    assert causes([lost, ending(3, PEER)]) == [lost, ending(3, PEER)]


def test_what_a_rank_says_for_the_user_is_kept_as_it_is() -> None:
    said = ending(1, ClaimError("socket 0 is held"))
    assert said.text == "failed: socket 0 is held"
    assert isinstance(said.error, ClaimError)
    assert ending(1, ValueError("x")).text == "failed: ValueError('x')"


def test_of_an_error_of_several_lines_the_first_is_said() -> None:
    cuda = RuntimeError("CUDA error: an assertion failed\nFor debugging consider …")
    assert ending(1, cuda).text == "failed: RuntimeError('CUDA error: an assertion failed')"


def test_the_place_of_an_error_without_a_message_is_told() -> None:
    traceback = """Traceback (most recent call last):
  File "/opt/site-packages/vllm/v1/worker/worker.py", line 12, in load_model
    self.load()
  File "/opt/site-packages/vllm/models/nemotron_h.py", line 871, in set_moe_parameters
    assert example_moe is not None
AssertionError"""
    said = ending(1, AssertionError(), traceback)
    assert said.text == "failed: AssertionError() at vllm/models/nemotron_h.py:871"
    assert ending(1, AssertionError("no experts"), traceback).text == (
        "failed: AssertionError('no experts')"
    )


@pytest.mark.parametrize("cause", [dist.DistNetworkError("closed"), AssertionError(), CLAIMED])
def test_an_error_as_ray_raises_it_is_read(
    cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        raise cause
    except Exception as error:  # noqa: BLE001
        traceback = "".join(format_exception(error))
    raised = RayTaskError("run", traceback, cause, "a rank", 12, "10.0.0.1").as_instanceof_cause()
    assert isinstance(raised, type(cause))

    def get(ref: object, timeout: float) -> None:
        raise raised

    monkeypatch.setattr(failure.ray, "get", get)
    found = ending_of(3, "a call")
    assert found is not None
    assert found.rank == 3
    where = (
        f" at {'/'.join(Path(__file__).parts[-3:])}:" if isinstance(cause, AssertionError) else ""
    )
    assert found.text.startswith(ending(3, cause).text + where)
    assert found.severity is ending(3, cause).severity


class Unreadable:
    """Ranks whose endings nobody can read."""

    def ended(self, at_least: int, timeout_s: float) -> list[Ending]:
        raise OSError("unreadable")

    def report(self, endings: object) -> str:
        return "never"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_does_not_go_on_where_endings_cannot_be_read() -> None:
    told: list[str] = []
    RankWatch(Unreadable(), 1, told.append).join()
    assert told == ["a rank has ended"]


def test_the_first_report_of_a_failure_stays() -> None:
    known = Failure()
    known.check()
    assert known.wait(0) is None
    assert [known.tell("first"), known.tell("second")] == [True, False]
    assert known.wait(0) == known.report == "first"
