"""Byte counts against the headers of real checkpoints and against published totals."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from plan_cases import config_of

from placement.model.config import UnknownModelError
from placement.model.reading import shape_from_config, shape_from_safetensors, shape_of
from placement.model.shape import ModelShape

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
}
LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
}
OPT: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 130,
    "max_position_embeddings": 40,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "llama with biases": ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**SMALL, "head_dim": 32}),
    "qwen2": ("qwen2", SMALL),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 32}),
    "gemma": ("gemma", {**SMALL, "head_dim": 16}),
    "gemma2": ("gemma2", {**SMALL, "head_dim": 16}),
    "gemma3": ("gemma3_text", {**SMALL, "head_dim": 16}),
    "opt": ("opt", {**OPT, "word_embed_proj_dim": 64}),
    "opt projected": ("opt", {**OPT, "word_embed_proj_dim": 32}),
    "mixtral": ("mixtral", {**SMALL, "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **SMALL,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **SMALL,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **SMALL,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {**SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v2 lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 24}),
}


def headers(directory: Path) -> dict[str, int]:
    """Bytes of every tensor, read here in another way than the code under test does."""
    sizes = {}
    for file in directory.glob("*.safetensors"):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        for name, entry in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                sizes[name] = end - start
    return sizes


def layer_bytes(sizes: dict[str, int], index: int) -> int:
    return sum(size for name, size in sizes.items() if f".layers.{index}." in name)


def build(directory: Path, model_type: str, settings: dict[str, Any]) -> Any:
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[model_type](**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # float32 in the published checkpoints
            buffer.data = buffer.data.float()
    return model


def assert_exact(directory: Path) -> tuple[ModelShape, ModelShape]:
    config = json.loads((directory / "config.json").read_text())
    sizes = headers(directory)
    from_config, from_headers = shape_from_config(config), shape_from_safetensors(directory)
    for shape in (from_config, from_headers):
        assert shape.weight_bytes == sum(sizes.values())
        for layer in shape.layers:
            assert layer.nbytes == layer_bytes(sizes, layer.index)
    assert from_config.bytes_by_role() == from_headers.bytes_by_role()
    assert from_config.output_matrix
    assert from_config.tied == from_headers.tied
    for mine, theirs in zip(from_config.layers, from_headers.layers, strict=True):
        assert mine.kv == theirs.kv
        assert set(mine.tensors) == set(theirs.tensors)
    return from_config, from_headers


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bytes_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, *CHECKPOINTS[name])
    model.save_pretrained(tmp_path)
    assert_exact(tmp_path)


def test_fp8_blocks_with_their_scales(tmp_path: Path) -> None:
    import transformers
    from transformers.integrations import finegrained_fp8 as fp8

    model = build(tmp_path, "llama", {**SMALL, "hidden_size": 160, "num_hidden_layers": 2})
    settings = transformers.FineGrainedFP8Config(weight_block_size=(128, 128))
    model = fp8.replace_with_fp8_linear(model, ["lm_head"], settings).to_empty(device="cpu")
    write(tmp_path, model, settings.to_dict())
    shape, _ = assert_exact(tmp_path)
    # 160 inputs and 96 outputs need 2 x 1 blocks of 128 x 128, each with a float32 scale.
    scale = next(t for t in shape.layers[0].tensors if t.name == "mlp.up_proj.weight_scale_inv")
    assert scale.nbytes == 2 * 4


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packed_to_four_bits(symmetric: bool, tmp_path: Path) -> None:
    from compressed_tensors import compressors, quantization

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": {**weights, "symmetric": symmetric}}
    settings = quantization.QuantizationConfig(
        config_groups={"group_0": group},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="frozen",
    )
    model = build(tmp_path, "llama", SMALL)
    quantization.apply_quantization_config(model, settings)
    compressors.ModelCompressor(quantization_config=settings).compress_model(model)
    found = {**settings.model_dump(mode="json"), "quant_method": "compressed-tensors"}
    write(tmp_path, model, found)
    assert_exact(tmp_path)


def write(directory: Path, model: Any, quantization_config: dict[str, Any]) -> None:
    """Save a quantised model as its checkpoint is on the hub: config and one safetensors file."""
    from safetensors.torch import save_file

    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": quantization_config}
    (directory / "config.json").write_text(json.dumps(config, default=str))


PUBLISHED = {
    # `total_size` of the model.safetensors.index.json on the hub.
    "Llama-3.1-8B": (config_of("llama", 32, 4096, 14336, (32, 8), 128256), 16060522496),
    "Llama-3.1-70B": (config_of("llama", 80, 8192, 28672, (64, 8), 128256), 141107412992),
    "Qwen2.5-7B": (config_of("qwen2", 28, 3584, 18944, (28, 4), 152064), 15231233024),
    "Qwen3-8B": (config_of("qwen3", 36, 4096, 12288, (32, 8), 151936, head_dim=128), 16381470720),
    "gemma-2-9b": (
        config_of("gemma2", 42, 3584, 14336, (16, 8), 256000, head_dim=256),
        18483411968,
    ),
    "Mixtral-8x7B": (
        config_of(
            "mixtral", 32, 4096, 14336, (32, 8), 32000, num_local_experts=8, num_experts_per_tok=2
        ),
        93405585408,
    ),
    "Qwen3-30B-A3B": (
        config_of(
            "qwen3_moe", 48, 2048, 6144, (32, 4), 151936, head_dim=128, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=768,
        ),
        61064245248,
    ),
    "gpt-oss-120b": (
        config_of(
            "gpt_oss", 36, 2880, 2880, (64, 8), 201088, head_dim=64, num_local_experts=128,
            num_experts_per_tok=4, sliding_window=128, tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention"] * 18,
            quantization_config={"quant_method": "mxfp4"},
        ),
        65248815744,
    ),
    "DeepSeek-V2-Lite": (
        config_of(
            "deepseek_v2", 27, 2048, 10944, (16, 16), 102400, n_routed_experts=64,
            n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
            first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
            qk_nope_head_dim=128, v_head_dim=128,
        ),
        31412968448,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_of_published_models(name: str) -> None:
    config, total_size = PUBLISHED[name]
    assert shape_from_config(config).weight_bytes == total_size


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        # A linear layer of 64 inputs and 96 outputs, 4 bits, groups of 32: 8 weights an int32.
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
            {
                "qweight": 64 // 8 * 96 * 4,
                "qzeros": 2 * 96 // 8 * 4,
                "scales": 2 * 96 * 2,
                "g_idx": 64 * 4,
            },
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
            {"qweight": 64 * 96 // 8 * 4, "qzeros": 2 * 96 // 8 * 4, "scales": 2 * 96 * 2},
        ),
    ],
)
def test_gptq_and_awq_layouts(settings: dict[str, Any], tensors: dict[str, int]) -> None:
    config = {"model_type": "llama", **SMALL, "quantization_config": settings}
    found = {
        tensor.name.removeprefix("mlp.up_proj."): tensor.nbytes
        for tensor in shape_from_config(config).layers[0].tensors
        if tensor.name.startswith("mlp.up_proj.")
    }
    assert found == tensors


def test_kv_bytes_per_token() -> None:
    # 2 (keys and values) x 8 heads x 128 x 2 bytes x 80 layers.
    llama = shape_from_config(PUBLISHED["Llama-3.1-70B"][0])
    assert llama.kv_bytes_per_token() == 2 * 8 * 128 * 2 * 80
    # Latent of 512 and rotary key of 64, once for all heads, x 2 bytes x 27 layers.
    assert shape_from_config(PUBLISHED["DeepSeek-V2-Lite"][0]).kv_bytes_per_token() == 576 * 2 * 27
    fp8 = shape_from_config(PUBLISHED["Llama-3.1-70B"][0], kv_dtype="fp8")
    assert fp8.kv_bytes_per_token() == llama.kv_bytes_per_token() // 2


def test_kv_and_weights_of_a_tensor_parallel_rank() -> None:
    layer = shape_from_config(PUBLISHED["Qwen2.5-7B"][0]).layers[0]  # 4 KV heads of 128
    assert layer.kv is not None
    assert [layer.kv.rank_bytes(size) for size in (1, 2, 4, 8)] == [2048, 1024, 512, 512]
    sizes = {tensor.name: tensor for tensor in layer.tensors}
    key, norm = sizes["self_attn.k_proj.weight"], sizes["input_layernorm.weight"]
    assert key.rank_bytes(8) == key.nbytes // 4  # two ranks share a KV head
    assert norm.rank_bytes(8) == norm.nbytes
    assert sizes["mlp.up_proj.weight"].rank_bytes(8) * 8 == sizes["mlp.up_proj.weight"].nbytes


def test_sliding_windows() -> None:
    config = {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window": 512}
    config |= {"num_hidden_layers": 12}
    windows = [layer.kv and layer.kv.window for layer in shape_from_config(config).layers]
    assert windows == ([512] * 5 + [None]) * 2
    kv = shape_from_config(config).layers[0].kv
    assert kv is not None
    assert (kv.seen(100), kv.seen(4096), kv.kept(4096, 64)) == (100, 512, 575)


def test_dtype_wins_over_the_config(tmp_path: Path) -> None:
    config, total = PUBLISHED["Llama-3.1-8B"]
    assert shape_from_config(config, "float32").weight_bytes == 2 * total
    assert shape_from_config(config, "auto").weight_bytes == total
    build(tmp_path, "llama", SMALL).save_pretrained(tmp_path)
    stored = shape_from_safetensors(tmp_path)
    assert shape_from_safetensors(tmp_path, "float32").weight_bytes == 2 * stored.weight_bytes
    with pytest.raises(UnknownModelError, match="'int3' is not known"):
        shape_from_config(config, "int3")


def test_an_unknown_architecture_is_read_from_its_checkpoint(tmp_path: Path) -> None:
    settings = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 130, "n_positions": 32}
    model = build(tmp_path, "gpt2", settings)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UnknownModelError, match="model_type 'gpt2' is not known"):
        shape_from_config(config)
    shape = shape_of(tmp_path)
    assert shape.weight_bytes == sum(headers(tmp_path).values())
    assert [bool(layer.tensors) for layer in shape.layers] == [True, True]
    assert shape.tied


def test_layers_for_speculation_are_left_out(tmp_path: Path) -> None:
    build(tmp_path, "llama", SMALL).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    shape = shape_from_safetensors(tmp_path)
    sizes = headers(tmp_path)
    assert shape.weight_bytes == sum(sizes.values()) - layer_bytes(sizes, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors header"),
        (b"\xff" * 16, "no safetensors header"),
        (struct.pack("<Q", 3) + b"{ab", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "expected a JSON object"),
    ],
)
def test_damaged_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    config, _ = PUBLISHED["Llama-3.1-8B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownModelError, match=message):
        shape_from_safetensors(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"config\.json"):
        shape_of(tmp_path)
    config = dict(PUBLISHED["Llama-3.1-8B"][0])
    del config["hidden_size"]
    with pytest.raises(UnknownModelError, match="hidden_size"):
        shape_of(config)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama-3.1-8B"][0]))
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnknownModelError, match=r"model-1\.safetensors of the index are missing"):
        shape_from_safetensors(tmp_path)
    unknown = PUBLISHED["Llama-3.1-8B"][0] | {"quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(UnknownModelError, match="'hqq' is not known"):
        shape_of(unknown)
