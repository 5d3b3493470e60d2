"""How many weights a compact weight's codebook leaves out, in trained and in random matrices.

A compact weight holds the upper byte of each bf16 as a code of four bits; a weight whose upper byte
has no code is an outlier.  For every matrix this prints the share of outliers, the largest share in
a block of 32 outputs, and the share of blocks that stay packed because they have more than one
outlier in 512 weights.

    python benchmarks/compact_shares.py NAME=CHECKPOINT.safetensors … --out WITHOUT_ENDING

Matrices of a checkpoint in another type are rounded to bf16, as vLLM does when it loads them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

BLOCK, MULTIPLE = 32, 32
CODES = 16
"""Codes of a codebook: 0, and the most frequent other upper bytes."""
PACKED_FROM = 1 / 512
"""Share of outliers above which a block stays packed."""
COMPACT_BYTES, PACKED_BYTES, OUTLIER_BYTES = 1.5, 2, 8
RANDOM_SHAPE = (2048, 2048)


def codes_of(upper: torch.Tensor) -> torch.Tensor:
    """[256]: whether the codebook of a matrix has each upper byte."""
    counts = torch.bincount(upper.flatten().long(), minlength=256)
    counts[0] = 0
    known = torch.zeros(256, dtype=torch.bool)
    # Of equally frequent ones the smaller byte is taken, as csrc/kernels/formats/compact.h does.
    known[torch.sort(counts, descending=True, stable=True).indices[: CODES - 1]] = True
    known[0] = True
    return known


def shares(weight: torch.Tensor) -> dict[str, float]:
    """Shares of one matrix [N, K], N and K multiples of 32."""
    upper = weight.to(torch.bfloat16).view(torch.int16).bitwise_right_shift(8).bitwise_and(255)
    is_outlier = ~codes_of(upper)[upper.long()]
    by_block = is_outlier.view(len(weight) // BLOCK, -1).double().mean(dim=1)
    stays = by_block > PACKED_FROM
    kept = by_block[~stays]
    outliers = float(kept.mean()) if len(kept) else 0.0
    packed = float(stays.double().mean())
    held = packed * PACKED_BYTES + (1 - packed) * (COMPACT_BYTES + outliers * OUTLIER_BYTES)
    return {
        "outliers": float(is_outlier.double().mean()),
        "worst_block": float(by_block.max()),
        "packed_blocks": packed,
        "bytes_of_packed": held / PACKED_BYTES,
    }


def matrices(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of a checkpoint that a CPU rank would hold as compact weights."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if len(shape := file.get_slice(name).get_shape()) != 2 or "embeddings" in name:
                continue
            if shape[0] % BLOCK == 0 and shape[1] % MULTIPLE == 0:
                yield name, file.get_tensor(name)


def random_matrices() -> Iterator[tuple[str, torch.Tensor]]:
    """Distributions that benchmarks use for weights, by name."""
    torch.manual_seed(0)
    yield "uniform ±0.001 (vLLM's dummy weights)", torch.empty(RANDOM_SHAPE).uniform_(-1e-3, 1e-3)
    yield "normal", torch.randn(RANDOM_SHAPE) * 0.02
    yield "Laplace", torch.distributions.Laplace(0.0, 0.02).sample(RANDOM_SHAPE)
    for degrees in (5.0, 3.0, 2.0):
        student = torch.distributions.StudentT(degrees).sample(RANDOM_SHAPE)
        yield f"Student's t, {degrees:.0f} degrees of freedom", student * 0.02
    yield (
        "any bits",
        torch.randint(-(2**15), 2**15, RANDOM_SHAPE, dtype=torch.int16).view(torch.bfloat16),
    )


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all matrices of a checkpoint, or of one random matrix."""
    return {
        "weights": name,
        "matrices": len(rows),
        "outliers_median": statistics.median(row["outliers"] for row in rows),
        "outliers_most": max(row["outliers"] for row in rows),
        "worst_block": max(row["worst_block"] for row in rows),
        "packed_blocks": statistics.fmean(row["packed_blocks"] for row in rows),
        "bytes_of_packed": statistics.fmean(row["bytes_of_packed"] for row in rows),
    }


def table(found: list[dict[str, Any]]) -> Table:
    """One row a checkpoint or distribution."""
    shown = Table(title="Outliers of compact weights")
    for column in ("weights", "matrices", "outliers, median", "in the worst matrix",
                   "in the worst block", "blocks that stay packed", "bytes ÷ bf16"):  # fmt: skip
        shown.add_column(column)
    for row in found:
        shares = (row[key] for key in ("outliers_median", "outliers_most", "worst_block"))
        shown.add_row(
            row["weights"], str(row["matrices"]), *(f"{share:.2e}" for share in shares),
            f"{row['packed_blocks']:.1%}", f"{row['bytes_of_packed']:.3f}",
        )  # fmt: skip
    return shown


def main() -> None:
    """Look at all of them, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", metavar="NAME=PATH", nargs="*", help="safetensors files")
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    options = parser.parse_args()
    by_matrix = {}
    for given in options.checkpoints:
        label, _, path = given.partition("=")
        by_matrix[label] = [{"name": name, **shares(x)} for name, x in matrices(Path(path))]
    by_matrix |= {name: [{"name": name, **shares(weight)}] for name, weight in random_matrices()}
    found = [summary(name, rows) for name, rows in by_matrix.items()]
    content = {"summary": found, "matrices": by_matrix}
    options.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    console = Console(record=True, width=140)
    console.print(table(found))
    options.out.with_suffix(".txt").write_text(console.export_text())


if __name__ == "__main__":
    main()
