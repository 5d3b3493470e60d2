"""The first report of what ended the ranks: several threads can find out, all of them need it."""

from __future__ import annotations

import threading

from ray_hetero.errors import RankError


class Failure:
    """What ended the ranks, once it is known; the first report stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = threading.Event()
        self.report: str | None = None
        """One line about the rank; None while all is well."""

    def tell(self, report: str) -> bool:
        """Make a report; whether it was the first."""
        with self._lock:
            is_first = self.report is None
            if is_first:
                self.report = report
                self._known.set()
        return is_first

    def wait(self, limit_s: float) -> str | None:
        """The report, or None when there is none in time."""
        self._known.wait(limit_s)
        return self.report

    def check(self) -> None:
        """Go on while all is well.

        Raises:
            RankError: a rank has ended.

        """
        if self.report is not None:
            raise RankError(self.report)
