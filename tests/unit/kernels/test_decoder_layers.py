"""Decoder layers as one operator: what it stands for is what vLLM's classes still do.

Their forward methods run with parts that only write down what they are given: anything else that
came between would fail, or change what arrives.  An attention's runs with the same random parts as
the operator's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import (  # noqa: E402
    FAMILIES,
    HEAD,
    HIDDEN,
    attends,
    be_alone,
    class_of,
    computed,
    fuse_model,
    known_layers,
    layers_of,
    linears,
    model,
)
from native_module import BETWEEN_PRODUCTS, LEVELS, level_of, native, needs_native  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sequence import IntermediateTensors  # noqa: E402

from ray_hetero.kernels.layers.layer_parts import Linear  # noqa: E402
from ray_hetero.kernels.layers.structures import Calls, llama, structure_of  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.offload import layer_fusion  # noqa: E402

pytestmark = pytest.mark.usefixtures("contexts")

current_platform.import_kernels()


def classes(names: tuple[str, ...]) -> list[Any]:
    return [class_of(name) for name in names]


def by_name(cls: Any) -> str:
    return str(cls.__name__)


@pytest.mark.parametrize("cls", classes(llama.Llama.names), ids=by_name)
def test_a_layer_adds_its_residual_in_its_norms_and_nowhere_else(cls: Any) -> None:
    layer = SimpleNamespace(
        input_layernorm=lambda x, residual: (f"norm({x})", f"{residual}+{x}"),
        self_attn=lambda positions, hidden_states: f"attend({hidden_states})",
        post_attention_layernorm=lambda x, residual: (f"second({x})", f"{residual}+{x}"),
        mlp=lambda x: f"mlp({x})",
        ada_rms_norm_t_cond=None,
    )
    found = cls.forward(layer, positions="p", hidden_states="h", residual="r")
    attended = "attend(norm(h))"
    assert found == (f"mlp(second({attended}))", f"r+h+{attended}")


@pytest.mark.parametrize("cls", classes(llama.Llama.parts["mlp"]), ids=by_name)
def test_an_mlp_is_two_products_with_the_activation_between(cls: Any) -> None:
    mlp = SimpleNamespace(
        gate_up_proj=lambda x: (f"gate_up({x})", None),
        act_fn=lambda x: f"gated({x})",
        down_proj=lambda x: (f"down({x})", None),
    )
    assert cls.forward(mlp, "x") == "down(gated(gate_up(x)))"


HANDING_ON = {Calls.RESIDUAL, Calls.HIDDEN_FIRST}
"""How models call layers that hand a residual on."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_hands_on_what_a_layer_gives_to_the_next(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = model(2, family=family)
    known = structure_of(decoder, layers_of(decoder)[0])
    assert known is not None
    calls, layers = known[0].calls, known[0].layers
    group = SimpleNamespace(is_first_rank=False, is_last_rank=False)
    # A subclass has the forward function of the class that it is of.
    for cls in type(decoder).__mro__:
        if "forward" in vars(cls) and cls.__module__.startswith("vllm"):
            monkeypatch.setitem(cls.forward.__globals__, "get_pp_group", lambda: group)
    seen: list[tuple[object, ...]] = []

    def layer(*given: Any, **others: Any) -> Any:
        assert all(one is None for one in others.values())
        if calls is Calls.HIDDEN_FIRST:
            given = given[1], given[0], given[2]
        seen.append(given)
        if calls in HANDING_ON:
            return f"{given[1]}'", f"{given[2]}'"
        hidden = f"{given[0 if calls is Calls.WITHOUT_POSITIONS else 1]}'"
        return (hidden, "unused") if calls is Calls.SUM_AND_MORE else hidden

    vars(decoder)["_modules"].pop(layers)
    vars(decoder)[layers] = [None, layer, layer, None]
    given = {"hidden_states": "h", "residual": "r"}
    found = type(decoder).forward(decoder, None, "p", IntermediateTensors(given))
    if calls in HANDING_ON:
        assert seen == [("p", "h", "r"), ("p", "h'", "r'")]
        assert found.tensors == {"hidden_states": "h''", "residual": "r''"}
    else:
        first = () if calls is Calls.WITHOUT_POSITIONS else ("p",)
        assert seen == [(*first, "h"), (*first, "h'")]
        assert found.tensors == {"hidden_states": "h''"}


def fuse(model: Any, given: dict[Any, Linear] | None = None) -> int:
    given = linears(model) if given is None else given
    return fuse_model(torch.nn.Sequential(model), given, StreamingLinear(native))


def kinds(model: Any) -> list[str]:
    return [type(layer).__name__ for layer in layers_of(model)]


ATTENTIONS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "glm4")


@needs_native
@pytest.mark.parametrize("rotated", [HEAD, HEAD // 2, HEAD // 4])
@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("family", ATTENTIONS)
def test_an_attention_computes_what_vllms_does(
    family: str, tokens: int, rotated: int, contexts: dict[str, Any]
) -> None:
    torch.manual_seed(2)
    decoder = model(1, family=family, rotated=rotated)
    module = decoder.layers[1].self_attn
    contexts["layers.0"] = "metadata", module.attn, "cache", "slots"
    hidden, positions = torch.randn(tokens, HIDDEN).bfloat16(), torch.randint(64, (tokens,))
    expected = module(positions=positions, hidden_states=hidden)
    kernel = StreamingLinear(native)
    (layer,) = known_layers(decoder, linears(decoder), kernel)
    found = layer.attention(positions, module.qkv_proj(hidden)[0])
    assert found.is_contiguous()
    torch.testing.assert_close(module.o_proj(found)[0], expected, rtol=2**-6, atol=2**-5)


@needs_native
@pytest.mark.parametrize(
    ("tokens", "level"), [*((tokens, LEVELS[-1]) for tokens in (1, 40) if LEVELS),
                          *((3, level) for level in BETWEEN_PRODUCTS)],
)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_what_they_were_one_by_one(
    family: str, tokens: int, level: str, contexts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_alone(monkeypatch)
    torch.manual_seed(tokens)
    decoder = model(3, family=family)
    layers = layers_of(decoder)
    for number, layer in enumerate(layers):
        contexts[f"layers.{number}"] = "metadata", attends(layer), "cache", "slots"
    kernel = StreamingLinear(native, level_of(level))
    given = linears(decoder)
    (calls,) = {layer.calls for layer in known_layers(decoder, given, kernel)}
    positions = torch.arange(tokens)
    hidden = torch.randn(tokens, HIDDEN).bfloat16()
    residual = torch.randn(tokens, HIDDEN).bfloat16() if tokens > 1 else None
    residual = residual if calls in HANDING_ON else None
    kept = hidden.clone(), residual if residual is None else residual.clone()
    expected = computed(
        layers, calls, positions, *(one if one is None else one.clone() for one in kept)
    )
    assert fuse_model(torch.nn.Sequential(decoder), given, kernel) == 3
    assert all(type(one).__name__.endswith(("Run", "Positions", "Attention"))
               for one in layers_of(decoder))  # fmt: skip
    found = computed(layers_of(decoder), calls, positions, hidden, residual)
    apart = (found - expected).norm() / expected.norm()
    assert float(apart) < 2**-5
    assert torch.equal(hidden, kept[0])
    assert residual is None or torch.equal(residual, kept[1])


def another(name: str) -> Any:
    """A class that has a name of vLLM's, and computes something else."""

    def forward(self: Any, *given: Any) -> Any:
        raise NotImplementedError

    return type(name, (class_of(name),), {"forward": forward})


@needs_native
@pytest.mark.parametrize(
    ("layers", "is_compiled"), [(None, False), (another("LlamaDecoderLayer"), True)]
)
def test_what_calls_one_operator_only_is_not_compiled(layers: Any, is_compiled: bool) -> None:
    decoder = model(2, layer=layers)
    around = torch.nn.Module()
    around.decoder = decoder
    elsewhere = torch.nn.Module()
    for module in (decoder, around, elsewhere):
        module.do_not_compile = False
    given = linears(decoder)
    whole = torch.nn.ModuleList([around, elsewhere])
    assert bool(fuse_model(whole, given, StreamingLinear(native))) is not is_compiled
    assert [one.do_not_compile for one in (decoder, around)] == 2 * [not is_compiled]
    assert not elsewhere.do_not_compile


@needs_native
def test_a_dummy_run_attends_to_nothing(contexts: dict[str, Any]) -> None:
    decoder = model(1)
    contexts["layers.0"] = None, decoder.layers[1].self_attn.attn, "cache", None
    assert fuse(decoder) == 1
    hidden = torch.randn(4, HIDDEN).bfloat16()
    found = decoder.layers[1](torch.arange(4), hidden, None)
    assert all(bool(one.isfinite().all()) for one in found)


@needs_native
@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: model(2, model=another("LlamaModel")), "layers of this kind in LlamaModel"),
        (
            lambda: model(2, layer=another("LlamaDecoderLayer")),
            "LlamaDecoderLayer: layers of this kind",
        ),
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


def heads_of_no_vectors(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].self_attn.attn.head_size = decoder.layers[2].self_attn.attn.head_size_v = 72


def another_activation(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].mlp.act_fn = torch.nn.Tanh()


def llama_4_scaling(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].self_attn.do_llama_4_scaling = True


def another_norm(decoder: Any, given: dict[Any, Linear]) -> None:
    decoder.layers[2].post_attention_layernorm.variance_size_override = 64


@needs_native
@pytest.mark.parametrize(
    ("change", "fused"),
    [
        (wanting, 0), (divided, 2), (quantised, 2), (own_queries, 2), (quantised_cache, 2),
        (shared_cache, 2), (another_rotation, 2), (heads_of_no_vectors, 2), (another_norm, 2),
        (another_activation, 2), (llama_4_scaling, 2),
    ],
)  # fmt: skip
def test_a_layer_that_is_different_is_left_alone_and_parts_the_others(
    change: Any, fused: int
) -> None:
    decoder = model(3)
    given = linears(decoder)
    change(decoder, given)
    assert fuse(decoder, given) == fused
    left = (
        ["ResidualRun", "LlamaDecoderLayer", "ResidualRun"] if fused else ["LlamaDecoderLayer"] * 3
    )
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
            (torch.arange(3), hidden, residual, decoder.layers[1].number),
            test_utils=("test_schema", "test_faketensor"),
        )


@needs_native
def test_heads_that_are_no_vectors_are_refused() -> None:
    others = {"query_norm": None, "key_norm": None, "is_interleaved": False}
    for size, rotated in ((24, 24), (32, 15), (32, 64)):
        with pytest.raises(ValueError, match="multiples of 16"):
            native.Rotation(heads=1, kv_heads=1, size=size, cos_sin=0, positions=1,
                            rotated=rotated, **others)  # fmt: skip
