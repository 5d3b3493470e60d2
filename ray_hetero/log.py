"""The logger of this package, which every module and process of it uses."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.ray_hetero")
"""Below vLLM's own logger, so that its level, format and handlers hold; imports no vLLM."""


class _Forwarder(logging.Handler):
    """Hands records on to this package's logger, as if they were logged there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record on, if this package's logger takes its level."""
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def show_placement() -> None:
    """Let what `placement` logs appear under vLLM's settings too, in this process.

    `placement` knows neither vLLM nor this package, so its loggers have names of their own.
    """
    theirs = logging.getLogger("placement")
    if not any(isinstance(handler, _Forwarder) for handler in theirs.handlers):
        theirs.setLevel(logging.DEBUG)
        theirs.propagate = False
        theirs.addHandler(_Forwarder())
