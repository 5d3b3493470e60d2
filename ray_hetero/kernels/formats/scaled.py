"""Weights as short codes with scales: what the formats of quantised checkpoints have in common.

A checkpoint holds a code for each weight, and for each output a scale for every group of
neighbouring inputs.  The bits stay what they are; they are only brought into the order in which a
decode step reads them (csrc/kernels/formats/scaled.h).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.formats.base import BLOCK, HostWeight

if TYPE_CHECKING:
    import torch

GROUP_MULTIPLE = 4
"""Divisor of a group's number of inputs: what kernels expand at once."""
LARGEST_SCALE = 2.0**100
"""Largest scale: far above what checkpoints hold, and below what overflows on the way."""
LARGEST_E8M0 = 227
"""Code of `LARGEST_SCALE` in E8M0; those above are larger, and 255 is NaN."""
LANES = 16
"""Lanes of 32 bits in a register: in bf16 a row, two inputs of 32 outputs, fills two registers."""
NATIVE_SCALES = {
    "float32": "float32", "bfloat16": "bfloat16", "float8_e8m0fnu": "e8m0",
    "float8_e4m3fn": "e4m3",
}  # fmt: skip
"""The native module's names of the types of scales."""
LINE_BYTES = 64
"""Bytes of a cache line, of which a block takes whole ones."""


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantised weight W [N, K] as a checkpoint holds it.

    W[n, k] is the value of codes[n, k], less that of the zero point, times the scale of group
    k // group: widened to float32, multiplied there and rounded to the nearest bf16, the even one
    of two.  That is how vLLM's kernels for CPUs expand weights before they multiply.  For up to 32
    tokens the weight is multiplied before it is rounded (csrc/kernels/codes.h).  On the cores
    what is below 2^-126 counts as 0 (csrc/kernels/denormals.h), on a GPU it may not.
    """

    codes: torch.Tensor
    """[N, K], uint8, one code each."""
    scales: torch.Tensor
    """[N, groups]: bfloat16, float32, or E8M0 and E4M3 as PyTorch has them; or [N / 32, groups],
    float32, one for all outputs of a block."""
    group: int
    """Inputs that share a scale; the last group may have fewer."""
    zeros: torch.Tensor | None = None
    """[N, groups], uint8, codes whose value is 0; None for the format's own."""
    factor: float = 1.0
    """Factor that E4M3 scales are multiplied with, in float32."""

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def groups(self) -> int:
        """Groups of an output."""
        return -(-self.shape[1] // self.group)

    @property
    def layout(self) -> Layout:
        """Layout for the kernels."""
        is_uniform = len(self.scales) * BLOCK == self.shape[0]
        return Layout(
            self.group, self.scales.dtype, is_uniform, self.zeros is not None, self.factor
        )

    def for_each_weight(self, of_groups: torch.Tensor) -> torch.Tensor:
        """[N, K], float32, from one value for each group."""
        import torch

        values = of_groups.to(torch.float32)
        if of_groups.dtype == torch.float8_e4m3fn:
            values = values * torch.tensor(self.factor, dtype=torch.float32)
        values = values.repeat_interleave(self.shape[0] // len(values), 0)
        return values.repeat_interleave(self.group, 1)[:, : self.shape[1]]


@dataclass(frozen=True)
class Layout:
    """Layout of a weight's scales and zero points, without their values."""

    group: int
    scales: torch.dtype
    is_uniform: bool
    """Whether all outputs of a block share their scales."""
    has_zeros: bool
    factor: float

    def places(self, inputs: int, bits: int) -> tuple[int, int, int]:
        """Bytes of a block before its scales and before its zero points, and of all of it.

        Args:
            inputs: of the weight.
            bits: of a code.

        """
        groups = -(-inputs // self.group)
        scales = BLOCK * inputs * bits // 8
        zeros = scales + groups * self.outputs * self.scales.itemsize
        end = zeros + (groups * BLOCK if self.has_zeros else 0)
        return scales, zeros, end + -end % LINE_BYTES

    @property
    def outputs(self) -> int:
        """Scales of a group in a block."""
        return 1 if self.is_uniform else BLOCK

    @property
    def native(self) -> str:
        """The native module's name of the scales."""
        kind = name_of(self.scales)
        return "one" if self.is_uniform else NATIVE_SCALES[kind]


@dataclass(frozen=True, eq=False)
class ScaledWeight(HostWeight):
    """A weight of codes; `data` is [N, bytes of an output], rows and scales of a block together."""

    layout: Layout

    bits: ClassVar[int]
    """Bits of a code."""
    scale_types: ClassVar[tuple[str, ...]]
    """PyTorch's names of the types that scales may have."""
    has_zeros: ClassVar[bool] = False
    """Whether there may be zero points."""
    no_number: ClassVar[int] = 0
    """Code of eight bits, without its sign, that is no number; 0 if all are numbers."""

    @classmethod
    def made(cls, packed: torch.Tensor, native: ModuleType) -> Self | None:
        """None: codes come from a checkpoint, not from weights in bf16."""
        return None

    @classmethod
    def stored(cls, codes: Codes, native: ModuleType) -> Self:
        """A checkpoint's weight.

        Raises:
            UnsupportedError: a shape, a scale or a code that the kernels do not compute.

        """
        import torch

        cls._check(codes)
        encoding = cls._encoding(codes, native)
        blocks = codes.shape[0] // BLOCK
        data = torch.zeros((blocks, encoding.block_bytes), dtype=torch.uint8)
        at = 0
        for part in cls._parts(codes):
            end = at + part.shape[1]
            data[:, at:end] = part
            at = end
        return cls(data.view(codes.shape[0], -1), encoding, codes.layout)

    @classmethod
    def nbytes_of(cls, codes: Codes, native: ModuleType) -> int:
        """Bytes of a weight in the order of the kernels.

        Raises:
            UnsupportedError: as `stored`.

        """
        cls._check(codes)
        return int(codes.shape[0] // BLOCK * cls._encoding(codes, native).block_bytes)

    @classmethod
    def arranged(
        cls, codes: Codes, raw: torch.Tensor, outputs: torch.Tensor, place: torch.Tensor,
        native: ModuleType,
    ) -> tuple[Self, Callable[[], None]]:  # fmt: skip
        """A checkpoint's weight in memory that is there, and what writes it, in any thread.

        Args:
            codes: of the weight, which `nbytes_of` takes; their own tensor is not read.
            raw: uint8, [N, bytes], the codes as the checkpoint has them; 4 bits: the first of two
                in the lower half of a byte.
            outputs: number of the stored output for each one of the weight.
            place: uint8, bytes of the weight.
            native: the module of the kernels.

        """
        import torch

        encoding = cls._encoding(codes, native)
        scales = codes.scales
        if codes.layout.is_uniform or raw.stride(1) != 1 or codes.zeros is not None:
            raise AssertionError("each output has scales of its own, and no zero points")
        scales = scales.contiguous().view(torch.uint8)
        order = outputs.tolist()

        def write() -> None:
            native.arrange(
                codes=raw.data_ptr(), code_stride=raw.stride(0), scales=scales.data_ptr(),
                scale_stride=scales.stride(0), inputs=codes.shape[1], groups=codes.groups,
                scale_bytes=codes.scales.itemsize, bits=cls.bits, outputs=order, stored=len(raw),
                block_bytes=encoding.block_bytes, to=place.data_ptr(),
            )  # fmt: skip

        return cls(place.view(codes.shape[0], -1), encoding, codes.layout), write

    @classmethod
    def in_place(cls, codes: Codes, place: torch.Tensor, native: ModuleType) -> Self:
        """A checkpoint's weight in memory that has its bytes, or that somebody will write there.

        Args:
            codes: of the weight; without memory.
            place: uint8, bytes of the weight.
            native: the module of the kernels.

        """
        return cls(place.view(codes.shape[0], -1), cls._encoding(codes, native), codes.layout)

    @classmethod
    @abstractmethod
    def values(cls, codes: torch.Tensor) -> torch.Tensor:
        """Values of codes, uint8, whatever the zero point; exact in bf16."""

    @classmethod
    def zero(cls) -> int:
        """The code whose value is 0 where there are no zero points."""
        return 0

    @classmethod
    def rows(cls, codes: torch.Tensor) -> torch.Tensor:
        """Codes [N, K] as rows of blocks, [N / 32, bytes], as the kernels read them.

        Here those of four bits (csrc/kernels/formats/fp4.h, int4.h): a word of 16 bits has the
        halves of two rows.
        """
        four = elements(codes)
        blocks, pairs, _ = four.shape
        both = four.view(blocks, pairs // 2, 4, BLOCK).transpose(2, 3)
        nibbles = both.reshape(blocks, -1, 2)
        return nibbles[..., 0] | nibbles[..., 1] << 4

    @classmethod
    def codes(cls, rows: torch.Tensor, inputs: int) -> torch.Tensor:
        """Codes [N, K] of rows of blocks, [N / 32, bytes]: the reverse of `rows`."""
        import torch

        blocks = len(rows)
        nibbles = torch.stack((rows & 15, rows >> 4), dim=-1)
        both = nibbles.view(blocks, inputs // 4, BLOCK, 4).transpose(2, 3)
        return from_elements(both.reshape(blocks, inputs // 2, 2 * BLOCK))

    @classmethod
    @abstractmethod
    def _encoding(cls, codes: Codes, native: ModuleType) -> Any: ...

    @classmethod
    def expanded(cls, codes: Codes) -> torch.Tensor:
        """W [N, K] in bf16 by its definition, see `Codes`."""
        import torch

        values = cls.values(codes.codes).to(torch.float32)
        if codes.zeros is not None:
            values = values - codes.for_each_weight(codes.zeros)
        else:
            values = values - cls.zero()
        return (values * codes.for_each_weight(codes.scales)).to(torch.bfloat16)

    @classmethod
    def _check(cls, codes: Codes) -> None:
        import torch

        outputs, inputs = codes.shape
        if outputs % BLOCK or inputs % BLOCK:
            raise UnsupportedError(
                f"{cls.name}: expected outputs and inputs in multiples of {BLOCK}, got {outputs} "
                f"and {inputs}"
            )
        if codes.group <= 0 or codes.group % GROUP_MULTIPLE:
            raise UnsupportedError(
                f"{cls.name}: expected groups in multiples of {GROUP_MULTIPLE} inputs, got "
                f"{codes.group}"
            )
        kind = name_of(codes.scales.dtype)
        if kind not in cls.scale_types:
            raise UnsupportedError(
                f"{cls.name}: expected scales as {' or '.join(cls.scale_types)}, got {kind}"
            )
        if not abs(codes.factor) <= LARGEST_SCALE:
            raise UnsupportedError(
                f"{cls.name}: the factor of all scales is {codes.factor}; the checkpoint is damaged"
            )
        if codes.zeros is not None and not cls.has_zeros:
            raise UnsupportedError(f"{cls.name}: expected no zero points")
        scales = codes.scales
        if scales.is_meta:
            return  # Whoever reads the values looks at them.
        wrong = 0
        if scales.dtype != torch.float8_e8m0fnu:
            wrong = int((~(scales.float().abs() <= LARGEST_SCALE)).sum())
        elif (exponents := scales.view(torch.uint8)).max() > LARGEST_E8M0:
            wrong = int((exponents > LARGEST_E8M0).sum())
        cls.check_values(wrong, scales.numel())
        if cls.no_number:
            wrong = int(((codes.codes & cls.no_number) == cls.no_number).sum())
            cls.check_values(0, scales.numel(), wrong, codes.codes.numel())

    @classmethod
    def check_values(
        cls, wrong_scales: int, scales: int, wrong_codes: int = 0, codes: int = 0
    ) -> None:
        """Raise if some scales or codes are none that a weight can have.

        Args:
            wrong_scales: how many of the scales are infinite, NaN or too large.
            scales: how many there are.
            wrong_codes: how many of the codes are no numbers.
            codes: how many there are.

        Raises:
            UnsupportedError: some are.

        """
        if wrong_scales:
            raise UnsupportedError(
                f"{cls.name}: {wrong_scales} of {scales} scales are infinite, NaN or above "
                f"{LARGEST_SCALE:g}; the checkpoint is damaged"
            )
        if wrong_codes:
            raise UnsupportedError(
                f"{cls.name}: {wrong_codes} of {codes} weights are NaN; the checkpoint is damaged"
            )

    @classmethod
    def _parts(cls, codes: Codes) -> Iterator[torch.Tensor]:
        import torch

        yield cls.rows(codes.codes)
        for of_groups in (codes.scales, codes.zeros):
            if of_groups is not None:
                blocks = codes.shape[0] // BLOCK
                by_group = of_groups.reshape(blocks, -1, codes.groups).transpose(1, 2).contiguous()
                yield by_group.view(blocks, -1).view(torch.uint8)

    @property
    def facts(self) -> dict[str, Any]:
        """The layout, its type of scales by name."""
        return {**vars(self.layout), "scales": name_of(self.layout.scales)}


def layout_of(facts: Mapping[str, Any]) -> Layout:
    """Layout that `ScaledWeight.facts` describes."""
    import torch

    return Layout(**{**facts, "scales": getattr(torch, facts["scales"])})


def name_of(kind: torch.dtype) -> str:
    """A type's name without its module's."""
    return str(kind).removeprefix("torch.")


def elements(codes: torch.Tensor) -> torch.Tensor:
    """Elements of rows, [N / 32, K / 2, 64], of codes [N, K]."""
    outputs, inputs = codes.shape
    blocks = codes.reshape(outputs // BLOCK, BLOCK, inputs // 2, 2).transpose(1, 2)
    return blocks.reshape(outputs // BLOCK, inputs // 2, 2 * BLOCK)


def from_elements(rows: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] of elements [N / 32, K / 2, 64]."""
    blocks, pairs, _ = rows.shape
    return rows.reshape(blocks, pairs, BLOCK, 2).transpose(1, 2).reshape(blocks * BLOCK, 2 * pairs)
