"""Rows of a checkpoint's files that one expert rank reads: its slice of every expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from placement.model.checkpoint import StoredTensor
from placement.model.expert_tensors import ExpertTensors
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.file_experts import FileWeight, Rows
from ray_hetero.kernels.formats.stored_codes import CODES_PER_WORD, MX_GROUP, check_groups

Key = tuple[int | None, str]
"""An expert, None for tensors of all, and the rest of a tensor's name."""
Layer = Mapping[Key, StoredTensor]
"""Tensors of a layer's experts."""
Pairs = list[tuple[FileWeight, FileWeight]]
"""Gate and up in one, and down, of each expert."""

SUFFIXES = {
    "fp8": ("weight", "weight_scale_inv"),
    "int4": ("weight_packed", "weight_scale"),
}
"""Ends of the names of an expert's tensors, by format."""
_STORED = {"": ("BF16", 16), "fp8": ("F8_E4M3", 8), "mxfp4": ("U8", 4), "int4": ("I32", 4)}
"""Type of weights or codes in the files, and bits of one, by format."""
_EXPONENTS = {"U8": torch.float8_e8m0fnu, "F8_E8M0": torch.float8_e8m0fnu}
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16}
_SCALES = {"fp8": _EXPONENTS | _FLOATS, "mxfp4": _EXPONENTS, "int4": _FLOATS}
"""Types of scales by that of the files, by format."""


@dataclass(frozen=True)
class Share:
    """Part of every expert that one expert rank holds."""

    number: int
    ranks: int

    def part(self, size: int) -> tuple[int, int]:
        """This rank's part of an axis: where it begins, and how long it is.

        Raises:
            UnsupportedError: the axis cannot be divided into equal parts.

        """
        if size % self.ranks:
            raise UnsupportedError(
                f"experts of {self.ranks} expert ranks: {size} rows, blocks or groups of a tensor "
                f"cannot be divided by {self.ranks}. Set experts.ranks to a divisor of {size}."
            )
        part = size // self.ranks
        return self.number * part, part

    def of(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """This rank's part of a tensor along an axis, not copied.

        Raises:
            UnsupportedError: see `part`.

        """
        return tensor.narrow(axis, *self.part(tensor.shape[axis]))


class ExpertRows:
    """Finds the rows.

    Args:
        tensors: how the checkpoint holds its experts.
        share: of this rank.
        opened: descriptor of a file that is open.

    """

    def __init__(self, tensors: ExpertTensors, share: Share, opened: Callable[[Path], int]) -> None:
        self._tensors = tensors
        self._share = share
        self._opened = opened

    def of(self, layer: Layer) -> Pairs | None:
        """Weights of all experts of a layer; None for such as native code does not read.

        Raises:
            KeyError: a tensor is missing; its name.
            UnsupportedError: they cannot be divided so, or not between blocks.

        """
        scheme, names = self._tensors.scheme, self._tensors.names
        if names.has_all_in_one:
            if scheme != "mxfp4":
                return None
            count = layer[None, "gate_up_proj_blocks"].shape[0]
            found = [self._micro_floats(layer, expert) for expert in range(count)]
        else:
            count = 1 + max(expert for expert, _ in layer if expert is not None)
            found = [self._of_parts(layer, expert) for expert in range(count)]
        bits, shapes, pairs = _STORED[scheme][1], set(), []
        for gate_up, down in found:
            if gate_up is None or down is None or not (gate_up.suits(bits) and down.suits(bits)):
                return None
            shapes.add((gate_up.outputs, gate_up.inputs, down.outputs, down.inputs))
            pairs.append((gate_up, down))
        return pairs if len(shapes) == 1 else None

    def _micro_floats(
        self, layer: Layer, expert: int
    ) -> tuple[FileWeight | None, FileWeight | None]:
        def of(name: str, axis: int) -> FileWeight | None:
            blocks, scales = layer[None, f"{name}_blocks"], layer[None, f"{name}_scales"]
            return self._weight([blocks], [scales], axis, MX_GROUP, expert=expert)

        return of("gate_up_proj", 0), of("down_proj", 1)

    def _of_parts(self, layer: Layer, expert: int) -> tuple[FileWeight | None, FileWeight | None]:
        scheme, parts = self._tensors.scheme, self._tensors.names.parts
        weight, scale = SUFFIXES.get(scheme, ("weight", ""))
        if scheme == "fp8":
            self._check_blocks(layer[expert, f"{parts[0]}.{weight}"].shape[0])

        def of(names: tuple[str, ...], axis: int) -> FileWeight | None:
            codes = [layer[expert, f"{name}.{weight}"] for name in names]
            scales = [layer[expert, f"{name}.{scale}"] for name in names] if scale else []
            rows, group = self._tensors.block or (1, 0)
            if scheme == "int4":
                group = self._group(codes[0], scales[0], group, axis)
            return self._weight(codes, scales, axis, group, rows)

        return of(parts[:2], 0), of(parts[2:], 1)

    def _check_blocks(self, inner: int) -> None:
        """Raise if gate and up, or the slices of two ranks, would share a block's scale.

        Args:
            inner: rows of gate and of up, of all ranks.

        """
        _, part = self._share.part(inner)
        for size in self._tensors.block or ():
            if part % size:
                raise UnsupportedError(
                    f"experts in FP8 with a scale for every {size} rows: expected a multiple of "
                    f"{size} rows of gate and up in each expert rank, got {inner} / "
                    f"{self._share.ranks} = {part}. Set experts.ranks to a number with which they "
                    f"are, or leave experts out."
                )

    def _group(self, codes: StoredTensor, scales: StoredTensor, group: int, axis: int) -> int:
        """Inputs that share a scale, of which the last ones may be fewer.

        Raises:
            UnsupportedError: there are more or fewer scales, or a group would be divided.

        """
        inputs = CODES_PER_WORD * codes.shape[1]
        check_groups(inputs, scales.shape[1], group)
        _, part = self._share.part(inputs) if axis else (0, inputs)
        if part % group and part < inputs and group < inputs:
            raise UnsupportedError(
                f"experts in int4 with a scale for every {group} inputs: expected a multiple of "
                f"{group} inputs of down in each expert rank, got {inputs} / {self._share.ranks} = "
                f"{part}. Set experts.ranks to a number with which they are, or leave experts out."
            )
        return min(group, inputs)

    def _weight(
        self, codes: list[StoredTensor], scales: list[StoredTensor], axis: int, group: int,
        outputs_per_scale: int = 1, *, expert: int | None = None,
    ) -> FileWeight | None:  # fmt: skip
        """A weight of tensors one behind the other; None for types that are not expected.

        Args:
            codes: tensors of codes or of bf16, [outputs, …], before them experts if `expert` is
                given.
            scales: tensors of scales; none for bf16.
            axis: 0 if this rank has some of the outputs, 1 if some of the inputs.
            group: inputs that share a scale.
            outputs_per_scale: outputs that share a row of scales.
            expert: which one of those that a tensor has.

        """
        scheme = self._tensors.scheme
        dtype, bits = _STORED[scheme]
        kinds = {_SCALES[scheme].get(one.dtype) for one in scales}
        if any(one.dtype != dtype for one in codes) or len(kinds) > 1 or None in kinds:
            return None
        rows = [self._rows(one, axis, expert) for one in codes]
        scale_rows = [self._rows(one, axis, expert) for one in scales]
        inputs = rows[0][1] * 8 // bits
        made = FileWeight(
            tuple(one for one, _ in rows), inputs, tuple(one for one, _ in scale_rows),
            next(iter(kinds), None), group, outputs_per_scale,
            # As vLLM's classes hand them over.
            is_widened=scheme == "fp8" and kinds == {torch.bfloat16},
        )  # fmt: skip
        widths = {width for _, width in scale_rows}
        scale_bytes = made.stored_scales.itemsize if made.stored_scales is not None else 0
        is_whole = not widths or widths == {made.groups * scale_bytes}
        return made if is_whole and len({width for _, width in rows}) == 1 else None

    def _rows(self, tensor: StoredTensor, axis: int, expert: int | None) -> tuple[Rows, int]:
        """This rank's rows of a tensor, and bytes of each.

        Raises:
            UnsupportedError: it has none, or they cannot be divided so.

        """
        if 0 in tensor.shape:
            raise UnsupportedError(
                f"{tensor.name}: expected weights, got a tensor of shape {list(tensor.shape)}; the "
                "checkpoint is damaged"
            )
        shape, nbytes, offset = tensor.shape, tensor.nbytes, tensor.offset
        if expert is not None:
            nbytes //= shape[0]
            offset += expert * nbytes
            shape = shape[1:]
        outputs, columns = shape[:2]
        stride = nbytes // outputs
        descriptor = self._opened(tensor.file)
        if axis == 0:
            begin, count = self._share.part(outputs)
            return Rows(descriptor, offset + begin * stride, stride, count), stride
        # A scale of all inputs belongs to every slice.
        begin, count = (0, 1) if columns == 1 else self._share.part(columns)
        column = stride // columns
        return Rows(descriptor, offset + begin * column, stride, outputs), count * column
