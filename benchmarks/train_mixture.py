"""Train a small mixture of experts on text that packages ship, and record what its router chooses.

    python benchmarks/train_mixture.py --out mixture --minutes 20             # on a GPU
    python benchmarks/train_mixture.py --out mixture --minutes 1 --tiny       # a rehearsal on cores

The model is Transformers' Qwen3MoeForCausalLM, which vLLM serves as it is: eight layers of 64
experts, of which a token takes six, about 115 M parameters, and the usual loss that balances the
experts.  Its text are the pages, licences and sources of this environment's Python packages, one
file in twenty left out for the end: of these it writes down loss and routing.  `OUT/checkpoint` is
the model with its tokenizer, `OUT/routing.npz` has `experts` [layers, tokens, chosen] in the order
of the text, best first, and `OUT/training.json` the recipe, the losses and the shares of experts.

A model as small as this, trained for minutes, chooses experts by words more than by meaning.  Its
trace tells how uneven a trained router's choices are from token to token; large mixtures have more
experts that are specialised, and longer contexts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timed_training import trained

ENDINGS = (".md", ".rst", ".txt", ".py")
HELD_OUT = 20
"""One file in so many is not trained on."""
SMALLEST, LARGEST = 500, 200_000
"""Bytes of a file."""
END = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """Sizes of the model and of the training."""

    vocabulary: int = 16384
    hidden: int = 512
    layers: int = 8
    experts: int = 64
    chosen: int = 6
    expert_size: int = 128
    heads: int = 8
    kv_heads: int = 4
    balance: float = 0.01
    """Weight of the loss that balances the experts."""
    megabytes: int = 80
    """Megabytes of text at most."""
    context: int = 512
    batch: int = 32
    """Sequences of a step."""
    rate: float = 6e-4
    warm_up: int = 200
    """Steps until the rate is reached; it falls to a tenth by the end of the time."""
    seed: int = 0
    traced: int = 16384
    """Tokens of the trace."""


TINY = Recipe(
    vocabulary=2048, hidden=128, layers=4, experts=16, chosen=4, expert_size=64, heads=4,
    kv_heads=2, megabytes=2, context=128, batch=8, rate=2e-3, warm_up=20, traced=1024,
)  # fmt: skip
"""Recipe for rehearsals and tests; its sizes divide as CPU ranks need them."""


def main() -> None:
    """Train for some minutes, write the checkpoint, the trace and what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal's sizes")
    parser.add_argument("--megabytes", type=int, help="of text at most")
    options = parser.parse_args()
    recipe = TINY if options.tiny else Recipe()
    if options.megabytes:
        recipe = replace(recipe, megabytes=options.megabytes)
    torch.manual_seed(recipe.seed)
    # Products of experts are not of those that autocast computes in bfloat16.
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    files = texts(recipe.megabytes << 20)
    tokenizer = trained_tokenizer(files, recipe.vocabulary)
    held = [text for at, text in enumerate(files) if at % HELD_OUT == 0]
    rest = [text for at, text in enumerate(files) if at % HELD_OUT]
    known, unknown = (ids_of(tokenizer, some) for some in (rest, held))
    print(f"{len(files)} files, {len(known):,} tokens, {len(unknown):,} left out", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = new_model(recipe, len(tokenizer)).to(device)
    losses = train(model, known, recipe, options.minutes * 60)
    loss, routing = routed(model, unknown[: recipe.traced], recipe)
    model.to("cpu", torch.bfloat16).save_pretrained(options.out / "checkpoint")
    tokenizer.save_pretrained(options.out / "checkpoint")
    np.savez_compressed(options.out / "routing.npz", experts=routing)
    found = {
        "recipe": asdict(recipe),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "minutes": options.minutes,
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokens": len(known),
        "text": hashlib.sha256("".join(files).encode()).hexdigest()[:16],
        "losses": losses,
        "held_out_loss": loss,
        "routing": [evenness(layer, recipe.experts) for layer in routing],
    }
    (options.out / "training.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"held-out loss {loss:.3f}; {options.out}", flush=True)


def texts(most: int) -> list[str]:
    """Files of the packages and of Python's own library, in an order by their names' digests."""
    folders = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")}
    folders |= {path for path in sys.path if path.endswith("site-packages")}
    paths = {path for folder in folders for path in _files(Path(folder))}
    found, size, seen = [], 0, set()
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        if size + SMALLEST > most:
            break
        text = path.read_text(encoding="utf-8", errors="ignore")
        digest = hash(text)
        if digest not in seen and size + len(text) <= most:
            seen.add(digest)
            found.append(text)
            size += len(text)
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        is_text = path.suffix in ENDINGS or path.name.startswith(("LICENSE", "NOTICE", "METADATA"))
        if is_text and path.is_file() and SMALLEST < path.stat().st_size < LARGEST:
            yield path


def trained_tokenizer(files: Sequence[str], size: int) -> Any:
    """A tokenizer of byte pairs for this text."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    some = random.Random(0).sample(files, min(len(files), 3000))
    made.train_from_iterator(some, vocab_size=size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token=END, eos_token=END, pad_token=END
    )


def ids_of(tokenizer: Any, files: Sequence[str]) -> torch.Tensor:
    """Tokens of all files, one after the other with a mark between them."""
    each = tokenizer._tokenizer.encode_batch([f"{text}{END}" for text in files])
    return torch.tensor([token for one in each for token in one.ids])


def new_model(recipe: Recipe, vocabulary: int) -> Any:
    """The model, with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.chosen,
        moe_intermediate_size=recipe.expert_size,
        intermediate_size=recipe.expert_size * recipe.chosen,
        norm_topk_prob=True,
        router_aux_loss_coef=recipe.balance,
        max_position_embeddings=4 * recipe.context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    if torch.cuda.is_available():
        # One product for all experts, in place of a loop over them.
        model.set_experts_implementation("grouped_mm")
    return model


def train(model: Any, ids: torch.Tensor, recipe: Recipe, seconds: float) -> list[dict[str, float]]:
    """Train until the time is over.

    Returns:
        Seconds, steps and loss of the text, now and then.

    """
    device = model.device
    generator = torch.Generator().manual_seed(recipe.seed)

    def losses() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        starts = torch.randint(
            len(ids) - recipe.context, (recipe.batch,), generator=generator
        ).tolist()
        rows = torch.stack([ids[at : at + recipe.context] for at in starts]).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            output = model(rows, labels=rows, output_router_logits=True)
        return output.loss, {"loss": output.loss, "balance": output.aux_loss}

    model.train()
    return trained(
        model.parameters(), losses, seconds, rate=recipe.rate, warm_up=recipe.warm_up, decay=0.1
    )


def routed(model: Any, ids: torch.Tensor, recipe: Recipe) -> tuple[float, np.ndarray]:
    """Loss of a text in nats a token, and the experts that its tokens take.

    Returns:
        The loss, and numbers of experts [layers, tokens, chosen], best first.

    """
    model.eval()
    losses, chosen = [], []
    with torch.no_grad():
        for rows in ids.split(recipe.context):
            if len(rows) < recipe.context:
                continue
            given = rows[None].to(model.device)
            output = model(given, labels=given, output_router_logits=True)
            weighed = recipe.balance * output.aux_loss.item()
            losses.append(output.loss.item() - weighed)
            best = [logits.topk(recipe.chosen, dim=-1).indices for logits in output.router_logits]
            chosen.append(torch.stack(best).cpu().to(torch.uint8))
    return sum(losses) / len(losses), torch.cat(chosen, dim=1).numpy()


def evenness(routing: np.ndarray, experts: int) -> dict[str, float]:
    """How evenly one layer's tokens are divided.

    Returns:
        The largest expert's share over the mean share, how much of all choices the most popular
        quarter of the experts has, and how much of a token's experts its predecessor took, too.

    """
    counts = np.sort(np.bincount(routing.ravel(), minlength=experts))[::-1]
    kept = [len(set(one) & set(other)) for one, other in pairwise(routing)]
    return {
        "largest_over_mean": float(counts[0] / counts.mean()),
        "quarter_share": float(counts[: experts // 4].sum() / counts.sum()),
        "same_as_before": float(np.mean(kept) / routing.shape[1]),
    }


if __name__ == "__main__":
    main()
