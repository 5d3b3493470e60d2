"""How many tokens of decoder layers, and of experts, were computed in which way.

A token counts once for each of the layers that are one operator: where experts lie between
attentions, such an operator is of one layer.  Layers that vLLM computes operator by operator from
the beginning are not counted.  Experts that expert ranks compute are counted by these.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_hetero.kernels import step_trace
from ray_hetero.kernels.step_route import Reason
from ray_hetero.kernels.step_trace import Event


@dataclass
class LayerTokens:
    """Tokens times layers, by way, and what the cores have waited for meanwhile."""

    native: int = 0
    """Tokens times layers in native calls of decode steps."""
    on_gpu: int = 0
    """Tokens times layers by the GPU that computes this rank's prompts: whole layers, and in decode
    steps what lies behind a layer's attention."""
    by_operators: int = 0
    """Tokens times layers by single operators, on this rank's cores or its GPU's linear layers."""
    experts_on_gpu: int = 0
    """Tokens times layers whose experts lie on expert ranks, by a GPU that has read all or some of
    them over its link; expert ranks count the tokens of a split layer too."""
    left_out: int = 0
    """Tokens that a GPU rank has left out of the model's last MLP: nothing reads their rows."""
    columns_waited_s: float = 0.0
    """Seconds that the cores have waited in decode steps for columns of MLPs of the GPU."""
    instead: Reason | None = None
    """Reason for which layers were computed elsewhere than the step's route says; None if all were
    computed there."""


_counted = LayerTokens()


def count(layers: int, *, native: int = 0, on_gpu: int = 0, by_operators: int = 0) -> None:
    """Count the tokens of one step through some layers."""
    step_trace.note(Event.LAYERS, layers, native, on_gpu, by_operators)
    _counted.native += layers * native
    _counted.on_gpu += layers * on_gpu
    _counted.by_operators += layers * by_operators


def count_experts(on_gpu: int) -> None:
    """Count the tokens of one layer of experts."""
    _counted.experts_on_gpu += on_gpu


def count_left_out(tokens: int) -> None:
    """Count the tokens that one step's last MLP was not computed for."""
    _counted.left_out += tokens


def count_columns_wait(seconds: float) -> None:
    """Count what the cores have waited in one decode step for the GPU's columns."""
    _counted.columns_waited_s += seconds


def count_instead(reason: Reason) -> None:
    """Count layers that one step's route did not suit."""
    step_trace.note(Event.INSTEAD, reason)
    _counted.instead = reason


def take() -> LayerTokens:
    """Counts of this process since the last call."""
    global _counted
    taken, _counted = _counted, LayerTokens()
    return taken
