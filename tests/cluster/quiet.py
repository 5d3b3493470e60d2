"""What the output of an engine that ends in order must not say."""

from __future__ import annotations

import re

CRASH = re.compile(
    r"A worker died or was killed|SYSTEM_ERROR|force killing|died unexpectedly|Fatal Python error"
)
"""Lines by which a user would take a normal end for a crash."""
TRACEBACK = "Traceback (most recent call last)"
ENDS = "[shutdown]"
"""In vLLM's first line about an end; on the way up it prints tracebacks of errors that it handles,
as of a warm-up of its tokenizer where there is none."""

OF_STOCK = "[async_llm.py:"
"""vLLM's server cancels the task that listens to its engine, which takes that for the engine's
death, and tells of it in a traceback if it runs once more before it is cancelled too."""


def noise(output: str) -> list[str]:
    """Lines of an output that look like a crash; none of an engine that ended in order."""
    _, _, end = output.partition(ENDS)
    found = [line for line in output.splitlines() if CRASH.search(line)]
    tracebacks = [line for line in end.splitlines() if TRACEBACK in line]
    return found + [line for line in tracebacks if OF_STOCK not in line]
