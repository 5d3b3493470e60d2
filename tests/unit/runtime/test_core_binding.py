"""Threads of a process are where they are asked to be; looked at in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping

import pytest

from ray_hetero.runtime.openmp_environment import find_preload_libraries, openmp_environment

CPUS = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two logical CPUs")

THREADS = """
import os, threading, subprocess, sys
from ray_hetero.runtime import core_binding

quit = threading.Event()

def start():
    thread = threading.Thread(target=quit.wait, daemon=True)
    thread.start()
    return thread.native_id

def cpus(thread):
    return sorted(os.sched_getaffinity(thread))

first, second = {first}, {second}
early, main = start(), os.getpid()
"""


def answer_of(script: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    text = THREADS.format(first=CPUS[0], second=CPUS[1]) + textwrap.dedent(script)
    run = subprocess.run(
        [sys.executable, "-c", text], env=dict(environment), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return run.stdout.splitlines()


def test_ranks_main_thread_and_rays_threads_get_cores_of_their_own() -> None:
    answer = answer_of("""
        os.sched_setaffinity(early, [first])
        core_binding.take_cores([first], [second])
        print(cpus(main), cpus(early), cpus(start()))
    """)
    assert answer == [f"[{CPUS[0]}] [{CPUS[1]}] [{CPUS[0]}]"]


def test_without_spare_cores_rays_threads_share_all_of_the_ranks() -> None:
    answer = answer_of("""
        os.sched_setaffinity(early, [first])
        core_binding.take_cores([first, second], [])
        print(cpus(early) == sorted([first, second]) == cpus(main))
    """)
    assert answer == ["True"]


def test_serving_leads_from_the_first_compute_core() -> None:
    answer = answer_of("""
        core_binding.take_cores([first, second], [])
        core_binding.lead_from_first_core((second, first))
        print(cpus(main), len(cpus(early)))
    """)
    assert answer == [f"[{CPUS[1]}] 2"]


def test_a_process_keeps_to_its_cores_with_those_that_it_has_started() -> None:
    answer = answer_of("""
        child = subprocess.Popen(["sleep", "60"])
        core_binding.keep_to([second])
        print(cpus(main), cpus(early), cpus(child.pid), cpus(start()))
        child.kill()
        child.wait()
    """)
    assert answer == [f"[{CPUS[1]}] [{CPUS[1]}] [{CPUS[1]}] [{CPUS[1]}]"]


def test_without_cores_nothing_is_moved() -> None:
    answer = answer_of("""
        before = cpus(main)
        core_binding.keep_to([])
        core_binding.take_cores([], [])
        core_binding.lead_from_first_core(())
        core_binding.move_process(main, [])
        print(before == cpus(main) == cpus(early))
    """)
    assert answer == ["True"]


def test_another_process_is_moved_with_all_its_threads() -> None:
    answer = answer_of("""
        child = subprocess.Popen(
            [sys.executable, "-c",
             "import threading; threading.Thread(target=input).start(); print(1, flush=True)"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        child.stdout.readline()
        core_binding.move_process(child.pid, [second])
        threads = os.listdir(f"/proc/{child.pid}/task")
        print(len(threads), {tuple(cpus(int(thread))) for thread in threads})
        child.communicate("\\n")
        core_binding.move_process(child.pid, [second])
    """)
    assert answer == [f"2 {{({CPUS[1]},)}}"]


@pytest.mark.parametrize("openmp", ["gomp", "iomp"])
def test_a_thread_that_computes_alone_stays_where_it_is_put(openmp: str) -> None:
    libraries = find_preload_libraries()
    if getattr(libraries, openmp) is None:
        pytest.skip(f"lib{openmp} is not installed")
    environment = os.environ | openmp_environment(CPUS[:2], libraries, openmp)
    script = """
        import torch

        def compute():
            os.sched_setaffinity(0, [second])
            {begin}
            for _ in range(3):
                torch.ones(1 << 21).sum()
                torch.index_select(torch.randn(9000, 64), 0, torch.arange(9000))
            print(cpus(threading.get_native_id()))

        torch.ones(1 << 21).sum()
        torch.set_num_threads = lambda count: None  # as vLLM's CPU worker has it
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    """
    begins = {
        "core_binding.compute_alone()": CPUS[1], "core_binding.compute_alone([first])": CPUS[0],
        # Otherwise there would be nothing to be kept from.
        "torch.set_num_threads(1)": CPUS[0],
    }  # fmt: skip
    answers = {begin: answer_of(script.format(begin=begin), environment) for begin in begins}
    assert answers == {begin: [f"[{cpu}]"] for begin, cpu in begins.items()}
