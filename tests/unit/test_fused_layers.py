"""What lies between two attentions as one operator: against torch, and in a model's place."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import native, needs_bf16  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero import borrowed_gpu, fused_layers, streaming_linear  # noqa: E402
from ray_hetero.borrowed_gpu import BorrowedGpu  # noqa: E402
from ray_hetero.fused_layers import FusedLayer, Linear, Norm, Parts  # noqa: E402
from ray_hetero.packed_weights import PackedWeight, made_compact  # noqa: E402
from ray_hetero.streaming_linear import Prompts, StreamingLinear  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_bf16

HIDDEN, ATTENDED, WIDE, QUERIES = 512, 384, 1376, 768
EPSILON = 1e-5
TOLERANCE = {"rtol": 2**-6, "atol": 2**-5}
"""Of sums of bf16 products that were rounded four times on their way."""


def kernel() -> StreamingLinear:
    """With no AMX even where there is some: steps of up to four tokens are few."""
    made = StreamingLinear(native)
    made.has_amx, made.few_tokens = False, streaming_linear.MOST_TOKENS_WITHOUT_AMX
    return made


def linear(
    outputs: int, inputs: int, *, has_bias: bool = False, is_compact: bool = False
) -> tuple[Linear, torch.Tensor]:
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16()
    bias = torch.randn(outputs).bfloat16().float() if has_bias else None
    held = PackedWeight(torch.ops._C.convert_weight_packed(weight))
    return Linear(made_compact(held.data, native) if is_compact else held, bias), weight.float()


def norm() -> Norm:
    return Norm(torch.rand(HIDDEN).add_(0.5).bfloat16(), EPSILON)


class Layer:
    """Random parts, and what torch computes with them."""

    def __init__(self, *, is_last: bool, is_compact: bool = False) -> None:
        torch.manual_seed(3)
        made = [
            linear(HIDDEN, ATTENDED, is_compact=is_compact),
            linear(2 * WIDE, HIDDEN, has_bias=True, is_compact=is_compact),
            # Layers of both kinds may be together.
            linear(HIDDEN, WIDE),
            linear(QUERIES, HIDDEN, has_bias=True, is_compact=is_compact),
        ]
        output, gate_up, down, queries = (one for one, _ in made)
        self._plain = {id(one): weight for one, weight in made}
        behind = () if is_last else (norm(), queries)
        self.parts = Parts(output, norm(), gate_up, down, *behind)

    def _linear(self, x: torch.Tensor, one: Linear) -> torch.Tensor:
        y = x.float() @ self._plain[id(one)].T
        return (y if one.bias is None else y + one.bias).bfloat16()

    @staticmethod
    def _add_and_norm(
        x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = x.float() + residual.float()
        scale = torch.rsqrt(both.square().mean(-1, keepdim=True) + norm.epsilon)
        return (both * scale).bfloat16() * norm.weight, both.bfloat16()

    def expected(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.parts
        x, total = self._add_and_norm(self._linear(attended, parts.output), residual, parts.norm)
        gate, up = self._linear(x, parts.gate_up).float().chunk(2, dim=1)
        x = self._linear((torch.nn.functional.silu(gate) * up).bfloat16(), parts.down)
        if parts.next is None or parts.next_norm is None:
            return x, total
        x, total = self._add_and_norm(x, total, parts.next_norm)
        return self._linear(x, parts.next), total


def check(fused: FusedLayer, layer: Layer, tokens: int) -> None:
    # Views of wider tensors, as slices of what a step has more of.
    attended = torch.randn(tokens, ATTENDED + 32).bfloat16()[:, :ATTENDED]
    residual = torch.randn(tokens, HIDDEN + 32).bfloat16()[:, :HIDDEN]
    before = residual.clone()
    for found, expected in zip(
        fused(attended, residual), layer.expected(attended, residual), strict=True
    ):
        assert found.is_contiguous()
        torch.testing.assert_close(found.float(), expected.float(), **TOLERANCE)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 40])
def test_it_computes_what_torch_computes(tokens: int, is_last: bool, is_compact: bool) -> None:
    layer = Layer(is_last=is_last, is_compact=is_compact)
    check(FusedLayer(layer.parts, kernel()), layer, tokens)


@pytest.mark.skipif(native is None or not native.has_amx(), reason="needs AMX")
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 32, 33])
def test_with_amx_too(tokens: int, is_compact: bool) -> None:
    layer = Layer(is_last=False, is_compact=is_compact)
    check(FusedLayer(layer.parts, StreamingLinear(native)), layer, tokens)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_threads_do_not_change_the_result(threads: int) -> None:
    layer = Layer(is_last=False)
    fused = FusedLayer(layer.parts, kernel())
    attended, residual = (torch.randn(3, n).bfloat16() for n in (ATTENDED, HIDDEN))
    expected = fused(attended, residual)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            for one, other in zip(fused(attended, residual), expected, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_many_tokens_are_one_piece_of_work_for_a_gpu(
    is_last: bool, is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowed_gpu, "PIECE_BYTES", 256 << 10)
    monkeypatch.setattr(borrowed_gpu, "LEAST_BYTES", 1)
    # The last chunk is shorter.
    monkeypatch.setattr(borrowed_gpu, "CHUNK_TOKENS", 24)
    layer = Layer(is_last=is_last, is_compact=is_compact)
    gpu = BorrowedGpu(torch.device("cpu"), 64)
    for one in layer.parts.linears:
        gpu.add(one.weight)
    gpu.take()
    computing = kernel()
    computing.prompts = Prompts(gpu, 16)
    fused = FusedLayer(layer.parts, computing)
    sizes: list[int] = []
    between = BorrowedGpu.between

    def between_and_note(self: BorrowedGpu, parts: Parts, x: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(x))
        return between(self, parts, x, *rest)

    monkeypatch.setattr(BorrowedGpu, "between", between_and_note)
    for tokens in (15, 16, 64, 65, 50):
        check(fused, layer, tokens)
    assert sizes == [16, 64, 50]


def test_layers_that_do_not_fit_together_are_refused() -> None:
    layer = Layer(is_last=False)
    swapped = Parts(layer.parts.output, norm(), layer.parts.down, layer.parts.gate_up)
    with pytest.raises(ValueError, match="fit together"):
        FusedLayer(swapped, kernel())


@pytest.fixture
def forgotten() -> Iterator[None]:
    before = len(fused_layers._fused)
    yield
    del fused_layers._fused[before:]


def _named(name: str, **parts: Any) -> Any:
    made = type(name, (torch.nn.Module,), {})()
    for key, value in parts.items():
        setattr(made, key, value)
    return made


class _Linear(torch.nn.Module):
    tp_size = 1


def _model(layers: int, *, model: str = "LlamaModel", layer: str = "LlamaDecoderLayer") -> Any:
    def rms() -> Any:
        return _named(
            "RMSNorm", weight=torch.nn.Parameter(torch.ones(HIDDEN).bfloat16()), has_weight=True,
            variance_size_override=None, variance_epsilon=EPSILON,
        )  # fmt: skip

    def one() -> Any:
        return _named(
            layer,
            input_layernorm=rms(),
            self_attn=_named("LlamaAttention", qkv_proj=_Linear(), o_proj=_Linear()),
            post_attention_layernorm=rms(),
            mlp=_named(
                "LlamaMLP",
                gate_up_proj=_Linear(), down_proj=_Linear(), act_fn=_named("SiluAndMul"),
            ),
        )  # fmt: skip

    missing = _named("PPMissingLayer")
    stages = torch.nn.ModuleList([missing, *(one() for _ in range(layers)), missing])
    return _named(model, layers=stages, start_layer=1, end_layer=1 + layers)


def _linears(model: Any) -> dict[Any, Linear]:
    shapes = {
        "qkv_proj": (QUERIES, HIDDEN), "o_proj": (HIDDEN, ATTENDED),
        "gate_up_proj": (2 * WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE),
    }  # fmt: skip
    return {
        module: linear(*shapes[name.rpartition(".")[2]])[0]
        for name, module in model.named_modules()
        if isinstance(module, _Linear)
    }


@pytest.mark.usefixtures("forgotten")
def test_the_layers_of_a_stage_are_chained() -> None:
    model = _model(3)
    first = model.layers[1]
    linears = _linears(model)
    queries = linears[model.layers[2].self_attn.qkv_proj]
    assert fused_layers.fuse(torch.nn.Sequential(model), linears, kernel()) == 3
    made = fused_layers._fused[-3:]
    assert made[0].parts.next is queries
    assert made[2].parts.next is None
    # The first layer keeps what comes before its attention.
    assert isinstance(first.self_attn.qkv_proj, _Linear)
    assert type(first.input_layernorm).__name__ == "RMSNorm"
    # As vLLM's decoder layer runs them, between two attentions.
    attended, residual = (torch.randn(2, n).bfloat16() for n in (ATTENDED, HIDDEN))
    hidden, _ = first.self_attn.o_proj(attended)
    hidden, total = first.post_attention_layernorm(hidden, residual)
    hidden, total = model.layers[2].input_layernorm(first.mlp(hidden), total)
    found, _ = model.layers[2].self_attn.qkv_proj(hidden)
    expected = made[0](attended, residual)
    assert torch.equal(found, expected[0])
    assert torch.equal(total, expected[1])


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    "model",
    [
        _model(2, model="SubclassOfLlamaModel"),
        _model(2, layer="GraniteDecoderLayer"),
    ],
    ids=["model", "layer"],
)
def test_what_is_not_known_is_left_alone(model: Any) -> None:
    assert fused_layers.fuse(model, _linears(model), kernel()) == 0


@pytest.mark.usefixtures("forgotten")
def test_layers_between_which_something_happens_are_left_alone() -> None:
    wanting = _model(2)
    wanting.aux_hidden_state_layers = (1,)
    assert fused_layers.fuse(wanting, _linears(wanting), kernel()) == 0
    divided = _model(2)
    divided.layers[1].self_attn.o_proj.tp_size = 2
    assert fused_layers.fuse(divided, _linears(divided), kernel()) == 1
    quantised = _model(2)
    linears = _linears(quantised)
    del linears[quantised.layers[1].mlp.down_proj]
    assert fused_layers.fuse(quantised, linears, kernel()) == 1


@pytest.mark.usefixtures("forgotten")
def test_a_next_layer_that_is_not_packed_computes_its_own_queries() -> None:
    model = _model(2)
    linears = _linears(model)
    own = model.layers[2].self_attn.qkv_proj
    del linears[own]
    assert fused_layers.fuse(model, linears, kernel()) == 2
    assert fused_layers._fused[-2].parts.next is None
    assert model.layers[2].self_attn.qkv_proj is own


def test_the_operator_has_the_shapes_that_it_says() -> None:
    layer = Layer(is_last=False)
    fused_layers._fused.append(FusedLayer(layer.parts, kernel()))
    number = len(fused_layers._fused) - 1
    try:
        arguments = torch.randn(3, ATTENDED).bfloat16(), torch.randn(3, HIDDEN).bfloat16()
        torch.library.opcheck(
            torch.ops.ray_hetero.between_attentions, (*arguments, number),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
    finally:
        fused_layers._fused.pop()


def test_a_norm_of_another_kind_is_not_taken() -> None:
    weight = torch.nn.Parameter(torch.ones(HIDDEN))
    other = SimpleNamespace(weight=weight, has_weight=True, variance_size_override=None)
    assert fused_layers._norm(other) is None
