"""A rank of a group whose prompts the first one's pretended GPU computes, in a process of its own.

    python prompt_group_process.py '{"own": 0, "count": 2, "store": "/tmp/…", "limit_s": 5}'

Prints a line of JSON for each step that it has computed and found right, one whenever the GPU has
begun with an attention of the step that follows, and at the end the error of another rank's loss.
With "link": 2.5, the GPU's link takes so many times longer than the cores when it is measured: the
process then prints from how many tokens on the GPU computes a step, and who has computed two.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoder_parts import HIDDEN, attends
from group_steps import GroupSteps
from native_module import native
from paged_steps import Conversation
from slow_links import PRODUCT_S, slow_cores, slow_link
from vllm.platforms import current_platform

from ray_hetero.distributed import shared_sums
from ray_hetero.kernels.layers import layer_tokens, post_attention
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
from ray_hetero.kernels.linear.rank_sums import SumTerms
from ray_hetero.offload.group import joining
from ray_hetero.offload.prefill import gpu_layers

BREAK_S = 3.0
"""How long the GPU takes for an attention in the steps in which a rank is lost."""


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    total = x.float()
    dist.all_reduce(total)
    return total.bfloat16()


class Rank:
    """This process's rank, of a group of which every process makes all parts alike."""

    def __init__(self, own: int, count: int, store: str, limit_s: float, link: float = 0.0) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=own, world_size=count
        )  # fmt: skip
        given = {"least": 96, "most": 1024} if link else {}
        # Ranks are processes here, where those of GroupSteps are threads.
        collectives = {name: getattr(dist, name) for name in ("all_gather_object", "get_rank")}
        self.steps = GroupSteps(pytest.MonkeyPatch(), count, **given)
        for name, collective in collectives.items():
            setattr(dist, name, collective)
        post_attention.tensor_model_parallel_all_reduce = all_reduce
        self.rank = self.steps.ranks[own]
        kernel, group = self.rank.kernel, dist.group.WORLD
        most = kernel.limits.native_tokens
        terms = SumTerms(kernel.level.name, most, most * HIDDEN, len(self.rank.known))
        sums = shared_sums.joined(group, range(count), native, terms, limit_s)
        assert sums is not None
        kernel.sums = sums
        with pytest.MonkeyPatch.context() as patch:
            if link:
                self._measure(patch, link)
            groups = joining.joined(group, sums, self.rank.offer)
        assert groups is not None
        self.from_tokens = groups[0].from_tokens
        self.rank.made = DecoderLayers(self.rank.known, kernel, groups[0])
        kernel.limits = replace(
            kernel.limits, gpu_from=groups[0].from_tokens, gpu_room=groups[0].tokens
        )

    def _measure(self, patch: pytest.MonkeyPatch, link: float) -> None:
        """Have both measured, the link so many times as slow as the cores."""
        rank = self.rank
        rank.offer = replace(rank.offer, kernel=rank.kernel, is_auto=True)
        for cache in rank.caches:
            cache.zero_()  # vLLM's attention multiplies what was never written by nought
        own = rank.offer.linears
        slow_cores(patch, rank.kernel)
        # The link carries the others' parts too, which are as large.
        slow_link(patch, own, link * PRODUCT_S * len(own) / self.steps.count)

    def step(self, *parts: tuple[Conversation, int, int]) -> None:
        """Compute a step, and compare it with the whole sequences."""
        steps = self.steps
        positions, hidden = steps.begin(parts)
        for number, cache in enumerate(self.rank.caches):
            metadata, _, _, slots = steps.contexts[attends(steps.layers[number]).layer_name]
            attention = attends(self.rank.layers[number])
            steps.contexts[attention.layer_name] = metadata, attention, cache, slots
        steps.compare(*self.rank.made(positions, hidden, None), parts)
        tell(step=len(positions))


def take_time() -> None:
    """Let attentions say that they begin, and take long."""
    attend = gpu_layers.attend

    def attend_slowly(*given: Any, **more: Any) -> Any:
        tell(attending=True)
        time.sleep(BREAK_S)
        return attend(*given, **more)

    gpu_layers.attend = attend_slowly


def main() -> None:
    current_platform.import_kernels()
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = Rank(**given)
    if given.get("link"):
        least = rank.from_tokens
        tell(from_tokens=least, step_tokens=rank.rank.kernel.limits.native_tokens)
        for tokens in (least - 1, least):
            layer_tokens.take()
            rank.step((rank.steps.request(tokens), 0, tokens))
            tell(**asdict(layer_tokens.take()))
        return
    one, other, prompt = (rank.steps.request(tokens) for tokens in (60, 92, 150))
    rank.step((one, 0, 57), (other, 0, 88))
    rank.step((one, 57, 58), (other, 88, 89))
    # What decoding has written is read by the GPU, and the other way round.
    rank.step((one, 58, 59), (prompt, 0, 70), (other, 89, 90))
    rank.step((prompt, 70, 149), (one, 59, 60), (other, 90, 91))
    rank.step((prompt, 149, 150), (other, 91, 92))
    tell(named=[line for line in Path("/proc/self/maps").read_text().split() if "/shm/" in line])
    take_time()
    try:
        while True:
            rank.step((rank.steps.request(40), 0, 40))
    except dist.DistError as error:
        tell(error=str(error))


if __name__ == "__main__":
    main()
