"""vLLM loads quantised checkpoints into this project's kernels, which compute with their weights.

vLLM's own model and loader run here, without an engine.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import native, needs_native  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm import distributed  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.kernels import linear  # noqa: E402
from vllm.model_executor.layers import utils  # noqa: E402
from vllm.model_executor.layers.quantization.utils import w8a8_utils  # noqa: E402
from vllm.model_executor.model_loader import get_model  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import PlatformEnum  # noqa: E402

from placement.model.reading import shape_of  # noqa: E402
from ray_hetero.cli.demo.model import DemoShape, write_demo_model  # noqa: E402
from ray_hetero.cli.demo.stored import FORMATS  # noqa: E402
from ray_hetero.compat.models import quantised_kernels  # noqa: E402
from ray_hetero.config import CpuConfig  # noqa: E402
from ray_hetero.kernels.formats import SCALED_FORMATS  # noqa: E402
from ray_hetero.kernels.linear import quantised_linear  # noqa: E402
from ray_hetero.offload.linear_layers import LinearLayers  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(300)]
SHAPE = DemoShape(layers=1, hidden=768, heads=24)
"""All sizes are multiples of 128."""
HELD = {
    "int8": "int8", "w8a16": "int8", "fp8": "fp8", "fp8-channel": "fp8", "fp8-tensor": "fp8",
    "fp8-weight": "fp8", "fp8-32": "fp8", "w4a16": "int4", "w4a16-32": "int4",
    "w4a16-zeros": "int4", "gptq": "int4", "awq": "int4",
    "mxfp4": "fp4", "mxfp8": "fp8", "nvfp4": "fp4", "nvfp4-modelopt": "fp4",
}  # fmt: skip
"""The format of ray_hetero/kernels/formats that holds each."""
PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""vLLM's layers, and the checkpoint's that each is made of."""


def _dequantised(quantised: Path, plain: Path) -> dict[str, Any]:
    # That helper belongs to the tests with engines.
    path = Path(__file__).parents[2] / "cluster" / "dequantised.py"
    spec = importlib.util.spec_from_file_location("dequantised", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return load_file(module.dequantised(quantised, plain, torch.float32) / "model.safetensors")


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what is patched for the process of a rank."""
    # As vLLM's CPU worker does.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    requantise = w8a8_utils.requantize_with_max_scale
    monkeypatch.setattr(w8a8_utils, "requantize_with_max_scale", requantise)
    for name in quantised_linear.KERNELS:
        lists = getattr(linear, name)
        monkeypatch.setitem(lists, PlatformEnum.CPU, list(lists.get(PlatformEnum.CPU, [])))


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    method = f"file://{tmp_path / 'rendezvous'}"
    parallel_state.init_distributed_environment(1, 0, method, 0, "gloo")
    distributed.ensure_model_parallel_initialized(1, 1)
    yield
    distributed.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def test_every_format_of_demo_models_is_here() -> None:
    assert HELD.keys() == FORMATS.keys()


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- formats:.*?-->(.*?)<!-- end of formats -->", page, re.DOTALL)
    assert table is not None
    rows = re.findall(r"^\| .* \| `(.*)` \| (\S+) \| (\S+) \| tested \|", table[1], re.MULTILINE)
    assert {stored: held for stored, held, _ in rows} == HELD
    for _, held, bytes_each in rows:
        assert (
            float(bytes_each)
            == SCALED_FORMATS[held].bits / 8
            == 2 * SCALED_FORMATS[held].read_share
        )


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("name", HELD)
def test_layers_compute_with_the_checkpoints_weights(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    quantised = write_demo_model(tmp_path / "quantised", stored=name, shape=SHAPE)
    plain = _dequantised(quantised, tmp_path / "plain")
    layers = LinearLayers(CpuConfig(linear_kernel="streaming", fuse_layers=False), None, 64)
    arguments = EngineArgs(model=str(quantised), dtype="bfloat16", skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        request.getfixturevalue("_one_rank")
        model = get_model(vllm_config=config)
    assert layers.kernel is not None
    held = list(layers.kernel.weights.values())
    assert f"4 {HELD[name]}" in layers.loaded(model)
    # As planning counts them; norms, and zero points and indices that say nothing, are not held.
    planned = shape_of(quantised, "bfloat16", "auto").layers[0].nbytes
    linears = sum(one.data.nbytes for one in held if one.name == HELD[name])
    assert 0.97 * planned < linears < 1.03 * planned
    for ours, theirs in PARTS.items():
        module = model.get_submodule(f"model.layers.0.{ours}")
        exact = torch.cat([plain[f"model.layers.0.{one}.weight"] for one in theirs])
        for tokens in (1, 5, 40):
            # Many tokens are multiplied with weights that are expanded to bf16.
            weight = exact if tokens <= native.FEW_TOKENS else exact.bfloat16().float()
            x = torch.randn(tokens, weight.shape[1]).bfloat16()
            found = module.quant_method.apply(module, x, None)
            expected = x.float() @ weight.T
            room = 2 * weight.shape[1] * 2**-24 * (x.float().abs() @ weight.abs().T)
            assert ((found.float() - expected).abs() <= room + 2**-8 * expected.abs()).all(), ours


@pytest.mark.usefixtures("_restored")
def test_one_scale_of_parts_that_are_stored_together_is_the_layers() -> None:
    quantised_kernels.keep_scales_of_parts()
    weight = torch.randn(96, 64).to(torch.float8_e4m3fn)
    parts = [32, 32, 32]
    # vLLM begins with these, and a checkpoint of fused layers has the first only.
    scales = torch.full((3,), torch.finfo(torch.float32).min)
    scales[0] = 0.5
    scale, kept = w8a8_utils.requantize_with_max_scale(weight, scales, parts)
    assert scale == 0.5
    assert kept is weight
    apart = torch.tensor([0.5, 0.25, 1.0])
    scale, kept = w8a8_utils.requantize_with_max_scale(weight, apart, parts)
    assert scale.equal(apart.repeat_interleave(32)[:, None])
    assert kept is weight
