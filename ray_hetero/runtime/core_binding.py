"""Cores on which the threads of the engine's processes run.

OpenMP binds its own workers.  What is left are the main thread, which leads them, and the threads
of Ray, ZeroMQ and Gloo, which must not take a core from them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence

import psutil
import torch

from ray_hetero.log import logger

PARALLEL_ELEMENTS = 1 << 20
"""Elements of an operator that torch shares out among threads."""


def move_process(pid: int, cpus: Collection[int]) -> None:
    """Move every thread that a process of this host has by now.

    Args:
        pid: one that has ended meanwhile needs no cores.
        cpus: logical CPUs; without any, nothing is moved.

    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in psutil.Process(pid).threads():
            _move(thread.id, cpus)


def keep_to(cpus: Collection[int]) -> None:
    """Move this process and those that it has started, compilers for example.

    Args:
        cpus: logical CPUs; without any, nothing is moved.

    """
    if cpus:
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            move_process(process.pid, cpus)


def drop_niceness() -> None:
    """Give this thread, and those it starts, the priority that vLLM's own workers have.

    Ray's workers are nice unless the cluster was started otherwise (`ray-hetero ray-args`), and
    only a privileged process may take that back.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        logger.warning(
            "Ray runs this rank at niceness %d, so whatever else needs a core gets it first. "
            "Start Ray with RAY_worker_niceness=0 (`ray-hetero ray-args` prints it).",
            niceness,
        )


def take_cores(own: Collection[int], others: Collection[int]) -> None:
    """Spread this process's threads before it computes: main thread here, Ray's threads there.

    OpenMP binds the main thread to its first core as the process loads it, and Ray's threads
    inherit that: without this they would all run on a core whose work every step waits for.
    Threads that the main thread starts later, and compilers that it calls, inherit `own`.

    Args:
        own: logical CPUs of the main thread; without any, nothing is moved.
        others: those of the threads there are by now; without any, `own`.

    """
    move_process(os.getpid(), others or own)
    _move(os.getpid(), own)


def lead_from_first_core(compute: Sequence[int]) -> None:
    """Bind the main thread to the core that OpenMP counts as its own.

    For serving, when nothing is compiled any more: free to move, it would wake up on another
    compute thread's core, and both would take turns there.

    Args:
        compute: logical CPUs of the compute threads, in OpenMP's order; without any, nothing is
            bound.

    """
    _move(os.getpid(), compute[:1])


def compute_alone(cpus: Collection[int] = ()) -> None:
    """Compute on the current thread alone; OpenMP's workers belong to the main thread.

    vLLM's CPU worker makes `torch.set_num_threads` do nothing.  A thread whose first large operator
    calls workers gets a second set of them on the cores of the main thread's, and both runtimes
    move the thread itself to the first of these cores; Intel's does so with one thread too.

    Args:
        cpus: logical CPUs that the thread keeps to; without any, those that it has now.

    """
    cpus = cpus or os.sched_getaffinity(0)
    torch._C.set_num_threads(1)
    torch.ones(PARALLEL_ELEMENTS).sum()  # what moves the thread has happened when it is moved back
    os.sched_setaffinity(0, cpus)


def _move(thread: int, cpus: Collection[int]) -> None:
    if cpus:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cpus)
