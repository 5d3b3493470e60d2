"""A mixer of Mamba 2 in one native call gives, and keeps, what vLLM's own module does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import Product, bare, linears  # noqa: E402
from group_steps import Threads, sums_of  # noqa: E402
from linear_steps import CLOSE, STATES, TAPS, expect_rows, expect_states  # noqa: E402
from native_module import BETWEEN_PRODUCTS, LEVELS, level_of, native, needs_native  # noqa: E402
from torch.nn import functional  # noqa: E402
from vllm.config.mamba import MambaBackendEnum, MambaConfig  # noqa: E402
from vllm.model_executor.layers.mamba import mamba_mixer2  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_mixer2 import (  # noqa: E402
    MambaMixer2,
    Mixer2RMSNormGated,
)
from vllm.model_executor.layers.mamba.ops import ssu_dispatch  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata  # noqa: E402

from ray_hetero.compat.models import mamba2  # noqa: E402
from ray_hetero.kernels.formats.base import BLOCK  # noqa: E402
from ray_hetero.kernels.layers import layer_tokens, mamba2_mixers  # noqa: E402
from ray_hetero.kernels.layers.mamba2_mixers import (  # noqa: E402
    MixerOperator,
    NativeMixer,
    find_mixers,
)
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

HIDDEN = 256
NAME = "layers.0.mixer"
BEST = LEVELS[-1] if LEVELS else ""


def product(outputs: int, inputs: int, *, has_bias: bool = False) -> Any:
    """A linear layer of vLLM's, of which a rank has a part."""
    made = Product(outputs, inputs, has_bias=has_bias)
    made.reduce_results = made.input_is_parallel = True
    return made


def mixer_of(
    heads: int, groups: int, value: int, state: int, *, norm_groups: int | None, has_bias: bool
) -> Any:
    """vLLM's module, with weights."""
    values, keys = heads * value, groups * state
    channels, inputs = values + 2 * keys, 2 * values + 2 * keys + heads
    rows = -(-inputs // BLOCK) * BLOCK  # some ranks' parts are padded
    norm = bare(
        Mixer2RMSNormGated, tp_size=1, tp_rank=0, full_hidden_size=values,
        per_rank_hidden_size=values, n_groups=norm_groups or 1,
        group_size=values // (norm_groups or 1), variance_epsilon=1e-5,
        use_rms_norm=norm_groups is not None, weight=None,
    )  # fmt: skip
    norm._forward_method = norm.forward_native
    if norm_groups is not None:
        norm.weight = torch.nn.Parameter(torch.rand(values).add_(0.5).bfloat16())
    bias = torch.randn(channels).mul_(0.2).bfloat16() if has_bias else None
    made = bare(
        MambaMixer2, prefix=NAME, tp_size=1, ssm_state_size=state, conv_kernel_size=TAPS,
        activation="silu", intermediate_size=values, head_dim=value, num_heads=heads,
        n_groups=groups, groups_ssm_state_size=keys, conv_dim=channels, use_replayssm=False,
        num_spec=0, cache_config=object(), is_blackwell=False, tped_intermediate_size=values,
        tped_conv_size=channels, tped_dt_size=heads, norm=norm,
        in_proj=product(rows, HIDDEN, has_bias=has_bias),
        out_proj=product(HIDDEN, values, has_bias=has_bias),
        conv1d=bare(torch.nn.Module, bias=None if bias is None else torch.nn.Parameter(bias)),
        conv_weights=torch.randn(channels, TAPS).mul_(0.5).bfloat16(),
        A=torch.nn.Parameter(-torch.rand(heads).mul_(4)),
        D=torch.nn.Parameter(torch.randn(heads).bfloat16()),
        dt_bias=torch.nn.Parameter(torch.randn(heads).bfloat16()),
    )  # fmt: skip
    made.split_hidden_states_B_C_fn = lambda x: torch.split(x, [values, keys, keys], dim=-1)
    return made.requires_grad_(False)


class Step:
    """A mixer with the states of some requests, and a token of each.

    Args:
        numbers: of the requests' states; 0 for a row without a request.
        heads: heads, and their groups.
        sizes: elements of a value, and of a row of the state.
        norm_groups: of the norm; None for no norm.
        has_bias: whether products and convolution have one.
        has_factors: whether what the first product gives is multiplied.
        state: type of the heads' states.

    """

    def __init__(
        self, numbers: list[int], *, heads: tuple[int, int] = (32, 2),
        sizes: tuple[int, int] = (16, 64), norm_groups: int | None = 1, has_bias: bool = False,
        has_factors: bool = False, state: Any = torch.float32,
    ) -> None:  # fmt: skip
        torch.manual_seed(sum(numbers) + sum(heads))
        self.mixer = mixer_of(*heads, *sizes, norm_groups=norm_groups, has_bias=has_bias)
        channels, self.tokens = self.mixer.conv_dim, len(numbers)
        self.owner = torch.nn.Module()
        self.owner.mixer = self.mixer
        self.factors = None
        if has_factors:
            inputs = self.mixer.intermediate_size + channels + heads[0]
            self.factors = torch.rand(1, inputs).add_(0.5).bfloat16()
            self.owner.register_buffer("mup_vector", self.factors)
        # vLLM puts both states of a request into one page.
        self.pages = torch.randn(STATES, 2, TAPS * channels).bfloat16()
        self.inputs = self.pages[:, 0, : (TAPS - 1) * channels].view(STATES, TAPS - 1, channels)
        self.heads = torch.randn(STATES, heads[0], *sizes).to(state)
        self.mixer.kv_cache = (self.inputs, self.heads)
        self.x = torch.randn(self.tokens, HIDDEN).bfloat16()
        self.metadata = metadata_of(numbers)

    def made(self, level: str = BEST, kernel: StreamingLinear | None = None) -> MixerOperator:
        kernel = kernel or StreamingLinear(native, level_of(level))
        found, left = find_mixers(self.owner, linears(self.owner), kernel)
        assert not left, left
        return found[0].operator

    def states(self) -> tuple[Any, Any]:
        return self.inputs.clone(), self.heads.clone()

    def restore(self, states: tuple[Any, Any]) -> None:
        self.inputs.copy_(states[0])
        self.heads.copy_(states[1])


def metadata_of(numbers: list[int], prefills: int = 0) -> Any:
    """Metadata of vLLM's for a step of requests of one token each."""
    fields = dict.fromkeys(Mamba2AttentionMetadata.__dataclass_fields__)
    count = len(numbers)
    return Mamba2AttentionMetadata(**fields | {
        "num_prefills": prefills, "num_prefill_tokens": prefills, "num_decodes": count,
        "num_decode_tokens": count, "num_reqs": count + prefills,
        "state_indices_tensor_d": torch.tensor(numbers, dtype=torch.int32)[:, None],
    })  # fmt: skip


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's forward context."""
    found = SimpleNamespace(no_compile_layers={}, attn_metadata=None)
    for module in (mamba2_mixers, mamba_mixer2):
        monkeypatch.setattr(module, "get_forward_context", lambda: found)
    backend = ssu_dispatch._BACKEND_REGISTRY[MambaBackendEnum.CPU](MambaConfig())
    monkeypatch.setattr(ssu_dispatch, "_mamba_ssu_backend", backend)
    return found


def begin(step: Step, context: SimpleNamespace) -> None:
    context.no_compile_layers[NAME] = step.mixer
    context.attn_metadata = {NAME: step.metadata}


def stock(step: Step) -> Any:
    return step.mixer(step.x.clone(), step.factors)


def expect_vllms(step: Step, context: SimpleNamespace, *, level: str = BEST) -> None:
    begin(step, context)
    before = step.states()
    expected = stock(step)
    theirs = step.states()
    step.restore(before)
    kept = step.x.clone()
    layer_tokens.take()
    given = step.made(level)(step.x, step.factors)
    assert layer_tokens.take().native == step.tokens
    assert torch.equal(step.x, kept)
    numbers = step.metadata.state_indices_tensor_d[:, 0].long()
    rows = numbers > 0
    expect_rows(given, expected, rows)
    expect_states(step.states(), theirs, before, numbers[rows])


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numbers", [[3], [5, 1, 8, 2, 7]], ids=str)
def test_a_mixer_is_vllms_at_each_level(
    numbers: list[int], state: Any, level: str, context: SimpleNamespace
) -> None:
    expect_vllms(Step(numbers, state=state), context, level=level)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize(
    ("heads", "sizes", "norm_groups"),
    [((32, 1), (64, 128), 1), ((32, 8), (16, 16), 8), ((64, 2), (32, 256), None)],
    ids=str,
)
def test_it_is_with_any_heads(
    heads: tuple[int, int], sizes: tuple[int, int], norm_groups: int | None, level: str,
    context: SimpleNamespace,
) -> None:  # fmt: skip
    expect_vllms(
        Step([4, 6], heads=heads, sizes=sizes, norm_groups=norm_groups), context, level=level
    )


@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_with_biases_and_factors(
    has_bias: bool, has_factors: bool, context: SimpleNamespace
) -> None:
    expect_vllms(Step([4, 6, 1], has_bias=has_bias, has_factors=has_factors), context)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
def test_it_is_the_formula(level: str, context: SimpleNamespace) -> None:
    step = Step([4, 6], norm_groups=2)
    begin(step, context)
    expected, heads = by_formula(step)
    given = step.made(level)(step.x, None)
    apart = (given.float() - expected).norm() / expected.norm()
    assert float(apart) < 2**-6
    torch.testing.assert_close(step.heads[[4, 6]], heads, **CLOSE)


def by_formula(step: Step) -> tuple[Any, Any]:
    """Results [M, N] and new states of a mixer, all in float32."""
    mixer, numbers = step.mixer, step.metadata.state_indices_tensor_d[:, 0].long()
    values, keys = mixer.intermediate_size, mixer.groups_ssm_state_size
    given = step.x.float() @ mixer.in_proj.matrix.float().T
    gate, channels, steps = given.split([values, mixer.conv_dim, mixer.num_heads], -1)
    window = torch.cat([step.inputs[numbers].float(), channels[:, None]], 1)
    convolved = functional.silu((window * mixer.conv_weights.float().T).sum(1))
    x, key, query = convolved.split([values, keys, keys], -1)
    x = x.view(len(x), mixer.num_heads, mixer.head_dim)
    each = mixer.num_heads // mixer.n_groups
    key, query = (
        one.view(len(x), mixer.n_groups, mixer.ssm_state_size).repeat_interleave(each, 1)
        for one in (key, query)
    )
    steps = functional.softplus(steps + mixer.dt_bias.float())
    faded = step.heads[numbers].float() * torch.exp(mixer.A * steps)[..., None, None]
    heads = faded + (steps[..., None] * x)[..., None] * key[:, :, None]
    y = (heads * query[:, :, None]).sum(-1) + mixer.D.float()[:, None] * x
    y = y.flatten(1) * functional.silu(gate)
    groups = y.view(len(y), mixer.norm.n_groups, -1)
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-5)
    y = groups.flatten(1) * mixer.norm.weight.float()
    return y @ mixer.out_proj.matrix.float().T, heads


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_a_request_have_no_state(state: Any, context: SimpleNamespace) -> None:
    expect_vllms(Step([4, 0, 6, 0], state=state), context)


def test_rows_behind_the_steps_tokens_have_no_state(context: SimpleNamespace) -> None:
    step = Step([4, 6, 2, 3])
    step.metadata = metadata_of([4, 6])
    # A column of a table, as vLLM gives it.
    step.metadata.state_indices_tensor_d = torch.tensor([[4, 1], [6, 1]], dtype=torch.int32)[:, :1]
    assert mamba2.states_of_tokens(step.metadata, 4).tolist() == [4, 6, 0, 0]
    begin(step, context)
    before = step.states()
    step.made()(step.x, None)
    for one, old in zip(step.states(), before, strict=True):
        changed = (one != old).flatten(1).any(1).nonzero().flatten()
        assert changed.tolist() == [4, 6]


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
def test_what_is_no_number_stays_with_its_request(level: str, context: SimpleNamespace) -> None:
    step = Step([4, 6, 2])
    begin(step, context)
    before, layer = step.states(), step.made(level)
    expected, wanted = layer(step.x, None), step.states()
    step.restore(before)
    step.x[1] = float("nan")
    step.heads[2, 3] = float("inf")
    found = layer(step.x, None)
    assert torch.equal(found[0], expected[0])
    assert found[1:].isnan().any(1).all()
    for one, other in zip(step.states(), wanted, strict=True):
        assert torch.equal(one[4], other[4])


def test_a_state_is_carried_from_step_to_step(context: SimpleNamespace) -> None:
    step = Step([4, 6])
    begin(step, context)
    before = step.states()
    expected = [stock(step) for _ in range(12)]
    theirs = step.states()
    step.restore(before)
    layer = step.made()
    for wanted in expected:
        found = layer(step.x, None)
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-4, atol=2**-4)
    for one, other in zip(step.states(), theirs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **CLOSE)


def test_results_depend_on_no_number_of_threads(context: SimpleNamespace) -> None:
    step = Step([4, 6, 1], norm_groups=2)
    begin(step, context)
    before, threads = step.states(), torch.get_num_threads()
    layer, found = step.made(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            step.restore(before)
            found.append((layer(step.x, None), *step.states()))
    finally:
        torch.set_num_threads(threads)
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


def test_ranks_add_up_what_their_heads_give(context: SimpleNamespace) -> None:
    whole = Step([4, 6], norm_groups=2, has_bias=True)
    begin(whole, context)
    before = whole.states()
    expected = whole.made()(whole.x, None)
    threads, ranks = Threads(2), []
    for own, sums in enumerate(sums_of(2)):
        rank = part_of(whole, before, own)
        kernel = StreamingLinear(native)
        kernel.sums = sums
        context.attn_metadata[rank.mixer.prefix] = whole.metadata
        ranks.append((rank, rank.made(kernel=kernel)))
    found = threads.run([lambda one=one: one[1](one[0].x, None) for one in ranks])
    for one in found:
        if isinstance(one, Exception):
            raise one
        torch.testing.assert_close(one.float(), expected.float(), **CLOSE)
    heads = torch.cat([rank.heads for rank, _ in ranks], 1)
    torch.testing.assert_close(heads, whole.heads, **CLOSE)


def part_of(whole: Step, states: tuple[Any, Any], own: int) -> Step:
    """The half of a mixer, by heads, that one of two ranks has."""
    theirs, part = whole.mixer, Step([4, 6], heads=(16, 1), norm_groups=1, has_bias=True)
    mine, values, keys = part.mixer, theirs.intermediate_size, theirs.groups_ssm_state_size
    mine.prefix, mine.tp_size = f"{NAME}.{own}", 2
    mine.num_heads, mine.n_groups = theirs.num_heads, theirs.n_groups
    mine.norm.n_groups = theirs.norm.n_groups

    def half(x: Any, *sizes: int) -> Any:
        return torch.cat([one.chunk(2)[own] for one in x.split(sizes)]).contiguous()

    of_inputs, of_channels = (values, values, keys, keys, 32), (values, keys, keys)
    for name in ("matrix", "added"):
        setattr(mine.in_proj, name, half(getattr(theirs.in_proj, name), *of_inputs))
    more = -len(mine.in_proj.added) % BLOCK
    mine.in_proj.matrix = functional.pad(mine.in_proj.matrix, (0, 0, 0, more))
    mine.in_proj.added = functional.pad(mine.in_proj.added, (0, more))
    mine.out_proj.matrix = theirs.out_proj.matrix.chunk(2, 1)[own].contiguous()
    mine.out_proj.added = theirs.out_proj.added
    mine.conv_weights = half(theirs.conv_weights, *of_channels)
    mine.conv1d.bias.data = half(theirs.conv1d.bias.data, *of_channels)
    for name in ("A", "D", "dt_bias"):
        getattr(mine, name).data = getattr(theirs, name).data.chunk(2)[own].contiguous()
    mine.norm.weight.data = theirs.norm.weight.data.chunk(2)[own].contiguous()
    for one in (mine.in_proj, mine.out_proj):
        one.tp_size = 2
    part.inputs.copy_(half(states[0].movedim(2, 0), *of_channels).movedim(0, 2))
    part.heads.copy_(states[1].chunk(2, 1)[own])
    part.x = whole.x
    return part


def test_other_steps_are_vllms(context: SimpleNamespace) -> None:
    step = Step([4, 6])
    begin(step, context)
    operator = step.made()
    seen: list[Any] = []
    step.mixer.forward = lambda x, factors=None: (seen.append(x), x * 0.5)[1]
    for metadata in (None, {NAME: metadata_of([4], prefills=1)}):
        context.attn_metadata = metadata
        layer_tokens.take()
        given = NativeMixer(operator)(step.x)
        assert torch.equal(given, step.x * 0.5)
        assert layer_tokens.take().by_operators == 2
    assert len(seen) == 2


WRONG: dict[str, tuple[str, Any]] = {
    "another norm": ("norm", lambda mixer: setattr(mixer, "norm", torch.nn.LayerNorm(512))),
    "another activation": ("activation", lambda mixer: setattr(mixer, "activation", "gelu")),
    "rings": ("replayssm", lambda mixer: setattr(mixer, "use_replayssm", True)),
    "a norm of all ranks": ("several ranks", lambda mixer: setattr(mixer, "tp_size", 2)),
    "small values": ("multiples", lambda mixer: setattr(mixer, "head_dim", 8)),
    "float32": ("another type", lambda mixer: setattr(
        mixer, "conv_weights", mixer.conv_weights.float()
    )),
    "tensor-parallel ranks": ("tensor-parallel", lambda mixer: setattr(
        mixer.out_proj, "tp_size", 2
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_is_left_to_vllm(name: str) -> None:
    step = Step([4])
    why, change = WRONG[name]
    change(step.mixer)
    found, left = find_mixers(step.owner, linears(step.owner), StreamingLinear(native))
    assert not found
    ((said, count),) = left.items()
    assert why in said
    assert count == 1


def test_states_that_vllm_keeps_otherwise_are_left_to_it(context: SimpleNamespace) -> None:
    step = Step([4, 6])
    begin(step, context)
    operator = step.made()
    step.mixer.forward = lambda x, factors=None: x
    for states in (
        (step.inputs.transpose(1, 2), step.heads),
        (step.inputs, step.heads.half()),
        (step.inputs.float(), step.heads),
    ):
        step.mixer.kv_cache = states
        layer_tokens.take()
        operator(step.x, None)
        taken = layer_tokens.take()
        assert (taken.by_operators, taken.instead) == (2, "unknown_attention")


def test_mixers_and_states_that_do_not_fit_are_refused(context: SimpleNamespace) -> None:
    step = Step([STATES])
    begin(step, context)
    operator = step.made()
    with pytest.raises(ValueError, match=f"a state below {STATES}, got {STATES} for request 0"):
        operator(step.x, None)
    given: dict[str, Any] = {}
    operator.parts.native(SimpleNamespace(Mamba2Mixer=lambda **those: given.update(those)))
    for wrong, why in (
        ({"heads": (32, 5, 16, 64)}, "each group"),
        ({"heads": (32, 2, 8, 64)}, "multiples of 16"),
        ({"heads": (32, 2, 32, 64)}, "fit together"),
        ({"norm_groups": 64}, "groups of the norm"),
        ({"tap_count": 1}, "two taps"),
    ):
        with pytest.raises(ValueError, match=why):
            native.Mamba2Mixer(**given | wrong)
