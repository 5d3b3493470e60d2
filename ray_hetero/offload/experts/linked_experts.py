"""Experts of a layer in memory that a GPU's process maps beside the expert rank that holds them.

The expert rank tells how they lie there: formats, shapes, activation, biases.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import save

from placement.given import shown
from ray_hetero.errors import AgreementError
from ray_hetero.kernels.experts.activations import ROWS, Activation
from ray_hetero.kernels.experts.expert_room import in_lines
from ray_hetero.kernels.experts.routed_experts import RoutedExperts
from ray_hetero.offload.expand.stacks import Stack, stacks_of, tables_in, tensors_and_text
from ray_hetero.runtime import sealed_memory
from ray_hetero.runtime.gpu_memory import lock_pages
from ray_hetero.runtime.shared_pages import SharedPages

BIASES = ("w13_bias", "w2_bias")


@dataclass(frozen=True, eq=False)
class Half:
    """Gate and up of all experts of a slice, or down of all."""

    memory: torch.Tensor
    """Bytes of all, shared."""
    stacks: tuple[Stack, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of each weight."""
        return self.stacks[0].shape

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest weight in memory."""
        return max(in_lines(stack.nbytes) for stack in self.stacks)

    def begin(self, expert: int) -> int:
        """Offset of an expert's weight in memory, which ends where the next one begins."""
        return sum(
            min(stack.count, max(0, expert - stack.first)) * in_lines(stack.nbytes)
            for stack in self.stacks
        )


@dataclass(frozen=True, eq=False)
class LinkedSlice:
    """One expert rank's slice of all experts of a layer."""

    halves: tuple[Half, Half]
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    """Biases in the layout of `RoutedExperts.biases`."""
    activation: Activation

    @property
    def count(self) -> int:
        """Experts."""
        return self.halves[0].stacks[-1].last

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(half.memory.numel() for half in self.halves)

    def lock(self, block: range) -> None:
        """Lock the pages of some neighbouring experts, for copies to a GPU.

        Raises:
            RuntimeError: they cannot be locked.

        """
        for half in self.halves:
            lock_pages(half.memory[half.begin(block.start) : half.begin(block.stop)])


def shared(experts: RoutedExperts) -> SharedPages | None:
    """Seal a layer's memory with the description of what lies there; None if it is private.

    Raises:
        OSError: the system has no room for the description.

    """
    room = experts.room
    if room.pages is None:
        return None
    halves = [list(stacks_of(half)) for half in zip(*experts.weights, strict=True)]
    tensors = {
        f"{half}.{number}.{name}": table.contiguous()
        for half, stacks in enumerate(halves)
        for number, stack in enumerate(stacks)
        for name, table in stack.tables.items()
    }
    tensors |= {
        name: bias for name, bias in zip(BIASES, experts.biases, strict=True) if bias is not None
    }
    told = {
        "activation": asdict(experts.activation),
        "starts": room.starts,
        "used": room.used,
        "halves": [[stack.described() for stack in stacks] for stacks in halves],
    }
    room.pages.append(save(tensors, {"layer": json.dumps(told)}))
    return room.pages


def received(descriptor: int, data_bytes: int) -> LinkedSlice:
    """The slice in another process's memory, see `shared`.

    Args:
        descriptor: of the memory; not needed any more once this returns.
        data_bytes: of the weights, which come first.

    Raises:
        RuntimeError: the memory is not sealed.
        ValueError: it is none of `shared`; TypeError and LookupError too.
        OSError: it cannot be mapped.

    """
    nbytes = sealed_memory.written_bytes(descriptor, data_bytes)
    pages = SharedPages.received(descriptor)
    tensors, text = tensors_and_text(os.pread(descriptor, nbytes, data_bytes))
    told = json.loads(text["layer"])
    halves = [
        _half(
            pages.memory[:data_bytes],
            start,
            used,
            tuple(
                Stack.of(one, tables_in(tensors, f"{half}.{number}."))
                for number, one in enumerate(stacks)
            ),
        )
        for half, (start, used, stacks) in enumerate(
            zip(told["starts"], told["used"], told["halves"], strict=True)
        )
    ]
    biases = [tensors.get(name) for name in BIASES]
    activation = Activation(**told["activation"])
    if len(halves) != len(biases) or activation.value not in ROWS:
        raise ValueError(f"{len(halves)} halves of experts with {shown(activation)}")
    return LinkedSlice((halves[0], halves[1]), (biases[0], biases[1]), activation)


def _half(memory: torch.Tensor, start: int, used: int, stacks: tuple[Stack, ...]) -> Half:
    """The part of memory in which stacks of weights lie.

    Raises:
        ValueError: they do not.

    """
    half = Half(memory[start : start + used], stacks)
    numbers, ends = [stack.first for stack in stacks], [0, *(stack.last for stack in stacks)]
    is_inside = type(start) is type(used) is int and 0 <= start <= len(memory) - used
    if not is_inside or not stacks or numbers != ends[:-1] or half.begin(ends[-1]) > used:
        raise ValueError(f"{ends[-1]} weights in {used} bytes at {start} of {len(memory)}")
    return half


def check(slices: Sequence[LinkedSlice]) -> None:
    """Compare what expert ranks say of one layer.

    Raises:
        AgreementError: they hold slices of different shapes.

    """

    def said(one: LinkedSlice) -> tuple[Any, ...]:
        return (one.count, one.activation, *(half.shape for half in one.halves))

    if len({said(one) for one in slices}) > 1:
        raise AgreementError(
            f"expert ranks hold slices of different shapes: {[said(one) for one in slices]}"
        )
