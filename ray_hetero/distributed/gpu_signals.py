"""Requests to expert ranks and their answers in the stream of a GPU.

Memory operations of the stream write and wait for words of the host's memory (stream_words.py).  A
driver that refuses them gets host functions (cuLaunchHostFunc).

This module needs PyTorch and CUDA's driver, not vLLM.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ray_hetero.distributed.expert_memory import HandoverMemory, native
from ray_hetero.log import logger
from ray_hetero.runtime import gpu_memory
from ray_hetero.runtime.gpu_memory import lock_pages
from ray_hetero.runtime.stream_words import Driver, operations, waiting, writing


class GpuSignals:
    """Requests and answers of a stage that computes on the current GPU.

    Args:
        sender: the words.

    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._driver = Driver()
        self._addresses: list[tuple[int, int]] = []
        self._takes: Any = None
        self._posts: dict[tuple[int, int], Any] = {}
        self._mark: Any = None
        self._every = 0
        self.has_operations = False
        """Whether the stream itself writes and waits; else functions of the host do."""

    def parts(self, memory: HandoverMemory) -> tuple[torch.Tensor, ...]:
        """The memory as the GPU sees it; locks its pages.

        Raises:
            RuntimeError: the system refuses to lock them.

        """
        ranks = memory.geometry.ranks
        lock_pages(memory.memory)
        self._addresses = native().Sender.addresses(memory.memory.data_ptr(), ranks)
        self._takes = operations(
            *(waiting(answer, 1) for _, answer in self._addresses),
            *(writing(answer, 0) for _, answer in self._addresses),
        )
        # Answers are taken back, as behind every step: a driver that can do this can do all.
        status = self._run(operations(*(writing(at, 0) for _, at in self._addresses)))
        self.has_operations = status == 0
        if status:
            logger.warning(
                "CUDA's driver refuses stream memory operations (CUresult %d): host functions "
                "send the tokens to expert ranks instead",
                status,
            )
        torch.cuda.current_stream().synchronize()
        device = torch.device("cuda", torch.cuda.current_device())
        self._rows = torch.arange(memory.geometry.capacity, device=device).unsqueeze(1)
        self._is_token = torch.ones_like(self._rows, dtype=torch.bool)
        self._none = torch.tensor(-1, dtype=torch.int32, device=device)
        base = memory.memory.data_ptr()
        seen = gpu_memory.seen(base, memory.memory.nbytes, device)
        parts = seen.split(memory.geometry.sizes)
        at = native().Sender.mark_address(base, ranks) - base
        self._mark = parts[0][at : at + 4].view(torch.int32)
        return tuple(parts)

    def write(self, values: torch.Tensor, to: torch.Tensor) -> None:
        """Write the tensor over the link with a kernel.

        A copy of torch's would take the memory for the GPU's own, and tell CUDA so.
        """
        torch.mul(values, 1, out=to)

    def begin_step(self, tokens: int, every: int) -> None:
        """Mark the step's tokens on the stream: its graphs were captured with more rows."""
        torch.lt(self._rows, tokens, out=self._is_token)
        if every != self._every:
            # Behind the steps that are under way, whose experts are read later.
            self._mark.fill_(every)
            self._every = every

    def write_ids(self, ids: torch.Tensor, to: torch.Tensor) -> None:
        """Write experts of tokens over the link with a kernel, and -1 for other rows.

        Rows that fill a graph up would have the sockets read experts for nothing.
        """
        given = ids if ids.dtype == to.dtype else ids.to(to.dtype)
        torch.where(self._is_token[: len(ids)], given, self._none, out=to)

    def post(self, layer: int, tokens: int) -> None:
        """Write the requests behind what the stream has to do before."""
        given = self._posts.get((layer, tokens))
        if given is None:
            request = native().request(layer, tokens)
            given = (
                operations(*(writing(at, request) for at, _ in self._addresses))
                if self.has_operations
                else self._sender.posting(layer, tokens)
            )
            self._posts[layer, tokens] = given
        self._order(given)

    def wait(self) -> bool:
        """Make the stream wait for the answers; a failure cannot be known here."""
        self._order(self._takes if self.has_operations else self._sender.waiting())
        return True

    def _order(self, given: Any) -> None:
        status = self._run(given) if self.has_operations else self._call(*given)
        if status:
            raise RuntimeError(
                f"CUDA's driver returned error {status} (CUresult) while tokens were handed over"
            )

    def _run(self, given: Any) -> int:
        return self._driver.run(given, torch.cuda.current_stream())

    def _call(self, function: int, argument: int) -> int:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        return int(
            self._driver.library.cuLaunchHostFunc(
                stream, ctypes.c_void_p(function), ctypes.c_void_p(argument)
            )
        )
