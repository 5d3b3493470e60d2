"""vLLM's unquantised linear and embedding layers on a CPU rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import original, replace

if TYPE_CHECKING:
    import torch


def use_linear(
    kernel: Callable[..., Any],
    suits: Callable[[Any], bool],
    pack: Callable[[Any], Any],
) -> None:
    """Compute a CPU rank's unquantised linear layers with another kernel.

    Replaces: `layers.utils.dispatch_cpu_unquantized_gemm`.
    Why: dispatch_cpu_unquantized_gemm, called once a layer when its weights are loaded, chooses
    among vLLM's kernels only.
    Can go when: CPU linear kernels can be registered, as quantised ones can.

    Args:
        kernel: (x [..., K], packed weight [N, K], bias [N] in float32 or None) -> [..., N].
        suits: whether the kernel takes a weight; vLLM's choice is left for the others.
        pack: given each layer, its bias being float32 by then; gives the weight that the kernel is
            to be called with.

    """
    import torch
    from vllm.model_executor.layers import utils

    def make(choose: Any) -> Any:
        def dispatch(layer: Any, remove_weight: bool) -> None:
            if not suits(layer.weight):
                choose(layer, remove_weight)
                return
            if getattr(layer, "bias", None) is not None:
                layer.bias.data = layer.bias.to(torch.float32)
            packed = pack(layer)
            layer.cpu_linear = lambda x, weight, bias: kernel(x, packed, bias)
            if remove_weight:
                layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

        return dispatch

    replace(utils, "dispatch_cpu_unquantized_gemm", make)


def keep_embeddings_once(*, has_tied_output: bool) -> None:
    """Let a CPU rank hold one copy of an embedding, and one of an output matrix.

    Replaces: `UnquantizedEmbeddingMethod.process_weights_after_loading`.
    Why: UnquantizedEmbeddingMethod packs every embedding for multiplication and keeps the weights
    as they were too; an embedding is only looked up in, an output matrix only multiplied with.
    Can go when: it packs output matrices only, and keeps what is shared.

    Args:
        has_tied_output: whether this rank multiplies with the matrix that it looks up in.

    """
    import torch
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    original(utils, "dispatch_cpu_unquantized_gemm")

    def make(stock: Any) -> Any:
        def process_weights_after_loading(self: Any, layer: Any) -> None:
            if has_tied_output:
                stock(self, layer)
            elif isinstance(layer, ParallelLMHead):
                utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            else:
                layer.cpu_linear = torch.nn.functional.linear

        return process_weights_after_loading

    replace(UnquantizedEmbeddingMethod, "process_weights_after_loading", make)


def hold_embedding_whole(vocabulary: int, hidden: int) -> None:
    """Let a CPU rank of a tensor-parallel group look up in the whole input embedding.

    Replaces: `VocabParallelEmbedding.__init__`.
    Why: VocabParallelEmbedding is cut over the ranks of a group, so that each looks up some rows of
    a step in new memory, and an all-reduce of all hidden states follows before the first layer.
    Can go when: every model makes its embedding as vLLM's `VLLM_REPLICATE_EMBED` asks for.

    Args:
        vocabulary: rows of the input embedding, without padding.
        hidden: elements of a row.

    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    # Whoever gives one of these has a cut of its own, of which it adds up the results itself.
    own = {"disable_tp", "reduce_results", "quant_method", "parallel_group"}

    def make(stock: Any) -> Any:
        @functools.wraps(stock)
        def __init__(  # noqa: N807
            self: Any, num_embeddings: int, embedding_dim: int, *args: Any, **how: Any
        ) -> None:
            # Tables of other sizes, such as those of each layer or of several tokens together, may
            # have more bytes than all layers, and the plan counts a part of them for each rank.
            if (
                (num_embeddings, embedding_dim) == (vocabulary, hidden)
                and not isinstance(self, ParallelLMHead)
                and not own & how.keys()
            ):
                # A quantised one too: its method is told that there is one rank, and loads all.
                how["disable_tp"] = True
            stock(self, num_embeddings, embedding_dim, *args, **how)

        return __init__

    replace(VocabParallelEmbedding, "__init__", make)


def look_up_with(
    layer: Any,
    look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None],
) -> None:
    """Replace an embedding's look-up of rows by a function.

    Replaces: `UnquantizedEmbeddingMethod.embedding` of one layer.
    Why: UnquantizedEmbeddingMethod puts the rows into new memory each time, and a prompt's into so
    much that the system hands it out page by page.
    Can go when: an embedding can be given the memory for its result.

    Args:
        layer: vLLM's, one that is not sliced.
        look_up: of the matrix [vocabulary, N] and of tokens, int64; None leaves them to vLLM.

    """

    def make(stock: Any) -> Any:
        def embedding(layer: Any, tokens: torch.Tensor) -> torch.Tensor:
            found = look_up(layer.weight, tokens)
            return stock(layer, tokens) if found is None else found

        return embedding

    replace(layer.quant_method, "embedding", make)


def refuse_reload(reason: str) -> None:
    """Refuse to load a rank's weights anew, before any is touched.

    Replaces: `GPUModelRunner.reload_weights`.
    Why: reload_weights loads into a model's parameters, of which the layers of this rank have made
    copies of their own: old and new weights would be mixed.
    Can go when: layers are told that their weights were loaded anew.

    Args:
        reason: why not, and what to do.

    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from ray_hetero.errors import UnsupportedError

    def make(stock: Any) -> Any:
        def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
            raise UnsupportedError(reason)

        return reload_weights

    replace(GPUModelRunner, "reload_weights", make)
