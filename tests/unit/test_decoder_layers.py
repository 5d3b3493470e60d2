"""What the fused operator stands for is what vLLM's classes of the known names still do.

Their forward methods run with parts that only write down what they are given: anything else that
came between would fail, or change what arrives.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm")

from ray_hetero import fused_layers

FILES = ("llama", "qwen2", "qwen3")


def classes(names: set[str]) -> list[Any]:
    found = {}
    for file in FILES:
        module = importlib.import_module(f"vllm.model_executor.models.{file}")
        found |= {name: getattr(module, name) for name in names if hasattr(module, name)}
    assert set(found) == names
    return list(found.values())


def by_name(cls: Any) -> str:
    return str(cls.__name__)


@pytest.mark.parametrize("cls", classes(fused_layers.LAYERS), ids=by_name)
def test_a_layer_adds_its_residual_in_its_norms_and_nowhere_else(cls: Any) -> None:
    layer = SimpleNamespace(
        input_layernorm=lambda x, residual: (f"norm({x})", f"{residual}+{x}"),
        self_attn=lambda positions, hidden_states: f"attend({hidden_states})",
        post_attention_layernorm=lambda x, residual: (f"second({x})", f"{residual}+{x}"),
        mlp=lambda x: f"mlp({x})",
    )
    found = cls.forward(layer, positions="p", hidden_states="h", residual="r")
    attended = "attend(norm(h))"
    assert found == (f"mlp(second({attended}))", f"r+h+{attended}")


@pytest.mark.parametrize("cls", classes(fused_layers.ATTENTIONS), ids=by_name)
def test_an_attention_begins_and_ends_with_a_linear_layer(cls: Any) -> None:
    attention = MagicMock()
    queries = MagicMock()
    queries.split.return_value = (MagicMock(), MagicMock(), MagicMock())
    attention.qkv_proj.return_value = (queries, None)
    attention.rotary_emb.return_value = (MagicMock(), MagicMock())
    attention.o_proj.return_value = ("output", None)
    assert cls.forward(attention, positions="p", hidden_states="h") == "output"
    attention.qkv_proj.assert_called_once_with("h")
    attention.o_proj.assert_called_once_with(attention.attn.return_value)


@pytest.mark.parametrize("cls", classes(fused_layers.PERCEPTRONS), ids=by_name)
def test_a_perceptron_is_two_products_with_the_activation_between(cls: Any) -> None:
    perceptron = SimpleNamespace(
        gate_up_proj=lambda x: (f"gate_up({x})", None),
        act_fn=lambda x: f"gated({x})",
        down_proj=lambda x: (f"down({x})", None),
    )
    assert cls.forward(perceptron, "x") == "down(gated(gate_up(x)))"


@pytest.mark.parametrize("cls", classes(fused_layers.MODELS), ids=by_name)
def test_a_model_hands_on_what_a_layer_gives_to_the_next(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = cls.forward
    group = SimpleNamespace(is_first_rank=False, is_last_rank=False)
    monkeypatch.setitem(forward.__globals__, "get_pp_group", lambda: group)
    seen: list[tuple[object, object]] = []

    def layer(positions: object, hidden_states: Any, residual: Any) -> tuple[str, str]:
        seen.append((hidden_states, residual))
        return f"{hidden_states}'", f"{residual}'"

    model = MagicMock(layers=[None, layer, layer, None], start_layer=1, end_layer=3)
    model.pack_local_aux_hidden_states.return_value = {}
    given = {"hidden_states": "h", "residual": "r"}
    found = forward(model, None, "p", given)
    assert seen == [("h", "r"), ("h'", "r'")]
    assert found.tensors == {"hidden_states": "h''", "residual": "r''"}
