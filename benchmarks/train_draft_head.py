"""Train an EAGLE head for a small model on the states of its own answers.

    ray-hetero demo-model --trained smollm2
    python benchmarks/train_draft_head.py --model smollm2 --out smollm2-head --minutes 10
    python benchmarks/drafts_on_text.py --model smollm2 --head smollm2-head --out drafts.json

The model answers questions, writes functions of Python's library again and repeats pages of its
reference, none of which `drafts_on_text.py` asks about.  From a token and the target's last hidden
state before it, one decoder layer learns the target's next hidden state and, through the target's
own output matrix, its distribution of the next token ("EAGLE: Speculative Sampling Requires
Rethinking Feature Uncertainty", 2024).  A second pass learns from states that the first one gave,
as the drafts behind the first one are made of them.  `OUT` is a checkpoint for vLLM's method
`eagle`; `OUT/training.json` has the recipe, the losses and how often the head's best token is the
target's on answers that were left out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from drafts_on_text import SECTIONS
from timed_training import trained
from torch import nn
from torch.nn import functional

HELD_OUT = 20
"""One answer in so many is not trained on."""
ASKED = (
    "What is {}?", "Explain {} to a child.", "Write a short story about {}.",
    "Give me three facts about {}.", "Why do people like {}?", "How would you describe {}?",
    "Write a poem about {}.", "What should I know before I learn more about {}?",
)  # fmt: skip
SUBJECTS = (
    "water", "music", "trees", "the sun", "history", "bread", "trains", "mathematics", "dogs",
    "winter", "gardens", "mountains", "football", "coffee", "books", "the internet", "rivers",
    "paintings", "birds", "electricity", "chess", "cheese", "ships", "dreams", "bicycles",
    "languages", "volcanoes", "photography", "bees", "medicine", "money", "bridges", "rice",
    "friendship", "planets", "dancing", "clouds", "museums", "horses", "robots", "law", "salt",
    "clocks", "forests", "fish", "writing letters", "exercise", "deserts", "tea", "atoms",
)  # fmt: skip


CODE = (
    "ast", "calendar", "copy", "csv", "dis", "doctest", "glob", "inspect", "locale", "random",
    "tokenize", "traceback", "uuid", "optparse", "pprint", "tarfile", "difflib", "argparse",
)  # fmt: skip
"""Modules of Python's library whose functions are written again; see `drafts_on_text.MODULES`."""


@dataclass(frozen=True)
class Recipe:
    """Sizes of the answers and of the training."""

    answer: int = 160
    """Tokens of an answer at most."""
    temperature: float = 0.6
    at_once: int = 64
    """Answers that are written together."""
    context: int = 384
    """Tokens of a prompt and its answer at most."""
    batch: int = 8
    """Sequences of a step."""
    rate: float = 1e-3
    warm_up: int = 50
    """Steps until the rate is reached; it falls to a tenth by the end of the time."""
    noise: float = 0.1
    """Half of the width of the even noise on the target's states, in their standard deviations."""
    states: float = 0.1
    """Weight of the distance between states beside that between distributions."""
    seed: int = 0


class Head(nn.Module):  # type: ignore[misc]
    """The head: a combination of an embedding and a state, and a decoder layer.

    Args:
        config: the target's, of Transformers.

    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = LlamaDecoderLayer(config, 0)
        # vLLM's heads have no norm before their first attention.
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.rotation = LlamaRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """States of the next tokens [B, T, N] from embeddings and states of the same shape."""
        x = self.fc(torch.cat([embedded, states], -1))
        at = torch.arange(x.shape[1], device=x.device)[None]
        given = self.layers[0](x, position_embeddings=self.rotation(x, at), attention_mask=None)
        found: torch.Tensor = given[0] if isinstance(given, tuple) else given
        return found


def main() -> None:
    """Write answers, train on them for some minutes, write the head and what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="of `demo-model --trained`")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--minutes", type=float, default=10, help="of training")
    parser.add_argument("--prompts", type=int, default=1600, help="answered; some of them again")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = Recipe()
    torch.manual_seed(recipe.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    target = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    target = target.to(device).eval().requires_grad_(False)
    began = time.monotonic()
    asked = list(islice(cycle(prompts()), options.prompts))
    answers = list(written(target, tokenizer, asked, recipe))
    wrote_s = time.monotonic() - began
    known = [one for at, one in enumerate(answers) if at % HELD_OUT]
    held = answers[::HELD_OUT]
    print(f"{len(answers)} answers, {sum(map(len, known)):,} tokens, {wrote_s:.0f} s", flush=True)
    head = Head(target.config).to(device)
    losses = train(head, target, known, recipe, options.minutes * 60)
    found = {
        "recipe": asdict(recipe),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "minutes": options.minutes, "writing_s": wrote_s, "answers": len(answers),
        "tokens": sum(map(len, known)), "losses": losses, "hits": hits(head, target, held, recipe),
    }  # fmt: skip
    write(head, options.model, options.out)
    (options.out / "training.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"the target's token: {found['hits']}; {options.out}", flush=True)


def prompts() -> list[str]:
    """Questions, functions and pages, mixed, without those that `drafts_on_text.py` asks about."""
    import ast
    import importlib
    import inspect
    from pydoc_data import topics

    found = [asked.format(one) for asked in ASKED for one in SUBJECTS]
    pages = [text for name, text in topics.topics.items() if name not in SECTIONS]
    parts = [page[at : at + 800] for page in pages for at in range(300, len(page) - 800, 800)]
    found += [f"Repeat the following text and correct its errors:\n\n{one}" for one in parts[:400]]
    found += [f"Summarise this:\n\n{one}" for one in parts[400:700]]
    for name in CODE:
        module = importlib.import_module(name)
        source = inspect.getsource(module)
        for one in ast.parse(source).body:
            text = ast.get_source_segment(source, one) or ""
            if isinstance(one, ast.FunctionDef) and 300 < len(text) < 1200:
                found.append(f"Write this Python function again with type annotations:\n\n{text}")
    random.Random(0).shuffle(found)
    return found


def written(
    target: Any, tokenizer: Any, asked: Sequence[str], recipe: Recipe
) -> Iterator[torch.Tensor]:
    """Tokens of each prompt with the answer that the target writes to it."""
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for at in range(0, len(asked), recipe.at_once):
        chats = [[{"role": "user", "content": one}] for one in asked[at : at + recipe.at_once]]
        given = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        ).to(target.device)
        with torch.inference_mode():
            rows = target.generate(
                **given, max_new_tokens=recipe.answer, do_sample=True,
                temperature=recipe.temperature, pad_token_id=tokenizer.pad_token_id,
            ).clone()  # fmt: skip
        padding = given["attention_mask"].shape[1] - given["attention_mask"].sum(1)
        for row, left in zip(rows.cpu(), padding.tolist(), strict=True):
            ends = (row == tokenizer.eos_token_id).nonzero().flatten().tolist()
            last = next((end for end in ends if end >= given["input_ids"].shape[1]), len(row))
            yield row[left : last + 1][-recipe.context :]
        print(f"{at + len(chats)} of {len(asked)} answers", flush=True)


def of_target(target: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and last states, behind the norm, of rows [B, T] of tokens; each [B, T, N]."""
    with torch.inference_mode():
        states = target.model(input_ids=rows).last_hidden_state
        return target.get_input_embeddings()(rows).float(), states.float()


def batches(answers: Sequence[torch.Tensor], recipe: Recipe, generator: Any) -> Iterator[Any]:
    """Rows [B, T] of tokens and whether each belongs to an answer, for ever; of similar length."""
    ordered = sorted(answers, key=len)
    while True:
        at = int(torch.randint(len(ordered) - recipe.batch + 1, (1,), generator=generator))
        yield padded(ordered[at : at + recipe.batch])


def padded(some: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, T] of tokens, and which of them are no padding."""
    rows = nn.utils.rnn.pad_sequence(some, batch_first=True)
    lengths = torch.tensor([len(one) for one in some])
    return rows, torch.arange(rows.shape[1])[None] < lengths[:, None]


def train(
    head: Head, target: Any, answers: Sequence[torch.Tensor], recipe: Recipe, seconds: float
) -> list[dict[str, float]]:
    """Train until the time is over; returns seconds, steps and both passes' losses now and then."""
    device = target.device
    given = batches(answers, recipe, torch.Generator().manual_seed(recipe.seed))

    def losses() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows, real = (one.to(device) for one in next(given))
        embedded, states = (one.clone() for one in of_target(target, rows))
        noise = (torch.rand_like(states) * 2 - 1) * recipe.noise * states.std()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            first = head(embedded[:, 1:], states[:, :-1] + noise[:, :-1])
            loss = loss_of(first, states[:, 1:], real[:, 1:], target, recipe)
            second = head(embedded[:, 2:], first[:, :-1].detach().float())
            behind = loss_of(second, states[:, 2:], real[:, 2:], target, recipe)
        return loss + behind, {"first": loss, "second": behind}

    return trained(
        head.parameters(), losses, seconds, rate=recipe.rate, warm_up=recipe.warm_up, decay=0.01
    )


def loss_of(
    given: torch.Tensor, states: torch.Tensor, real: torch.Tensor, target: Any, recipe: Recipe
) -> torch.Tensor:
    """Distance of distributions, in nats, and of states from the target's, over real tokens."""
    given, states = given[real], states[real]
    with torch.no_grad():
        wanted = target.lm_head(states.bfloat16()).float().softmax(-1)
    logits = target.lm_head(given.bfloat16()).float()
    apart = functional.smooth_l1_loss(given.float() / states.std(), states / states.std())
    return functional.cross_entropy(logits, wanted) + recipe.states * apart


@torch.no_grad()
def hits(
    head: Head, target: Any, answers: Sequence[torch.Tensor], recipe: Recipe
) -> dict[str, float]:
    """Share of tokens at which the head's best token is the target's, in the first two passes."""
    equal, count = [0, 0], [0, 0]
    for at in range(0, len(answers), recipe.batch):
        rows, real = (one.to(target.device) for one in padded(answers[at : at + recipe.batch]))
        embedded, states = of_target(target, rows)
        with torch.autocast(target.device.type, dtype=torch.bfloat16):
            first = head(embedded[:, 1:], states[:, :-1])
            second = head(embedded[:, 2:], first[:, :-1].float())
        for which, (given, start) in enumerate(((first, 1), (second, 2))):
            of_real = real[:, start:]
            best, wanted = (
                target.lm_head(one[of_real].bfloat16()).argmax(-1)
                for one in (given, states[:, start:])
            )
            equal[which] += int((best == wanted).sum())
            count[which] += int(of_real.sum())
    return {name: one / of for name, one, of in zip(("first", "second"), equal, count, strict=True)}


def write(head: Head, model: Path, folder: Path) -> None:
    """Write the head as vLLM reads it; embedding and output matrix are the target's."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in head.state_dict().items()
    }
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
