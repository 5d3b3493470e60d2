"""Decoder layers as one operator: what it stands for is what vLLM's classes still do.

Their forward methods run with parts that only write down what they are given: anything else that
came between would fail, or change what arrives.  An attention's runs with the same random parts as
the operator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import HEAD, HIDDEN, class_of, known_layers, linears, model  # noqa: E402
from native_module import native, needs_native  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels import attention, decoder_layers, layer_fusion  # noqa: E402
from ray_hetero.kernels.layer_parts import Linear  # noqa: E402
from ray_hetero.kernels.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.kernels.structures import llama  # noqa: E402

current_platform.import_kernels()


def classes(names: tuple[str, ...]) -> list[Any]:
    return [class_of(name) for name in names]


def by_name(cls: Any) -> str:
    return str(cls.__name__)


@pytest.mark.parametrize("cls", classes(llama.LAYERS), ids=by_name)
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


@pytest.mark.parametrize("cls", classes(llama.MLPS), ids=by_name)
def test_a_perceptron_is_two_products_with_the_activation_between(cls: Any) -> None:
    perceptron = SimpleNamespace(
        gate_up_proj=lambda x: (f"gate_up({x})", None),
        act_fn=lambda x: f"gated({x})",
        down_proj=lambda x: (f"down({x})", None),
    )
    assert cls.forward(perceptron, "x") == "down(gated(gate_up(x)))"


@pytest.mark.parametrize("cls", classes(llama.MODELS), ids=by_name)
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


def fuse(model: Any, given: dict[Any, Linear] | None = None) -> int:
    given = linears(model) if given is None else given
    return layer_fusion.fuse(torch.nn.Sequential(model), given, StreamingLinear(native))


def kinds(model: Any) -> list[str]:
    return [type(layer).__name__ for layer in model.layers][1:-1]


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What vLLM's forward context gives, by name of a layer."""
    found: dict[str, Any] = {}
    for module in (attention, decoder_layers):
        monkeypatch.setattr(module, "get_attention_context", found.__getitem__)
    before = len(decoder_layers._runs)
    yield found
    del decoder_layers._runs[before:]


@needs_native
@pytest.mark.parametrize("rotated", [HEAD, HEAD // 2])
@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("cls", classes(llama.ATTENTIONS), ids=by_name)
def test_an_attention_computes_what_vllms_does(
    cls: Any, tokens: int, rotated: int, contexts: dict[str, Any]
) -> None:
    torch.manual_seed(2)
    decoder = model(1, attends=cls.__name__, rotated=rotated)
    module = decoder.layers[1].self_attn
    contexts["layers.0"] = "metadata", module.attn, "cache", "slots"
    hidden, positions = torch.randn(tokens, HIDDEN).bfloat16(), torch.randint(64, (tokens,))
    expected = cls.forward(module, positions=positions, hidden_states=hidden)
    kernel = StreamingLinear(native)
    (layer,) = known_layers(decoder, linears(decoder), kernel)
    found = layer.attention(positions, module.qkv_proj(hidden)[0])
    assert found.is_contiguous()
    torch.testing.assert_close(module.o_proj(found)[0], expected, rtol=2**-6, atol=2**-5)


@needs_native
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("is_first", [False, True])
def test_layers_are_what_they_were_one_by_one(
    is_first: bool, tokens: int, contexts: dict[str, Any]
) -> None:
    torch.manual_seed(tokens)
    decoder = model(3)
    layers = list(decoder.layers)[1:-1]
    for number, layer in enumerate(layers):
        contexts[f"layers.{number}"] = "metadata", layer.self_attn.attn, "cache", "slots"
    positions = torch.arange(tokens)
    hidden = torch.randn(tokens, HIDDEN).bfloat16()
    residual = None if is_first else torch.randn(tokens, HIDDEN).bfloat16()
    kept = hidden.clone(), residual if residual is None else residual.clone()
    expected: Any = hidden, residual
    for layer in layers:
        expected = layer(positions, *(one if one is None else one.clone() for one in expected))
    assert fuse(decoder) == 3
    assert kinds(decoder) == ["FusedRun", "FusedAlready", "FusedAlready"]
    found: Any = hidden, residual
    for layer in list(decoder.layers)[1:-1]:
        found = layer(positions, *found)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-5, atol=2**-3)
    assert torch.equal(hidden, kept[0])
    assert residual is None or torch.equal(residual, kept[1])


@needs_native
def test_a_dummy_run_attends_to_nothing(contexts: dict[str, Any]) -> None:
    decoder = model(1)
    contexts["layers.0"] = None, decoder.layers[1].self_attn.attn, "cache", None
    assert fuse(decoder) == 1
    hidden = torch.randn(4, HIDDEN).bfloat16()
    found = decoder.layers[1](torch.arange(4), hidden, None)
    assert all(bool(one.isfinite().all()) for one in found)


def another(name: str) -> Any:
    """A class that has a name of vLLM's, and computes something else."""

    def forward(self: Any, *given: Any) -> Any:
        raise NotImplementedError

    return type(name, (class_of(name),), {"forward": forward})


@needs_native
@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: model(2, model=another("LlamaModel")), "models of the class LlamaModel"),
        (lambda: model(2, layer=another("LlamaDecoderLayer")), "LlamaDecoderLayer: the layer"),
    ],
    ids=["model", "layer"],
)
def test_what_is_not_known_is_left_alone_and_named_in_one_line(
    made: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(layer_fusion.logger, "info", lambda text, *given: said.append(text % given))
    decoder = made()
    before = kinds(decoder)
    assert fuse(decoder) == 0
    assert kinds(decoder) == before
    (line,) = said
    assert line.startswith("2 decoder layers are computed operator by operator")
    assert why in line


@needs_native
def test_a_subclass_that_computes_the_same_is_known_under_any_name() -> None:
    layer, of_model = class_of("LlamaDecoderLayer"), class_of("LlamaModel")
    inherits = {base: type(f"Fine{base.__name__}", (base,), {}) for base in (layer, of_model)}
    assert fuse(model(2, model=inherits[of_model], layer=inherits[layer])) == 2


def wanting(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.aux_hidden_state_layers = (1,)


def divided(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].self_attn.o_proj.tp_size = 2


def quantised(decoder: Any, given: dict[Any, Linear]) -> None:
    del given[decoder.layers[2].mlp.down_proj]


def own_queries(decoder: Any, given: dict[Any, Linear]) -> None:
    del given[decoder.layers[2].self_attn.qkv_proj]


def quantised_cache(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].self_attn.attn.query_quant = "fp8"


def shared_cache(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].self_attn.attn.kv_sharing_target_layer_name = "layers.0"


def another_rotation(decoder: Any, given: dict[Any, Linear]) -> None:
    rotation = decoder.layers[2].self_attn.rotary_emb
    rotation.__class__ = type("MRotaryEmbedding", (RotaryEmbedding,), {"forward_native": None})


def pairs_side_by_side(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].self_attn.rotary_emb.is_neox_style = False


def heads_of_no_vectors(decoder: Any, given: dict[Any, Linear]) -> None:
    rotation = decoder.layers[2].self_attn.rotary_emb
    rotation.cos_sin_cache = rotation.cos_sin_cache[:, :16]


def another_norm(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].post_attention_layernorm.variance_size_override = 64


@needs_native
@pytest.mark.parametrize(
    ("change", "fused"),
    [
        (wanting, 0), (divided, 2), (quantised, 2), (own_queries, 2), (quantised_cache, 2),
        (shared_cache, 2), (another_rotation, 2), (pairs_side_by_side, 2),
        (heads_of_no_vectors, 2), (another_norm, 2),
    ],
)  # fmt: skip
def test_a_layer_that_is_different_is_left_alone_and_parts_the_others(
    change: Any, fused: int
) -> None:
    decoder = model(3)
    given = linears(decoder)
    change(decoder, given)
    assert fuse(decoder, given) == fused
    left = ["FusedRun", "LlamaDecoderLayer", "FusedRun"] if fused else ["LlamaDecoderLayer"] * 3
    assert kinds(decoder) == left


@needs_native
def test_the_operator_has_the_shapes_that_it_says(contexts: dict[str, Any]) -> None:
    decoder = model(1)
    contexts["layers.0"] = None, decoder.layers[1].self_attn.attn, "cache", None
    assert fuse(decoder) == 1
    hidden = torch.randn(3, HIDDEN).bfloat16()
    for residual in (None, torch.randn(3, HIDDEN).bfloat16()):
        torch.library.opcheck(
            torch.ops.ray_hetero.decoder_layers,
            (torch.arange(3), hidden, residual, len(decoder_layers._runs) - 1),
            test_utils=("test_schema", "test_faketensor"),
        )


@needs_native
def test_heads_that_are_no_vectors_are_refused() -> None:
    norms = {"query_norm": None, "key_norm": None}
    with pytest.raises(ValueError, match="multiples of 16"):
        native.Rotation(heads=1, kv_heads=1, size=24, cos_sin=0, positions=1, rotated=24, **norms)
