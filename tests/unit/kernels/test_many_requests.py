"""Decode steps of more tokens than are few, up to what one native call takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import decoder_parts  # noqa: E402
from decoder_parts import Product, attends, known_layers  # noqa: E402
from native_module import BETWEEN_PRODUCTS, LEVELS, native, needs_native  # noqa: E402
from stored_codes import made  # noqa: E402
from test_decode_step import (  # noqa: E402
    LAYERS,
    Requests,
    expect_the_same_by_any_threads,
    kernel_of,
    unpacked,
)
from vllm.platforms import current_platform  # noqa: E402

from placement.plan.devices import NATIVE_STEP_TOKENS  # noqa: E402
from ray_hetero.kernels.formats import CompactWeight, HostWeight, PackedWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.formats.integers import Int4Weight  # noqa: E402
from ray_hetero.kernels.layers import decode_step, layer_tokens  # noqa: E402
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers  # noqa: E402
from ray_hetero.kernels.layers.layer_parts import Linear  # noqa: E402
from ray_hetero.kernels.layers.layer_tokens import LayerTokens  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

BEST = LEVELS[-1] if LEVELS else ""
IN_PARTS = 2 * 2048 + 64
"""Inputs of a down projection that are multiplied in two parts."""


CLOSE = 2**-5
"""How far a token's results may be from others, relative to their length: attention is rounded
elsewhere than vLLM's."""
CLOSER = 2**-6
"""The same where sums are taken in another order only."""


def lengths_of(count: int) -> list[int]:
    return [1 + 37 * number % 150 for number in range(count)]


def expect_close(found: Any, expected: Any, close: float) -> None:
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        apart = (one.float() - other.float()).norm(dim=1) / other.float().norm(dim=1)
        assert float(apart.max()) < close, f"token {int(apart.argmax())}: {float(apart.max()):.4f}"


def expect_the_same(requests: Requests, *, isa: str = "vec", level: str = BEST) -> None:
    """A step is what layers are one by one, with vLLM's attention."""
    layers, (hidden, residual) = requests.made(level), requests.inputs(is_first=False)
    theirs = requests.begin("vec")
    expected = layers.one_by_one(requests.positions, hidden, residual)
    ours = requests.begin(isa)
    expect_close(requests.decoded(layers, hidden, residual), expected, CLOSE)
    for mine, vllms in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            unpacked(mine, isa).float(), unpacked(vllms, "vec").float(), rtol=2**-5, atol=2**-3
        )


def in_steps_of_few(requests: Requests, layers: DecoderLayers, hidden: Any, residual: Any) -> Any:
    """The same requests, a token each, in several steps."""
    requests.begin("vec")
    step = layers.decode_step
    assert step is not None
    contexts = [requests.contexts[attends(layer).layer_name] for layer in requests.layers]
    found = []
    for begin in range(0, requests.tokens, native.FEW_TOKENS):
        some = slice(begin, begin + native.FEW_TOKENS)
        own = decode_step.StepRequests(
            requests.positions[some], requests.slots[some], requests.lengths[some],
            requests.blocks[some],
        )  # fmt: skip
        found.append(step.run([own], contexts[:1], contexts, hidden[some], residual[some]))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("count", "isa"), [(33, "vec"), (64, "amx"), (100, "vec"), (128, "vec"), (128, "amx")]
)
def test_a_step_is_what_layers_are_one_by_one(
    count: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_the_same(Requests(monkeypatch, lengths_of(count)), isa=isa)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
def test_so_it_is_at_each_level(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_the_same(Requests(monkeypatch, lengths_of(37)), isa="amx", level=level)


def test_many_requests_verify_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [4 + length for length in lengths_of(32)]
    expect_the_same(Requests(monkeypatch, lengths, rows=[4] * 32), isa="amx")


def test_long_requests_have_parts_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the first two all drafts are attended together.
    lengths = [2500, 1100, 600, 64, 30, 17, 16, 100]
    expect_the_same(Requests(monkeypatch, lengths, block=128, rows=[16] * 8), isa="amx")


def held(kind: str, matrix: Any) -> HostWeight:
    if kind == "int4":
        outputs, inputs = matrix.shape
        codes = made(Int4Weight, outputs, inputs, 32, has_zeros=True)
        scales = codes.scales.abs().clamp(min=0.5) * (inputs**-0.5 / 8)
        return Int4Weight.stored(replace(codes, scales=scales.to(codes.scales.dtype)), native)
    weight = {"packed": PackedWeight, "compact": CompactWeight}[kind].made(pack(matrix), native)
    assert weight is not None
    return weight


def with_weights(requests: Requests, kind: str, level: str = BEST) -> DecoderLayers:
    """Layers whose weights are of one format."""
    for module in requests.decoder.modules():
        if isinstance(module, Product):
            # Some that are rare, so that compact ones have outliers.
            module.matrix.view(-1)[::1499] = 4.0
    given = {
        module: Linear(held(kind, module.matrix), module.added)
        for module in requests.decoder.modules()
        if isinstance(module, Product)
    }
    if kind == "compact":
        assert any(one.weight.encoding.outliers_count > 0 for one in given.values())
    kernel = kernel_of(level)
    return DecoderLayers(known_layers(requests.decoder, given, kernel), kernel)


@pytest.mark.parametrize("level", ["software_tiles", BEST])
@pytest.mark.parametrize("kind", ["packed", "compact", "int4"])
def test_weights_of_all_kinds_are_expanded_once(
    kind: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, lengths_of(45))
    layers = with_weights(requests, kind, level)
    hidden, residual = requests.inputs(is_first=False)
    expected = in_steps_of_few(requests, layers, hidden, residual)
    requests.begin("vec")
    found = requests.decoded(layers, hidden, residual)
    # Of few tokens codes are multiplied, of more weights that are rounded.
    expect_close(found, expected, CLOSE if kind == "int4" else CLOSER)


@pytest.mark.parametrize("level", ["software_tiles", BEST])
def test_inputs_that_do_not_fit_a_cache_are_multiplied_in_parts(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_parts, "WIDE", IN_PARTS)
    requests = Requests(monkeypatch, lengths_of(34))
    layers = with_weights(requests, "compact", level)
    hidden, residual = requests.inputs(is_first=False)
    expected = in_steps_of_few(requests, layers, hidden, residual)
    found = expect_the_same_by_any_threads(requests, layers, hidden, residual)
    expect_close(found, expected, CLOSER)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_what_others_have_left_in_a_block_does_not_matter(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = lengths_of(40)
    requests = Requests(monkeypatch, lengths)
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    slots = torch.ones(requests.blocks.numel() * 32, dtype=torch.bool)
    for blocks, length in zip(requests.blocks, lengths, strict=True):
        at = torch.arange(length - 1)
        slots[blocks.long()[at // 32] * 32 + at % 32] = False
    found = []
    for left in (0.0, float("nan")):
        requests.keys[:, slots], requests.values[:, slots] = left, left
        requests.begin(isa)
        found.append(requests.decoded(layers, hidden, residual))
        assert found[-1] is not None
    assert all(bool(one.isfinite().all()) for one in found[1])
    assert all(map(torch.equal, *found))


def test_the_plan_knows_how_many_they_may_be() -> None:
    assert native.STEP_TOKENS == NATIVE_STEP_TOKENS


def test_the_cores_compute_such_a_step_and_no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        def suits(self, tokens: int) -> bool:
            raise AssertionError("a decode step has been offered to the GPU")

    requests = Requests(monkeypatch, lengths_of(native.STEP_TOKENS))
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    monkeypatch.setattr(layers, "_on_gpu", Gpu())
    requests.begin("vec")
    layer_tokens.take()
    layers(requests.positions, hidden, residual)
    assert layer_tokens.take() == LayerTokens(native=native.STEP_TOKENS * LAYERS)
