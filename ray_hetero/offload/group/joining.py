"""How the CPU ranks of a group come to have their prompts computed by the first one's GPU.

All ranks that share memory for their sums (shared_sums.py) call `joined` once their layers are
known.  Where all suit and say the same, each of them hands descriptors of its weights' memory to
the first, which maps them, takes the GPU, and hands out memory for results.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from placement.units import GIB
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.linear.rank_sums import Gather, RankSums, gathering
from ray_hetero.log import logger
from ray_hetero.offload.decode import shared_decode
from ray_hetero.offload.decode.column_channel import (
    ColumnChannel,
    ColumnMemory,
    MakeColumns,
    MlpColumnClient,
    no_columns,
)
from ray_hetero.offload.decode.column_pieces import are_alike
from ray_hetero.offload.decode.mlp_columns import maker_of
from ray_hetero.offload.decode.share_choice import Shares
from ray_hetero.offload.group.group_layers import (
    GroupLayers,
    PromptOffer,
    PromptTerms,
    WholeLayers,
    linears_of,
)
from ray_hetero.offload.group.prompt_group import MOST_BYTES, RESULTS, PromptGroup
from ray_hetero.offload.prefill import threshold
from ray_hetero.offload.weights.shared_weights import LinkedLinear, linked, read_whole
from ray_hetero.runtime import sealed_memory
from ray_hetero.runtime.shared_pages import SharedPages
from ray_hetero.runtime.unix_sockets import MALFORMED, NOTE, unlike

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer import Layer
    from ray_hetero.kernels.layers.layer_parts import Linear
    from ray_hetero.kernels.linear.streaming_linear import StreamingLinear


def joined(
    group: dist.ProcessGroup, sums: RankSums, offer: PromptOffer | None
) -> list[GroupLayers] | None:
    """Let one GPU compute the prompts of a group; all its ranks have to call this.

    Args:
        group: of processes on CPUs.
        sums: with the other ranks.
        offer: of this rank; None where it cannot.

    Returns:
        What computes each run of layers; None where some rank cannot, or the GPU.

    Raises:
        RuntimeError: another rank has ended, is late, or tells something else than was expected.

    """

    gather = gathering(group, sums.size)
    terms = None if offer is None else offer.terms()
    heard = gather(terms)
    if offer is None or terms is None or any(other != terms for other in heard):
        return None
    with naming(sums):
        join = _begin if sums.is_first else _join
        made = join(sums, offer, terms, gather)
    if made is None:
        return None
    shared, layers = made
    results, *of_columns = shared.split(terms.shared_bytes(sums.size))
    prompts = PromptGroup(sums, _results(results, terms))
    none: list[Any] = [None] * len(offer.runs)
    memories = [ColumnMemory.within(one, terms.inner) for one in of_columns]
    columns = _columns(offer, layers, memories, sums.own, gather)
    shares = _shares(offer, columns[0], gather, is_first=sums.is_first)
    least = _settle_steps(offer, layers, gather, is_shared=not shares.is_empty)
    return [
        GroupLayers(
            prompts, run, tokens=terms.tokens, from_tokens=least, shares=shares, columns_of=make
        )
        for run, make in zip(layers.runs if layers else none, columns, strict=True)
    ]  # fmt: skip


@contextmanager
def naming(sums: RankSums) -> Iterator[None]:
    """Errors of what ranks of a group send each other, told of these ranks."""
    who = f"one of the ranks {list(sums.ranks)}, of one tensor-parallel group,"
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"{who} has ended or was not there in {sums.limit_s:g} s (exchange.timeout_s), or "
            f"memory cannot be shared: {error}"
        ) from None
    except MALFORMED as error:
        raise RuntimeError(f"{who} {unlike(error)}") from None


Made = tuple[torch.Tensor, WholeLayers | None]
"""Memory that all ranks map, and what is on the GPU of the first one."""


def _results(memory: torch.Tensor, terms: PromptTerms) -> torch.Tensor:
    return memory[: terms.results_bytes].view(torch.bfloat16).view(RESULTS, -1)


def _columns(
    offer: PromptOffer, layers: WholeLayers | None, memories: Sequence[ColumnMemory], own: int,
    gather: Gather,
) -> list[MakeColumns]:  # fmt: skip
    """Makers of the offload of each run's MLP columns in decode steps; the same on all ranks.

    Args:
        offer: of this rank.
        layers: of all ranks, where this one is the first.
        memories: of all ranks.
        own: place of this rank among them.
        gather: tells the others.

    """
    kernel = offer.kernel
    if kernel is None or not offer.share:
        return [no_columns for _ in offer.runs]
    makers: list[MakeColumns] = (
        [partial(_from_gpu, run, kernel, memories[own], offer.tokens) for run in offer.runs]
        if layers is None
        else [maker_of(run.layers, run.gpu, kernel, memories) for run in layers.runs]
    )
    can = all(
        shared_decode.suits(run) and make(len(run)) is not None
        for run, make in zip(offer.runs, makers, strict=True)
    )
    return makers if all(gather(can)) else [no_columns for _ in offer.runs]


def _from_gpu(
    layers: Sequence[Layer], kernel: StreamingLinear, memory: ColumnMemory, tokens: int, count: int
) -> ColumnChannel | None:
    return MlpColumnClient(layers[:count], kernel, memory, tokens) if are_alike(layers) else None


def _shares(offer: PromptOffer, columns: MakeColumns, gather: Gather, *, is_first: bool) -> Shares:
    """Shares of MLPs that the GPU computes in decode steps; the same on all ranks."""
    kernel, layers = offer.kernel, offer.runs[0]
    if kernel is None or not offer.share or not shared_decode.suits(layers):
        return Shares(())
    # They read the same memory: all begin together.
    places = gather(offer.place)
    return shared_decode.shares_of(
        offer.share, layers, kernel, columns, lambda taken: max(gather(taken)),
        # The first rank has the GPU, and keeps what is measured for all.
        place="; ".join(places) if is_first and all(places) else "",
        agree=lambda found: gather(found)[0],
    )  # fmt: skip


def _settle_steps(
    offer: PromptOffer, layers: WholeLayers | None, gather: Gather, *, is_shared: bool
) -> int:
    """Choose the largest decode step that the cores compute; the same on all ranks.

    Args:
        offer: of this rank.
        layers: of all ranks, where this one is the first.
        gather: tells the others.
        is_shared: whether decode steps are shared with the GPU, and their size stays.

    Returns:
        Tokens of a step from which the GPU computes it.

    """
    kernel, least = offer.kernel, offer.from_tokens
    if (
        kernel is None
        or (is_shared and not offer.is_auto)
        or not threshold.is_open(kernel, least, offer.tokens)
    ):
        return least
    gather(None)  # they read the same memory: all begin together
    cores = max(gather(threshold.on_cores(kernel, _measured(offer.runs[0]))))
    link = 0.0
    if layers is not None:
        gpu, some = layers.runs[0].gpu, _measured(layers.runs[0].layers)
        link = threshold.over_link(kernel, gpu, some)
        if offer.is_auto:
            link = threshold.confirmed(kernel, gpu, some, cores, link)
            least = threshold.raised(kernel, gpu, least, cores, link)
    told: tuple[float, int] = gather((link, least))[0]
    link, least = told
    if not is_shared:
        threshold.choose(kernel, offer.from_tokens, cores, link)
    return least


def _measured(run: Sequence[Layer]) -> list[Linear]:
    return threshold.first([linears_of(layer) for layer in run])


def _begin(sums: RankSums, offer: PromptOffer, terms: PromptTerms, gather: Gather) -> Made | None:
    """Take the others' weights and the GPU."""
    others = [_weights(connection, sums.limit_s) for connection in sums.connections[1:]]
    with ExitStack() as stack:
        size = sum(terms.shared_bytes(sums.size))
        descriptor = sealed_memory.made("ray_hetero-prompts", size)
        stack.callback(os.close, descriptor)
        shared = sealed_memory.mapped(descriptor, size)
        problem, layers = "", None
        try:
            layers = WholeLayers.taking(offer, others, shared, _results(shared, terms))
        except UnsupportedError as error:
            problem = str(error)
            logger.warning(
                "no GPU computes whole layers of prompts for all of the ranks %s: %s",
                list(sums.ranks),
                problem,
            )
        if layers is None:
            torch.cuda.memory.empty_cache()  # for the ranks, which use the GPU on their own
        gather(problem)
        if layers is None:
            return None
        for connection in sums.connections[1:]:
            assert connection is not None
            socket.send_fds(connection, [NOTE], [descriptor])
    logger.info(
        "prompts are computed by the GPU in whole layers, their attention too, for all of the "
        "ranks %s, in steps of %d tokens and more: it can read %.1f GiB of weights over its link, "
        "and uses %.1f GiB of its own memory (cpu.prefill_on_gpu)",
        list(sums.ranks),
        terms.from_tokens,
        layers.taken.weight_bytes / GIB,
        layers.taken.gpu_bytes / GIB,
    )
    return shared, layers


def _join(sums: RankSums, offer: PromptOffer, terms: PromptTerms, gather: Gather) -> Made | None:
    """Hand this rank's weights to the first one, and take memory that all map."""
    connection = sums.connections[0]
    assert connection is not None
    connection.settimeout(sums.limit_s)
    content = offer.weights.described(offer.linears)
    description = os.memfd_create("ray_hetero-weights", os.MFD_CLOEXEC)
    with os.fdopen(description, "wb") as file:
        file.write(content)
        file.flush()
        pages = offer.weights.pages
        said = json.dumps({"pages": len(pages)}).encode()
        socket.send_fds(connection, [said], [description])
    for one in pages:
        one.seal()
        socket.send_fds(connection, [NOTE], [one.descriptor])
    if gather(None)[0]:
        return None  # the first rank has said why
    return _results_memory(connection, sum(terms.shared_bytes(sums.size))), None


def _results_memory(connection: socket.socket, nbytes: int) -> torch.Tensor:
    """The memory that the first rank hands out.

    Raises:
        RuntimeError: it has another size.

    """
    descriptor = _descriptor(connection)[1]
    try:
        if not sealed_memory.has_size(descriptor, nbytes):
            raise RuntimeError(
                f"the shared memory of a group's prompts has {os.fstat(descriptor).st_size} bytes, "
                f"expected {nbytes}, sealed; do all ranks run the same release?"
            )
        return sealed_memory.mapped(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _weights(connection: socket.socket | None, limit_s: float) -> list[LinkedLinear]:
    """Linear layers of another rank."""
    assert connection is not None
    connection.settimeout(limit_s)
    said, descriptor = _descriptor(connection)
    try:
        content = read_whole(descriptor)
    finally:
        os.close(descriptor)
    return linked(content, _pages(connection, int(json.loads(said)["pages"])))


def _pages(connection: socket.socket, count: int) -> Sequence[SharedPages]:
    found = []
    for _ in range(count):
        _, descriptor = _descriptor(connection)
        try:
            found.append(SharedPages.received(descriptor))
        finally:
            os.close(descriptor)
    return found


def _descriptor(connection: socket.socket) -> tuple[bytes, int]:
    """A message with the descriptor that comes with it."""
    message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
    if not descriptors:
        raise ConnectionResetError("the other end is closed")
    return message, descriptors[0]
