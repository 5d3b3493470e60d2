"""Addresses of all Ray clusters that this user's processes on this host belong to.

Each engine without RAY_ADDRESS starts a Ray of its own, in a folder of its own, so that a host can
have several.  Their node processes (raylets) are told where the head is by an argument.
"""

from __future__ import annotations

import os

import psutil

RAYLET = "raylet"
ARGUMENT = "--gcs-address="


def local_addresses() -> tuple[str, ...]:
    """host:port of each cluster's head, the oldest first."""
    found: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            if process.name() != RAYLET or process.uids().real != os.getuid():
                continue
            address = _address(process.cmdline())
            if address is not None:
                found.setdefault(address, process.create_time())
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return tuple(sorted(found, key=lambda address: found[address]))


def _address(command: list[str]) -> str | None:
    return next((one.removeprefix(ARGUMENT) for one in command if one.startswith(ARGUMENT)), None)
