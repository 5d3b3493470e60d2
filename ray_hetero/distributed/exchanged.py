"""Seconds and bytes of exchanges between ranks.

Without torch, which the process of the status board has no other use for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Exchanged:
    """Sums over a rank's exchanges, in seconds and bytes."""

    waiting_s: float = 0.0
    """Seconds of waiting until the previous stage had computed what it sent, or the next one what
    comes first on the GPU of both."""
    exchange_s: float = 0.0
    """Packing and sending, and from the end of the previous stage's computing to the arrival of
    what it sent.  Where the stages are on two hosts, whose clocks differ, arrivals count as
    waiting."""
    received_bytes: int = 0
    sent_bytes: int = 0
