"""Tensors that a stage receives, and which of them its model reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.sequence import IntermediateTensors

from ray_hetero.compat.worker.warmup import without_attention


class NotedTensors(IntermediateTensors):  # type: ignore[misc]
    """Intermediate tensors that note the names which a model reads.

    Args:
        tensors: by name, [tokens, …] each.
        read: names that have been read, which slices of these tensors share.

    """

    def __init__(self, tensors: dict[str, torch.Tensor], read: set[str] | None = None) -> None:
        self.read = set() if read is None else read
        super().__init__(_Noted(tensors, self.read))

    def __getitem__(self, key: str | slice) -> Any:
        """The tensor of this name, or these rows of all tensors, which are then still unread."""
        if isinstance(key, slice):
            rows = {name: tensor[key] for name, tensor in dict.items(self.tensors)}
            return NotedTensors(rows, self.read)
        return self.tensors[key]

    @property
    def unread(self) -> tuple[str, ...]:
        """Names that have not been read, in order."""
        return tuple(sorted(set(self.tensors.keys()) - self.read))


class _Noted(dict[str, Any]):
    """Tensors by name; whoever takes a value has read it, a look at the names is none."""

    def __init__(self, tensors: dict[str, torch.Tensor], read: set[str]) -> None:
        super().__init__(tensors)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    # A dict that is made of one without this method takes the values past __getitem__.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.update({name} & self.keys())
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._read.add(name)
        return super().pop(name, *default)

    def items(self) -> Any:
        self._read.update(self)
        return super().items()

    def values(self) -> Any:
        self._read.update(self)
        return super().values()


def unread_names(runner: Any) -> tuple[str, ...]:
    """Names of the tensors that the stage before sends and this stage's model does not read.

    The model makes a pass of one token for that, which is not compiled; none on a first stage.  A
    drafter makes none: it would be compiled for one token.

    Uses: `GPUModelRunner._dummy_run`, `GPUModelRunner.speculative_config`,
    `ForwardContext.skip_compiled`.

    Args:
        runner: vLLM's, its weights being loaded.

    """
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.is_first_rank:
        return ()
    model, drafting = runner.model, runner.speculative_config
    noting = _Noting(model)
    runner.model, runner.speculative_config = noting, None
    try:
        runner._dummy_run(1, is_profile=True, skip_eplb=True, **without_attention(runner))
    finally:
        runner.model, runner.speculative_config = model, drafting
    if noting.tensors is None:
        # vLLM makes no passes where only the encoder of images runs.
        return ()
    passed_on = "" if group.is_last_rank else _passed_on(model)
    return tuple(
        name for name in noting.tensors.unread if not (passed_on and name.startswith(passed_on))
    )


def _passed_on(model: Any) -> str:
    """Beginning of the names that a stage in between hands on without its model.

    Uses: `EagleModelMixin.AUX_HIDDEN_STATE_KEY`.
    """
    return str(getattr(getattr(model, "model", model), "AUX_HIDDEN_STATE_KEY", ""))


class _Noting:
    """In the place of a runner's model for one pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.tensors: NotedTensors | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **given: Any) -> Any:
        from vllm.forward_context import get_forward_context

        # Compiled code would keep the objects of this pass, and read tensors without their names.
        get_forward_context().skip_compiled = True
        self.tensors = NotedTensors(given["intermediate_tensors"].tensors)
        return self._model(**given | {"intermediate_tensors": self.tensors})
