"""Has a test run import the native modules that `make sanitize` has built.

Python imports this module at its start, as its folder is in PYTHONPATH.  The modules lie below
the folder that RAY_HETERO_SANITIZED names; those of the source tree stay as they are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

MODULES = ("placement._native", "ray_hetero._streaming_linear", "ray_hetero._expert_handover")


class Sanitized(importlib.abc.MetaPathFinder):
    """Finds the native modules in a folder.

    Args:
        folder: with a file for each of them.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's file; an error where it was not built, so that no test passes without."""
        if name not in MODULES:
            return None
        found = sorted(self._folder.glob(f"{name.replace('.', '/')}*.so"))
        if not found:
            raise FileNotFoundError(f"{self._folder}: expected {name}; type: make sanitize")
        return importlib.util.spec_from_file_location(name, found[0])


if "RAY_HETERO_SANITIZED" in os.environ:
    sys.meta_path.insert(0, Sanitized(Path(os.environ["RAY_HETERO_SANITIZED"])))
