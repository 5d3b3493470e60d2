"""kt-kernel's routed experts, called by address; only its extension and its libraries are needed.

Of the wheel `kt-kernel`, unpack `kt_kernel/_kt_kernel_ext_amx*.so` and the folder `kt_kernel.libs`
beside `kt_kernel`; for a processor without AMX, `_kt_kernel_ext_avx512_bf16*.so`.  An extension is
for the Python that its name has (cpython-312), and needs no PyTorch.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCALE_BLOCK = 128
"""Outputs, and inputs, that share a scale of FP8."""


@contextmanager
def unbound() -> Iterator[None]:
    """Let threads that are started meanwhile run anywhere.

    OpenMP binds the thread that loads it to one processor, kt-kernel's copy of OpenMP too.  Workers
    are bound by kt-kernel, but the thread that hands them their work inherits this one's binding,
    and spins: a worker on the same processor would take two to three times as long.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class KtKernel:
    """A pool of threads, and what computes experts with it.

    Args:
        folder: where `kt_kernel` and `kt_kernel.libs` are.
        threads: of the pool, on the first NUMA node.
        build: of the extension: amx, avx512_bf16, or avx2.
        kind: class of the extension's `moe`: AMXBF16_MOE, AMXFP8_MOE, or of avx2 AVX2BF16_MOE,
            AVX2FP8_MOE.

    Raises:
        FileNotFoundError: there is no extension for this Python.

    """

    def __init__(
        self, folder: Path, threads: int, build: str = "amx", kind: str = "AMXBF16_MOE"
    ) -> None:
        suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
        path = folder / "kt_kernel" / f"_kt_kernel_ext_{build}{suffix}"
        if not path.exists():
            raise FileNotFoundError(f"{path}: unpack it from the wheel of kt-kernel")
        spec = importlib.util.spec_from_file_location("kt_kernel_ext", path)
        assert spec is not None
        assert spec.loader is not None
        self._module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        config = self._module.WorkerPoolConfig()
        config.subpool_count = 1
        config.subpool_numa_map = [0]
        config.subpool_thread_count = [threads]
        with unbound():
            self._pool = self._module.CPUInfer(config)
        self._kind = getattr(self._module.moe, kind)

    def layer(
        self,
        shape: tuple[int, int, int, int],
        gates: Sequence[int],
        ups: Sequence[int],
        downs: Sequence[int],
        most_tokens: int,
        scales: Sequence[Sequence[int]] | None = None,
    ) -> KtLayer:
        """One layer; its weights are copied.

        Args:
            shape: experts, experts of a token, hidden size, inner size.
            gates: addresses of [inner, hidden], bf16 or E4M3, of each expert.
            ups: the same.
            downs: addresses of [hidden, inner].
            most_tokens: most tokens of a call.
            scales: of E4M3, of gates, ups and downs: addresses of [outputs / 128, inputs / 128],
                float32, of each expert.

        """
        experts = shape[0]
        on_gpu = (ctypes.c_bool * experts)()
        places = (ctypes.c_int64 * experts)(*range(experts))
        config = self._module.moe.MOEConfig(*shape, ctypes.addressof(on_gpu))
        config.layer_idx = 0
        config.pool = self._pool.backend_
        config.max_len = most_tokens
        config.gate_projs, config.up_projs = [list(gates)], [list(ups)]
        config.down_projs = [list(downs)]
        if scales is None:
            scales = [[0] * experts] * 3
        else:
            config.quant_config.bits = 8
            config.quant_config.group_size = SCALE_BLOCK
            config.quant_config.zero_point = False
        config.gate_scales, config.up_scales, config.down_scales = ([list(one)] for one in scales)
        moe = self._kind(config)
        self._pool.submit(moe.load_weights_task(ctypes.addressof(places)))
        self._pool.sync()
        return KtLayer(self._pool, moe, (on_gpu, places))


class KtLayer:
    """One layer of experts; `kept` is memory that it points at."""

    def __init__(self, pool: Any, moe: Any, kept: object) -> None:
        self._pool, self._moe, self._kept = pool, moe, kept
        self._tokens = ctypes.c_int32()

    def __call__(self, tokens: int, chosen: int, ids: int, weights: int, x: int, y: int) -> None:
        """Compute y from x, [tokens, hidden], bf16; ids int64 and weights float32, by address."""
        self._tokens.value = tokens
        task = self._moe.forward_task(
            ctypes.addressof(self._tokens), chosen, ids, weights, x, y, False
        )
        self._pool.submit(task)
        self._pool.sync()
