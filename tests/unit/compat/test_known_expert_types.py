"""Types of routed experts' weights that CPU ranks compute, whatever shares a scale."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization.utils import quant_utils  # noqa: E402

from ray_hetero.compat.models.quantised_experts import is_known  # noqa: E402


@pytest.mark.parametrize("outputs", [1, 32, 128])
@pytest.mark.parametrize("inputs", [-1, 32, 64, 128])
def test_floats_of_eight_bits_and_integers_of_four_are_known(outputs: int, inputs: int) -> None:
    shared = quant_utils.ScaleDesc(torch.float16, True, quant_utils.GroupShape(outputs, inputs))
    types = (torch.float8_e4m3fn, quant_utils.kInt4Static.dtype, quant_utils.kInt4StaticAsym.dtype)
    assert all(is_known(quant_utils.QuantKey(one, shared)) for one in types)


def test_groups_of_32_as_kimi_k2_has_them_are_known() -> None:
    assert is_known(quant_utils.kInt4Static32)


def test_others_are_not() -> None:
    assert not is_known(None)
    assert not is_known(quant_utils.kNvfp4Static)
    assert not is_known(quant_utils.kInt8StaticChannelSym)
