"""A small Ray of this host, started and stopped by one of this project's processes."""

from __future__ import annotations

import contextlib
import logging
import os

import psutil
import ray

from ray_hetero.runtime.ray_arguments import RAY_SETTINGS

OBJECT_STORE_BYTES = 128 << 20
"""Bytes of the object store: nothing large goes through it; Ray's default takes 30 % of memory."""
OWN_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_prestart_worker_first_driver": "0",
}
"""Ray's processes wait a minute for a head that is gone to come back; this one's do not.  And a
worker is started for every core at once, which none of the ranks can use: theirs have environments
of their own."""
LINGER_SECONDS = 2.0
"""Seconds that Ray's processes get to end by themselves when it has been stopped."""


def settle_environment() -> None:
    """Set what Ray reads from the environment; what the user has set stays."""
    for name, value in (RAY_SETTINGS | OWN_SETTINGS).items():
        os.environ.setdefault(name, value)


def start(*, log_to_driver: bool = True) -> str:
    """Start a Ray and connect to it; its address.

    Args:
        log_to_driver: whether lines of its workers come out of this process.

    """
    settle_environment()
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=log_to_driver,
        logging_level=logging.WARNING,
    )
    return str(ray.get_runtime_context().gcs_address)


def stop() -> None:
    """Stop the Ray that this process has started.

    Ray kills a raylet that does not end within a second; the raylet's agents then try for a minute
    to tell the head, which is gone as well.
    """
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    processes = [
        process for raylet in raylets for process in (raylet, *raylet.children(recursive=True))
    ]
    ray.shutdown()
    _, lingering = psutil.wait_procs(processes, timeout=LINGER_SECONDS)
    for process in lingering:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
