"""Layers in float16: the kernels' own source over vectors that read and write that type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import decoder_parts  # noqa: E402
import test_adapters  # noqa: E402
import test_decode_step  # noqa: E402
from decoder_parts import (  # noqa: E402
    FAMILIES,
    HIDDEN,
    attends,
    be_alone,
    computed,
    fuse_model,
    known_layers,
    layers_of,
    linears,
    model,
)
from native_module import HALF_LEVELS, TESTED_HALF, level_of, native, needs_native  # noqa: E402
from test_decode_step import (  # noqa: E402
    WITH_RESIDUAL,
    Requests,
    expect_rows_apart,
    expect_the_same,
    kernel_of,
)
from vllm.model_executor.kernels import linear  # noqa: E402
from vllm.model_executor.layers import utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import PlatformEnum  # noqa: E402

from ray_hetero.config import CpuConfig  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.formats import PackedWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.formats.fp8 import Fp8Weight  # noqa: E402
from ray_hetero.kernels.formats.scaled import Codes  # noqa: E402
from ray_hetero.kernels.layers import fusible_layers  # noqa: E402
from ray_hetero.kernels.linear import quantised_linear, streaming_linear  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.offload.linear_layers import LinearLayers  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

BEST = HALF_LEVELS[-1] if HALF_LEVELS else ""
CODES = 1 << 16
IN_PARTS = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture
def _in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make models in float16, whose neighbours are eight times nearer than in bf16."""
    monkeypatch.setattr(decoder_parts, "DTYPE", torch.float16)
    monkeypatch.setattr(test_decode_step, "CLOSE", {"rtol": 2**-8, "atol": 2**-7})


def every_code() -> Any:
    """All float16 there are."""
    return torch.arange(CODES, dtype=torch.int32).to(torch.int16).view(torch.float16)


def compute(x: Any, weight: Any, bias: Any, level: str) -> Any:
    kernel = StreamingLinear(native, level_of(level))
    return kernel.compute(x, PackedWeight.made(pack(weight), native), bias)


def alone(values: Any, places: Any) -> Any:
    """[values, 32], each in its place among zeros."""
    spread = torch.zeros(len(values), 32, dtype=torch.float16)
    return spread.scatter_(1, places[:, None], values[:, None])


@pytest.mark.parametrize("level", TESTED_HALF)
@pytest.mark.parametrize("tokens", [1, 3, 32, 40])
def test_every_weight_is_what_the_checkpoint_says(tokens: int, level: str) -> None:
    values, places = every_code(), torch.arange(CODES) % 32
    found = compute(torch.ones(tokens, 32, dtype=torch.float16), alone(values, places), None, level)
    assert found.dtype == torch.float16
    torch.testing.assert_close(
        found, values.expand(tokens, -1), rtol=0, atol=0, equal_nan=True
    )  # fmt: skip


@pytest.mark.parametrize("level", TESTED_HALF)
def test_every_input_is_what_it_was(level: str) -> None:
    values, places = every_code(), torch.arange(CODES) % 32
    x, weight = alone(values, places), torch.eye(32, dtype=torch.float16)
    for some in (slice(CODES), slice(31), slice(1000, 1003)):
        found = compute(x[some], weight, None, level)
        own = found.gather(1, places[some, None])[:, 0]
        torch.testing.assert_close(own, values[some], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", TESTED_HALF)
def test_sums_are_rounded_to_the_nearest(level: str) -> None:
    torch.manual_seed(1)
    exponents = torch.randint(-30, 20, (4096,))
    bias = torch.cat([
        torch.rand(4096).add_(1).mul_(torch.exp2(exponents.float())),
        # Between two neighbours, and at the ends of the range.
        (torch.arange(1, 1025) + 0.5) * 2**-24, (torch.arange(1024, 2016) + 0.5) * 2.0**5,
        torch.tensor([65504, 65519, 65520, 65535, 1e6, float("inf"), 2**-25, 2**-26, 0.0]),
    ])  # fmt: skip
    bias = torch.cat([bias, -bias])
    bias = torch.cat([bias, bias.new_zeros(-len(bias) % 32)])
    weight = torch.zeros(len(bias), 32, dtype=torch.float16)
    for tokens in (1, 40):
        x = torch.ones(tokens, 32, dtype=torch.float16)
        found = compute(x, weight, bias, level)
        torch.testing.assert_close(found, bias.half().expand(tokens, -1), rtol=0, atol=0)


@pytest.mark.parametrize("level", TESTED_HALF)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 1376), (544, 2080)])
def test_products_are_within_the_bound(outputs: int, inputs: int, level: str) -> None:
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).half()
    bias = torch.randn(outputs)
    for tokens in (1, 2, 7, 8, 9, 32, 33, 70, 300):
        # A view of a wider tensor, as attention hands over slices.
        x = torch.randn(tokens, inputs + 64).half()[:, :inputs]
        expected = x.double() @ weight.double().T + bias
        found = compute(x, weight, bias, level).double()
        sums = x.double().abs() @ weight.double().abs().T + bias.abs()
        room = 2 * (inputs + 1) * 2.0**-24 * sums + 2.0**-11 * expected.abs() + 2.0**-25
        assert ((found - expected).abs() <= room).all()


@pytest.mark.usefixtures("_in_half")
@pytest.mark.parametrize("level", TESTED_HALF)
@pytest.mark.parametrize("lengths", [[33], [300, 1, 64, 512, *range(120, 126)]], ids=str)
def test_a_decode_step_is_what_layers_are_one_by_one(
    lengths: list[int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_the_same(Requests(monkeypatch, lengths), level=level, atol=2**-7)


@pytest.mark.usefixtures("_in_half")
@pytest.mark.parametrize("rows", [[4, 4], [2, 16, 1]], ids=str)
def test_requests_may_verify_drafts(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, [130, 513, 40][: len(rows)], block=128, rows=rows)
    expect_the_same(requests, level=BEST, atol=2**-7)


@pytest.mark.usefixtures("_in_half")
@pytest.mark.parametrize("family", sorted({*FAMILIES} - test_decode_step.IN_PARTS))
def test_decode_steps_of_other_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_heads = 6 if family == "opt" else 2
    requests = Requests(monkeypatch, [200, 40], family=family, kv_heads=kv_heads)
    # Sums are as large as 8, where neighbours are 2^-8 apart.
    expect_the_same(requests, is_first=family not in WITH_RESIDUAL, level=BEST, atol=2**-6)


@pytest.mark.usefixtures("_in_half")
@pytest.mark.parametrize("level", TESTED_HALF)
def test_a_decode_step_adds_adapters(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_adapters.test_a_decode_step_adds_them(8, level, monkeypatch)


@pytest.mark.usefixtures("_in_half")
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_what_vllms_own_are(
    family: str, tokens: int, contexts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_alone(monkeypatch)
    torch.manual_seed(tokens)
    decoder = model(2, family=family)
    layers = layers_of(decoder)
    for number, layer in enumerate(layers):
        contexts[f"layers.{number}"] = "metadata", attends(layer), "cache", "slots"
    given, kernel = linears(decoder), kernel_of(BEST)
    (calls,) = {layer.calls for layer in known_layers(decoder, given, kernel)}
    positions, hidden = torch.arange(tokens), torch.randn(tokens, HIDDEN).half()
    expected = computed(layers, calls, positions, hidden.clone())
    assert fuse_model(torch.nn.Sequential(decoder), given, kernel) == 2
    found = computed(layers_of(decoder), calls, positions, hidden)
    apart = (found - expected).norm() / expected.norm()
    assert float(apart) < 2**-8


@pytest.mark.usefixtures("_in_half")
def test_norms_of_another_type_are_left_to_vllm(contexts: dict[str, Any]) -> None:
    decoder = model(1)
    (layer,) = layers_of(decoder)
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.bfloat16()
    found = fusible_layers.layer_of(decoder, layer, linears(decoder), kernel_of(BEST))
    assert found == "norms are of another type than the linear layers"


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what is patched for the process of a rank."""
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    for name in quantised_linear.KERNELS:
        lists = getattr(linear, name)
        monkeypatch.setitem(lists, PlatformEnum.CPU, list(lists.get(PlatformEnum.CPU, [])))
    yield
    # The process has one kernel, which later tests use in bfloat16.
    if kernel := streaming_linear.at_hand():
        kernel.use(torch.bfloat16)


@pytest.mark.usefixtures("_restored")
def test_a_rank_takes_the_level_of_its_models_type() -> None:
    config = CpuConfig(linear_kernel="streaming", compact_weights=True)
    for dtype, name in ((torch.float16, BEST), (torch.bfloat16, native.levels()[-1].name)):
        layers = LinearLayers(config, None, 64, dtype=dtype)
        kernel = layers.kernel
        assert kernel is not None
        assert (kernel.dtype, kernel.level.name) == (dtype, name)
        layer = torch.nn.Module()
        weight = torch.randn(64, 96).mul_(0.1).to(dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        ((_, held),) = kernel.weights.items()
        # Twelve bits are enough for most of a bf16, not of a float16.
        assert held.name == ("packed" if dtype == torch.float16 else "compact")
        x = torch.randn(5, 96).to(dtype)
        expected = x.float() @ weight.float().T
        found = layer.cpu_linear(x, layer.weight, None)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.usefixtures("_restored")
def test_quantised_weights_are_multiplied_with_bfloat16_only() -> None:
    layers = LinearLayers(
        CpuConfig(linear_kernel="streaming"), None, 64, dtype=torch.float16
    )  # fmt: skip
    codes = Codes(torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 1), 32)
    with pytest.raises(UnsupportedError, match=r"Module: its weights are fp8, .* --dtype bfloat16"):
        layers._stored(torch.nn.Module(), Fp8Weight, codes)


@pytest.mark.usefixtures("_restored")
def test_no_gpu_computes_prompts_in_float16() -> None:
    config = CpuConfig(linear_kernel="streaming", prefill_on_gpu=True)
    with pytest.raises(UnsupportedError, match=r"in bfloat16 only, .* type --dtype bfloat16"):
        LinearLayers(config, torch.device("cpu"), 64, dtype=torch.float16)
    asked = LinearLayers(
        CpuConfig(linear_kernel="streaming"), torch.device("cpu"), 64, dtype=torch.float16
    )
    assert asked._gpu is None


@pytest.mark.usefixtures("_in_half")
@pytest.mark.parametrize("level", TESTED_HALF)
@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_a_draft_that_overflows_stays_with_those_behind_it(
    left: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_rows_apart(monkeypatch, (6, 2), "vec", level, left)
