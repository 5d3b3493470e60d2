"""Experts of a quantised checkpoint, brought into the order of the kernel by all cores at once.

Native code reads the checkpoint's codes and scales once and writes them where they stay; nothing
lies in between.  This module needs PyTorch and the native module, not vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch

from ray_hetero.compat.models.quantised_experts import StoredExperts
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.activations import Order
from ray_hetero.kernels.experts.expert_room import MakeRoom, Room, in_lines
from ray_hetero.kernels.experts.quantised_experts import KINDS, codes_of
from ray_hetero.kernels.experts.routed_experts import MULTIPLE, paired
from ray_hetero.kernels.formats import HostWeight
from ray_hetero.kernels.formats.scaled import Codes, ScaledWeight
from ray_hetero.kernels.formats.stored_codes import MX_GROUP, NVFP4_GROUP

Found = tuple[Codes, torch.Tensor]
"""Codes without memory for themselves, and the checkpoint's bytes [N, …] that hold them."""


def arranged(
    stored: StoredExperts, native: ModuleType, order: Order, make_room: MakeRoom
) -> tuple[Room, list[tuple[HostWeight, HostWeight]]] | None:
    """Memory with all experts of a layer; None for formats that others bring into order.

    Args:
        stored: the checkpoint's tensors.
        native: the module of the kernels.
        order: of the outputs of gate and up.
        make_room: makes the memory.

    Raises:
        UnsupportedError: a shape, a scale or a code that the kernels do not compute.

    """
    if stored.scheme not in ("mxfp4", "nvfp4", "fp8"):
        return None
    kind, count = KINDS[stored.scheme], len(stored.w13)
    all_found = [_found(stored, expert) for expert in range(count)]
    shapes = [codes.shape for codes, _ in all_found[0]]
    if any(size % MULTIPLE for shape in shapes for size in shape):
        return None
    sizes = _sizes(kind, all_found, native)
    room = make_room((count * in_lines(sizes[0]), count * in_lines(sizes[1])))
    room.expect((count * in_lines(sizes[0]), count * in_lines(sizes[1])))
    gate_up, down = (torch.arange(outputs) for outputs, _ in shapes)
    orders = paired(gate_up, order), down
    weights: list[tuple[HostWeight, HostWeight]] = []
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        tasks = []
        for found in all_found:
            made = []
            for half, ((codes, raw), outputs) in enumerate(zip(found, orders, strict=True)):
                place = room.taken(sizes[half], half)
                weight, write = kind.arranged(codes, raw, outputs, place, native)
                made.append(weight)
                tasks.append(pool.submit(write))
            weights.append((made[0], made[1]))
        for task in tasks:
            task.result()
    return room, weights


def _sizes(
    kind: type[ScaledWeight], all_found: Sequence[tuple[Found, Found]], native: ModuleType
) -> tuple[int, int]:
    """Bytes of gate and up, and of down.

    Raises:
        UnsupportedError: a shape, a scale or a code that the kernels do not compute.

    """
    sizes = 0, 0
    for expert, ((gate_up, _), (down, _)) in enumerate(all_found):
        try:
            sizes = kind.nbytes_of(gate_up, native), kind.nbytes_of(down, native)
        except UnsupportedError as error:
            raise UnsupportedError(f"expert {expert}: {error}") from None
    return sizes


def _found(stored: StoredExperts, expert: int) -> tuple[Found, Found]:
    if stored.scheme == "fp8":
        both = codes_of(stored, expert)
        return (both[0], both[0].codes), (both[1], both[1].codes)

    def of(weight: torch.Tensor, scale: torch.Tensor, factors: torch.Tensor | None) -> Found:
        outputs, half = weight.shape
        shape = torch.empty((outputs, 2 * half), dtype=torch.uint8, device="meta")
        if stored.scheme == "mxfp4":
            return Codes(shape, scale.view(torch.float8_e8m0fnu), MX_GROUP), weight
        assert factors is not None, "vLLM registers a factor for each expert"
        return Codes(shape, scale, NVFP4_GROUP, factor=float(factors[expert])), weight

    return (
        of(stored.w13[expert], stored.w13_scale[expert], stored.w13_factor),
        of(stored.w2[expert], stored.w2_scale[expert], stored.w2_factor),
    )
