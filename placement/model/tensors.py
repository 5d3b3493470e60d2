"""Weight tensors of a model as numbers: how many elements, how wide, how they are sharded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["attention", "mlp", "expert", "shared expert", "router", "norm", "other"]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, or the same tensor of every expert of a layer."""

    name: str
    """Name without the layer's prefix; `*` stands for the number of an expert."""
    elements: int
    """Elements of one such tensor."""
    dtype_bytes: int
    count: int = 1
    """Number of such tensors: the experts of a layer, otherwise 1."""
    role: Role = "other"
    shards: int | None = None
    """Most tensor-parallel parts that the tensor can be cut into; 1 is replicated, None any."""
    values: int = 1
    """Weights in one element: 8 for 4-bit weights packed into int32, 0 for scales and norms."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.elements * self.dtype_bytes * self.count

    @property
    def weights(self) -> int:
        """Weights that a token is multiplied with."""
        return self.elements * self.count * self.values

    @property
    def bits(self) -> int:
        """Bits of one weight; 0 of scales and norms."""
        return 8 * self.dtype_bytes // self.values if self.values else 0

    @property
    def is_16_bit_matrix(self) -> bool:
        """Whether a linear layer or an expert multiplies with it as it is."""
        return self.dtype_bytes == 2 and self.values == 1

    def rank_bytes(self, tensor_parallel_size: int) -> int:
        """Bytes that one tensor-parallel rank holds, rounded up."""
        return -(-self.nbytes // self._parts(tensor_parallel_size))

    def rank_weights(self, tensor_parallel_size: int) -> int:
        """Weights that a token is multiplied with on one tensor-parallel rank, rounded up."""
        return -(-self.weights // self._parts(tensor_parallel_size))

    def _parts(self, size: int) -> int:
        return size if self.shards is None else min(size, self.shards)


@dataclass(frozen=True)
class KvCache:
    """Cache of one layer: keys and values or latents of each token, a state of each sequence."""

    bytes_per_token: int
    """0 where the layer keeps a state alone."""
    heads: int
    """KV heads, the parts that tensor parallelism can spread; 1 for the latent of MLA."""
    window: int | None = None
    """Sliding window in tokens; None sees the whole context."""
    flops_per_pair: int = 0
    """Floating-point operations of attention for one (query, key) pair, all heads."""
    state_bytes: int = 0
    """Constant bytes of a sequence: Gated DeltaNet, Mamba, a short convolution."""
    draft_bytes: int = 0
    """Bytes that a state grows by with each draft of a step, whose inputs its convolution keeps."""
    is_kept_whole: bool = False
    """Whether tokens behind the window are kept too, as vLLM does with chunks of attention."""
    beside: tuple[KvCache, ...] = ()
    """Further caches of the layer, such as that of an indexer."""

    def rank_bytes(self, tensor_parallel_size: int) -> int:
        """Bytes a token costs one tensor-parallel rank; with more ranks than heads, one head."""
        heads = -(-self.heads // tensor_parallel_size)
        return self.bytes_per_token * heads // self.heads

    def rank_state_bytes(self, tensor_parallel_size: int, drafts: int = 0) -> int:
        """Bytes of one state of a sequence on one tensor-parallel rank, rounded up.

        Args:
            tensor_parallel_size: ranks of the stage.
            drafts: that a step verifies of a sequence at most; it then has a state behind each of
                them, and one behind the token before, so that any number can be refused.

        """
        return -(-(self.state_bytes + drafts * self.draft_bytes) // tensor_parallel_size)

    def seen(self, context: int) -> int:
        """How many of a sequence's tokens this layer looks at."""
        return context if self.window is None else min(context, self.window)

    def kept(self, context: int, chunk: int) -> int:
        """How many of a sequence's tokens this layer keeps, with a chunk of prompt in flight."""
        if self.window is None or self.is_kept_whole:
            return context
        return min(context, self.window - 1 + chunk)

    def rank_held(
        self, tensor_parallel_size: int, context: int, chunk: int, drafts: int = 0
    ) -> int:
        """Bytes that one tensor-parallel rank keeps of a sequence, all caches of the layer.

        Args:
            tensor_parallel_size: ranks of the stage.
            context: tokens of the sequence.
            chunk: tokens of it that are in flight.
            drafts: see `rank_state_bytes`.

        """
        size = tensor_parallel_size
        states = (1 + drafts) * self.rank_state_bytes(size, drafts)
        own = self.rank_bytes(size) * self.kept(context, chunk) + states
        return own + sum(one.rank_held(size, context, chunk, drafts) for one in self.beside)

    def rank_read(self, tensor_parallel_size: int, context: int, drafts: int = 0) -> int:
        """Bytes that a decode step reads of a sequence on one rank, and writes of its states."""
        size = tensor_parallel_size
        states = (2 + drafts) * self.rank_state_bytes(size, drafts)
        own = self.rank_bytes(size) * self.seen(context) + states
        return own + sum(one.rank_read(size, context, drafts) for one in self.beside)

    @property
    def is_full(self) -> bool:
        """Whether the layer keeps nothing but keys and values of all tokens."""
        return self.window is None and not self.state_bytes and not self.beside


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    index: int
    tensors: tuple[Tensor, ...]
    kv: KvCache | None
    """Cache of the layer; None where it keeps none, or reads that of another layer."""
    remote: tuple[Tensor, ...] = ()
    """Tensors of experts that expert ranks hold; these are not among `tensors`."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


_REPLICATED = re.compile(
    r"(norm|router|\.gate\.|shared_expert_gate|kv_a_proj|q_a_proj|project_in|project_out|position"
    r"|(o_proj|out_proj|down_proj|fc2|\.dense|c_proj|dense_4h_to_h)\.bias$|g_idx$|weight_shape$"
    r"|input_scale$|activation_scale$)"
)
_KV_HEADS = re.compile(r"\b(k_proj|v_proj)\.")
_ATTENTION = re.compile(r"attn|attention|query_key_value")
_MLP = re.compile(r"mlp|feed_forward|ffn|fc[12]\b|block_sparse_moe|gate_proj|up_proj|down_proj")
_NOT_MULTIPLIED = re.compile(
    r"norm|bias$|scales?$|scale_inv$|qzeros$|zero_point$|g_idx$|weight_shape$|_input_scale$"
)


def role_of(name: str) -> Role:
    """Role of a tensor of a decoder layer, by its name in the checkpoint."""
    if ".experts." in name:
        return "expert"
    if "shared_expert" in name:
        return "shared expert"
    if "norm" in name:
        return "norm"
    if ".gate." in name or "router" in name:
        return "router"
    if _ATTENTION.search(name):
        return "attention"
    return "mlp" if _MLP.search(name) else "other"


def shards_of(name: str, kv_heads: int) -> int | None:
    """Most parts that vLLM can cut that tensor into: 1 is replicated, None is any."""
    if _REPLICATED.search(name):
        return 1
    return kv_heads if _KV_HEADS.search(name) else None


def is_multiplied(name: str) -> bool:
    """Whether tokens are multiplied with that tensor (not norms, biases or scales)."""
    return _NOT_MULTIPLIED.search(name) is None
