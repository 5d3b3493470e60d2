"""Splits of well-known models worked out by hand.

Figures of the table: H100 SXM 79 GiB, of these 90 % = 76 343 043 686 bytes, reads at
0.85 x 3350 = 2847.5 GB/s; Xeon 8480+ reads at 0.75 x 307.2 = 230.4 GB/s.
"""

from __future__ import annotations

import pytest
from plan_cases import (
    CPU_BANDWIDTH,
    GPU_BANDWIDTH,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MIXTRAL_8X22B,
    device,
    split_of,
    stage,
)

RUNTIME = 2**30
H100 = 76_343_043_686


def test_70b_on_one_h100_and_two_sockets() -> None:
    # A layer: attention 2 x 8192 x 8192 + 2 x 8192 x 1024, MLP 3 x 8192 x 28672, 2 norms of 8192:
    # 855 654 400 weights x 2 bytes.  KV of 4 sequences: 4 x 4096 tokens x 4096 bytes.
    layer, kv = 1_711_308_800, 4 * 4096 * 4096
    # Activations: 2048 tokens x 2 bytes x (4 x 8192 + 3 x 28672).
    activations = 2048 * 2 * (4 * 8192 + 3 * 28672)
    # In the middle the H100 holds neither embedding nor output matrix:
    # (76.343 - 1.074 - 0.487) GB / 1.778 GB = 42.05 layers.  38 layers are left for the sockets.
    in_middle = (H100 - RUNTIME - activations) // (layer + kv)
    assert in_middle == 42
    stages = [stage(device("H100 SXM")), *(stage(device("Xeon 8480+", i)) for i in range(2))]
    split = split_of(LLAMA_70B, stages, batch=1, context=4096, max_sequences=4)
    assert split.order == (1, 0, 2)
    assert split.layers == (20, 42, 18)  # the last socket has the output matrix to read as well
    # One sequence of 4096 tokens has 16.8 MB of KV a layer; the output matrix is 2.1 GB.
    on_cpu, on_gpu = ((layer + kv / 4) / speed for speed in (CPU_BANDWIDTH, GPU_BANDWIDTH))
    output = (128256 * 8192 + 8192) * 2 / CPU_BANDWIDTH
    # Through memory that both map, and over the GPU's link.
    send = 70e-6 + 2 * 2 * 8192 / 10e9 + 2 * 2 * 8192 / 51.2e9
    sampling = 128256 * 8e-9
    expected = 38 * on_cpu + 42 * on_gpu + output + sampling + 2 * send
    assert split.step_s == pytest.approx(expected, rel=1e-6)
    assert split.step_s == pytest.approx(0.321, abs=0.001)
    gpu = split.ranks[1]
    assert gpu.memory.weights == 42 * layer
    assert gpu.kv_bytes == 42 * 4096 * split.kv_tokens
    assert split.gpu_only is None


def test_405b_on_two_h100_and_two_sockets() -> None:
    # A layer: attention 2 x 16384^2 + 2 x 16384 x 1024, MLP 3 x 16384 x 53248, x 2 bytes;
    # each of 2 ranks holds half of it, and both norms of 16384 whole.
    half = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384 * 2
    # KV of 4 x 4096 tokens: half of 8 heads x 128 x 2 x 2 bytes.
    kv = 4 * 4096 * 2048
    activations = 2048 * 2 * (4 * 16384 + 3 * 53248 // 2)
    # The GPU stage comes last, with half of the output matrix and the last norm.
    output = 128256 * 16384 + 16384 * 2
    on_gpu = (H100 - RUNTIME - activations - output) // (half + kv)
    assert on_gpu == 22  # 72.57 GB / 3.221 GB = 22.5
    gpus = stage(device("H100 SXM", 0), device("H100 SXM", 1))
    sockets = stage(*(device("Xeon 8480+", i, gib=460) for i in range(2)))
    split = split_of(LLAMA_405B, [gpus, sockets], batch=1, context=4096, max_sequences=4)
    assert (split.order, split.layers) == ((1, 0), (104, 22))
    reads = 104 * half / CPU_BANDWIDTH  # 1.439 s of 1.48 s
    assert split.stages[0].decode.weights / 1e12 == pytest.approx(reads, rel=1e-6)
    assert split.step_s == pytest.approx(1.48, abs=0.01)


def test_mixtral_8x22b_on_one_h200_and_one_socket() -> None:
    # A layer: attention 2 x 6144^2 + 2 x 6144 x 1024, router 8 x 6144, norms 2 x 6144, x 2 bytes,
    # and 8 experts of 3 x 6144 x 16384 x 2 bytes, of which a token reads 2.
    rest = (2 * 6144**2 + 2 * 6144 * 1024 + 8 * 6144 + 2 * 6144) * 2
    experts = 8 * 3 * 6144 * 16384 * 2
    assert rest + experts == 5_008_121_856
    kv = 4096 * 4096
    # vLLM's Mixtral has embedding and output matrix on every stage: 2 x 32768 x 6144 x 2 bytes.
    around = 2 * 32768 * 6144 * 2 + 6144 * 2
    activations = 2048 * 2 * (4 * 6144 + 3 * 2 * 16384)
    usable = int(139 * 2**30 * 0.9)
    on_gpu = (usable - RUNTIME - activations - around) // (rest + experts + kv)
    assert on_gpu == 26  # 131.9 GB / 5.025 GB = 26.3
    stages = [stage(device("H200")), stage(device("Xeon 8480+", gib=460))]
    split = split_of(MIXTRAL_8X22B, stages, batch=1, context=4096, max_sequences=1)
    assert (split.order, split.layers) == ((1, 0), (30, 26))
    # 1.384 GB a layer: 6.01 ms on the socket, 0.34 ms on the H200.
    active = rest + experts * 2 / 8
    cpu, gpu = split.stages
    assert cpu.decode.weights / 1e12 == pytest.approx(30 * active / CPU_BANDWIDTH, rel=1e-6)
    assert gpu.decode.weights / 1e12 == pytest.approx(26 * active / (0.85 * 4800e9), rel=1e-6)
    # 16 tokens wake 8 x (1 - 0.75^16) = 7.92 of 8 experts.
    many = split_of(MIXTRAL_8X22B, stages, batch=16, context=64, max_sequences=16)
    awake = rest + experts * (1 - 0.75**16)
    per_layer = many.stages[0].decode.weights / 1e12 / many.layers[0]
    assert per_layer == pytest.approx(awake / CPU_BANDWIDTH, rel=1e-6)


def test_8b_needs_no_cpu_rank() -> None:
    # 16.1 GB of weights in 76.3 GB: (16.06 - 1.05 of the embedding) GB / 2847.5 GB/s = 5.27 ms,
    # and 32 layers x 4096 tokens x 4096 bytes of KV = 0.19 ms.
    stages = [stage(device("H100 SXM")), stage(device("Xeon 8480+"))]
    split = split_of(LLAMA_8B, stages, batch=1, context=4096, max_sequences=4)
    assert split.gpu_only is not None
    assert split.gpu_only.layers == (32,)
    assert split.gpu_only.step_s == pytest.approx(5.46e-3, abs=2e-5)
    assert split.step_s > split.gpu_only.step_s
    assert sorted(split.layers) == [1, 31]  # both were asked for, so the socket gets one layer
    assert split.layers[split.order.index(1)] == 1
