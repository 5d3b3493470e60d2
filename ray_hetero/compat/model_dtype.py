"""vLLM's EngineArgs: the dtype of a model where nobody has said any."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import replace

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

CPUS_ATTRIBUTE = "_ray_hetero_has_cpus"
STOCK_ATTRIBUTE = "_ray_hetero_stock_dtype"


def choose_dtype(
    engine_args: EngineArgs, choose: Callable[[str, bool], str], *, has_cpus: bool | None
) -> None:
    """Let the dtype of this engine's model be chosen again, where `--dtype` is `auto`.

    Replaces: `EngineArgs.create_model_config`.
    Why: vLLM takes the dtype that a checkpoint names, and most quantised ones name float16, in
    which CPU ranks have none of this project's kernels for quantised weights.  What the checkpoint
    names is known once its configuration is read, and other parts of the engine's configuration
    are built from it.
    Can go when: a backend is asked for the dtype, or these kernels compute in float16.

    Args:
        engine_args: of the engine; those of other engines are left alone.
        choose: given the name of vLLM's own choice and whether the checkpoint is quantised, the
            name of the dtype to take.
        has_cpus: whether the engine has CPU ranks or expert ranks; without, vLLM's choice holds.
            None where that is told later: a model with images then keeps vLLM's choice too, since
            other processes prepare images in the dtype of the beginning.

    """
    from vllm.engine.arg_utils import EngineArgs

    def make(stock: Any) -> Any:
        @functools.wraps(stock)
        def create_model_config(self: Any) -> ModelConfig:
            model: ModelConfig = stock(self)
            has_cpus = getattr(self, CPUS_ATTRIBUTE, False)
            may_have = has_cpus is None and not model.is_multimodal_model
            if self.dtype == "auto" and (has_cpus or may_have):
                _choose_again(model, choose)
            return model

        return create_model_config

    replace(EngineArgs, "create_model_config", make)
    setattr(engine_args, CPUS_ATTRIBUTE, has_cpus)


def _choose_again(model: ModelConfig, choose: Callable[[str, bool], str]) -> None:
    import torch
    from vllm.platforms import current_platform

    stock = model.dtype
    is_quantised = model.model_arch_config.quantization_config is not None
    chosen = getattr(torch, choose(str(stock).removeprefix("torch."), is_quantised))
    # GPUs before Ampere do not compute in bfloat16.
    if chosen != stock and chosen in current_platform.supported_dtypes:
        setattr(model, STOCK_ATTRIBUTE, stock)
        model.dtype = chosen


def stock_dtype(model: ModelConfig) -> torch.dtype | None:
    """The dtype that vLLM had chosen for a model; None where that was not changed."""
    return getattr(model, STOCK_ATTRIBUTE, None)


def take_stock_dtype(model: ModelConfig) -> None:
    """Give a model the dtype that vLLM had chosen for it."""
    if (stock := stock_dtype(model)) is not None:
        model.dtype = stock
