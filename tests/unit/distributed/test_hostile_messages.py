"""A peer that sends something else than ranks of this release: one named error, and no room by
what it says."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from safetensors.torch import save  # noqa: E402

from ray_hetero.distributed import expert_offers, shared_sums  # noqa: E402
from ray_hetero.distributed.expert_meeting import ExpertMeeting, address_of, reach  # noqa: E402
from ray_hetero.distributed.expert_memory import (  # noqa: E402
    Geometry,
    HandoverMemory,
    RemoteLayer,
    _native,
)
from ray_hetero.errors import AgreementError, RayHeteroError, StartupError  # noqa: E402
from ray_hetero.offload.group import joining  # noqa: E402
from ray_hetero.offload.group.prompt_group import PromptGroup  # noqa: E402
from ray_hetero.runtime import sealed_memory, unix_sockets  # noqa: E402
from ray_hetero.runtime.shared_pages import STEP  # noqa: E402

LIMIT_S = 2.0
BYTES = STEP
SHAPE, STRIDE = [4, 2, 16, 32], [1024, 512, 32, 1]
WHO = "rank 7, of the same tensor-parallel group,"
ODD = (
    b"[", b"[]", b"{", b"1", b"null", b"\xff\xfe", b"[" * 9000, b'"memory"', b'["memory"]',
    b"9" * 5000, b'{"stays": {"a": 1e400}', b"\0", b"{" + b" " * 60_000,
)  # fmt: skip
"""Messages in no language, or of another form than any."""


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end and the peer's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def group_of(own: int, connection: socket.socket) -> PromptGroup:
    """A group of two ranks, of which the other one is the peer."""
    connections = [None, connection] if own == 0 else [connection, None]
    ranks = (6, 7) if own == 0 else (7, 6)
    sums: Any = SimpleNamespace(
        is_first=own == 0, size=2, ranks=ranks, connections=connections, limit_s=LIMIT_S
    )
    return PromptGroup(sums, torch.zeros(2, 8, dtype=torch.bfloat16))


@contextmanager
def descriptor_of(nbytes: int, *, sealed: bool = True) -> Iterator[int]:
    descriptor = sealed_memory.made("test", nbytes, can_grow=True)
    try:
        if sealed:
            sealed_memory.seal(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def little_room() -> Iterator[None]:
    """Address space for what is there and a little more: what takes memory by a number that came
    from elsewhere fails with MemoryError."""
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("message", [*ODD, b"{}", b'{"problems": 1}', b'{"memory": {}'])
def test_how_a_step_has_ended_is_told_or_is_nothing(message: bytes) -> None:
    with pair() as (ours, theirs):
        theirs.send(message)
        with pytest.raises(dist.DistError, match=rf"^{WHO} has sent something else .* release"):
            group_of(1, ours).wait()


@pytest.mark.parametrize("message", [*ODD, b"\0" * 40, b"\1" + b"\0" * 39])
def test_another_step_is_named(message: bytes) -> None:
    with pair() as (ours, theirs):
        theirs.send(message)
        with pytest.raises(dist.DistError, match=f"^{WHO} computes another step"):
            group_of(0, ours).begin((1, 2, 3, 4))


def told(**other: Any) -> bytes:
    """What a rank tells of its caches."""
    return json.dumps({"shape": SHAPE, "stride": STRIDE, "offsets": [0]} | other).encode()


CACHES = [
    *ODD, b'{"a": 1}', told(shape=None), told(shape=4), told(shape="4"), told(shape=[1e30] * 4),
    told(shape=[True] * 4), told(stride=None), told(stride=[1, 1, 1, 1e3]), told(stride=[1]),
    told(stride=[-1024, 512, 32, 1]), told(stride=[10**30, 1, 1, 1]), told(offsets=None),
    told(offsets=["0"]), told(offsets=[-1]), told(offsets=[BYTES]), told(offsets=[10**30]),
    told(offsets=[0.0]), told(offsets=[True]), told(offsets={}), told(offsets=[None]),
    told(stride=[2**62, 512, 32, 1]), told(offsets=[BYTES // 2 - 4 * 1024 + 1]),
]  # fmt: skip


@pytest.mark.parametrize("message", CACHES)
def test_caches_that_are_none_are_named(message: bytes) -> None:
    own = [torch.zeros(4, 2, 16, 32, dtype=torch.bfloat16)]
    with pair() as (ours, theirs), descriptor_of(BYTES) as descriptor:
        socket.send_fds(theirs, [message], [descriptor])
        with pytest.raises(dist.DistError, match=f"^{WHO} has (sent something|another KV cache)"):
            group_of(0, ours).caches(own)


def test_caches_that_are_right_are_mapped() -> None:
    own = [torch.zeros(4, 2, 16, 32, dtype=torch.bfloat16)]
    last = BYTES // 2 - 4 * 1024
    with pair() as (ours, theirs), descriptor_of(BYTES) as descriptor:
        socket.send_fds(theirs, [told(offsets=[last])], [descriptor])
        found = group_of(0, ours).caches(own)
        assert found is not None
        found[0][0].fill_(1)
        assert os.pread(descriptor, 2, BYTES - 2) == b"\x80\x3f"


@pytest.mark.parametrize("kind", ["none", "a pipe", "not sealed", "empty"])
def test_memory_of_caches_that_is_none_is_named(kind: str) -> None:
    own = [torch.zeros(4, 2, 16, 32, dtype=torch.bfloat16)]
    with pair() as (ours, theirs):
        if kind == "none":
            theirs.send(told())
            assert group_of(0, ours).caches(own) is None
            return
        nbytes = 0 if kind == "empty" else BYTES
        with descriptor_of(nbytes, sealed=kind != "not sealed") as memory:
            read, write = os.pipe()
            socket.send_fds(theirs, [told()], [read if kind == "a pipe" else memory])
            os.close(read), os.close(write)
            with pytest.raises(dist.DistError, match=rf"^{WHO} .*memory"):
                group_of(0, ours).caches(own)


def weights(told: Any, **tensors: Any) -> bytes:
    text = told if isinstance(told, str) else json.dumps(told)
    content: bytes = save(tensors, {"weights": text})
    return content


STACK: dict[str, Any] = {
    "format": "packed", "shape": [32, 64], "first": 0, "count": 1, "nbytes": 4096, "facts": {}
}  # fmt: skip
LINEAR: dict[str, Any] = {"stack": STACK, "pages": 0, "begin": 0}


def linear(**other: Any) -> bytes:
    return weights([LINEAR | other])


def stack(**other: Any) -> bytes:
    return linear(stack=STACK | other)


DESCRIPTIONS: dict[str, bytes] = {
    "nothing": b"", "text": b"text", "a length alone": b"\xff" * 8, "zeros": bytes(100),
    "half": linear()[:-20], "no text": save({"a": torch.zeros(1)}), "no JSON": weights("["),
    "a number": weights(1), "text for a list": weights("abc"),
    "60,000 lists": weights("[" * 60_000),
    "a linear that is a list": weights([[]]), "nothing of a linear": weights([{}]),
    "pages 1": linear(pages=1), "pages -1": linear(pages=-1), "pages text": linear(pages="0"),
    "pages true": linear(pages=True), "begin -1": linear(begin=-1), "begin 0.5": linear(begin=0.5),
    "begin behind the end": linear(begin=BYTES), "begin 1e400": weights('[{"begin": 1e400}]'),
    "begin near the end": linear(begin=BYTES - 4095), "stack null": linear(stack=None),
    "format none": stack(format="none"), "format null": stack(format=None),
    "format a list": stack(format=[]), "shape 0": stack(shape=[0, 64]),
    "shape -32": stack(shape=[-32, -64]), "shape text": stack(shape="32"),
    "shape 1": stack(shape=[32]), "shape huge": stack(shape=[10**30, 64]),
    "shape half": stack(shape=[32.5, 64]), "rows that do not divide": stack(shape=[33, 64]),
    "count 2": stack(count=2), "count -1": stack(count=-1), "nbytes -1": stack(nbytes=-1),
    "nbytes 0": stack(nbytes=0), "nbytes huge": stack(nbytes=10**30),
    "nbytes text": stack(nbytes="1"), "facts null": stack(facts=None), "more": stack(more=1),
}  # fmt: skip


def send_weights(end: socket.socket, content: bytes, told: bytes, pages: Sequence[int]) -> None:
    description = os.memfd_create("test")
    os.write(description, content)
    socket.send_fds(end, [told], [description])
    os.close(description)
    for descriptor in pages:
        socket.send_fds(end, [unix_sockets.NOTE], [descriptor])


def taken(ours: socket.socket) -> Any:
    """The peer's weights, with errors as `joined` names them."""
    sums: Any = SimpleNamespace(ranks=(6, 7), limit_s=LIMIT_S)
    with joining.naming(sums):
        return joining._weights(ours, LIMIT_S)


def test_weights_that_are_right_are_linked() -> None:
    with pair() as (ours, theirs), descriptor_of(BYTES) as pages:
        send_weights(theirs, linear(begin=BYTES - 4096), b'{"pages": 1}', [pages])
        (found,) = taken(ours)
    assert found.weight.shape == (32, 64)
    assert found.weight.data.shape == (32, 128)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_weights_that_are_none_are_named(name: str) -> None:
    with pair() as (ours, theirs), descriptor_of(BYTES) as pages:
        send_weights(theirs, DESCRIPTIONS[name], b'{"pages": 1}', [pages])
        with pytest.raises(RuntimeError, match=r"^one of the ranks \[6, 7\].* something else .*"):
            taken(ours)


@pytest.mark.parametrize("message", [*ODD, b"{}", b'{"pages": null}', b'{"pages": "a"}'])
def test_a_number_of_pages_that_is_none_is_named(message: bytes) -> None:
    with pair() as (ours, theirs), descriptor_of(BYTES) as pages:
        send_weights(theirs, linear(), message, [pages])
        with pytest.raises(RuntimeError, match=r"^one of the ranks \[6, 7\].* something else .*"):
            taken(ours)


def test_a_description_takes_no_more_room_than_its_sender_has_taken() -> None:
    with pair() as (ours, theirs):
        huge = os.memfd_create("test")
        os.truncate(huge, 1 << 40)
        socket.send_fds(theirs, [b'{"pages": 0}'], [huge])
        os.close(huge)
        with little_room(), pytest.raises(RuntimeError, match="1099511627776 bytes"):
            taken(ours)


def test_an_offer_takes_no_more_room_than_its_sender_has_taken() -> None:
    with pair() as (ours, theirs), descriptor_of(1 << 40) as memory:
        theirs.send(b'{"layers": 1, "points": null}')
        socket.send_fds(theirs, [b'{"layer": "a", "data_bytes": 0}'], [memory])
        with little_room(), pytest.raises(AgreementError, match=r"expert rank 7.*1099511627776 b"):
            expert_offers.taken([ours], ["expert rank 7"], LIMIT_S)


OFFERS: dict[str, bytes] = {
    "nothing": b"", "no tensors": b"text", "no text": save({"a": torch.zeros(1)}),
    **{
        name: save({}, {"layer": text})
        for name, text in {
            "no JSON": "[", "a list": "[]", "no halves": '{"starts": [], "used": [], "halves": []}',
            "halves of nothing": '{"starts": [0, 0], "used": [1, 1], "halves": [[], []]}',
            "starts before": '{"starts": [-9, 0], "used": [1, 1], "halves": [[], []]}',
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERS)
def test_experts_that_are_none_are_named(name: str) -> None:
    content = OFFERS[name]
    with pair() as (ours, theirs):
        memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.write(memory, bytes(4096) + content)
        sealed_memory.seal(memory)
        theirs.send(b'{"layers": 1, "points": null}')
        socket.send_fds(theirs, [b'{"layer": "a", "data_bytes": 4096}'], [memory])
        os.close(memory)
        with pytest.raises(RayHeteroError, match="expert rank 7"):
            expert_offers.taken([ours], ["expert rank 7"], LIMIT_S)


def in_turn(answers: Sequence[Any]) -> Callable[[Any], list[Any]]:
    """What two ranks tell each other, of which the peer tells these."""
    left = iter(answers)
    return lambda told: [told, next(left)]


@pytest.mark.parametrize("message", [b"", b"\0", b"\0" * 4, b"\2\0\0\0", b"\xff" * 4])
def test_a_member_of_a_group_that_is_none_is_named(message: bytes) -> None:
    there: list[socket.socket] = []

    def gather(told: Any) -> list[Any]:
        if isinstance(told, tuple):
            there.append(unix_sockets.unix_socket(LIMIT_S))
            unix_sockets.connect(there[0], told[1])
            if message:
                there[0].send(message)
            else:
                there[0].close()
        return [told, True]

    with pytest.raises(RuntimeError, match="a process that is no other rank of this group"):
        shared_sums._begin(0, 2, 4096, gather, LIMIT_S)
    there[0].close()


@pytest.mark.parametrize(("nbytes", "sealed"), [(8, True), (4096, False), (1 << 40, True)])
def test_memory_for_results_has_the_size_that_was_agreed_on(nbytes: int, sealed: bool) -> None:
    with pair() as (ours, theirs), descriptor_of(nbytes, sealed=sealed) as descriptor:
        socket.send_fds(theirs, [unix_sockets.NOTE], [descriptor])
        with pytest.raises(RuntimeError, match=f"{nbytes} bytes, expected 4096, sealed"):
            joining._results_memory(ours, 4096)


needs_handover = pytest.mark.skipif(_native is None, reason="needs the native module")
GEOMETRY = {"ranks": 1, "capacity": 4, "hidden": 8, "chosen": 2, "dtype": "float32"}
LAYER = {"name": "a", "hidden": 8, "chosen": 2}


def agreed(layer: dict[str, Any] | None = None, **other: Any) -> bytes:
    return json.dumps({**GEOMETRY, "layers": [LAYER | (layer or {})], **other}).encode()


MEETINGS = [
    *ODD, agreed(ranks=0), agreed(ranks=-1), agreed(ranks=1.0), agreed(ranks=True),
    agreed(ranks=10**30), agreed(capacity=0), agreed(capacity="4"), agreed(hidden=-8),
    agreed(chosen=None), agreed(dtype="Tensor"), agreed(dtype=7), agreed(dtype=None), agreed(a=1),
    agreed(layers=None), agreed(layers=[1]), agreed({"name": []}), agreed({"hidden": 9}),
    agreed({"hidden": -1}), agreed({"hidden": "8"}), agreed({"chosen": 3}), agreed({"chosen": 0}),
    agreed({"chosen": True}), agreed({"more": 1}),
]  # fmt: skip


@needs_handover
@pytest.mark.parametrize("message", MEETINGS)
def test_what_a_stage_tells_is_right_or_named(message: bytes) -> None:
    meeting = os.urandom(8).hex()
    stage = ExpertMeeting(meeting, 0)
    geometry = Geometry(1, 4, 8, 2, torch.float32)
    descriptor = HandoverMemory.made(geometry)
    listener = stage._listener

    def answer() -> None:
        end = listener.accept()[0]
        socket.send_fds(end, [message], [descriptor])
        end.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(RayHeteroError, match="the rank that hands tokens of stage 0 over"):
            reach(meeting, 0, 0, (), LIMIT_S)
    finally:
        thread.join()
        os.close(descriptor)
        listener.close()


@needs_handover
@pytest.mark.parametrize("message", [b"-1", b"2", b"1", b"x", b"9" * 5000, b"1e9", "٣".encode()])
def test_an_expert_rank_of_no_known_number_is_named(message: bytes) -> None:
    meeting = os.urandom(8).hex()
    stage = ExpertMeeting(meeting, 0)
    layers = (RemoteLayer("a", 8, 2),)
    geometry = Geometry.of(layers, ranks=2, tokens=1, dtype=torch.float32)
    ends = []
    for content in (b"1", message):
        ends.append(unix_sockets.unix_socket(LIMIT_S))
        ends[-1].connect(address_of(meeting, 0))
        ends[-1].send(content)
    with pytest.raises(AgreementError, match=r"^expert rank 6 has sent something else"):
        stage.accept(geometry, layers, ["expert rank 6", "expert rank 7"], LIMIT_S)
    for end in ends:
        end.close()


@needs_handover
def test_an_expert_rank_that_closes_at_once_is_told_as_missing() -> None:
    meeting = os.urandom(8).hex()
    stage = ExpertMeeting(meeting, 0)
    geometry = Geometry.of((), ranks=2, tokens=1, dtype=torch.float32)
    with unix_sockets.unix_socket(LIMIT_S) as end:
        end.connect(address_of(meeting, 0))
    with pytest.raises(StartupError, match=r"^expert rank 6 and expert rank 7 has closed"):
        stage.accept(geometry, (), ["expert rank 6", "expert rank 7"], LIMIT_S)
