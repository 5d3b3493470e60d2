"""A layer with a Gated DeltaNet in one native call gives, and keeps, what vLLM's own layer does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import decoder_parts  # noqa: E402
from decoder_parts import Product, bare, class_of, fuse_model, gemma_norm, linears, mlp  # noqa: E402
from group_steps import Threads, sums_of  # noqa: E402
from linear_steps import CLOSE, STATES, TAPS, expect_rows, expect_states  # noqa: E402
from native_module import BETWEEN_PRODUCTS, LEVELS, level_of, native, needs_native  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNormGated  # noqa: E402
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (  # noqa: E402
    QwenGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention  # noqa: E402
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata  # noqa: E402

from ray_hetero.compat.models import gated_delta  # noqa: E402
from ray_hetero.kernels.formats.base import BLOCK  # noqa: E402
from ray_hetero.kernels.layers import gated_delta_layers, layer_tokens  # noqa: E402
from ray_hetero.kernels.layers.kinds import LayerOperator, operator_of  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402

current_platform.import_kernels()
gdn_attention.register_cpu_gdn_attention_ops()
pytestmark = needs_native

HIDDEN = 256
NAME = "layers.0.linear_attn"
BEST = LEVELS[-1] if LEVELS else ""


def product(outputs: int, inputs: int, ranks: int = 1) -> Any:
    """A linear layer of vLLM's, of which a rank has a part."""
    made = Product(outputs, inputs)
    made.tp_size, made.reduce_results, made.input_is_parallel = ranks, True, True
    made.input_size_per_partition = inputs
    made.quant_method = bare_method()
    return made


def bare_method() -> Any:
    return UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)


def delta_net(
    key_heads: int, value_heads: int, key: int, value: int, *, is_by_key_head: bool, gate: str
) -> Any:
    """vLLM's module, with weights."""
    keys, values = key_heads * key, value_heads * value
    made = bare(
        QwenGatedDeltaNetAttention, prefix=NAME, tp_size=1, tp_rank=0, num_k_heads=key_heads,
        num_v_heads=value_heads, head_k_dim=key, head_v_dim=value, conv_kernel_size=TAPS,
        key_dim=keys, value_dim=values, gqa_interleaved_layout=is_by_key_head,
        activation="silu", disable_tp_for_ba_proj=False,
        conv1d=bare(torch.nn.Module, bias=None),
        in_proj_qkvz=product(2 * keys + 2 * values, HIDDEN),
        in_proj_ba=product(2 * value_heads, HIDDEN), out_proj=product(HIDDEN, values),
        norm=bare(
            RMSNormGated, eps=1e-6, activation=gate, group_size=None, norm_before_gate=True,
            weight=torch.nn.Parameter(torch.rand(value).add_(0.5).bfloat16()), bias=None,
        ),
    )  # fmt: skip
    made._forward_method = made.forward_cpu
    give_taps(made, torch.randn(2 * keys + values, TAPS).mul_(0.5).bfloat16())
    made.A_log = torch.nn.Parameter(torch.rand(value_heads).mul_(2).log_())
    made.dt_bias = torch.nn.Parameter(torch.randn(value_heads).bfloat16())
    return made.requires_grad_(False)


def give_taps(module: Any, taps: Any) -> None:
    """Give a module the weights [channels, taps] of its convolution, as when they are loaded."""
    module.conv1d.weight = torch.nn.Parameter(taps[:, None].clone(), requires_grad=False)
    # On some processors vLLM's operators expect them packed.
    dispatch_cpu_unquantized_gemm(module.conv1d, remove_weight=False)


class Step:
    """A layer with the states of some requests, and a token of each.

    Args:
        numbers: of the requests' states; 0 for a row without a request.
        heads: of keys and of values.
        sizes: elements of a key and of a value.
        is_by_key_head: whether products give what belongs to a key head together.
        has_experts: whether vLLM's module computes what comes behind.
        gate: function of the output gates.
        state: type of the heads' states.

    """

    def __init__(
        self, numbers: list[int], *, heads: tuple[int, int] = (2, 4),
        sizes: tuple[int, int] = (32, 64), is_by_key_head: bool = False,
        has_experts: bool = False, gate: str = "silu", state: Any = torch.float32,
    ) -> None:  # fmt: skip
        torch.manual_seed(sum(numbers) + sum(heads))
        (key_heads, value_heads), (key, value) = heads, sizes
        self.delta = delta_net(
            key_heads, value_heads, key, value, is_by_key_head=is_by_key_head, gate=gate
        )  # fmt: skip
        behind = mlp("LlamaMLP" if has_experts else "Qwen2MoeMLP")
        behind.expert_gate = None
        for one in (behind.gate_up_proj, behind.down_proj):
            one.reduce_results = one.input_is_parallel = True
        self.layer = bare(
            class_of("Qwen3NextDecoderLayer"), layer_type="linear_attention", layer_scale=False,
            use_attn_reduce_scatter_for_moe=False, linear_attn=self.delta, mlp=behind,
            input_layernorm=gemma_norm(HIDDEN), post_attention_layernorm=gemma_norm(HIDDEN),
        )  # fmt: skip
        self.model = bare(
            class_of("Qwen3NextModel"), start_layer=0, end_layer=1, aux_hidden_state_layers=(),
            layers=torch.nn.ModuleList([self.layer]),
        )  # fmt: skip
        self.tokens = len(numbers)
        channels = 2 * key_heads * key + value_heads * value
        # vLLM puts both states of a request into one page.
        self.pages = torch.randn(STATES, 2, TAPS * channels).bfloat16()
        self.inputs = self.pages[:, 0, : (TAPS - 1) * channels].view(STATES, TAPS - 1, channels)
        self.heads = torch.randn(STATES, value_heads, value, key).to(state)
        self.delta.kv_cache = (self.inputs, self.heads)
        self.residual = torch.randn(self.tokens, HIDDEN).bfloat16()
        self.hidden = torch.randn(self.tokens, HIDDEN).bfloat16()
        starts = torch.arange(self.tokens + 1, dtype=torch.int32)
        self.metadata = GDNAttentionMetadata(
            num_prefills=0, num_prefill_tokens=0, num_decodes=self.tokens,
            num_decode_tokens=self.tokens, num_spec_decodes=0, num_spec_decode_tokens=0,
            num_actual_tokens=self.tokens, non_spec_query_start_loc=starts,
            non_spec_state_indices_tensor=torch.tensor(numbers, dtype=torch.int32),
        )  # fmt: skip

    @property
    def linears(self) -> Any:
        """Linear layers that the kernel computes: those of whole blocks."""
        small = [self.delta.in_proj_ba] if len(self.delta.in_proj_ba.matrix) % BLOCK else []
        held = torch.nn.ModuleList(
            one for one in self.model.modules() if isinstance(one, Product) and one not in small
        )
        return linears(held)

    def made(self, level: str = BEST, kernel: StreamingLinear | None = None) -> LayerOperator:
        kernel = kernel or StreamingLinear(native, level_of(level))
        found = operator_of(self.model, self.layer, self.linears, kernel)
        assert isinstance(found, LayerOperator), found
        has_mlp = found.parts.behind.down is not None
        assert found.rest is (None if has_mlp else self.layer.mlp)
        return found

    def states(self) -> tuple[Any, Any]:
        return self.inputs.clone(), self.heads.clone()

    def restore(self, states: tuple[Any, Any]) -> None:
        self.inputs.copy_(states[0])
        self.heads.copy_(states[1])

    def stock(self, residual: Any) -> tuple[Any, Any]:
        """Run vLLM's layer; returns its output and residual."""
        hidden = self.hidden.clone()
        residual = None if residual is None else residual.clone()
        found: tuple[Any, Any] = self.layer(hidden, residual, torch.arange(self.tokens))
        return found


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's forward context."""
    found = SimpleNamespace(no_compile_layers={}, attn_metadata=None, slot_mapping={})
    for module in (gated_delta_layers, gdn_attention):
        monkeypatch.setattr(module, "get_forward_context", lambda: found)
    return found


def positions_of(step: Step) -> Any:
    """Positions of a step's tokens, none of which counts."""
    return torch.arange(step.tokens)


def begin(step: Step, context: SimpleNamespace) -> None:
    context.no_compile_layers[NAME] = step.delta
    context.attn_metadata = {NAME: step.metadata}


def expect_vllms(
    step: Step, context: SimpleNamespace, *, level: str = BEST, is_first: bool = False
) -> None:
    begin(step, context)
    residual = None if is_first else step.residual
    before = step.states()
    expected = step.stock(residual)
    theirs = step.states()
    step.restore(before)
    kept = step.hidden.clone(), step.residual.clone()
    layer = step.made(level)
    layer_tokens.take()
    given, total = layer(positions_of(step), step.hidden, residual)
    assert layer_tokens.take().native == step.tokens
    assert torch.equal(step.hidden, kept[0])
    assert torch.equal(step.residual, kept[1])
    if layer.parts.behind.down is None:
        given = step.layer.mlp(given)
    numbers = step.metadata.non_spec_state_indices_tensor.long()
    rows = numbers > 0
    for one, other in zip((given, total), expected, strict=True):
        expect_rows(one, other, rows)
    expect_states(step.states(), theirs, before, numbers[rows])


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("is_by_key_head", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numbers", [[3], [5, 1, 8, 2, 7]], ids=str)
def test_a_layer_is_vllms_at_each_level(
    numbers: list[int], state: Any, is_by_key_head: bool, level: str, context: SimpleNamespace
) -> None:
    expect_vllms(
        Step(numbers, state=state, is_by_key_head=is_by_key_head), context, level=level
    )  # fmt: skip


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("is_by_key_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [((1, 1), (32, 32)), ((2, 2), (64, 32)), ((4, 16), (128, 128)), ((16, 48), (32, 32))],
    ids=str,
)
def test_it_is_with_any_heads(
    heads: tuple[int, int], sizes: tuple[int, int], is_by_key_head: bool, level: str,
    context: SimpleNamespace,
) -> None:  # fmt: skip
    step = Step([4, 6], heads=heads, sizes=sizes, is_by_key_head=is_by_key_head)
    expect_vllms(step, context, level=level, is_first=True)


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_it_is_with_any_gate_before_experts_or_an_mlp(
    gate: str, has_experts: bool, context: SimpleNamespace
) -> None:
    expect_vllms(Step([4, 6, 1], gate=gate, has_experts=has_experts), context)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_a_request_have_no_state(state: Any, context: SimpleNamespace) -> None:
    expect_vllms(Step([4, 0, 6, 0], state=state), context)


def test_rows_behind_the_steps_tokens_have_no_state(context: SimpleNamespace) -> None:
    step = Step([4, 6, 2, 3])
    step.metadata.num_decodes = step.metadata.num_decode_tokens = 2
    step.metadata.num_actual_tokens = 2
    # A column of a table, as vLLM gives it.
    numbers = step.metadata.non_spec_state_indices_tensor
    step.metadata.non_spec_state_indices_tensor = torch.stack([numbers, numbers], 1)[:, 0]
    assert gated_delta.states_of_tokens(step.metadata, 4).tolist() == [4, 6, 0, 0]
    begin(step, context)
    before = step.states()
    step.made()(positions_of(step), step.hidden, step.residual)
    for one, old in zip(step.states(), before, strict=True):
        changed = (one != old).flatten(1).any(1).nonzero().flatten()
        assert changed.tolist() == [4, 6]


def test_states_may_be_fresh(context: SimpleNamespace) -> None:
    step = Step([4, 6])
    step.inputs.zero_()
    step.heads.zero_()
    expect_vllms(step, context)


def test_a_state_is_carried_from_step_to_step(context: SimpleNamespace) -> None:
    step = Step([4, 6], is_by_key_head=True)
    begin(step, context)
    before = step.states()
    expected = [step.stock(step.residual) for _ in range(12)]
    theirs = step.states()
    step.restore(before)
    layer = step.made()
    for given, total in expected:
        found = layer(positions_of(step), step.hidden, step.residual)
        torch.testing.assert_close(found[0].float(), given.float(), rtol=2**-4, atol=2**-4)
        assert torch.equal(found[1], total) or torch.allclose(
            found[1].float(), total.float(), **CLOSE
        )
    for one, other in zip(step.states(), theirs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **CLOSE)


def test_results_depend_on_no_number_of_threads(context: SimpleNamespace) -> None:
    step = Step([4, 6, 1])
    begin(step, context)
    before, threads = step.states(), torch.get_num_threads()
    layer, found = step.made(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            step.restore(before)
            found.append((*layer(positions_of(step), step.hidden, step.residual), *step.states()))
    finally:
        torch.set_num_threads(threads)
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


@pytest.mark.parametrize("has_experts", [False, True])
def test_other_steps_are_vllms(
    has_experts: bool, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step([4, 6], has_experts=has_experts)
    begin(step, context)
    step.metadata.num_prefills, step.metadata.num_decodes = 1, 1
    step.metadata.num_decode_tokens = 1
    monkeypatch.setattr(step.delta, "_forward_method", lambda x: x * 0.5)
    for residual in (None, step.residual):
        expected = step.stock(residual)
        kept = step.hidden.clone(), step.residual.clone()
        layer = step.made()
        layer_tokens.take()
        given, total = layer(positions_of(step), step.hidden, residual)
        assert layer_tokens.take().by_operators == 2
        found = (step.layer.mlp(given) if has_experts else given), total
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.float(), other.float(), **CLOSE)
        assert torch.equal(step.hidden, kept[0])
        assert torch.equal(step.residual, kept[1])
    # A run before there are states.
    context.attn_metadata = None
    del step.delta.kv_cache
    assert layer(positions_of(step), step.hidden, None)[0].shape == step.hidden.shape


@pytest.mark.parametrize("has_experts", [False, True])
def test_layers_of_a_model_become_operators(has_experts: bool, context: SimpleNamespace) -> None:
    step = Step([4, 6], has_experts=has_experts)
    begin(step, context)
    before = step.states()
    expected = step.made()(positions_of(step), step.hidden, step.residual)
    step.restore(before)
    model = torch.nn.Sequential(step.model)
    assert fuse_model(model, step.linears, StreamingLinear(native)) == 1
    (one,) = step.model.layers
    assert type(one).__name__ == "ResidualAttention"
    assert one.mlp is (step.layer.mlp if has_experts else None)
    # vLLM's model asks its first layer.
    assert step.model.use_sequence_parallel is False
    given, total = one(positions=torch.arange(2), hidden_states=step.hidden, residual=step.residual)
    assert torch.equal(total, expected[1])
    assert torch.equal(given, step.layer.mlp(expected[0]) if has_experts else expected[0])


@pytest.mark.parametrize("has_experts", [False, True])
def test_ranks_of_a_group_add_up_what_their_heads_give(
    has_experts: bool, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_parts, "WIDE", 384)
    whole = Step([4, 6], heads=(2, 4), has_experts=has_experts)
    begin(whole, context)
    before = whole.states()
    expected = whole.made()(positions_of(whole), whole.hidden, whole.residual)
    threads, ranks = Threads(2), []
    for own, sums in enumerate(sums_of(2)):
        rank = part_of(whole, before, own)
        kernel = StreamingLinear(native)
        kernel.sums = sums
        rank.delta.prefix = f"{NAME}.{own}"
        context.no_compile_layers[rank.delta.prefix] = rank.delta
        context.attn_metadata[rank.delta.prefix] = rank.metadata
        ranks.append((rank, rank.made(kernel=kernel)))
    found = threads.run(
        [lambda one=one: one[1](positions_of(one[0]), one[0].hidden, one[0].residual)
         for one in ranks]
    )  # fmt: skip
    for one in found:
        if isinstance(one, Exception):
            raise one
        for mine, theirs in zip(one, expected, strict=True):
            torch.testing.assert_close(mine.float(), theirs.float(), **CLOSE)
    heads = torch.cat([rank.heads for rank, _ in ranks], 1)
    torch.testing.assert_close(heads, whole.heads, **CLOSE)


def part_of(whole: Step, states: tuple[Any, Any], own: int) -> Step:
    """The half of a layer, by heads, that one of two ranks has."""
    theirs, layer = whole.delta, whole.layer
    part = Step([4, 6], heads=(1, 2))
    part.metadata = whole.metadata
    mine, keys, values = part.delta, theirs.key_dim, theirs.value_dim
    mine.tp_size, mine.tp_rank = 2, own
    mine.num_k_heads, mine.num_v_heads = theirs.num_k_heads, theirs.num_v_heads
    mine.key_dim, mine.value_dim = keys, values

    def half(x: Any, *sizes: int) -> Any:
        return torch.cat([one.chunk(2)[own] for one in x.split(sizes)]).contiguous()

    mine.in_proj_qkvz.matrix = half(theirs.in_proj_qkvz.matrix, keys, keys, values, values)
    mine.in_proj_ba.matrix = half(theirs.in_proj_ba.matrix, 4, 4)
    mine.out_proj.matrix = theirs.out_proj.matrix.chunk(2, 1)[own].contiguous()
    give_taps(mine, half(gated_delta.convolution(theirs), keys, keys, values))
    mine.A_log.data, mine.dt_bias.data = half(theirs.A_log, 4), half(theirs.dt_bias, 4)
    mine.norm.weight.data = theirs.norm.weight.data
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(part.layer, name, getattr(layer, name))
    wide = len(layer.mlp.gate_up_proj.matrix) // 2
    part.layer.mlp = bare(type(layer.mlp), act_fn=layer.mlp.act_fn, expert_gate=None)
    up = part.layer.mlp.gate_up_proj = product(wide, HIDDEN, 2)
    down = part.layer.mlp.down_proj = product(HIDDEN, wide // 2, 2)
    up.matrix = half(layer.mlp.gate_up_proj.matrix, wide, wide)
    down.matrix = layer.mlp.down_proj.matrix.chunk(2, 1)[own].contiguous()
    for one in (mine.in_proj_qkvz, mine.in_proj_ba, mine.out_proj):
        one.tp_size = 2
    part.inputs.copy_(half(states[0].movedim(2, 0), keys, keys, values).movedim(0, 2))
    part.heads.copy_(states[1].chunk(2, 1)[own])
    part.hidden, part.residual = whole.hidden, whole.residual
    return part


def test_weights_are_read_out_of_other_kernels_exactly() -> None:
    layer = product(8, 600)
    assert torch.equal(gated_delta.weight_of(layer, torch.bfloat16), layer.matrix)


WRONG: dict[str, tuple[str, Any]] = {
    "another module": ("linear state", lambda step: setattr(step.delta, "in_proj_qkv", None)),
    "another norm": ("norm", lambda step: setattr(step.layer, "input_layernorm", torch.nn.ReLU())),
    "a norm of groups": ("norm", lambda step: setattr(step.delta.norm, "group_size", 32)),
    "another activation": ("activation", lambda step: setattr(step.delta, "activation", "gelu")),
    "gates of all heads": (
        "gates", lambda step: setattr(step.delta, "disable_tp_for_ba_proj", True)
    ),
    "quantised gates": (
        "quantised", lambda step: setattr(step.delta.in_proj_ba, "quant_method", None)
    ),
    "small keys": ("multiples", lambda step: setattr(step.delta, "head_k_dim", 24)),
    "tensor-parallel ranks": (
        "tensor-parallel", lambda step: setattr(step.delta.out_proj, "tp_size", 2)
    ),
    "a drafter": ("drafter", lambda step: setattr(step.model, "aux_hidden_state_layers", (1,))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_is_left_to_vllm_with_a_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step([4])
    why, change = WRONG[name]
    change(step)
    with caplog.at_level("INFO"):
        fused = fuse_model(torch.nn.Sequential(step.model), step.linears, StreamingLinear(native))
    assert fused == 0
    assert list(step.model.layers) == [step.layer]
    (line,) = [one.message for one in caplog.records if "operator by operator" in one.message]
    assert "Qwen3NextDecoderLayer" in line
    assert why in line


def test_states_that_vllm_keeps_otherwise_are_left_to_it(
    context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step([4, 6])
    begin(step, context)
    monkeypatch.setattr(step.delta, "_forward_method", lambda x: x)
    layer = step.made()
    for states in (
        (step.inputs.transpose(1, 2), step.heads),
        (step.inputs, step.heads.half()),
        (step.inputs.float(), step.heads),
    ):
        step.delta.kv_cache = states
        layer_tokens.take()
        layer(positions_of(step), step.hidden, step.residual)
        taken = layer_tokens.take()
        assert (taken.by_operators, taken.instead) == (2, "unknown_attention")


def test_layers_and_states_that_do_not_fit_are_refused(context: SimpleNamespace) -> None:
    step = Step([STATES])
    begin(step, context)
    layer = step.made()
    with pytest.raises(ValueError, match=f"a state below {STATES}, got {STATES} for request 0"):
        layer(positions_of(step), step.hidden, step.residual)
    given = described(layer.parts)
    for wrong, why in (
        ({"heads": (2, 5, 32, 64, False)}, "value heads"),
        ({"heads": (2, 4, 24, 64, False)}, "multiples of 16"),
        ({"heads": (2, 4, 32, 32, False)}, "fit together"),
        ({"tap_count": 1}, "two taps"),
    ):
        with pytest.raises(ValueError, match=why):
            native.GatedDeltaLayer(**given | wrong)


def described(parts: Any) -> dict[str, Any]:
    """Arguments of the native module's layer."""
    given: dict[str, Any] = {}
    taken = SimpleNamespace(
        PostAttention=native.PostAttention, GatedDeltaLayer=lambda **those: given.update(those)
    )
    parts.native(taken)
    return given
