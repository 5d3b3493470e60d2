"""Models of `decoder_parts` whose linear layers vLLM's own LoRA modules are around."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import decoder_parts
import torch
from decoder_parts import Product, bare, layers_of
from vllm.lora import layers as lora_layers
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

MOST_TOKENS = 512

OUTPUTS = ("o_proj", "down_proj", "out_proj", "fc2", "dense", "dense_4h_to_h")
"""Layers whose inputs the ranks of a group share out; of the others they share out the outputs."""


def punica() -> Any:
    """vLLM's object that knows each token's slot."""
    return PunicaWrapperCPU(MOST_TOKENS, MOST_TOKENS, "cpu")


def choose(wrapper: Any, slots: list[int]) -> None:
    """Have the tokens of the next step have adapters in some slots, -1 for none."""
    count = max(slots, default=0) + 2
    numbers = tuple(slot + 1 for slot in slots)
    mapping = LoRAMapping(numbers, numbers, is_prefill=True)
    wrapper.update_metadata(mapping, list(range(1, count + 1)), count + 1, 1000)


class _Method:
    """What vLLM's modules call in the place of a layer's own forward function."""

    @staticmethod
    def apply(layer: Any, x: Any, bias: Any) -> Any:
        y, _ = layer(x)
        return y


def _slices(name: str, outputs: int, parts: Any) -> tuple[int, ...]:
    """Outputs of what a checkpoint calls one layer each."""
    if name in {"qkv_proj", "query_key_value"}:
        return parts.q_size, parts.kv_size, parts.kv_size
    return (outputs // 2, outputs // 2) if name == "gate_up_proj" else (outputs,)


def _wrapped(name: str, layer: Product, parts: Any, wrapper: Any, slots: int, rank: int) -> Any:
    outputs, inputs = layer.matrix.shape
    layer.quant_method, layer.bias = _Method(), None
    layer.skip_bias_add = layer.gather_output = False
    layer.return_bias = layer.input_is_parallel = layer.reduce_results = True
    slices = _slices(name, outputs, parts)
    kinds = {3: "MergedQKVParallelLinearWithLoRA", 2: "MergedColumnParallelLinearWithLoRA"}
    one = "RowParallelLinearWithLoRA" if name in OUTPUTS else "ColumnParallelLinearWithLoRA"
    return bare(
        getattr(lora_layers, kinds.get(len(slices), one)), base_layer=layer,
        punica_wrapper=wrapper, tp_size=layer.tp_size, tp_rank=0, input_size=inputs,
        output_size=outputs, output_slices=slices, n_slices=len(slices),
        output_ids=(0,) * len(slices), is_merged_col_linear=False, _enable_aux_cuda_stream=False,
        lora_config=SimpleNamespace(fully_sharded_loras=False),
        lora_a_stacked=tuple(
            torch.zeros(slots, 1, rank, inputs, dtype=decoder_parts.DTYPE) for _ in slices
        ),
        lora_b_stacked=tuple(
            torch.zeros(slots, 1, size, rank, dtype=decoder_parts.DTYPE) for size in slices
        ),
    )  # fmt: skip


def adapt(model: Any, wrapper: Any, *, slots: int, rank: int) -> None:
    """Put vLLM's modules around all linear layers of a model."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Product) and name != "base_layer":
                setattr(module, name, _wrapped(name, layer, module, wrapper, slots, rank))


def adapted(model: Any) -> Iterator[Any]:
    """vLLM's modules of a model whose layers are not fused yet."""
    for layer in layers_of(model):
        for module in layer.modules():
            if hasattr(module, "lora_a_stacked"):
                yield module


def load(modules: list[Any], slot: int, *, rank: int, seed: int, scale: float = 0.5) -> None:
    """Have vLLM put an adapter of random matrices into a slot."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Any:
        return (torch.randn(rows, columns, generator=random) * columns**-0.5).to(
            decoder_parts.DTYPE
        )

    for module in modules:
        inputs = module.input_size * (module.tp_size if is_divided(module) else 1)
        a = [matrix(rank, inputs) for _ in module.output_slices]
        whole = 1 if is_divided(module) else module.tp_size
        b = [matrix(size * whole, rank) * scale for size in module.output_slices]
        module.set_lora(slot, *((a, b) if len(a) > 1 else (a[0], b[0])))


def is_divided(module: Any) -> bool:
    """Whether the ranks of a group share out the inputs of a module's layer."""
    return isinstance(module, lora_layers.RowParallelLinearWithLoRA)


def unload(modules: list[Any], slot: int) -> None:
    """Have vLLM take an adapter away."""
    for module in modules:
        module.reset_lora(slot)
