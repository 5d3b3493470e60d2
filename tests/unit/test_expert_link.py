"""Experts that a GPU reads over its link are computed as the cores compute them.

Without a GPU here: the CPU takes its place, with the same pieces, copies and expansions; only
vLLM's kernel has one of torch's operators in its place.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import LEVELS, native  # noqa: E402

from ray_hetero.compat.quantised_experts import StoredExperts  # noqa: E402
from ray_hetero.config import ExpertsConfig  # noqa: E402
from ray_hetero.distributed import expert_link  # noqa: E402
from ray_hetero.distributed.expert_memory import RemoteLayer  # noqa: E402
from ray_hetero.distributed.expert_offers import Offer  # noqa: E402
from ray_hetero.errors import AgreementError, UnsupportedError  # noqa: E402
from ray_hetero.kernels import gpu_experts  # noqa: E402
from ray_hetero.kernels.expert_pieces import runs_of  # noqa: E402
from ray_hetero.kernels.expert_rates import CoreRates  # noqa: E402
from ray_hetero.kernels.expert_room import SharedRoom  # noqa: E402
from ray_hetero.kernels.experts import SILU, SWIGLU_OAI, RoutedExperts  # noqa: E402
from ray_hetero.kernels.gpu_experts import GpuExperts  # noqa: E402
from ray_hetero.kernels.linked_experts import LinkedSlice, received, shared  # noqa: E402
from ray_hetero.kernels.quantised_experts import KINDS, codes_of, held  # noqa: E402
from ray_hetero.planning.prefill_memory import ExpertSizes  # noqa: E402
from ray_hetero.weight_formats import FORMATS  # noqa: E402

if native is None:
    pytest.skip("needs the native module", allow_module_level=True)

CPU = torch.device("cpu")
LEVEL = native.level(LEVELS[-1])
EXPERTS, HIDDEN, INNER, CHOSEN = 7, 64, 96, 3
ACTIVATIONS = {"silu": (SILU, False), "swigluoai": (SWIGLU_OAI, True)}


class Layer:
    """A layer on so many expert ranks, and what it is in plain tensors.

    Args:
        kind: the format; of a quantised checkpoint too.
        ranks: among which its inner size is divided.
        activation: as vLLM has it.
        inner: of all slices together.
        is_mixed: whether the values of some experts do not suit the compact format.

    """

    def __init__(
        self, kind: str, ranks: int, activation: str = "silu", *, inner: int = INNER,
        is_mixed: bool = False,
    ) -> None:  # fmt: skip
        self.activation, self.is_interleaved = ACTIVATIONS[activation]
        each = inner // ranks
        has_bias = activation == "swigluoai"
        w13 = (torch.randn(EXPERTS, 2 * inner, HIDDEN) * HIDDEN**-0.5).bfloat16()
        w2 = (torch.randn(EXPERTS, HIDDEN, inner) * inner**-0.5).bfloat16()
        for weight in (w13, w2):
            weight.view(-1)[::1499] = 20.0
            weight.view(-1)[::1999] = -(2.0**-40)
            if is_mixed:
                weight[2:4] = torch.exp2(torch.randint(-60, 0, weight[2:4].shape)).bfloat16()
        biases = (None, None)
        if has_bias:
            biases = (torch.randn(EXPERTS, 2 * inner).bfloat16(),
                      torch.randn(EXPERTS, HIDDEN).bfloat16())  # fmt: skip
        self.ranks: list[RoutedExperts] = []
        plain: list[tuple[torch.Tensor, ...]] = []
        for rank in range(ranks):
            part = self._outputs(inner, rank, each)
            own = (w13[:, part], w2[:, :, rank * each : (rank + 1) * each].contiguous())
            own_biases: Any = (None, None)
            if biases[0] is not None and biases[1] is not None:
                # The first rank adds the bias of down.
                own_biases = (biases[0][:, part], biases[1] if rank == 0 else 0 * biases[1])
            given = None if kind in FORMATS else stored(kind, *own)
            self.ranks.append(self._made(kind, *own, *own_biases, given))
            plain.append(tuple(one.float() for one in own) if given is None else dequantised(given))
        self.w13 = torch.empty(EXPERTS, 2 * inner, HIDDEN)
        for rank, (gate_up, _) in enumerate(plain):
            self.w13[:, self._outputs(inner, rank, each)] = gate_up
        self.w2 = torch.cat([down for _, down in plain], dim=2)
        self.biases = biases

    def _outputs(self, inner: int, rank: int, each: int) -> torch.Tensor:
        """Which outputs of gate and up a rank has."""
        own = torch.arange(rank * each, (rank + 1) * each)
        if self.is_interleaved:
            return torch.stack([2 * own, 2 * own + 1], dim=1).flatten()
        return torch.cat([own, inner + own])

    def _made(
        self, kind: str, w13: Any, w2: Any, w13_bias: Any, w2_bias: Any, given: Any
    ) -> RoutedExperts:
        common: dict[str, Any] = {
            "native": native, "level": LEVEL, "activation": self.activation,
            "is_interleaved": self.is_interleaved, "room": SharedRoom,
        }  # fmt: skip
        if given is None:
            return RoutedExperts(w13, w2, w13_bias, w2_bias, kind=FORMATS[kind], **common)
        weights = held(given, native, is_interleaved=self.is_interleaved)
        return RoutedExperts.of_weights(weights, EXPERTS, w13_bias, w2_bias, **common)

    @functools.cached_property
    def slices(self) -> tuple[LinkedSlice, ...]:
        """As a GPU's process maps them."""
        found = []
        for experts in self.ranks:
            pages = shared(experts)
            assert pages is not None
            found.append(received(pages.descriptor, len(pages.memory)))
        return tuple(found)

    def expected(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """In float32, but for what is rounded between the two products."""
        y = torch.zeros(x.shape)
        for expert in range(EXPERTS):
            tokens, chosen = (ids == expert).nonzero(as_tuple=True)
            both = x[tokens].float() @ self.w13[expert].T
            if self.biases[0] is not None:
                both += self.biases[0][expert].float()
            if self.is_interleaved:
                gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0) + 1
                between = gate * torch.sigmoid(1.702 * gate) * up
            else:
                between = torch.nn.functional.silu(both[:, : both.shape[1] // 2])
                between = between * both[:, both.shape[1] // 2 :]
            out = between.bfloat16().float() @ self.w2[expert].T
            if self.biases[1] is not None:
                out += self.biases[1][expert].float()
            y.index_add_(0, tokens, out * weights[tokens, chosen, None])
        return y


def stored(kind: str, w13: torch.Tensor, w2: torch.Tensor) -> StoredExperts:
    """Weights in the codes of a checkpoint; the values are other ones."""

    def codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        experts, outputs, inputs = weight.shape
        if kind == "fp8":
            scales = torch.rand(experts, outputs // 32, inputs // 32) + 0.5
            return weight.to(torch.float8_e4m3fn), scales
        if kind == "mxfp4":
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            return torch.randint(256, (experts, outputs, inputs // 2), dtype=torch.uint8), scales
        words = torch.randint(-(2**31), 2**31, (experts, outputs, inputs // 8), dtype=torch.int32)
        scales = (torch.rand(experts, outputs, inputs // 32) * 0.02).bfloat16()
        return words, scales

    (gate_up, gate_up_scale), (down, down_scale) = codes(w13), codes(w2)
    block = (32, 32) if kind == "fp8" else None
    return StoredExperts(kind, gate_up, down, gate_up_scale, down_scale, block=block)


def dequantised(given: StoredExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """What the codes of a checkpoint are."""
    pairs = [codes_of(given, expert) for expert in range(EXPERTS)]
    gate_up, down = (
        torch.stack([KINDS[given.scheme].expanded(pair[half]).float() for pair in pairs])
        for half in range(2)
    )
    return gate_up, down


def routed(tokens: int, *, most: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens with weights and ids of experts below a number."""
    x = torch.randn(tokens, HIDDEN).bfloat16()
    ids = torch.rand(tokens, most).topk(CHOSEN).indices.int()
    return x, torch.rand(tokens, CHOSEN), ids


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    most = float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=2**-6, atol=2**-7 * max(1.0, most))


def computed(gpu: GpuExperts, given: Any, layer: int = 0) -> torch.Tensor:
    gpu.begin(given[2], layer)
    return gpu.sums(*given, layer)


def made(layers: Sequence[Sequence[LinkedSlice] | None], pieces: int) -> GpuExperts:
    """With room for pieces of so many experts."""
    sizes = gpu_experts.sizes_of([one for one in layers if one is not None])
    found = GpuExperts(CPU, layers, CHOSEN, sizes.beside + pieces * sizes.each)
    assert found.experts <= pieces
    return found


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", [*FORMATS, *KINDS])
def test_sums_are_those_of_the_cores_and_of_a_reference(
    kind: str, ranks: int, activation: str
) -> None:
    torch.manual_seed(0)
    layer = Layer(kind, ranks, activation)
    gpu = made([layer.slices], 3)
    given = routed(70)
    # A row that only fills a step up.
    given[2][5] = -1
    found = computed(gpu, given)
    assert_close(found, layer.expected(*given))
    assert_close(found, sum(rank(*given).float() for rank in layer.ranks))
    assert not found[5].any()
    assert torch.equal(found, computed(gpu, given))


@pytest.mark.parametrize("pieces", [1, 2, 7, 100])
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_pieces_and_what_is_left_out_change_nothing(tokens: int, pieces: int) -> None:
    torch.manual_seed(1)
    layer = Layer("compact", 2, inner=64)
    gpu = made([layer.slices], pieces)
    for most in (CHOSEN, 5, EXPERTS):
        given = routed(tokens, most=most)
        assert_close(computed(gpu, given), layer.expected(*given))


def test_experts_that_no_token_has_chosen_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    gpu = made([Layer("packed", 1).slices], 2)
    read: list[int] = []
    fetch = gpu._reader._fetch
    monkeypatch.setattr(
        gpu._reader,
        "_fetch",
        lambda piece: (read.extend(n for run in piece.runs for n in range(*run)), fetch(piece)),
    )
    x, weights, ids = routed(2)
    ids[:] = torch.tensor([1, 4, 5])
    computed(gpu, (x, weights, ids))
    assert read == [1, 4, 5]
    read.clear()
    # So many tokens are expected to use all.
    computed(gpu, routed(200, most=4))
    assert read == list(range(EXPERTS))
    # No token is anybody's: nothing to read, nothing to add up.
    read.clear()
    assert not computed(gpu, (x, weights, ids.fill_(-1))).any()
    assert read == [0]


def test_what_comes_next_is_on_its_way_and_may_not_come() -> None:
    torch.manual_seed(3)
    layers = [Layer("packed", 1), Layer("compact", 1), Layer("packed", 1)]
    slices = [layers[0].slices, layers[1].slices, None, layers[2].slices]
    gpu = made(slices, 3)
    assert [number in gpu for number in range(4)] == [True, True, False, True]
    given = routed(90)
    for number, layer in [(0, 0), (1, 1), (3, 2), (1, 1), (0, 0), (0, 0), (3, 2)]:
        assert_close(computed(gpu, given, number), layers[layer].expected(*given))
    # A layer is asked for, and another one is computed.
    gpu.begin(given[2], 0)
    assert_close(computed(gpu, given, 1), layers[1].expected(*given))


def test_experts_that_stay_packed_lie_between_compact_ones() -> None:
    torch.manual_seed(4)
    layer = Layer("compact", 2, inner=64, is_mixed=True)
    slices = layer.slices
    formats = [stack.format for stack in slices[0].halves[0].stacks]
    assert formats == ["compact", "packed", "compact"]
    for pieces in (1, 3, 7):
        given = routed(60)
        assert_close(computed(made([slices], pieces), given), layer.expected(*given))


def test_many_tokens_are_multiplied_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    layer = Layer("packed", 1)
    monkeypatch.setattr(gpu_experts, "LEAST_TOKENS", 16)
    monkeypatch.setattr(gpu_experts, "EXPERT_WORK_BYTES", 1)
    given = routed(70)
    for pieces in (3, 7):
        assert_close(computed(made([layer.slices], pieces), given), layer.expected(*given))


def test_slices_of_other_shapes_and_budgets_for_nothing_are_refused() -> None:
    left, right = Layer("packed", 1, inner=64).slices, Layer("packed", 1).slices
    with pytest.raises(AgreementError, match="slices of different shapes"):
        GpuExperts(CPU, [(*left, *right)], CHOSEN, 1 << 30)
    with pytest.raises(UnsupportedError, match=r"GPU .* experts\.prefill_gpu_gib is 0\.03"):
        GpuExperts(CPU, [left], CHOSEN, 1 << 25)


def test_pieces_are_of_one_size_within_the_budget() -> None:
    sizes = ExpertSizes(
        count=128, stored=9 << 20, expanded=9 << 20, largest=6 << 20, tables=1 << 20
    )
    assert sizes.each == 27 << 20
    # 65 MiB beside; 40 experts would fit, four pieces of 32 are as many as of 40 and less.
    budget = (65 + 27 * 40) << 20
    assert sizes.experts_of_a_piece(budget) == 32
    assert sizes.gpu_bytes(32) <= budget
    assert sizes.experts_of_a_piece(1 << 40) == 128
    assert sizes.experts_of_a_piece(sizes.beside + sizes.each - 1) == 0
    assert sizes.experts_of_a_piece(sizes.beside + sizes.each) == 1


def test_neighbours_are_read_at_once() -> None:
    assert runs_of([0, 1, 2]) == ((0, 3),)
    assert runs_of([1, 2, 4, 7, 8]) == ((1, 3), (4, 5), (7, 9))
    assert runs_of([]) == ()


def test_cores_are_compared_with_the_link_by_what_was_measured() -> None:
    slow = CoreRates(((256, 0.010), (1024, 0.025)))
    fast = CoreRates(((256, 0.008), (1024, 0.026)))
    rates = CoreRates.of_all([slow, fast])
    assert rates.points == ((256, 0.010), (1024, 0.026))
    assert rates.seconds(128) == pytest.approx(0.005)
    assert rates.seconds(640) == pytest.approx(0.018)
    assert rates.seconds(1024) == pytest.approx(0.026)
    assert rates.seconds(2 * 1024 + 256) == pytest.approx(0.062)
    assert rates.crossing(0.0181, 4096) == 648
    assert rates.crossing(0.0301, 4096) == 1024 + 112
    assert rates.crossing(1.0, 4096) is None


ASKED = RemoteLayer("a", HIDDEN, CHOSEN)


def linked(offers: Sequence[Offer], **config: Any) -> expert_link.ExpertLink | None:
    return expert_link.made(
        ExpertsConfig(ranks=1, **config), CPU, [ASKED], offers, dtype=torch.bfloat16, tokens=64
    )


def offered(points: Any, *, is_there: bool = True) -> Offer:
    slices = {"a": Layer("packed", 1).slices[0]} if is_there else {}
    return Offer(None if points is None else CoreRates(points), slices)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The log."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO", "vllm.ray_hetero")
    return caplog


def test_the_link_is_taken_from_where_it_is_faster(said: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(6)
    slow, fast = offered(((16, 1e3), (64, 1e4))), offered(((16, 1e-9), (64, 1e-8)))
    link = linked([slow])
    assert link is not None
    assert link.tokens == 8
    assert (link.takes(8, 0), link.takes(7, 0), link.takes(8, 1)) == (True, False, False)
    assert "experts of steps of 8 tokens and more" in said.text
    assert linked([fast]) is None
    assert "which are faster in steps of up to 64 tokens" in said.text
    # What was asked for is not measured against.
    link = linked([fast], prefill_on_gpu_tokens=20)
    assert link is not None
    assert link.tokens == 20
    assert linked([slow], prefill_on_gpu=False) is None


def test_without_memory_to_read_the_cores_compute_all(said: pytest.LogCaptureFixture) -> None:
    missing = offered(((16, 0.01), (64, 0.04)), is_there=False)
    assert linked([missing]) is None
    assert "in memory that the GPU can read" in said.text
    assert "the cores take 40.0 ms a layer for 64 tokens" in said.text
    with pytest.raises(UnsupportedError, match=r"Set experts\.prefill_on_gpu to false"):
        linked([missing], prefill_on_gpu=True)
    with pytest.raises(UnsupportedError, match=r"prefill_gpu_gib is 0\.01"):
        linked([offered(None)], prefill_on_gpu=True, prefill_gpu_gib=0.01)
