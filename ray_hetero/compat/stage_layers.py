"""A stage that has been loaded has the weights of its own layers, and of no others."""

from __future__ import annotations

from torch import nn

from ray_hetero.compat.models.model_parts import decoder_layers
from ray_hetero.errors import UnsupportedError


def check_layers_of_stage(model: nn.Module, layers: range, total: int) -> None:
    """Refuse a stage whose model has not taken the layers that it is to have.

    The class of each model decides for itself which layers it makes, and one that none makes leaves
    no trace but wrong tokens.

    Uses: `PPMissingLayer`, of which vLLM's models make what is on other stages.

    Args:
        model: of the stage, with its weights, as vLLM has made it.
        layers: numbers of the stage's layers.
        total: layers of the whole model.

    Raises:
        UnsupportedError: names the layers.

    """
    from vllm.model_executor.models.utils import PPMissingLayer

    path = decoder_layers(model, total)
    found = list(model.get_submodule(path)) if path else []
    if len(found) != total:
        return
    missing = [at for at in layers if isinstance(found[at], PPMissingLayer)]
    others = [
        at
        for at, layer in enumerate(found)
        if at not in layers and next(layer.parameters(), None) is not None
    ]
    for problem, numbers in (
        ("has not taken the weights of layers {} of its own", missing),
        ("has taken the weights of layers {}, which another stage has too", others),
    ):
        if numbers:
            said = problem.format(", ".join(map(str, numbers)))
            raise UnsupportedError(
                f"{type(model).__name__} {said}: this stage is to have layers {layers.start} to "
                f"{layers.stop - 1} of {total}. Write a layout of one stage."
            )
