"""The groups of a world with several kinds of device: NCCL, shared memory or Gloo, per group.

| members of a group             | device communication                               |
| ------------------------------ | -------------------------------------------------- |
| GPUs only                      | NCCL and vLLM's own GPU communicators, as in stock |
| CPU sockets of one host        | vLLM's shared memory, as in stock                  |
| CPU sockets of several hosts   | Gloo                                               |
| both kinds                     | Gloo through pinned host memory                    |
| stages of a pipeline           | GPUs only, all of one size: NCCL; else the stage   |
|                                | boundary                                           |

No NCCL communicator ever spans a CPU rank: `torch.distributed.new_group` is called by all ranks
in the same order, but only members build the communicator, each with its own group's backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import GroupCoordinator, get_world_group
from vllm.forward_context import get_forward_context, is_forward_context_available

from ray_hetero.compat.worker import message_queues
from ray_hetero.distributed.messages import There
from ray_hetero.distributed.neighbour import Neighbours
from ray_hetero.distributed.stage_boundary import StageBoundary
from ray_hetero.world import World

Received = tuple[dict[str, Any] | None, list[Any], list[Callable[[], None]]]
"""Tensors, handles to wait for, and callbacks to call then; as vLLM's `irecv_tensor_dict`."""

# One world a process, like vLLM's own groups.
_world: World | None = None
_device_backend = "gloo"


def set_world(world: World, device_backend: str) -> None:
    """Tell this process about its world, before the first group is made.

    Args:
        world: which rank is of which kind.
        device_backend: what groups of GPUs only use, the platform's own: NCCL.

    """
    global _world, _device_backend
    _world = world
    _device_backend = device_backend


class HostCommunicator(DeviceCommunicatorBase):  # type: ignore[misc]
    """Collectives over Gloo; tensors of a GPU pass through pinned host memory.

    Results come back on the caller's device.  Every member gets bit-identical results: Gloo
    reduces each element once and copies the sum to all.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tokens: int | None = None
        self._pinned: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def begin_step(self, tokens: int) -> None:
        """Tell how many tokens the next step has."""
        self._tokens = tokens

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group.

        On a GPU the sum takes the input's place: CUDA graphs before and after share its address.
        On a CPU the sum is a tensor of its own: the compiler may reuse the input's memory.
        """
        if input_.device.type == "cpu":
            host = input_.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(host, group=self.device_group)
            return host
        reduced = input_[: self._tokens] if _has_steps_rows(input_) else input_
        host = self._to_host(reduced)
        dist.all_reduce(host, group=self.device_group)
        reduced.copy_(host)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate all members' tensors along `dim`, in rank order."""
        return self._to_device(super().all_gather(self._to_host(input_), dim))

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate along `dim` on member `dst`; None elsewhere."""
        gathered = super().gather(self._to_host(input_), dst, dim)
        return None if gathered is None else self._to_device(gathered)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sum over the group, each member keeping its chunk along `dim`."""
        return self._to_device(super().reduce_scatter(self._to_host(input_), dim))

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Copy member `src`'s tensor to all, in place."""
        host = self._to_host(tensor)
        dist.broadcast(host, src=self.ranks[src], group=self.device_group)
        return self._from_host(host, tensor)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send to member `dst`, the next one by default."""
        super().send(self._to_host(tensor), dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Receive from member `src`, the previous one by default."""
        host = torch.empty(size, dtype=dtype)
        source = (self.rank_in_group - 1) % self.world_size if src is None else src
        dist.recv(host, self.ranks[source], group=self.device_group)
        return self._to_device(host)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        host = self._buffer(tensor.dtype, tensor.numel()).view(tensor.shape)
        # A blocking copy: Gloo reads the memory at once, outside of any stream.
        return host.copy_(tensor)

    def _buffer(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        # Powers of two bound the number of buffers whatever the batch sizes are.
        capacity = 1 << max(elements - 1, 1).bit_length()
        key = (dtype, capacity)
        if key not in self._pinned:
            self._pinned[key] = torch.empty(capacity, dtype=dtype, device="cpu", pin_memory=True)
        return self._pinned[key][:elements]

    def _from_host(self, host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return host if like.device.type == "cpu" else like.copy_(host)

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host if self.device.type == "cpu" else host.to(self.device)


def _has_steps_rows(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a row for each token of the step, padded to its CUDA graph or not."""
    if not is_forward_context_available():
        return False
    graph = get_forward_context().batch_descriptor
    return graph is not None and graph.num_tokens == tensor.shape[0]


def _receivers(world: World, rank: int) -> tuple[int, ...]:
    """Global ranks that a rank sends its stage's output to."""
    engine, place = divmod(rank, len(world.seats))
    seat = world.seats[place]
    first = engine * len(world.seats)
    return tuple(first + one for one in world.layout.receivers(seat.stage, seat.tensor_rank))


class HeteroGroup(GroupCoordinator):  # type: ignore[misc]
    """vLLM's group, with communication chosen by the kinds of its members."""

    device_communicator: Any
    mq_broadcaster: Any

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        use_all2all: bool = False,
    ) -> None:
        assert _world is not None
        rank = dist.get_rank()
        # Of a pipeline's groups a rank may be in several; vLLM's own class keeps the last.
        own = [ranks for ranks in group_ranks if rank in ranks][-1]
        local = [member % len(_world.seats) for member in own]
        kinds = _world.group_kinds(local)
        is_even = _world.layout.is_even
        # Stages that are not all GPUs, or not of one size, meet at the boundary.
        is_stock = (
            kinds == {"gpu"} and is_even if group_name == "pp" else _world.is_stock_group(local)
        )
        super().__init__(
            group_ranks=group_ranks,
            local_rank=local_rank,
            torch_distributed_backend=_device_backend if kinds == {"gpu"} and is_stock else "gloo",
            use_device_communicator=use_device_communicator and is_stock,
            use_message_queue_broadcaster=use_message_queue_broadcaster,
            group_name=group_name,
            use_all2all=use_all2all,
        )
        self.boundary: StageBoundary | None = None
        if self.mq_broadcaster is not None:
            message_queues.unlink_once_attached(self.mq_broadcaster)
        if is_stock or len(own) == 1:
            if self.device.type == "cpu" and self.device_communicator is not None:
                message_queues.unlink_cpu_shared_memory(self.device_communicator)
            return
        if group_name == "pp":
            # Stages meet at the boundary only; without a communicator in the group, vLLM may
            # capture CUDA graphs of a GPU stage.
            neighbours = Neighbours.in_line(
                # Of stages of several sizes a rank may have neighbours in several groups.
                self.device_group if is_even else get_world_group().cpu_group,
                self.ranks,
                self.rank_in_group,
                _receivers(_world, rank),
            )
            self.boundary = StageBoundary(neighbours, self.device)
        elif use_device_communicator:
            self.use_device_communicator = True
            # Compiled as one operator, at which graphs can be split.
            self.use_custom_op_call = True
            self.device_communicator = HostCommunicator(
                cpu_group=self.cpu_group,
                device=self.device,
                device_group=self.device_group,
                unique_name=self.unique_name,
                use_all2all=use_all2all,
            )

    @property
    def over_host(self) -> HostCommunicator | None:
        """Communicator of a group of both kinds, or of several hosts."""
        communicator = self.device_communicator
        return communicator if isinstance(communicator, HostCommunicator) else None

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Copy member `src`'s tensor to all members, whatever their kind."""
        if self.over_host is not None:
            return self.over_host.broadcast(input_, src)
        return super().broadcast(input_, src)

    def isend_tensor_dict(
        self,
        tensor_dict: dict[str, Any],
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: dict[str, bool] | None = None,
    ) -> list[Any]:
        """Send a stage's output on; across kinds through the stage boundary.

        Where there are CPU ranks, the slices that vLLM lets tensor-parallel ranks send for each
        other are not used: at the boundary gathering them again would cost a collective, and of
        a mixed stage only the GPUs, whose pipeline vLLM serves, would take part in it.
        """
        if self.boundary is None:
            slicing = self._slicing(all_gather_group, all_gather_tensors)
            handles: list[Any] = super().isend_tensor_dict(tensor_dict, dst, *slicing)
            return handles
        # vLLM takes the first handle for metadata and waits for the others before its next step;
        # the boundary keeps what it sends alive by itself, so there is none to wait for.
        self.boundary.isend(tensor_dict)
        return [There()]

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: dict[str, bool] | None = None,
    ) -> Received:
        """Receive the previous stage's output; across kinds through the stage boundary."""
        if self.boundary is None:
            slicing = self._slicing(all_gather_group, all_gather_tensors)
            received: Received = super().irecv_tensor_dict(src, *slicing)
            return received
        return self.boundary.irecv()

    @staticmethod
    def _slicing(
        group: GroupCoordinator | None, tensors: dict[str, bool] | None
    ) -> tuple[GroupCoordinator | None, dict[str, bool] | None]:
        """Group and tensors gathered after a transfer: none with CPU ranks or unequal stages."""
        assert _world is not None
        return (group, tensors) if _world.is_stock else (None, None)
