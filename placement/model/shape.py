"""The sizes of a model as values; reading them is `model_shape`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from placement.model.tensors import Layer, Tensor
from placement.model.towers import is_tower
from placement.model.undivided import Use, barred_cuts, divided

Source = Literal["config", "safetensors", "vLLM"]
"""Source of sizes: a reader of config.json, headers of files, vLLM's own class of the model."""
NO_PIPELINES = (
    "vLLM has no pipelines for this model: all layers are on one stage. Give "
    "--pipeline-parallel-size 1, or write a layout of one stage."
)
LONG = 1 << 24
"""Tokens of a sequence that is longer than any window."""


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: one latent per token instead of keys and values per head."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model that placing it needs."""

    model_type: str
    source: Source
    layers: tuple[Layer, ...]
    embedding: tuple[Tensor, ...]
    final_norm: tuple[Tensor, ...]
    output_head: tuple[Tensor, ...]
    """Empty where the embedding serves as output matrix."""
    extra: tuple[Tensor, ...]
    """Encoders of images and sound, and whatever else is no part of the decoder."""
    tied: bool
    vocabulary_everywhere: bool
    """vLLM gives each pipeline stage of this architecture its embedding, norm and output head."""
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    """Widest MLP a token passes, all its active experts together."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    """Width of activations."""
    experts: int = 0
    active_experts: int = 0
    mla: Mla | None = None
    expert_parts: int = 0
    """Most slices that a routed expert can be cut into: its inner size, or blocks of it."""
    uses: tuple[Use, ...] = ()
    """Layers that must be on the same stage as an earlier one."""
    divides: bool = True
    """Whether vLLM has pipelines for the model."""
    has_unsized_encoders: bool = False
    """Whether there are encoders of images or sound beside what is listed here."""

    @property
    def towers(self) -> tuple[Tensor, ...]:
        """Encoders of images and sound: every stage holds them, the first one computes them."""
        return tuple(tensor for tensor in self.extra if is_tower(tensor.name))

    @property
    def has_encoders(self) -> bool:
        """Whether the model encodes images or sound."""
        return self.has_unsized_encoders or bool(self.towers)

    def without_encoders(self) -> ModelShape:
        """The model as it is for text alone."""
        kept = tuple(tensor for tensor in self.extra if not is_tower(tensor.name))
        return replace(self, extra=kept, has_unsized_encoders=False)

    @property
    def barred(self) -> frozenset[int]:
        """Layers that no stage may begin with."""
        return barred_cuts(self.uses) if self.divides else frozenset(range(1, len(self.layers)))

    def why_not_divided(self, layers: tuple[int, ...]) -> str:
        """Why stages of so many layers do not compute the model; empty where they do."""
        if len(layers) > 1 and not self.divides:
            return NO_PIPELINES
        return divided(self.uses, layers)

    def with_remote_experts(self, layers: int) -> ModelShape:
        """The model as stages of it are that leave their last layers' experts to expert ranks.

        Args:
            layers: of how many layers, the model's last ones.

        """
        remote = remote_layers(len(self.layers), layers)
        return replace(
            self,
            layers=tuple(_without_experts(x) if x.index in remote else x for x in self.layers),
        )

    @property
    def remote_bytes(self) -> int:
        """Bytes of the experts that expert ranks hold, all together."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.remote)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        rest = self.embedding + self.final_norm + self.output_head + self.extra
        return sum(layer.nbytes for layer in self.layers) + sum(t.nbytes for t in rest)

    def bytes_by_role(self) -> dict[str, int]:
        """Weight bytes of attention, MLP, experts, norms, embedding, output head, …."""
        sums: dict[str, int] = {}
        named: list[tuple[str, Tensor]] = [
            *((tensor.role, tensor) for layer in self.layers for tensor in layer.tensors),
            *(("embedding", tensor) for tensor in self.embedding),
            *(("norm", tensor) for tensor in self.final_norm),
            *(("output head", tensor) for tensor in self.output_head),
            *(("other", tensor) for tensor in self.extra),
        ]
        for role, tensor in named:
            sums[role] = sums.get(role, 0) + tensor.nbytes
        return sums

    def kv_bytes_per_token(self) -> int:
        """Bytes that one more token adds to a long sequence, over all layers."""
        return self.kv_bytes(2 * LONG, 1) - self.kv_bytes(2 * LONG - 1, 1)

    def kv_bytes(self, tokens: int, chunk: int, drafts: int = 0) -> int:
        """Bytes that a sequence keeps over all layers.

        Args:
            tokens: of the sequence.
            chunk: of it that are in flight.
            drafts: of it in a step.

        """
        caches = (layer.kv for layer in self.layers)
        return sum(kv.rank_held(1, tokens, chunk, drafts) for kv in caches if kv is not None)

    def around(self, *, first: bool, last: bool) -> tuple[Tensor, ...]:
        """Tensors outside the layers that a stage holds, as vLLM 0.32 places them."""
        everywhere = self.vocabulary_everywhere
        tensors = self.extra if first else self.towers
        if first or everywhere or (last and self.tied):
            tensors += self.embedding
        if last or everywhere:
            tensors += self.final_norm + self.output_head
        return tensors

    @property
    def output_matrix(self) -> tuple[Tensor, ...]:
        """Tensors that a decode step reads after the last layer."""
        if not self.tied:
            return self.output_head + self.final_norm
        matrix = max(self.embedding, key=lambda tensor: tensor.nbytes, default=None)
        return ((matrix,) if matrix is not None else ()) + self.final_norm


def remote_layers(layers: int, remote: int) -> range:
    """Numbers of the layers of a model whose experts lie on expert ranks: its last ones.

    Args:
        layers: decoder layers of the model.
        remote: how many of them.

    """
    return range(layers - remote, layers)


def _without_experts(layer: Layer) -> Layer:
    experts = tuple(tensor for tensor in layer.tensors if tensor.role == "expert")
    kept = tuple(tensor for tensor in layer.tensors if tensor.role != "expert")
    return replace(layer, tensors=kept, remote=layer.remote + experts)
