"""Training of a small model for a given time, part of train_mixture.py and train_draft_head.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

NEXT_REPORT_S = 15.0


def trained(
    parameters: Iterable[torch.nn.Parameter],
    losses: Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    seconds: float,
    *,
    rate: float,
    warm_up: int,
    decay: float,
) -> list[dict[str, float]]:
    """Train with AdamW until the time is over, and say now and then how far it is.

    Args:
        parameters: of the model.
        losses: computes the loss of the next step, and the losses that are reported, by name.
        seconds: of training.
        rate: learning rate at its height; it falls to a tenth by the end of the time.
        warm_up: steps until that is reached.
        decay: of weights.

    Returns:
        Seconds, steps and the reported losses, now and then.

    """
    trainable = list(parameters)
    optimiser = torch.optim.AdamW(trainable, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
    found: list[dict[str, float]] = []
    began, told, step = time.monotonic(), 0.0, 0
    while (passed := time.monotonic() - began) < seconds:
        share = min(1.0, (step + 1) / warm_up) * (1 - 0.9 * passed / seconds)
        for group in optimiser.param_groups:
            group["lr"] = rate * share
        loss, reported = losses()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if passed - told >= NEXT_REPORT_S or not found:
            told = passed
            values = {name: value.item() for name, value in reported.items()}
            found.append({"seconds": round(passed, 1), "steps": step, **values})
            print(found[-1], flush=True)
    return found
