"""On a GPU rank of the last stage: the last layer of prompts, of rows whose logits are wanted only.

Keys and values are needed of all tokens.  But what lies behind them in the last layer, its
attention, its output layer and its MLP, is read only where a request's last token is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from ray_hetero.compat.worker import read_rows
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.layers.structures import layers_attribute, structure_of
from ray_hetero.log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from placement.cluster.assignment import Seat
    from ray_hetero.kernels.layers.structures import LayerModules
    from ray_hetero.world import World

LEAST = 1024
"""Tokens of a step from which rows are left out.  Smaller steps gain little, and CUDA graphs are
captured of them, whose number of rows is fixed."""
MLP, OUTPUT = "mlp", "output"
"""Parts of a layer that compute rows one by one."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_installed: dict[str, LastLayer] = {}
"""The last layer of this process, by the name of its attention: one, or none."""


class LastLayer:
    """Rows of a model's last layer.

    Args:
        attention: name of the layer's attention.
        least: tokens of a step from which rows are left out.

    """

    def __init__(self, attention: str, least: int) -> None:
        self._attention = attention
        self._least = least
        self._asking: set[str] = set()
        self.parts: dict[str, read_rows.Compute] = {}
        """Functions that compute rows, by the part of the layer that they are of."""

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

    def compute(self, part: str, x: torch.Tensor) -> torch.Tensor:
        """Compute the rows of a step that are read; the others become 0.

        Args:
            part: of the layer.
            x: [tokens, its inputs].

        """
        rows = self._rows(len(x))
        if rows is None:
            return self.parts[part](x)
        if part == MLP:
            layer_tokens.count_left_out(len(x) - len(rows))
        computed = self.parts[part](x[rows])
        output = computed.new_zeros(len(x), computed.shape[1])
        output[rows] = computed
        return output

    def attend(
        self, forward: Callable[..., torch.Tensor], layer: Any, query: torch.Tensor,
        key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: Any,
        output: torch.Tensor, *scales: Any, **named_scales: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attend as vLLM's `AttentionImpl.forward` does, from rows that are read.

        Args:
            forward: vLLM's own function.
            layer: vLLM's attention, whose cache has this step's keys and values.
            query: [tokens, heads, size].
            key: [tokens, kv heads, size].
            value: as `key`.
            kv_cache: of the layer.
            metadata: of the step.
            output: [tokens, heads, size], where the values come; 0 in other rows.
            scales: of a quantised output.
            named_scales: the same.

        """
        rows = self._rows(len(query))
        of_rows = None if rows is None else read_rows.attention_of_rows(layer, metadata, rows)
        if rows is None or of_rows is None:
            return forward(
                layer, query, key, value, kv_cache, metadata, output, *scales, **named_scales
            )
        attended = output.new_empty(len(rows), *output.shape[1:])
        forward(
            layer, query[rows], key, value, kv_cache, of_rows, attended, *scales, **named_scales
        )
        output.zero_()
        # Requests without tokens, with which metadata are padded, have the row of the one before.
        output[rows] = attended[torch.searchsorted(rows, rows)]
        return output

    def _rows(self, tokens: int) -> torch.Tensor | None:
        """The rows of a step of so many tokens that are read; None where all are computed."""
        if tokens < self._least or self._asking:
            return None
        rows = read_rows.of_last_tokens(self._attention)
        return None if rows is None or 2 * len(rows) > tokens else rows


def install(runner: Any, vllm_config: VllmConfig, world: World, seat: Seat) -> LastLayer | None:
    """Leave out rows of the last layer if this rank has it, and if nothing reads them.

    Args:
        runner: vLLM's, its weights loaded.
        vllm_config: of the rank.
        world: of the engine.
        seat: of the rank.

    Returns:
        The layer, to be told of each step; None where all rows are computed.

    """
    is_last = seat.stage == len(world.layout.stages) - 1
    # The CPU ranks of a mixed group would wait for sums of all rows.
    if seat.kind != "gpu" or not is_last or world.layout.is_mixed(seat.stage):
        return None
    found = find(runner.get_model()) if read_rows.are_of_last_tokens(vllm_config) else None
    if found is None:
        return None
    mlp, modules = found
    name = modules.attend.layer_name
    least = max(LEAST, 1 + (vllm_config.compilation_config.max_cudagraph_capture_size or 0))
    last = LastLayer(name, least)

    def make(part: str, columns: int) -> Callable[[read_rows.Compute], read_rows.Compute]:
        def of(forward: read_rows.Compute) -> read_rows.Compute:
            last.parts[part] = forward
            return lambda x: torch.ops.ray_hetero.last_rows(x, name, part, columns)

        return of

    _installed.clear()
    _installed[name] = last
    read_rows.compute_mlp_by(mlp, make(MLP, modules.down.output_size))
    read_rows.compute_linear_by(modules.output, make(OUTPUT, modules.output.output_size))
    read_rows.attend_by(modules.attend, last.attend)
    # Compiled code is kept by what the configuration says.
    vllm_config.additional_config |= {"ray_hetero_last_layer": True}
    logger.info(
        "gpu rank %d computes its last layer's attention and MLP only for rows whose logits are "
        "wanted, in steps of %d tokens and more",
        seat.rank,
        least,
    )
    return last


def find(model: torch.nn.Module) -> tuple[Any, LayerModules] | None:
    """The MLP of a model's last layer, and the layer's modules; None if it is not known."""
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
    return mlp, modules


def _last_rows(x: torch.Tensor, attention: str, part: str, columns: int) -> torch.Tensor:
    return _installed[attention].compute(part, x)


def _like_rows(x: torch.Tensor, attention: str, part: str, columns: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], columns)


direct_register_custom_op(
    "last_rows",
    _last_rows,
    fake_impl=_like_rows,
    target_lib=_library,
    dispatch_key=current_platform.dispatch_key,
)
