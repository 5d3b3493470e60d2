"""On a GPU rank of the last stage: the last MLP of prompts, of rows whose logits are wanted only.

Attention needs the rows of all tokens, but nothing comes behind the last layer's MLP except the
final norm and the logits, which are wanted of a request's last token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from ray_hetero.compat import read_rows
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.layers.structures import layers_attribute, structure_of
from ray_hetero.log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from placement.cluster.assignment import Seat
    from ray_hetero.world import World

LEAST = 1024
"""Tokens of a step from which rows are left out.  Smaller steps gain little, and CUDA graphs are
captured of them, whose number of rows is fixed."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_installed: dict[str, LastMlp] = {}
"""The MLP of this process, by the name of its layer's attention: one, or none."""


class LastMlp:
    """The MLP of a model's last layer.

    Args:
        forward: computes rows.
        attention: name of the layer's attention.
        least: tokens of a step from which rows are left out.

    """

    def __init__(
        self, forward: Callable[[torch.Tensor], torch.Tensor], attention: str, least: int
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._least = least
        self._asking: set[str] = set()

    def begin_step(self, scheduler_output: Any) -> None:
        """Learn which requests want logprobs of their prompts: while one does, all rows are read.

        A preempted request is not finished, and one that is resumed is known from before.
        """
        self._asking -= set(scheduler_output.finished_req_ids)
        self._asking |= {
            request.req_id
            for request in scheduler_output.scheduled_new_reqs
            if read_rows.asks_for_prompt(request.sampling_params)
        }

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the rows of a step that are read; the others become 0.

        Args:
            x: [tokens, hidden].

        """
        rows = None
        if len(x) >= self._least and not self._asking:
            rows = read_rows.of_last_tokens(self._attention)
        if rows is None or 2 * len(rows) > len(x):
            return self._forward(x)
        layer_tokens.count_left_out(len(x) - len(rows))
        output = torch.zeros_like(x)
        output[rows] = self._forward(x[rows])
        return output


def install(runner: Any, vllm_config: VllmConfig, world: World, seat: Seat) -> None:
    """Leave out rows of the last MLP if this rank has it, and if nothing reads them.

    Args:
        runner: vLLM's, its weights loaded.
        vllm_config: of the rank.
        world: of the engine.
        seat: of the rank.

    """
    is_last = seat.stage == len(world.layout.stages) - 1
    # The CPU ranks of a mixed group would wait for sums of all rows.
    if seat.kind != "gpu" or not is_last or world.layout.is_mixed(seat.stage):
        return
    found = find(runner.get_model()) if read_rows.are_of_last_tokens(vllm_config) else None
    if found is None:
        return
    mlp, attention = found
    least = max(LEAST, 1 + (vllm_config.compilation_config.max_cudagraph_capture_size or 0))

    def make(forward: Callable[[torch.Tensor], torch.Tensor]) -> read_rows.Compute:
        _installed.clear()
        _installed[attention] = LastMlp(forward, attention, least)
        return lambda x: torch.ops.ray_hetero.last_mlp(x, attention)

    read_rows.compute_by(mlp, make)
    # Compiled code is kept by what the configuration says.
    vllm_config.additional_config |= {"ray_hetero_last_mlp": True}
    logger.info(
        "gpu rank %d computes its last layer's MLP only for rows whose logits are wanted, in steps "
        "of %d tokens and more",
        seat.rank,
        least,
    )


def find(model: torch.nn.Module) -> tuple[Any, str] | None:
    """The MLP of a model's last layer, and the name of its attention; None if it is not known."""
    found: list[tuple[Any, str]] = [
        (decoder, name)
        for decoder in model.modules()
        if (name := layers_attribute(decoder)) and decoder.start_layer < decoder.end_layer
    ]
    if len(found) != 1:
        return None
    ((decoder, name),) = found
    last = getattr(decoder, name)[decoder.end_layer - 1]
    known = structure_of(decoder, last)
    if known is None:
        return None
    _, modules = known
    mlp = getattr(last, "mlp", None)
    # Falcon's MLP, whose parts have other names, hands on more than rows.
    if modules.gate_up is None or getattr(mlp, "gate_up_proj", None) is not modules.gate_up:
        return None
    return mlp, modules.attend.layer_name


def begin_step(scheduler_output: Any) -> None:
    """Learn what the next step has to compute, before it is run."""
    for one in _installed.values():
        one.begin_step(scheduler_output)


def _last_mlp(x: torch.Tensor, attention: str) -> torch.Tensor:
    return _installed[attention](x)


def _like_rows(x: torch.Tensor, attention: str) -> torch.Tensor:
    return torch.empty_like(x)


direct_register_custom_op(
    "last_mlp",
    _last_mlp,
    fake_impl=_like_rows,
    target_lib=_library,
    dispatch_key=current_platform.dispatch_key,
)
