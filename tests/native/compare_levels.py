"""Compares the native kernels of every level that this processor has with the portable ones.

    python tests/native/compare_levels.py [MODULE.so [EMULATED.so]]

Levels that the processor lacks are compared over emulated instructions where their module is given
(tests/native/emulated, which setup.py builds in place), with fewer tokens, as they are slow.

Needs numpy, and a compiler with pybind11 where the module is not built yet; neither PyTorch nor
vLLM.  Prints the worst difference of each operation in shares of what is allowed; the exit status
is 1 if one is above 1.

Allowed is, for sums of K products w · x in float32, 2 · K · 2^-24 · Σ |w · x|, and one rounding to
bf16 of each side; what goes through several layers may differ by 1/64 of its largest value.  One
level's results are the same bit by bit whatever the number of threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
NAME = "_streaming_linear"
SHAPES = [(32, 32), (96, 1376), (160, 2080), (64, 4096)]
TOKENS = [1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 70, 300]
FEW_TOKENS = [1, 3, 9, 17, 33]
THREADS = (1, 3)
HIDDEN, WIDE, HEADS, KV_HEADS, SIZE, LAYERS = 96, 416, 6, 2, 64, 3
BLOCK, POSITIONS = 32, 1024
LENGTHS = [[1], [33], [300, 1, 64, 512], list(range(97, 129))]
FEW_LENGTHS = [[33, 1, 64, 161]]
MANY_LENGTHS = list(range(30, 67))
"""More tokens than are few, for one family."""

Bits = np.ndarray[Any, np.dtype[np.uint16]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def loaded(path: Path, name: str) -> Any:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(folder: Path) -> Path:
    """The module, built in a folder."""
    import pybind11

    target = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    kernels = ROOT / "csrc/kernels"
    sources = [*(kernels / "bindings").glob("*.cpp"), *(kernels / "levels").glob("*.cpp")]
    options = ["-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden",
               *(f"-I{include}" for include in includes)]  # fmt: skip

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        subprocess.run(["g++", *options, "-c", str(source), "-o", made], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run(["g++", "-fopenmp", "-shared", *objects, "-o", str(target)], check=True)
    return target


def bf16(values: Floats) -> Bits:
    """The nearest bf16 of finite values."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def floats(values: Bits) -> Floats:
    """Of bf16."""
    return (values.astype(np.uint32) << 16).view(np.float32)


class Weight:
    """Random [N, K] in a format of the module, with what it points at."""

    def __init__(
        self, module: Any, random: np.random.Generator, n: int, k: int, kind: str,
        *, has_packed_block: bool = True,
    ) -> None:  # fmt: skip
        plain = bf16(random.normal(0, k**-0.5, (n, k)).astype(np.float32))
        # Some that a compact weight holds as outliers, and a block that it leaves as it is.
        plain.reshape(-1)[::1499] = bf16(np.float32([30.0]))
        plain.reshape(-1)[::1503] = bf16(np.float32([-1e-9]))
        if has_packed_block:
            plain[-32:, ::31] = bf16(np.float32([-1e20]))
        self.plain = floats(plain)
        blocks = plain.reshape(n // 32, 32, k // 2, 2).transpose(0, 2, 1, 3)
        self.packed = np.ascontiguousarray(blocks).reshape(n, k)
        self.rows: Any = self.packed
        if kind == "compact":
            self.rows = np.zeros((n, k * 3 // 2), dtype=np.uint8)
            self.encoding = module.Compact.made(address(self.packed), n, k, address(self.rows))
            assert self.encoding is not None
        else:
            self.encoding = module.Packed(n, k)

    @property
    def native(self) -> tuple[int, int, Any]:
        """As layers of the module want it, without a bias."""
        return address(self.rows), 0, self.encoding


def address(array: Any) -> int:
    """Of its first element."""
    return int(array.ctypes.data)


def of_threads(compute: Callable[[], Bits]) -> Bits:
    """A result, which has to be the same for every number of threads."""
    openmp = ctypes.CDLL("libgomp.so.1")
    found = []
    for threads in THREADS:
        openmp.omp_set_num_threads(threads)
        found.append(compute())
    assert all(np.array_equal(found[0], other) for other in found), "threads change the result"
    return found[0]


def expansions(module: Any, level: Any) -> Iterator[float]:
    """0 where a compact weight becomes what it was, bit by bit."""
    for n, k in SHAPES:
        weight = Weight(module, np.random.default_rng(k), n, k, "compact")
        packed = np.zeros_like(weight.packed)
        module.expand(
            w=address(weight.rows), encoding=weight.encoding, packed=address(packed), level=level
        )
        yield 0.0 if np.array_equal(packed, weight.packed) else float("inf")


def products(module: Any, level: Any, kind: str) -> Iterator[float]:
    """Differences of y = x · Wᵀ + b in shares of the bound."""
    is_emulated = level.name.startswith("emulated_")
    for n, k in SHAPES[:2] if is_emulated else SHAPES:
        random = np.random.default_rng(n)
        weight = Weight(module, random, n, k, kind)
        bias = random.normal(size=n).astype(np.float32)
        for m in FEW_TOKENS if is_emulated else TOKENS:
            x = bf16(random.normal(size=(m, k + 32)).astype(np.float32))

            def compute(
                level: Any, weight: Weight = weight, bias: Floats = bias, x: Bits = x, m: int = m
            ) -> Bits:
                y = np.full((m, len(bias)), 0x7FC0, dtype=np.uint16)
                module.linear(
                    x=address(x), stride=x.shape[1], w=address(weight.rows),
                    encoding=weight.encoding, bias=address(bias), y=address(y), m=m, level=level,
                )  # fmt: skip
                return y

            mine = floats(of_threads(lambda compute=compute: compute(level)))
            portable = floats(compute(module.level("portable")))
            products = np.abs(floats(x[:, :k])) @ np.abs(weight.plain).T
            bound = 2 * k * 2.0**-24 * products + 2.0**-7 * np.abs(portable) + 1e-30
            # NaN is no smaller than anything.
            yield float(np.max(np.nan_to_num(np.abs(mine - portable) / bound, nan=np.inf)))


@dataclass(frozen=True)
class Family:
    """What layers of a family of models are made of."""

    norm: str = "rms"
    has_head_norms: bool = False
    has_norms_behind: bool = False
    """Of what the attention and the MLP give."""
    activation: str = "silu"
    is_gated: bool = True
    is_parallel: bool = False
    multiplier: float = 1.0
    is_interleaved: bool = False
    window: int | None = None
    soft_cap: float = 0.0
    has_sinks: bool = False


FAMILIES = {
    "Llama": Family(),
    "Qwen 3": Family(has_head_norms=True),
    "Gemma 2": Family(
        norm="rms_plus_one", has_norms_behind=True, activation="gelu_tanh", window=48, soft_cap=5.0
    ),
    "GPT-NeoX": Family(norm="layer", activation="gelu", is_gated=False, is_parallel=True),
    "OPT": Family(norm="layer", activation="relu", is_gated=False),
    "sinks, multipliers": Family(multiplier=0.5, is_interleaved=True, has_sinks=True),
}


class Decoder:
    """Layers of random weights, with what they point at."""

    def __init__(self, module: Any, kind: str, family: Family) -> None:
        random = np.random.default_rng(7)
        self._kept: list[Any] = []
        self.module = module
        cos_sin = self._keep(bf16(random.uniform(-1, 1, (POSITIONS, SIZE)).astype(np.float32)))

        def norm(size: int) -> tuple[str, int, int, float, bool]:
            weight = bf16(random.uniform(0.5, 1.5, size).astype(np.float32))
            bias = bf16(random.uniform(-0.5, 0.5, size).astype(np.float32))
            at = address(self._keep(bias)) if family.norm == "layer" else 0
            return family.norm, address(self._keep(weight)), at, 1e-5, False

        def linear(n: int, k: int) -> tuple[int, int, Any, None]:
            weight = Weight(module, random, n, k, kind, has_packed_block=False)
            self._keep(weight)
            return *weight.native, None  # no adapters

        def qkv() -> tuple[Any, Any]:
            return norm(HIDDEN), linear((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN)

        heads = norm(SIZE) if family.has_head_norms else None
        self.rotation = module.Rotation(
            heads=HEADS, kv_heads=KV_HEADS, size=SIZE, cos_sin=address(cos_sin),
            positions=POSITIONS, rotated=SIZE, is_interleaved=family.is_interleaved,
            query_norm=heads, key_norm=heads,
        )  # fmt: skip
        behind = norm(HIDDEN) if family.has_norms_behind else None
        self.blocks = [
            module.PostAttention(
                output=linear(HIDDEN, HEADS * SIZE), output_norm=behind, norm=norm(HIDDEN),
                gate_up=linear((1 + family.is_gated) * WIDE, HIDDEN), activation=family.activation,
                down=linear(HIDDEN, WIDE), down_norm=behind, multiplier=family.multiplier,
                is_parallel=family.is_parallel, next=None if layer + 1 == LAYERS else qkv(),
            )
            for layer in range(LAYERS)
        ]  # fmt: skip
        sinks = self._keep(random.normal(size=HEADS).astype(np.float32))
        scores = module.Scores(
            scale=0.2, window=family.window, soft_cap=family.soft_cap,
            sinks=address(sinks) if family.has_sinks else 0,
        )  # fmt: skip
        first, layers = qkv(), [(self.rotation, scores, block) for block in self.blocks]
        self.layers = module.DecoderLayers(first=first, layers=layers)

    def _keep(self, kept: Any) -> Any:
        self._kept.append(kept)
        return kept

    def rotated(self, level: Any, m: int) -> Bits:
        """Heads of m tokens."""
        random = np.random.default_rng(m)
        qkv = bf16(random.normal(size=(m, (HEADS + 2 * KV_HEADS) * SIZE)).astype(np.float32))
        positions = random.integers(0, POSITIONS, m)
        self.rotation.run(address(qkv), qkv.shape[1], address(positions), m, level)
        return qkv

    def past_attention(self, level: Any, m: int, block: int) -> Bits:
        """Sum and y of what lies behind an attention."""
        random = np.random.default_rng(m)
        attended = bf16(random.normal(size=(m, HEADS * SIZE)).astype(np.float32))
        residual = bf16(random.normal(size=(m, HIDDEN)).astype(np.float32))
        width = HIDDEN if block + 1 == LAYERS else (HEADS + 2 * KV_HEADS) * SIZE
        both = np.zeros(m * (HIDDEN + width), dtype=np.uint16)
        self.blocks[block].run(
            address(attended), address(residual), m, address(both), address(both[m * HIDDEN :]),
            level,
        )  # fmt: skip
        return both

    def stepped(self, level: Any, lengths: list[int], *, tiles: bool) -> Bits:
        """Y and sum of a decode step, and the caches that it has written.

        Args:
            level: of the kernels.
            lengths: of the requests, with the token of this step.
            tiles: whether keys and values lie in tiles.

        """
        held, table, positions, slots, held_before, hidden, residual = step_of(tuple(lengths))
        m, most, caches = len(lengths), table.shape[1], held_before.copy()
        out = np.zeros((2, m, HIDDEN), dtype=np.uint16)
        strides = KV_HEADS * BLOCK * 2 * SIZE, BLOCK * 2 * SIZE
        requests = self.module.Requests(
            m=m, positions=address(positions), slots=address(slots), lengths=address(held),
            blocks=address(table), most_blocks=most, block=BLOCK, cache_blocks=m * most,
            tiles=tiles,
        )  # fmt: skip
        self.layers.run(
            requests=[requests], caches=[(address(cache), *strides, 0) for cache in caches],
            hidden=address(hidden), residual=address(residual),
            y=address(out[0]), sum=address(out[1]), level=level,
        )  # fmt: skip
        return np.concatenate([out.reshape(-1), caches.reshape(-1)])


@cache
def step_of(lengths: tuple[int, ...]) -> tuple[Any, ...]:
    """Requests of a step at random, for all families and levels: lengths, table of blocks,
    positions, slots, caches, hidden states and residuals."""
    random = np.random.default_rng(len(lengths))
    m, most = len(lengths), -(-max(lengths) // BLOCK)
    table = np.arange(m * most, dtype=np.int32).reshape(m, most)
    held = np.array(lengths, dtype=np.int32)
    positions = held.astype(np.int64) - 1
    slots = table[np.arange(m), positions // BLOCK] * BLOCK + positions % BLOCK
    shape = (LAYERS, m * most, KV_HEADS, BLOCK, 2 * SIZE)
    caches = bf16(random.normal(size=shape).astype(np.float32))
    hidden, residual = (bf16(random.normal(size=(m, HIDDEN)).astype(np.float32)) for _ in range(2))
    return held, table, positions, slots.astype(np.int64), caches, hidden, residual


def share(mine: Bits, portable: Bits, allowed: float = 1 / 64) -> float:
    """The largest difference, of what is allowed of the largest value."""
    # Without a sign, bits are in the order of the values, and NaN is the largest.
    largest = float(floats(np.array([np.max(portable & 0x7FFF)]))[0])
    differing = mine != portable
    difference = np.abs(floats(mine[differing]) - floats(portable[differing])) / largest
    found = np.max(np.nan_to_num(difference, nan=np.inf), initial=0.0) / allowed
    return float(found) if np.isfinite(largest) else float("inf")


def layers(module: Any, level: Any, operation: str) -> Iterator[float]:
    """Differences of an operation of decoder layers, in shares of what is allowed."""
    portable = module.level("portable")
    is_emulated = level.name.startswith("emulated_")
    cases: list[Callable[[Any], Bits]] = []
    for kind in ("packed",) if is_emulated else ("packed", "compact"):
        for family in FAMILIES.values():
            decoder = Decoder(module, kind, family)
            if operation == "rotation":
                cases += [lambda on, m=m, d=decoder: d.rotated(on, m) for m in (1, 5, 40)]
            elif operation == "post_attention":
                cases += [
                    lambda on, m=m, b=block, d=decoder: d.past_attention(on, m, b)
                    for m in ((3, 17) if is_emulated else (1, 3, 17, 32, 40))
                    for block in (0, LAYERS - 1)
                ]
            else:
                lengths = FEW_LENGTHS if is_emulated else LENGTHS
                if family == FAMILIES["Llama"]:
                    lengths = [*lengths, MANY_LENGTHS]
                cases += [
                    lambda on, some=some, tiles=tiles, d=decoder: d.stepped(on, some, tiles=tiles)
                    for some in lengths
                    for tiles in (False, True)
                ]
    for compute in cases:
        mine = of_threads(lambda compute=compute: compute(level))
        yield share(mine, compute(portable))


def main(arguments: list[str]) -> int:
    """Compare, print, and give the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        found = sorted((ROOT / "ray_hetero").glob(f"{NAME}*.so"))
        path = Path(arguments[0]) if arguments else found[0] if found else built(Path(folder))
        module = loaded(path, NAME)
        levels = list(module.levels())
        if len(arguments) > 1:
            known = {level.name for level in levels}
            emulated = loaded(Path(arguments[1]), "_emulated_levels").levels()
            levels += [one for one in emulated if one.name.removeprefix("emulated_") not in known]
        right = True
        for level in levels:
            worst = {
                "expand": max(expansions(module, level)),
                "linear, packed": max(products(module, level, "packed")),
                "linear, compact": max(products(module, level, "compact")),
                **{one: max(layers(module, level, one))
                   for one in ("rotation", "post_attention", "decode_step")},
            }  # fmt: skip
            right &= all(value <= 1 for value in worst.values())
            shown = "  ".join(f"{name} {value:.3f}" for name, value in worst.items())
            print(f"{level.name:20} {shown}", flush=True)
    print("all as allowed" if right else "WRONG: more than is allowed")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
