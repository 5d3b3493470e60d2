"""Where a step is computed, and why.

A step's route follows from the tokens of its requests and the limits of the rank, in one order of
questions: a native call of the cores, whole layers on a GPU, linear layers on a GPU, operators on
the cores.  It is made once, when a step begins, and handed to the stage boundary, to what reads
weights ahead, and to the layers.  Layers may find at their call that they cannot take it, for
reasons that only the call shows; they name these (layer_tokens.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

DECODING_TOKENS = 8
"""Most tokens of a request that decodes: one and the drafts that it verifies."""
NATIVE_ROWS = 16
"""Most tokens of a request in a native call.  Longer chunks are left to vLLM's attention, which
multiplies matrices; of these, the tokens of a long request read its keys and values together
(csrc/kernels/attention.h)."""
PROMPT_TOKENS = 16
"""Least tokens of a request whose attention is worth sending its cached keys to a GPU: for fewer
queries reading them where they are takes less time.  A step without such a request has no prompts
for a GPU."""
# The next stage takes the rows of decoding requests from the host's memory, so none may stay on
# a GPU; and requests that are too long for a native call have to suit the GPU.
assert DECODING_TOKENS < PROMPT_TOKENS <= NATIVE_ROWS + 1


class Place(StrEnum):
    """Where a step's layers are computed."""

    NATIVE = "native"
    """One native call on the cores, for each run of layers."""
    GPU = "gpu"
    """Prompts on a GPU, as whole layers where it has room for them, and decoding requests on the
    cores where they have many cached tokens."""
    PRODUCTS = "products"
    """Linear layers on a GPU, attention on the cores."""
    CORES = "cores"
    """Operator by operator on the cores."""


class Reason(StrEnum):
    """Why a step is computed where it is."""

    DECODING = "decoding"
    PROMPTS = "prompts"
    MANY_REQUESTS = "many_requests"
    FEW_TOKENS = "few_tokens"
    NO_GPU = "no_gpu"
    NO_ROOM = "no_room"
    ADAPTERS = "adapters"
    MOSTLY_DECODING = "mostly_decoding"
    UNKNOWN_ATTENTION = "unknown_attention"


@dataclass(frozen=True)
class StepLimits:
    """Numbers of tokens that decide where a CPU rank computes a step."""

    native_tokens: int = 0
    """Most tokens of a decode step that is one native call; 0 where no layers are one operator."""
    gpu_from: int | None = None
    """Least tokens of a step that a GPU computes; None where no GPU computes prompts."""
    gpu_room: int = 0
    """Most tokens of such a step."""
    has_products: bool = False
    """Whether the GPU computes single linear layers too; that of a group computes whole layers."""

    def is_for_gpu(self, tokens: int) -> bool:
        """Whether the GPU computes linear layers of so many tokens."""
        return self.gpu_from is not None and self.gpu_from <= tokens <= self.gpu_room


@dataclass(frozen=True)
class StepRoute:
    """The place of one step."""

    tokens: int
    longest: int
    """Most tokens of a request."""
    prompt_tokens: int
    """Tokens of all requests that have more than a decoding one."""
    place: Place
    reason: Reason
    reads_ahead: bool
    """Whether the GPU's first weights are read before the step reaches its layers.  Only tokens of
    requests that do not decode count: the cores may decode the others, so that too few are left."""

    @classmethod
    def of(cls, counts: Collection[int], limits: StepLimits) -> StepRoute:
        """The route of a step that vLLM has scheduled.

        Args:
            counts: tokens of each request.
            limits: of this rank.

        """
        prompt_tokens = sum(count for count in counts if count > DECODING_TOKENS)
        return cls._made(sum(counts), max(counts, default=0), prompt_tokens, limits)

    @classmethod
    def of_rows(cls, tokens: int, longest: int, limits: StepLimits) -> StepRoute:
        """The route of a call that is no scheduled step: a dummy run, or a drafter's.

        Args:
            tokens: of the call.
            longest: most tokens of a request; all tokens of a run without requests.
            limits: of this rank.

        """
        return cls._made(tokens, longest, tokens if longest > DECODING_TOKENS else 0, limits)

    @classmethod
    def _made(cls, tokens: int, longest: int, prompt_tokens: int, limits: StepLimits) -> StepRoute:
        place, reason = _decided(tokens, longest, limits)
        ahead = place in {Place.GPU, Place.PRODUCTS} and limits.is_for_gpu(prompt_tokens)
        return cls(tokens, longest, prompt_tokens, place, reason, reads_ahead=ahead)

    @property
    def is_decoding(self) -> bool:
        """Whether no request has so many tokens that a GPU may compute them for a CPU stage."""
        return self.longest <= DECODING_TOKENS


def _decided(tokens: int, longest: int, limits: StepLimits) -> tuple[Place, Reason]:
    """The order of the questions: requests of 16 tokens would suit both a native call and a GPU."""
    if longest <= NATIVE_ROWS and tokens <= limits.native_tokens:
        return Place.NATIVE, Reason.DECODING
    if limits.gpu_from is None:
        return Place.CORES, Reason.NO_GPU
    if tokens < limits.gpu_from:
        return Place.CORES, Reason.FEW_TOKENS
    if tokens > limits.gpu_room:
        return Place.CORES, Reason.NO_ROOM
    if longest < PROMPT_TOKENS:
        place = Place.PRODUCTS if limits.has_products else Place.CORES
        return place, Reason.MANY_REQUESTS
    return Place.GPU, Reason.PROMPTS
