"""Write the table of vLLM's operators that CPU ranks call into docs/upgrading-vllm.md.

    cd tests && python -m families.operators     # runs the models, writes families/operators.json
    python tools/write_operators_page.py

The text around the table is kept.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from page_blocks import DOCS, replaced, rewrite, table

PAGE = DOCS / "upgrading-vllm.md"
RESULTS = DOCS.parent / "tests" / "families" / "operators.json"
BEGIN = "<!-- operators: written by tools/write_operators_page.py -->"
END = "<!-- end of operators -->"
KINDS = {"start": "at the start", "prompt": "steps with prompts", "decode": "decode steps"}
"""Columns of the kinds of steps in the results."""
HERE = "`torch_operators.py`"
NO_FORM = "none"
IN_TORCH = {
    "causal_conv1d_fwd_cpu": NO_FORM,
    "causal_conv1d_weight_pack": NO_FORM,
    "chunk_gated_delta_rule_cpu": NO_FORM,
    "compute_slot_mapping_kernel_impl": HERE,
    "cpu_attention_with_kv_cache": HERE,
    "cpu_attn_reshape_and_cache": HERE,
    "create_onednn_mm_handler": "`torch.nn.functional.linear`, which vLLM takes where it fails",
    "fused_add_rms_norm": HERE,
    "fused_gdn_gating_cpu": NO_FORM,
    "get_scheduler_metadata": HERE,
    "greedy_argmax": HERE,
    "mamba_chunk_scan_fwd_cpu": NO_FORM,
    "mla_decode_kvcache": NO_FORM,
    "onednn_mm": "`torch.nn.functional.linear`",
    "rms_norm": HERE,
    "rotary_embedding": HERE,
    "silu_and_mul": HERE,
}
"""Form of each operator in plain PyTorch; `HERE` is in `compat/models`."""

Results = Mapping[str, Mapping[str, Sequence[str]]]


def families(names: Collection[str], everyone: Collection[str]) -> str:
    """Families in words: all, all but some, or some.

    Args:
        names: of architectures.
        everyone: all that were run.

    """
    others = sorted(set(everyone) - set(names))
    if not others:
        return "all"
    if len(others) < len(names):
        return "all but " + ", ".join(map(_short, others))
    return ", ".join(map(_short, sorted(names))) or "–"


def _short(architecture: str) -> str:
    return architecture.removesuffix("ForCausalLM")


def content(results: Results) -> str:
    """The table: operators that most families call in decode steps first."""
    by_kind = {
        kind: {
            operator: {name for name, row in results.items() if operator in row.get(kind, ())}
            for operator in {one for row in results.values() for one in row.get(kind, ())}
        }
        for kind in KINDS
    }
    operators = {one for found in by_kind.values() for one in found}

    def order(operator: str) -> tuple[int, int, str]:
        decode, prompt = (len(by_kind[kind].get(operator, ())) for kind in ("decode", "prompt"))
        return (-decode, -prompt, operator)

    rows = (
        (
            f"`{operator.partition('::')[2]}`",
            *(families(by_kind[kind].get(operator, ()), results) for kind in KINDS),
            IN_TORCH[operator.partition("::")[2]],
        )
        for operator in sorted(operators, key=order)
    )
    return table(("operator", *KINDS.values(), "form in PyTorch"), rows)


def written(page: str) -> str:
    """The page with its table written anew."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return replaced(page, BEGIN, END, content(results))


if __name__ == "__main__":
    rewrite(PAGE, written)
