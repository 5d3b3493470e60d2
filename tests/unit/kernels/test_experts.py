"""Routed experts are what a float reference computes, whatever the routing, threads and format."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import EMULATED, LEVELS, TESTED, level_of, native  # noqa: E402
from vllm import _custom_ops as vllm_ops  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import activation as vllm_activations  # noqa: E402
from vllm.model_executor.layers.activation import SwigluOAIAndMul  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # noqa: E402
    CPUUnquantizedExperts,
)
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.compat.models import cpu_experts  # noqa: E402
from ray_hetero.kernels.experts.activations import (  # noqa: E402
    ROWS,
    SILU,
    SWIGLU_OAI,
    SWIGLU_STEP,
    Activation,
    Order,
)
from ray_hetero.kernels.experts.expert_layers import (  # noqa: E402
    activation_of,
    unsuited,
    unsuited_activation,
)
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices  # noqa: E402
from ray_hetero.kernels.experts.experts_one_by_one import PlainExperts  # noqa: E402
from ray_hetero.kernels.experts.routed_experts import RoutedExperts, paired  # noqa: E402
from ray_hetero.kernels.formats import FORMATS  # noqa: E402

if native is None:
    pytest.skip("needs the native module", allow_module_level=True)

current_platform.import_kernels()
BEST = LEVELS[-1]
SLOW = {"portable", "software_tiles", *EMULATED}
CLAMPED = tuple(
    Activation(value, alpha=1.702, beta=1.0, limit=0.75, up_limit=0.75)
    for value in ("swigluoai", "swigluoai_uninterleave")
)
ACTIVATIONS = {
    **{value: Activation(value) for value in ROWS if not value.startswith("sw")},
    "silu limited": Activation(limit=0.75, up_limit=0.75),
    "swigluoai": SWIGLU_OAI,
    "swigluoai limited": CLAMPED[0],
    "swigluoai_uninterleave": CLAMPED[1],
    "swiglustep": dataclasses.replace(SWIGLU_STEP, limit=0.5, up_limit=0.5),
    "situ": Activation("situ", limit=1.5),
    "situ limited": Activation("situ", limit=0.75, up_limit=1.25),
}
"""Each row with figures that change what it computes."""


@dataclass
class Given:
    """A layer in plain tensors."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    activation: Activation = SILU

    @classmethod
    def random(
        cls, experts: int, hidden: int, inner: int, *, bias: bool = False, **how: Any
    ) -> Given:
        activation = how.get("activation", SILU)
        outputs = inner if activation.order is Order.ALONE else 2 * inner
        w13 = torch.randn(experts, outputs, hidden).mul_(hidden**-0.5).bfloat16()
        w2 = torch.randn(experts, hidden, inner).mul_(inner**-0.5).bfloat16()
        # Some that are rare, so that compact weights have outliers.
        for weight in (w13, w2):
            weight.view(-1)[::1499] = 20.0
            weight.view(-1)[::1999] = -(2.0**-40)
        biases = {"w13_bias": torch.randn(experts, outputs).bfloat16(),
                  "w2_bias": torch.randn(experts, hidden).bfloat16()}  # fmt: skip
        return cls(w13, w2, **(biases if bias else {}), **how)

    def made(self, level: str, kind: str = "packed") -> RoutedExperts:
        return RoutedExperts(
            ExpertMatrices(self.w13, self.w2, self.w13_bias, self.w2_bias),
            native=native, level=level_of(level), kind=FORMATS[kind], activation=self.activation,
        )  # fmt: skip

    def expected(
        self, x: torch.Tensor, weights: torch.Tensor | None, ids: torch.Tensor
    ) -> torch.Tensor:
        """In float32, but for what is rounded between the two products."""
        y = torch.zeros(x.shape)
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            tokens, chosen = (ids == expert).nonzero(as_tuple=True)
            both = x[tokens].float() @ self.w13[expert].float().T
            if self.w13_bias is not None:
                both += self.w13_bias[expert].float()
            out = self.activation(both).bfloat16().float() @ self.w2[expert].float().T
            if self.w2_bias is not None:
                out += self.w2_bias[expert].float()
            y.index_add_(0, tokens, out if weights is None else out * weights[tokens, chosen, None])
        return y


def routed(tokens: int, experts: int, chosen: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(chosen).indices.int()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # What is between the products is rounded to bf16 after sums in another order, the result too.
    most = float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=2**-6, atol=2**-8 * max(1.0, most))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "chosen"),
    [(8, 64, 32, 1), (16, 1088, 96, 4), (128, 96, 64, 8), (9, 32, 40, 3)],
)
def test_experts_are_those_of_a_float_reference(
    experts: int, hidden: int, inner: int, chosen: int, kind: str, level: str
) -> None:
    torch.manual_seed(experts + hidden)
    given = Given.random(experts, hidden, inner)
    made = given.made(level, kind)
    for tokens in (1, 3, 40) if level in SLOW else (1, 2, 3, 9, 17, 33, 64, 130, 300):
        # A view of a wider tensor.
        x = torch.randn(tokens, hidden + 32).bfloat16()[:, :hidden]
        ids, weights = routed(tokens, experts, chosen), torch.rand(tokens, chosen)
        assert_close(made(x, weights, ids), given.expected(x, weights, ids))


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_biases_and_a_limit_are_kept(tokens: int, kind: str, level: str) -> None:
    torch.manual_seed(tokens)
    for activation in CLAMPED:
        given = Given.random(6, 96, 32, bias=True, activation=activation)
        x, weights = torch.randn(tokens, 96).bfloat16(), torch.rand(tokens, 2)
        ids = routed(tokens, 6, 2)
        found = given.made(level, kind)(x, weights, ids)
        assert_close(found, given.expected(x, weights, ids))


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_a_float_reference(name: str, level: str) -> None:
    torch.manual_seed(6)
    for inner, has_bias in ((40, False), (96, True)):
        given = Given.random(5, 64, inner, bias=has_bias, activation=ACTIVATIONS[name])
        made = {kind: given.made(level, kind) for kind in FORMATS}
        for tokens in (1, 5, 40):
            # Large ones too: powers of two overflow.
            x = torch.randn(tokens, 64).mul_(30 if tokens == 5 else 1).bfloat16()
            ids, weights = routed(tokens, 5, 2), torch.rand(tokens, 2)
            for one in made.values():
                assert_close(one(x, weights, ids), given.expected(x, weights, ids))


def stock(value: str, figures: Activation) -> Any:
    """What vLLM says an activation is: its operators for others than GPUs."""
    classes = vllm_activations
    with set_current_vllm_config(VllmConfig()):
        if value in ("silu", "swigluoai_uninterleave") and figures.limit < math.inf:
            return classes.SiluAndMulWithClamp(figures.limit, figures.alpha, figures.beta)
        if value == "situ":
            up_limit = None if math.isinf(figures.up_limit) else figures.up_limit
            return classes.SituAndMul(figures.limit, up_limit)
        if value == "swigluoai":
            return SwigluOAIAndMul(figures.alpha, figures.limit)
        if value == "swiglustep":
            return classes.SwigluStepAndMul(figures.limit)
        if value == "relu2_no_mul":
            return classes.ReLUSquaredActivation()
        if value in ("gelu", "gelu_tanh"):
            return classes.GeluAndMul("tanh" if value == "gelu_tanh" else "none")
        return classes.SiluAndMul()


ALONE = {
    "silu_no_mul": torch.nn.functional.silu,
    "gelu_no_mul": torch.nn.functional.gelu,
    "gelu_tanh_no_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
"""What vLLM calls for these."""


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_formulas_are_vllms(name: str) -> None:
    torch.manual_seed(7)
    activation, x = ACTIVATIONS[name], torch.randn(50, 64) * 4
    theirs = ALONE.get(activation.value) or stock(activation.value, activation).forward_native
    torch.testing.assert_close(activation(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_all_activations_that_vllm_applies_are_rows() -> None:
    gated_relu2 = MoEActivation.RELU2  # known by name, and applied by nothing
    assert {one.value for one in MoEActivation} - {gated_relu2.value} == set(ROWS)


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("tokens", [2, 33, 300])
def test_all_tokens_may_choose_one_expert_and_some_may_be_elsewhere(
    tokens: int, level: str
) -> None:
    torch.manual_seed(tokens)
    given = Given.random(12, 64, 64)
    made = given.made(level)
    x, weights = torch.randn(tokens, 64).bfloat16(), torch.rand(tokens, 3)
    one = torch.full((tokens, 3), -1, dtype=torch.int32)
    assert torch.equal(made(x, weights, one), torch.zeros_like(x))
    one[:, 1] = 7
    assert_close(made(x, weights, one), given.expected(x, weights, one))
    some = routed(tokens, 12, 3)
    some[some > 5] = -1
    assert_close(made(x, weights, some), given.expected(x, weights, some))


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_result_depends_neither_on_threads_nor_on_chance(
    kind: str, level: str, threads: None
) -> None:
    torch.manual_seed(3)
    given = Given.random(5, 2080, 64)
    made = given.made(level, kind)
    for tokens in (1, 7) if level in SLOW else (1, 7, 60, 400):
        x, weights = torch.randn(tokens, 2080).bfloat16(), torch.rand(tokens, 2)
        ids = routed(tokens, 5, 2)
        torch.set_num_threads(1)
        expected = made(x, weights, ids)
        for count in (2, 3, 7, 2):
            torch.set_num_threads(count)
            assert torch.equal(made(x, weights, ids), expected)


def test_more_tokens_than_are_computed_at_once() -> None:
    torch.manual_seed(4)
    given = Given.random(64, 1024, 32)
    x, ids = torch.randn(600, 1024).bfloat16(), routed(600, 64, 64)
    weights = torch.rand(600, 64)
    assert_close(given.made(BEST)(x, weights, ids), given.expected(x, weights, ids))


def test_weights_of_one_need_not_be_given() -> None:
    given = Given.random(4, 64, 32)
    x, ids = torch.randn(5, 64).bfloat16(), routed(5, 4, 1).long()
    assert_close(given.made(BEST)(x, None, ids), given.expected(x, None, ids))


def test_an_expert_that_there_is_not_is_refused() -> None:
    made = Given.random(4, 64, 32).made(BEST)
    x, ids = torch.zeros(1, 64).bfloat16(), torch.tensor([[1, 4]])
    with pytest.raises(ValueError, match="expected experts below 4, got 4"):
        made(x, torch.ones(1, 2), ids)


def test_a_hidden_size_that_the_layout_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden size 48: expected a multiple of 32"):
        Given.random(2, 48, 32).made(BEST)


def test_gate_and_up_are_neighbours_in_halves_of_blocks() -> None:
    gate, up = torch.arange(40), torch.arange(100, 140)
    for given, order_given in (
        (torch.cat([gate, up]), Order.HALVES),
        (torch.stack([gate, up], dim=1).flatten(), Order.TURNS),
    ):
        order = paired(given.view(-1, 1), order_given).flatten().tolist()
        assert order[:32] == [*range(16), *range(100, 116)]
        assert order[64:96] == [*range(32, 40), *[0] * 8, *range(132, 140), *[0] * 8]
        assert len(order) == 128
    assert paired(up.view(-1, 1), Order.ALONE).flatten().tolist() == [*range(100, 140), *[0] * 24]


# ---- vLLM's layers ------------------------------------------------------------------------------


def layer_of(given: Given, activation: MoEActivation) -> Any:
    layer = torch.nn.Module()
    layer.activation = activation
    layer.layer_name = "model.layers.0.mlp.experts"
    hidden = given.w2.shape[1]
    layer.moe_config = SimpleNamespace(
        activation=activation, hidden_dim=hidden,
        intermediate_size_per_partition=given.w2.shape[2], swiglu_limit=None, swiglu_alpha=None,
        swiglu_beta=None, activation_situ_beta=None, activation_situ_linear_beta=None,
    )  # fmt: skip
    layer.swiglu_limit = layer.swiglu_alpha = layer.swiglu_beta = None
    for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):
        tensor = getattr(given, name.removesuffix("_weight"))
        if tensor is not None:
            setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer


PATCHED = (
    "process_weights_after_loading", "apply", "_supports_activation", "_supports_no_act_and_mul",
    "_supports_grouped_gemm",
)  # fmt: skip
"""What `cpu_experts.use_experts` replaces of vLLM's class."""


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take patches back behind the test."""
    for name in PATCHED:
        own = inspect.getattr_static(CPUUnquantizedExperts, name)
        monkeypatch.setattr(CPUUnquantizedExperts, name, own)
    made = FusedMoEConfig.__post_init__
    monkeypatch.setattr(FusedMoEConfig, "__post_init__", made)


@pytest.mark.parametrize("name", ["silu", "swigluoai", "gelu", "gelu_tanh"])
def test_vllms_experts_use_it_and_hold_their_weights_once(name: str, unpatched: None) -> None:
    torch.manual_seed(5)
    given = Given.random(8, 64, 32, bias=name == "swigluoai", activation=ACTIVATIONS[name])
    made = given.made(BEST)
    calls: list[int] = []

    def kernel(out: Any, x: Any, weights: Any, ids: Any, number: int) -> None:
        calls.append(number)
        made(x, weights, ids, out)

    cpu_experts.use_experts(kernel, lambda layer: 6 if unsuited(layer) == "" else None, ROWS)
    layer = layer_of(given, MoEActivation(name))
    experts = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    experts.process_weights_after_loading(layer)
    assert layer.w13_weight.shape == given.w13.shape
    assert layer.w13_weight.untyped_storage().nbytes() <= 64
    x, weights = torch.randn(20, 64).bfloat16(), torch.rand(20, 2)
    ids = routed(20, 8, 2)
    out, theirs = torch.empty_like(x), torch.empty_like(x)

    def apply(weights: torch.Tensor, *, is_on_input: bool) -> None:
        experts.apply(
            output=out, hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight,
            topk_weights=weights, topk_ids=ids, activation=layer.activation,
            global_num_experts=8, expert_map=None, a1q_scale=None, a2_scale=None,
            workspace13=out, workspace2=out, expert_tokens_meta=None,
            apply_router_weight_on_input=is_on_input,
        )  # fmt: skip

    apply(weights, is_on_input=False)
    vllm_ops.cpu_fused_moe(
        theirs, x, vllm_ops.cpu_prepack_moe_weight(given.w13, "vec"),
        vllm_ops.cpu_prepack_moe_weight(given.w2, "vec"), given.w13_bias, given.w2_bias, weights,
        ids, name, "vec",
    )  # fmt: skip
    assert_close(out, theirs.float())
    apply(weights, is_on_input=True)
    assert_close(out, given.expected(x, None, ids))
    assert calls == [6, 6]


def test_experts_of_other_kinds_are_left_to_vllm(
    unpatched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given.random(2, 64, 32)
    silu = MoEActivation.SILU
    assert unsuited(layer_of(given, silu)) == ""
    floats = layer_of(Given(given.w13.float(), given.w2.float()), silu)
    assert "torch.float32, expected torch.bfloat16" in unsuited(floats)
    assert "hidden size is 48" in unsuited(layer_of(Given.random(2, 48, 32), silu))
    assert cpu_experts.has_kernel(floats)

    left: list[Any] = []
    methods = {"process_weights_after_loading": lambda self, layer: left.append(layer),
               "apply": lambda self, *given: left.append(given)}  # fmt: skip
    for name, method in methods.items():
        monkeypatch.setattr(CPUUnquantizedExperts, name, method)
    cpu_experts.use_experts(lambda *call: pytest.fail("not its layer"), lambda layer: None, ROWS)
    experts = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    experts.process_weights_after_loading(floats)
    experts.apply(*range(15))
    assert left == [floats, tuple(range(15))]
    # Its own kernel is still asked what it takes.
    assert cpu_experts.has_kernel(floats)
    assert not cpu_experts.has_kernel(layer_of(given, MoEActivation.SITU))
    assert CPUUnquantizedExperts._supports_activation(MoEActivation.SITU)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_figures_are_those_of_the_layer(name: str) -> None:
    activation = ACTIVATIONS[name]
    if activation.value in ("swigluoai", "swiglustep"):
        pytest.skip("vLLM's operators have these figures, which no layer changes")
    layer = layer_of(
        Given.random(2, 64, 32, activation=activation), MoEActivation(activation.value)
    )
    if activation.value == "situ":
        layer.moe_config.activation_situ_beta = activation.limit
        if activation.up_limit < math.inf:
            layer.moe_config.activation_situ_linear_beta = activation.up_limit
    elif activation.limit < math.inf:
        # The layer's own go first.
        layer.swiglu_limit, layer.moe_config.swiglu_limit = activation.limit, 5.0
        layer.moe_config.swiglu_alpha = activation.alpha
        layer.moe_config.swiglu_beta = activation.beta
    assert unsuited_activation(layer) == ""
    assert activation_of(layer) == activation


def test_activations_that_nothing_computes_are_refused_by_name() -> None:
    given = Given.random(2, 64, 32)
    refused = {
        MoEActivation.RELU2: "the activation is relu2, expected one of silu, swigluoai",
        MoEActivation.GELU: "gelu with a limit of 3.0, expected none",
        MoEActivation.SWIGLUSTEP: "the limit of swiglustep is 3.0, expected 7.0",
    }
    for activation, why in refused.items():
        layer = layer_of(given, activation)
        layer.swiglu_limit = 3.0
        assert why in unsuited_activation(layer)
    assert "without a limit" in unsuited_activation(
        layer_of(given, MoEActivation.SWIGLUOAI_UNINTERLEAVE)
    )
    assert "without its beta" in unsuited_activation(layer_of(given, MoEActivation.SITU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu_tanh", "relu2_no_mul", "silu limited"])
def test_layers_that_no_kernel_takes_are_computed_by_torch(
    name: str, dtype: torch.dtype, unpatched: None
) -> None:
    torch.manual_seed(9)
    given = Given.random(6, 48, 32, activation=ACTIVATIONS[name])
    given.w13, given.w2 = given.w13.to(dtype), given.w2.to(dtype)
    layer = layer_of(given, MoEActivation(given.activation.value))
    plain = PlainExperts(layer, given.activation)
    x, weights = torch.randn(20, 48).to(dtype), torch.rand(20, 2)
    ids = routed(20, 6, 2)
    ids[3] = -1
    found = plain(x, weights, ids, torch.empty_like(x))
    assert_close(found, given.expected(x, weights, ids))
    assert not found[3].any()


def test_the_activation_of_gpt_oss_has_vllms_figures() -> None:
    known = inspect.signature(SwigluOAIAndMul).parameters
    assert (SWIGLU_OAI.alpha, SWIGLU_OAI.limit) == (known["alpha"].default, known["limit"].default)
