"""Models of vLLM's that are wrong, or do not load, in stages of a pipeline."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ray_hetero.compat.models import mamba2
from ray_hetero.compat.patching import original, replace

LAYER = re.compile(r"\.\d+\.")
"""Part of the name of a weight that belongs to a numbered layer."""


def prepare_loading(*, has_cpu: bool = False) -> None:
    """Let every model load its own stage; called before a rank loads its weights.

    Args:
        has_cpu: whether any rank of the engine is a CPU socket.

    """
    if has_cpu:
        mamba2.keep_states_of_step_ends()
    leave_out_layers_of_other_stages()
    give_heads_their_tied_weights()
    pass_layers_of_other_stages()


def leave_out_layers_of_other_stages() -> None:
    """Hand a model no weights of layers that are on other stages.

    Replaces: `DefaultModelLoader.get_all_weights`.
    Uses: `utils.is_pp_missing_parameter`, `WeightsMapper.map_name`.
    Why: `load_weights` of some models, GraniteMoeHybridModel the first, looks every name up among
    the parameters of its stage, and ends with a KeyError for those of another.
    Can go when: vLLM's loader leaves them out, or every load_weights does.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.models import utils

    original(utils, "is_pp_missing_parameter")

    def make(stock: Any) -> Any:
        def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[Any]:
            mapper = getattr(model, "hf_to_vllm_mapper", None)
            for name, weight in stock(self, model_config, model):
                if not LAYER.search(name):
                    yield name, weight
                    continue
                mapped = name if mapper is None else mapper.map_name(name)
                if mapped is None or not utils.is_pp_missing_parameter(mapped, model):
                    yield name, weight

        return get_all_weights

    replace(DefaultModelLoader, "get_all_weights", make)


def give_heads_their_tied_weights() -> None:
    """Let an output head share its weights with an embedding that is on another stage.

    Replaces: `ParallelLMHead.tie_weights`.
    Adds: `tie_weights` to PPMissingLayer.
    Why: models such as Ernie4_5_MoeForCausalLM tie the two on every stage.  On stages without the
    head, PPMissingLayer has no such method; on the last one the embedding, whose weights the head
    would take, is a PPMissingLayer itself.  There the head's own weights are loaded under the
    embedding's name, as vLLM does for Llama.
    Can go when: vLLM's models with tied weights make the embedding on the last stage too.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.models.utils import PPMissingLayer

    def make(stock: Any) -> Any:
        def tie_weights(self: Any, embed_tokens: Any) -> Any:
            if isinstance(embed_tokens, PPMissingLayer):
                # No longer missing: weights are loaded into it.
                embed_tokens.__class__ = _Rows
                embed_tokens.weight = self.weight
                return self
            return stock(self, embed_tokens)

        return tie_weights

    replace(ParallelLMHead, "tie_weights", make)
    PPMissingLayer.tie_weights = lambda self, embed_tokens: self


def pass_layers_of_other_stages() -> None:
    """Hand hidden states and residual on where a model calls a layer that is on another stage.

    Replaces: `PPMissingLayer.forward`.
    Why: GraniteMoeHybridModel.forward calls all layers of the model, those of other stages too.
    PPMissingLayer returns the first of what it is given, which are the positions.
    Can go when: GraniteMoeHybridModel.forward calls the layers of its own stage only.
    """
    from vllm.model_executor.models.utils import PPMissingLayer

    def make(stock: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.keys() >= {"hidden_states", "residual"}:
                return kwargs["hidden_states"], kwargs["residual"]
            return stock(self, *args, **kwargs)

        return forward

    replace(PPMissingLayer, "forward", make)


class _Rows(nn.Module):  # type: ignore[misc]
    """Weights of an embedding that only the output head uses."""


def read_per_layer_inputs() -> None:
    """Let the later stages of Gemma 4 read the inputs of each layer; called once it is loaded.

    Replaces: `Gemma4Model.__call__`.
    Why: stage 0 sends `per_layer_inputs`, but Gemma4Model.forward reads them only if its argument
    of this name is given, which its callers never do behind stage 0.  Such layers then compute
    without their inputs, and tokens are wrong without a warning.
    Can go when: Gemma4Model.forward reads what is in its intermediate tensors.
    """
    module = sys.modules.get("vllm.model_executor.models.gemma4")
    if module is None:
        return

    def make(stock: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("intermediate_tensors", args[2] if len(args) > 2 else None)
            if given is not None and "per_layer_inputs" in given.tensors:
                kwargs["per_layer_inputs"] = given["per_layer_inputs"]
            return stock(self, *args, **kwargs)

        return call

    replace(original(module, "Gemma4Model"), "__call__", make)
