"""Hides instruction sets of this processor from torch and vLLM, in every process of a test run.

    make test MAX_CPU_ISA=avx2

Python imports this module at its start, as its folder is in PYTHONPATH.  RAY_HETERO_MAX_CPU_ISA
limits this project's own kernels; vLLM chooses its library and its operators by what `torch.cpu`
says, so that is limited here, and oneDNN and ATen by their environment variables.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

HIDDEN = {
    "amx": (),
    "avx512_bf16": ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_init_amx"),
    "avx512": ("_is_avx512_bf16_supported",),
    "avx2": ("_is_avx512_supported", "_is_vnni_supported"),
    "portable": ("_is_avx2_supported",),
}
"""Functions of `torch.cpu` that answer no, by level; those of better levels too."""
ONEDNN = {"avx512_bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE", "avx2": "AVX2",
          "portable": "SSE41"}  # fmt: skip


class Masked(importlib.abc.MetaPathFinder):
    """Changes `torch.cpu` while it is imported.

    Args:
        hidden: the functions that answer no.

    """

    def __init__(self, hidden: Sequence[str]) -> None:
        self._hidden = hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec; its loader hides the functions."""
        if name != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_masked(module: ModuleType) -> None:
            load(module)
            for function in self._hidden:
                # One that torch has renamed must not stay visible.
                assert hasattr(module, function), function
                setattr(module, function, lambda: False)

        spec.loader.exec_module = load_masked  # type: ignore[method-assign]
        return spec


best = os.environ.get("RAY_HETERO_MAX_CPU_ISA", "amx")
levels = list(HIDDEN)
better = levels[: levels.index(best) + 1]
sys.meta_path.insert(0, Masked([name for level in better for name in HIDDEN[level]]))
if best in ONEDNN:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", ONEDNN[best])
if best in {"avx2", "portable"}:
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2" if best == "avx2" else "default")
