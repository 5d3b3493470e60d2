"""Steps of layers with a state, in which requests have several tokens of which some are refused."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch.nn import functional  # noqa: E402
from vllm import _custom_ops  # noqa: E402
from vllm.config.mamba import MambaBackendEnum, MambaConfig  # noqa: E402
from vllm.model_executor.layers.mamba import mamba_mixer2  # noqa: E402
from vllm.model_executor.layers.mamba.ops import ssu_dispatch  # noqa: E402
from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.compat.models import gated_delta, mamba2  # noqa: E402

current_platform.import_kernels()

DRAFTS, TAPS, STATES, STEPS = 3, 4, 40, 20
"""Most drafts of a request; taps of convolutions; states of a cache; steps of a test."""
NUMBERS = torch.arange(1, 13, dtype=torch.int32).view(3, 1 + DRAFTS)
"""[requests, tokens], of the states behind each token of a step."""
REQUESTS = len(NUMBERS)


def steps(*, is_full: bool = False) -> Iterator[tuple[Any, Any, list[slice]]]:
    """Tokens of each step, [requests + 1]; how many were accepted in the one before, [requests];
    and the tokens that are accepted then, of each request."""
    drawn = random.Random(7)
    accepted = torch.ones(REQUESTS, dtype=torch.int32)
    for _ in range(STEPS):
        counts = [1 + DRAFTS if is_full else drawn.randint(1, 1 + DRAFTS) for _ in range(REQUESTS)]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        left = [drawn.randint(1, count) for count in counts]
        kept = [slice(int(at), int(at) + one) for at, one in zip(starts, left, strict=False)]
        yield starts, accepted, kept
        accepted = torch.tensor(left, dtype=torch.int32)


def convolved(histories: list[Any], x: Any, starts: Any, weight: Any, bias: Any) -> Any:
    """Convolution of a step's tokens [tokens, channels] with all before them."""
    rows = []
    for history, begin, end in zip(histories, starts, starts[1:], strict=False):
        inputs = torch.cat([history[-(TAPS - 1) :], x[begin:end]]).float()
        y = functional.conv1d(
            inputs.T[None], weight.float()[:, None], bias, groups=weight.shape[0]
        )  # fmt: skip
        rows.append(functional.silu(y)[0].T)
    return torch.cat(rows)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's functions, as a CPU rank has them."""
    backend = ssu_dispatch._BACKEND_REGISTRY[MambaBackendEnum.CPU](MambaConfig())
    monkeypatch.setattr(ssu_dispatch, "_mamba_ssu_backend", backend)
    for name in ("causal_conv1d_update", "selective_state_update"):
        monkeypatch.setattr(mamba_mixer2, name, getattr(mamba_mixer2, name))
    monkeypatch.setattr(gdn_attention, "_spec_forward", gdn_attention._spec_forward)
    mamba2.verify_drafts()
    gated_delta.verify_few_drafts()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_goes_on_behind_the_last_token_that_was_accepted(has_bias: bool) -> None:
    torch.manual_seed(0)
    channels = 32
    weight = torch.randn(channels, TAPS)
    bias = torch.randn(channels) if has_bias else None
    states = torch.randn(STATES, TAPS - 1 + DRAFTS, channels)
    histories = [states[int(one), : TAPS - 1].clone() for one in NUMBERS[:, 0]]
    others = states[13:].clone()
    for starts, accepted, kept in steps():
        x = torch.randn(int(starts[-1]), channels)
        found = mamba_mixer2.causal_conv1d_update(
            x.clone(), states.transpose(1, 2), weight, bias, "silu", conv_state_indices=NUMBERS,
            num_accepted_tokens=accepted, query_start_loc=starts, max_query_len=1 + DRAFTS,
        )  # fmt: skip
        torch.testing.assert_close(found, convolved(histories, x, starts, weight, bias))
        histories = [torch.cat([old, x[rows]]) for old, rows in zip(histories, kept, strict=True)]
    assert torch.equal(states[13:], others)


@pytest.mark.usefixtures("patched")
def test_heads_go_on_behind_the_last_token_that_was_accepted() -> None:
    torch.manual_seed(0)
    heads, value, size = 4, 16, 32
    rates = -torch.rand(heads)[:, None, None].expand(-1, value, size)
    skips, bias = (torch.randn(heads)[:, None].expand(-1, value) for _ in range(2))
    states = torch.randn(STATES, heads, value, size)
    one_by_one = states[NUMBERS[:, 0].long()].clone()

    def update(held: Any, given: tuple[Any, ...], **step: Any) -> Any:
        out = torch.empty(len(given[0]), heads, value)
        x, dt, key, query = given
        mamba_mixer2.selective_state_update(
            held, x, dt[:, :, None].expand(-1, -1, value), rates, key, query, skips, bias,
            dt_softplus=True, out=out, is_blackwell=False, **step,
        )  # fmt: skip
        return out

    for starts, accepted, kept in steps():
        tokens = int(starts[-1])
        shapes = ((heads, value), (heads,), (2, size), (2, size))
        given = tuple(torch.randn(tokens, *shape) for shape in shapes)
        found = update(
            states, given, state_batch_indices=NUMBERS, dst_state_batch_indices=NUMBERS,
            num_accepted_tokens=accepted, cu_seqlens=starts,
        )  # fmt: skip
        for request, rows in enumerate(kept):
            held = one_by_one[request : request + 1].clone()
            for at in range(rows.start, int(starts[request + 1])):
                number = torch.zeros(1, 1, dtype=torch.int32)
                wanted = update(
                    held, tuple(one[at : at + 1] for one in given), state_batch_indices=number,
                    dst_state_batch_indices=number, null_block_id=-1, num_accepted_tokens=None,
                    cu_seqlens=None,
                )  # fmt: skip
                torch.testing.assert_close(found[at : at + 1], wanted)
                if at == rows.stop - 1:
                    one_by_one[request] = held[0]


HEADS, KEY, VALUE = (2, 4), 64, 64
"""Heads of keys and of values; elements of each."""


def delta_net() -> Any:
    """Stand-in for a layer, with the attributes that `_spec_forward` reads."""
    keys, values = HEADS[0] * KEY, HEADS[1] * VALUE
    taps = torch.randn(2 * keys + values, TAPS).mul_(0.5).bfloat16()

    def split(x: Any) -> tuple[Any, ...]:
        query, key, value = x[None].split([keys, keys, values], -1)
        shapes = ((HEADS[0], KEY), (HEADS[0], KEY), (HEADS[1], VALUE))
        return tuple(
            one.unflatten(-1, shape).contiguous()
            for one, shape in zip((query, key, value), shapes, strict=True)
        )

    return SimpleNamespace(
        conv1d=SimpleNamespace(weight=taps[:, None], bias=None, _cpu_unpacked_conv_weight=taps),
        activation="silu", A_log=torch.rand(HEADS[1]), dt_bias=torch.randn(HEADS[1]).bfloat16(),
        rearrange_mixed_qkv=split,
    )  # fmt: skip


@pytest.mark.usefixtures("patched")
def test_a_delta_net_goes_on_behind_the_last_token_that_was_accepted() -> None:
    torch.manual_seed(0)
    layer = delta_net()
    weight = layer.conv1d._cpu_unpacked_conv_weight
    columns = TAPS - 1 + DRAFTS
    inputs = torch.randn(STATES, columns, len(weight)).bfloat16()
    heads = torch.randn(STATES, HEADS[1], KEY, VALUE)
    histories = [inputs[int(one), : TAPS - 1].clone() for one in NUMBERS[:, 0]]
    one_by_one = heads[NUMBERS[:, 0].long()].clone()
    for starts, accepted, kept in steps():
        x = torch.randn(int(starts[-1]), len(weight)).bfloat16()
        gates = torch.randn(2, len(x), HEADS[1]).bfloat16()
        step = SimpleNamespace(
            num_spec_decodes=REQUESTS, spec_query_start_loc=starts, num_accepted_tokens=accepted,
            spec_state_indices_tensor=NUMBERS,
        )  # fmt: skip
        found = gdn_attention._spec_forward(
            layer, step, x, *gates, inputs.transpose(1, 2), heads, TAPS, columns
        )
        y = convolved(histories, x, starts, weight, None).bfloat16()
        for request, rows in enumerate(kept):
            held = one_by_one[request : request + 1].clone()
            for at in range(rows.start, int(starts[request + 1])):
                query, key, value = layer.rearrange_mixed_qkv(y[at : at + 1])
                wanted = _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu(
                    A_log=layer.A_log, dt_bias=layer.dt_bias, q=query, k=key, v=value,
                    a=gates[1, at : at + 1], b=gates[0, at : at + 1], initial_state_source=held,
                    initial_state_indices=torch.zeros(1, dtype=torch.int32),
                    cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip
                torch.testing.assert_close(
                    found[at].float(), wanted.view(HEADS[1], VALUE).float(), rtol=2**-5, atol=2**-5
                )
                if at == rows.stop - 1:
                    one_by_one[request] = held[0]
        histories = [torch.cat([old, x[rows]]) for old, rows in zip(histories, kept, strict=True)]


def test_vllms_convolution_for_cpus_does_not_know_what_was_accepted() -> None:
    parameters = inspect.signature(causal_conv1d.causal_conv1d_update_cpu).parameters
    assert "num_accepted_tokens" not in parameters, "see whether `verify_drafts` can go"
