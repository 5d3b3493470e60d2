"""A small byte-level BPE tokenizer with a chat template, trained offline on the text below."""

from __future__ import annotations

import re
from typing import Any

VOCABULARY_SIZE = 768
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<s>",
    "</s>",
    "<pad>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEXT = """\
The harbour wakes before the town does. Boats come in on the early tide, and the people who
mend nets sit along the wall with their backs to the wind. One of them counts the boats, another
counts the boxes, and a third writes both numbers into a small book with a blue cover.
A child asked what the book was for. "For the winter," said the writer. "When there is nothing
to count, we read what there was." The child thought about that and asked for a page of her own.
On her page she wrote the weather, the names of the dogs, and the colour of the water.
Every morning was a little different: grey with rain, green with sun, white with wind.
After a year she had more than three hundred lines. She read them to the people on the wall, and
they remembered things that were in none of the other books. Where was the old boat with the red
sail? Who brought the bread when the road was closed? How many dogs were there in the summer?
In the end the town kept both books. The numbers said what had been caught and sold, and the
lines said what it had been like to be there. A reader needs both of them, and so does a town.
There is a machine in the house by the water now. It can count the boats from their sound and
send the numbers to the next town in less than a second. It has not yet learned the dogs.
{"name": "harbour", "boats": 12, "open": true, "tide": [0.5, 1.25, 3.75], "note": null}
0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100 2024 2025 2026
"""


def train_tokenizer(max_length: int) -> Any:
    """Train the tokenizer; the same text gives the same tokenizer.

    Args:
        max_length: longest sequence of the model it is for, in tokens.

    Returns:
        A `transformers.PreTrainedTokenizerFast`.

    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def text_tokens(tokenizer: Any) -> list[int]:
    """Ids of tokens that stand for a space and a whole word of the training text."""
    words = {f" {word}" for word in re.findall(r"[A-Za-z]+", TEXT)}
    return [token for token in range(len(tokenizer)) if tokenizer.decode([token]) in words]
