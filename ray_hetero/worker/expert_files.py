"""The experts of a model in an expert rank, read from the checkpoint's files.

Neither vLLM's classes of models nor its platform for CPUs are imported: headers of safetensors
files tell where each expert's tensors are, and native code reads this rank's slices into the order
of the kernels.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from placement.model.checkpoint import StoredTensor, stored_tensors
from placement.model.config import DamagedCheckpointError, UnknownModelError
from placement.model.shape import remote_layers
from placement.units import GIB
from ray_hetero.compat.models.quantised_experts import StoredExperts
from ray_hetero.config import HeteroConfig
from ray_hetero.distributed.expert_service import HeldLayer
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.activations import FIXED, Activation
from ray_hetero.kernels.experts.arranged_experts import arranged
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices
from ray_hetero.kernels.experts.expert_room import Room, room_to_share
from ray_hetero.kernels.experts.file_experts import FileReader
from ray_hetero.kernels.experts.load_progress import LoadProgress
from ray_hetero.kernels.experts.quantised_experts import KINDS, held
from ray_hetero.kernels.experts.routed_experts import RoutedExperts
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger
from ray_hetero.worker.expert_rows import SUFFIXES, ExpertRows, Key, Share
from ray_hetero.worker.kept_experts import KeptExperts
from ray_hetero.world import ExpertSource

Tensors = Mapping[Key, torch.Tensor]
"""Tensors of a layer, which lie in the mapped files."""
Begun = Callable[[], RoutedExperts]
"""Waits until a layer's experts are in memory, and gives them; see `_Maker.begin` for errors."""
LAYERS_AT_ONCE = 2
"""Layers that are read at the same time, so that threads have work while one ends."""


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
        OSError: a file cannot be read.

    """
    began = time.monotonic()
    numbers = remote_layers(source.layers, remote)
    layers = _tensors_of_layers(_folder_of(source), source, numbers)
    if not layers:
        raise UnsupportedError(
            f"experts.ranks is {share.ranks}, but {source.model} has no routed experts in its "
            f"last {remote} layers. Leave experts out."
        )
    found = _read(layers, source, config, kernel, share)
    nbytes = sum(layer.experts.nbytes for layer in found.values() if layer.experts is not None)
    seconds = time.monotonic() - began
    logger.info(
        "slices %d of %d of the experts of %d layers are read without vLLM's loader, %.1f GiB "
        "in %.1f s (%.2f GiB/s)",
        share.number + 1, share.ranks, len(found), nbytes / GIB, seconds, nbytes / GIB / seconds,
    )  # fmt: skip
    return found


def _read(
    layers: Mapping[int, Mapping[Key, StoredTensor]], source: ExpertSource, config: HeteroConfig,
    kernel: StreamingLinear, share: Share,
) -> dict[str, HeldLayer]:  # fmt: skip
    """Layers by vLLM's name, some of which are read at the same time."""
    found: dict[str, HeldLayer] = {}
    with contextlib.ExitStack() as stack:
        progress = LoadProgress(len(layers), _bytes_of(layers, share))
        files = _Files(stack)
        maker = _Maker(source, config, kernel, share, files, progress)
        stack.push(lambda kind, *_: maker.close(is_whole=kind is None))
        begun: deque[tuple[int, Begun]] = deque()

        def finish() -> None:
            number, wait = begun.popleft()
            with _named(number, source):
                experts = wait()
            progress.add(experts.nbytes)
            found[source.tensors.names.of_layer(number)] = _held(experts, source)

        for number, tensors in sorted(layers.items()):
            with _named(number, source):
                begun.append((number, maker.begin(number, tensors)))
            if len(begun) > LAYERS_AT_ONCE:
                finish()
        while begun:
            finish()
    return found


@contextlib.contextmanager
def _named(number: int, source: ExpertSource) -> Iterator[None]:
    """Put a layer's name before errors of its experts."""
    name = source.tensors.names.of_layer(number)
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None
    except KeyError as error:
        raise UnknownModelError(
            f"{name}: {source.model} has no tensor {error.args[0]} of it"
        ) from None
    except EOFError as error:
        raise DamagedCheckpointError(str(error)) from None


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
    folder: Path, source: ExpertSource, numbers: range
) -> dict[int, dict[Key, StoredTensor]]:
    """Places of the experts' tensors by layer.

    Raises:
        UnknownModelError: files are missing, or damaged.

    """
    found: dict[int, dict[Key, StoredTensor]] = defaultdict(dict)
    pattern = source.tensors.of_experts
    for tensor in stored_tensors(folder):
        match = pattern.search(tensor.name)
        if match is None or int(match[1]) not in numbers:
            continue
        expert = None if source.tensors.names.has_all_in_one else int(match[2])
        found[int(match[1])][expert, match[match.lastindex or 0]] = tensor
    return found


def _bytes_of(layers: Mapping[int, Mapping[Key, StoredTensor]], share: Share) -> int:
    """Bytes of the files that a rank reads, about: biases are not divided."""
    return sum(one.nbytes for layer in layers.values() for one in layer.values()) // share.ranks


class _Files:
    """Files of the checkpoint, open until a load has ended.

    Args:
        stack: closes them.

    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._descriptors: dict[Path, int] = {}
        self._mapped: dict[Path, Any] = {}

    def opened(self, path: Path) -> int:
        """Descriptor of a file."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._descriptors[path])
        return self._descriptors[path]

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """A tensor, which lies in the mapped file."""
        if stored.file not in self._mapped:
            self._mapped[stored.file] = self._stack.enter_context(safe_open(stored.file, "pt"))
        tensor: torch.Tensor = self._mapped[stored.file].get_tensor(stored.name)
        return tensor


class _Maker:
    """Makes a layer's experts from its tensors.

    Args:
        source: the checkpoint, and how it holds its experts.
        config: in which format the kernel computes.
        kernel: computes them.
        share: of this rank.
        files: of the checkpoint.
        progress: counts what is read.

    """

    def __init__(
        self, source: ExpertSource, config: HeteroConfig, kernel: StreamingLinear, share: Share,
        files: _Files, progress: LoadProgress,
    ) -> None:  # fmt: skip
        self._tensors = source.tensors
        self._share = share
        names = source.tensors.names
        self._activation = FIXED.get(names.activation) or Activation(names.activation)
        self._kernel = kernel
        self._kind = FORMATS[config.cpu.weight_format(kernel.level.name)]
        self._room = room_to_share if config.experts.is_read_by_gpus else Room
        self._files = files
        self._rows = ExpertRows(source.tensors, share, files.opened)
        self._progress = progress
        self._reader = FileReader(kernel.native, torch.get_num_threads(), progress.read)
        folder = config.experts.keep_packed
        self._kept = (
            KeptExperts(
                folder,
                source,
                share,
                kernel,
                self._kind.name,
                files.opened,
                config.startup.load_timeout_s,
            )
            if folder
            else None
        )

    def close(self, *, is_whole: bool) -> None:
        """Read no more, and wait for what is being kept if all has been read."""
        self._reader.close()
        if self._kept is not None:
            self._kept.finish(is_wanted=is_whole)

    def begin(self, number: int, tensors: Mapping[Key, StoredTensor]) -> Begun:
        """Begin to read a layer from its kept file, or from the checkpoint; see `_begin`.

        Args:
            number: of the layer.
            tensors: of its experts.

        """
        if (kept := self._kept) is None:
            return self._begin(tensors)
        layer = self._tensors.names.of_layer(number)
        wait = kept.begin(layer, tensors, self._reader, self._room, self._progress.read)
        begun = self._begin(tensors) if wait is None else None

        def finish() -> RoutedExperts:
            if wait is not None and (found := wait()) is not None:
                return RoutedExperts.in_room(*found, *self._biases(tensors), **self._about)
            experts = (begun or self._begin(tensors))()
            kept.keep(layer, tensors, experts)
            return experts

        return finish

    def _begin(self, tensors: Mapping[Key, StoredTensor]) -> Begun:
        """Begin to read a layer from the checkpoint, and give what waits for it.

        Raises:
            KeyError: a tensor is missing; its name.
            UnsupportedError: a shape, a scale or a code that the kernels do not compute.
            EOFError: a file is shorter than its header says.
            OSError: a file cannot be read.

        """
        pairs = self._rows.of(tensors)
        if pairs is None:
            mapped = {key: self._files.tensor(one) for key, one in tensors.items()}
            experts = self._made(mapped)
            self._progress.read(sum(one.nbytes for one in mapped.values()) // self._share.ranks)
            return lambda: experts
        kind = KINDS[self._tensors.scheme] if self._tensors.scheme else self._kind
        wait = self._reader.begin(pairs, kind, self._activation.order, self._room)
        biases = self._biases(tensors)
        return lambda: RoutedExperts.in_room(*wait(), *biases, **self._about)

    @property
    def _about(self) -> dict[str, Any]:
        return {
            "native": self._kernel.native, "level": self._kernel.level,
            "activation": self._activation,
        }  # fmt: skip

    def _made(self, tensors: Tensors) -> RoutedExperts:
        """The experts of a layer that native code does not read; errors as of `begin`."""
        about, scheme = self._about, self._tensors.scheme
        if self._tensors.names.has_all_in_one:
            biases = self._rounded_biases(tensors)
            if not scheme:
                matrices = ExpertMatrices(*self._plain_together(tensors), *biases)
                return RoutedExperts(matrices, kind=self._kind, room=self._room, **about)
            return self._quantised(self._micro_floats(tensors), biases, about)
        if not scheme:
            matrices = ExpertMatrices(*self._stacked(tensors, "weight", torch.bfloat16))
            return RoutedExperts(matrices, kind=self._kind, room=self._room, **about)
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

    def _biases(
        self, stored: Mapping[Key, StoredTensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        if not self._tensors.names.has_all_in_one:
            return None, None
        names = "gate_up_proj_bias", "down_proj_bias"
        tensors: Tensors = {(None, one): self._files.tensor(stored[None, one]) for one in names}
        return self._rounded_biases(tensors)

    def _rounded_biases(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
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
