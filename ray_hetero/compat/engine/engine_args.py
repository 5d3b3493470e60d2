"""vLLM's EngineArgs and VllmConfig: backend's name, model's dtype, attributes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.engine import engine_environment
from ray_hetero.compat.patching import original, replace
from ray_hetero.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from ray_hetero.world import EngineSpec

SPEC_ATTRIBUTE = "_ray_hetero_spec"
RUNNER_ATTRIBUTE = "_ray_hetero_v2_model_runner"
BATCHES_ATTRIBUTE = "_ray_hetero_batches_in_flight"
CPUS_ATTRIBUTE = "_ray_hetero_has_cpus"
STOCK_ATTRIBUTE = "_ray_hetero_stock_dtype"


def teach_backend_name(
    is_ours: Callable[[object], bool], prepare: Callable[[Any], EngineSpec]
) -> None:
    """Patch EngineArgs.create_engine_config to understand the name `ray_hetero`.

    Replaces: `EngineArgs.create_engine_config`.
    Why: vLLM takes unknown backend names for dotted paths and refuses pipeline parallelism for
    them (EngineArgs._check_feature_supported), and an executor is handed the driver's finished
    VllmConfig, while ranks of the other kind need one built on their own platform.
    Can go when: executors can be registered by name, with their EngineArgs.

    Args:
        is_ours: whether a value of --distributed-executor-backend names this backend.
        prepare: called with the EngineArgs first; what it answers goes to the executor.

    """
    from vllm.engine.arg_utils import EngineArgs

    from ray_hetero.compat.stand_in import check_own_device

    create = original(EngineArgs, "create_engine_config")
    if hasattr(create, "__ray_hetero__"):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Of an engine that was configured and never made.
        engine_environment.take_back()
        if not is_ours(self.distributed_executor_backend):
            check_own_device()
            return create(self, *args, **kwargs)
        with engine_environment.kept_on_success():
            spec = prepare(self)
            vllm_config = create(self, *args, **kwargs)
            remember_runner(vllm_config)
        setattr(vllm_config, SPEC_ATTRIBUTE, spec)
        return vllm_config

    create_engine_config.__ray_hetero__ = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def spec_of(vllm_config: VllmConfig) -> EngineSpec:
    """Specification that `teach_backend_name` attached to the driver's configuration.

    Raises:
        UnsupportedError: the plugin did not run in the process that built the configuration.

    """
    spec = found_spec(vllm_config)
    if spec is None:
        raise UnsupportedError(
            "the ray_hetero plugin was not loaded: VLLM_PLUGINS is "
            f"{os.environ.get('VLLM_PLUGINS')!r}; add ray_hetero to it or unset it"
        )
    return spec


def found_spec(vllm_config: VllmConfig) -> EngineSpec | None:
    """The same; None for an engine of another backend."""
    return getattr(vllm_config, SPEC_ATTRIBUTE, None)


def limit_batches_in_flight(vllm_config: VllmConfig, batches: int) -> None:
    """Set how many batches this engine keeps in the pipeline at once.

    Replaces: `VllmConfig.max_concurrent_batches`.
    Why: VllmConfig.max_concurrent_batches is one per stage.  Every batch in flight has a stage
    read all of its weights again; where one stage is slow and bound by memory, two half-full
    batches take twice as long as one full batch, and the other stage's time is not worth hiding.
    Can go when: the number is an option.
    """
    _let_configs_answer(vllm_config, "max_concurrent_batches", BATCHES_ATTRIBUTE, batches)


def remember_runner(vllm_config: VllmConfig) -> None:
    """Let a configuration remember which model runner its engine has.

    Replaces: `VllmConfig.use_v2_model_runner`.
    Why: it asks the environment each time, also in the user's process, where the variable is taken
    back once the engine's processes are there.
    Can go when: the model runner is an option of the configuration.
    """
    found = vllm_config.use_v2_model_runner
    _let_configs_answer(vllm_config, "use_v2_model_runner", RUNNER_ATTRIBUTE, found)


def _let_configs_answer(vllm_config: VllmConfig, name: str, attribute: str, value: object) -> None:
    """Make a property of VllmConfig answer by an attribute, on this configuration."""
    own_class = type(vllm_config)
    stock = original(own_class, name)
    if not hasattr(stock.fget, "__ray_hetero__"):

        def answer(self: Any) -> Any:
            remembered = getattr(self, attribute, None)
            return stock.fget(self) if remembered is None else remembered

        answer.__ray_hetero__ = True  # type: ignore[attr-defined]
        setattr(own_class, name, property(answer))
    setattr(vllm_config, attribute, value)


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
