"""What the output of an engine that ends in order must not say."""

from __future__ import annotations

import re

NOISE = re.compile(
    r"A worker died or was killed|SYSTEM_ERROR|force killing|Traceback \(most recent call last\)"
    r"|died unexpectedly|Fatal Python error|leaked \w+ objects"
)
"""Lines by which a user would take a normal end for a crash."""


def noise(output: str) -> list[str]:
    """Lines of an output that look like a crash; none of an engine that ended in order."""
    return [line for line in output.splitlines() if NOISE.search(line)]
