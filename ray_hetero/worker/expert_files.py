"""The experts of a model in an expert rank, read from the checkpoint's files.

Neither vLLM's classes of models nor its platform for CPUs are imported: headers of safetensors
files tell where each expert's tensors are, and native code brings this rank's slices into the order
of the kernels.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from placement.model.checkpoint import weight_files
from placement.model.config import UnknownModelError
from placement.model.expert_tensors import ExpertTensors
from placement.model.shape import remote_layers
from placement.units import GIB
from ray_hetero.compat.models.quantised_experts import StoredExperts
from ray_hetero.config import HeteroConfig
from ray_hetero.distributed.expert_service import HeldLayer
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.activations import FIXED, Activation
from ray_hetero.kernels.experts.arranged_experts import arranged
from ray_hetero.kernels.experts.expert_room import Room, room_to_share
from ray_hetero.kernels.experts.load_progress import LoadProgress
from ray_hetero.kernels.experts.quantised_experts import held
from ray_hetero.kernels.experts.routed_experts import RoutedExperts
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger
from ray_hetero.world import ExpertSource

Tensors = Mapping[tuple[int | None, str], torch.Tensor]
"""Tensors of a layer by expert, None for those of all, and by the rest of their name."""
SUFFIXES = {
    "fp8": ("weight", "weight_scale_inv"),
    "int4": ("weight_packed", "weight_scale"),
}
"""Ends of the names of an expert's tensors, by format."""


@dataclass(frozen=True)
class Share:
    """Part of every expert that one expert rank holds."""

    number: int
    ranks: int

    def of(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """This rank's part of a tensor along an axis, not copied.

        Raises:
            UnsupportedError: the axis cannot be divided into equal parts.

        """
        size = tensor.shape[axis]
        if size % self.ranks:
            raise UnsupportedError(
                f"experts of {self.ranks} expert ranks: {size} rows, blocks or groups of a tensor "
                f"cannot be divided by {self.ranks}. Set experts.ranks to a divisor of {size}."
            )
        part = size // self.ranks
        return tensor.narrow(axis, self.number * part, part)


def load_from_files(
    source: ExpertSource,
    config: HeteroConfig,
    kernel: StreamingLinear,
    remote: int,
    share: Share,
) -> dict[str, HeldLayer]:
    """Load this rank's slices of all remote experts.

    Args:
        source: the checkpoint, and how it holds its experts.
        config: in which format the kernel computes.
        kernel: computes them.
        remote: number of layers, see `remote_layers`.
        share: of this rank.

    Returns:
        The layers by vLLM's name.

    Raises:
        UnsupportedError: there are no experts, or they cannot be divided so, or nothing here
            computes them.
        UnknownModelError: tensors are missing, or have other names.

    """
    numbers = remote_layers(source.layers, remote)
    with contextlib.ExitStack() as files:
        layers = _tensors_of_layers(_folder_of(source), source.tensors, numbers, files)
        if not layers:
            raise UnsupportedError(
                f"experts.ranks is {share.ranks}, but {source.model} has no routed experts in its "
                f"last {remote} layers. Leave experts out."
            )
        maker = _Maker(source, config, kernel, share)
        progress = LoadProgress(len(layers))
        found = {}
        for number, tensors in sorted(layers.items()):
            name = source.tensors.names.of_layer(number)
            try:
                experts = maker.made(tensors)
            except UnsupportedError as error:
                raise UnsupportedError(f"{name}: {error}") from None
            except KeyError as error:
                raise UnknownModelError(
                    f"{name}: {source.model} has no tensor {error.args[0]} of it"
                ) from None
            found[name] = _held(experts, source)
            progress.add(experts.nbytes)
    nbytes = sum(layer.experts.nbytes for layer in found.values() if layer.experts is not None)
    logger.info(
        "slices %d of %d of the experts of %d layers are read without vLLM's loader, %.1f GiB",
        share.number + 1, share.ranks, len(found), nbytes / GIB,
    )  # fmt: skip
    return found


def _folder_of(source: ExpertSource) -> Path:
    """The checkpoint's folder; its files are fetched from the hub where they are not there."""
    if Path(source.model).is_dir():
        return Path(source.model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            source.model,
            revision=source.revision,
            cache_dir=source.download_dir,
            allow_patterns=["*.safetensors", "*.safetensors.index.json"],
        )
    )


def _tensors_of_layers(
    folder: Path, tensors: ExpertTensors, numbers: range, files: contextlib.ExitStack
) -> dict[int, dict[tuple[int | None, str], torch.Tensor]]:
    """Tensors of the experts by layer, which lie in the mapped files until these are closed."""
    found: dict[int, dict[tuple[int | None, str], torch.Tensor]] = defaultdict(dict)
    pattern = tensors.of_experts
    for path in weight_files(folder):
        file = files.enter_context(safe_open(path, "pt"))
        for name in file.keys():  # noqa: SIM118
            match = pattern.search(name)
            if match is None or int(match[1]) not in numbers:
                continue
            expert = None if tensors.names.has_all_in_one else int(match[2])
            found[int(match[1])][expert, match[match.lastindex or 0]] = file.get_tensor(name)
    return found


class _Maker:
    """Makes a layer's experts from its tensors.

    Args:
        source: the checkpoint, and how it holds its experts.
        config: in which format the kernel computes.
        kernel: computes them.
        share: of this rank.

    """

    def __init__(
        self, source: ExpertSource, config: HeteroConfig, kernel: StreamingLinear, share: Share
    ) -> None:
        self._tensors = source.tensors
        self._share = share
        names = source.tensors.names
        self._activation = FIXED.get(names.activation) or Activation(names.activation)
        self._kernel = kernel
        self._kind = FORMATS[config.cpu.weight_format(kernel.level.name)]
        self._room = room_to_share if config.experts.prefill_on_gpu else Room

    def made(self, tensors: Tensors) -> RoutedExperts:
        """The experts of a layer.

        Raises:
            KeyError: a tensor is missing; its name.
            UnsupportedError: a shape, a scale or a code that the kernels do not compute.

        """
        about: dict[str, Any] = {
            "native": self._kernel.native, "level": self._kernel.level,
            "activation": self._activation,
        }  # fmt: skip
        scheme = self._tensors.scheme
        if self._tensors.names.has_all_in_one:
            biases = self._biases(tensors)
            if not scheme:
                w13, w2 = self._plain_together(tensors)
                return RoutedExperts(w13, w2, *biases, kind=self._kind, room=self._room, **about)
            return self._quantised(self._micro_floats(tensors), biases, about)
        if not scheme:
            w13, w2 = self._stacked(tensors, "weight", torch.bfloat16)
            return RoutedExperts(w13, w2, kind=self._kind, room=self._room, **about)
        weight, scale = SUFFIXES[scheme]
        w13, w2 = self._stacked(tensors, weight)
        w13_scale, w2_scale = self._stacked(tensors, scale)
        stored = StoredExperts(scheme, w13, w2, w13_scale, w2_scale, block=self._tensors.block)
        return self._quantised(stored, (None, None), about)

    def _quantised(
        self, stored: StoredExperts, biases: Sequence[torch.Tensor | None], about: dict[str, Any]
    ) -> RoutedExperts:
        native, order = self._kernel.native, self._activation.order
        if found := arranged(stored, native, order, self._room):
            return RoutedExperts.in_room(*found, *biases, **about)
        weights = held(stored, native, order)
        return RoutedExperts.of_weights(weights, len(stored.w13), *biases, room=self._room, **about)

    def _stacked(
        self, tensors: Tensors, end: str, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One kind of tensors of all experts: gate and up [E, outputs, …], and down [E, …]."""
        count = 1 + max(expert for expert, _ in tensors if expert is not None)
        gate, up, down = (f"{part}.{end}" for part in self._tensors.names.parts)

        def halves(expert: int) -> list[torch.Tensor]:
            return [self._share.of(tensors[expert, part], 0) for part in (gate, up)]

        def last(expert: int) -> torch.Tensor:
            found = tensors[expert, down]
            # A scale of all inputs belongs to every slice.
            return found if found.shape[1] == 1 else self._share.of(found, 1)

        outputs, *others = halves(0)[0].shape
        dtype = dtype or halves(0)[0].dtype
        w13 = torch.empty((count, 2 * outputs, *others), dtype=dtype)
        w2 = torch.empty((count, *last(0).shape), dtype=dtype)

        def copy(expert: int) -> None:
            for half, part in enumerate(halves(expert)):
                w13[expert, half * outputs : (half + 1) * outputs].copy_(part)
            w2[expert].copy_(last(expert))

        # Pages of the files are read by as many threads.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(copy, range(count)))
        return w13, w2

    def _biases(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Biases of gate and up, and of down, which the first rank adds; as vLLM rounds them."""
        gate_up = self._share.of(tensors[None, "gate_up_proj_bias"], 1).to(torch.bfloat16)
        down = tensors[None, "down_proj_bias"].to(torch.bfloat16)
        return gate_up.contiguous(), down if self._share.number == 0 else torch.zeros_like(down)

    def _plain_together(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of one tensor [E, inputs, outputs] each."""
        gate_up, down = tensors[None, "gate_up_proj"], tensors[None, "down_proj"]
        return (
            self._share.of(gate_up, 2).mT.to(torch.bfloat16).contiguous(),
            self._share.of(down, 1).mT.to(torch.bfloat16).contiguous(),
        )

    def _micro_floats(self, tensors: Tensors) -> StoredExperts:
        """Tensors in MXFP4: codes [E, outputs, groups, 16], exponents [E, outputs, groups]."""

        def of(name: str, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
            blocks, scales = tensors[None, f"{name}_blocks"], tensors[None, f"{name}_scales"]
            codes = self._share.of(blocks, axis).flatten(-2).contiguous()
            return codes, self._share.of(scales, axis).contiguous()

        (w13, w13_scale), (w2, w2_scale) = of("gate_up_proj", 1), of("down_proj", 2)
        return StoredExperts("mxfp4", w13, w2, w13_scale, w2_scale)


def _held(experts: RoutedExperts, source: ExpertSource) -> HeldLayer:
    def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return experts(x, weights, ids)

    return HeldLayer(
        experts.hidden, torch.bfloat16, compute, experts.call, experts,
        source.tensors.chosen, experts.count,
    )  # fmt: skip
