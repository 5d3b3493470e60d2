"""Every link fits the protocol, and nothing but the registry knows which links there are."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from ray_hetero.distributed import link, linking
from ray_hetero.distributed.link import Terms
from ray_hetero.distributed.messages import Packing
from ray_hetero.distributed.neighbour import Neighbour

ROOM = Path(linking.__file__).parent
BACKENDS = {path.stem for path in ROOM.glob("*_link.py")}


def test_only_the_registry_names_a_backend() -> None:
    named = {
        path.stem
        for path in ROOM.parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[-1] in BACKENDS
    }
    assert named == {"linking"}


def test_every_backend_is_registered_once_by_a_name_of_its_own() -> None:
    modules = [type(one).__module__.split(".")[-1] for one in linking.LINKS]
    assert sorted(modules) == sorted(BACKENDS)
    assert len({one.name for one in linking.LINKS}) == len(linking.LINKS)


def test_the_last_link_can_be_offered_and_reached_everywhere() -> None:
    packing = Packing({"hidden_states": torch.zeros(1, 8)})
    terms, neighbour = Terms(packing, 4, 2, 1.0, torch.device("cpu")), Neighbour(1, group=None)
    last: link.Link = linking.LINKS[-1]
    offer = last.offer(terms, neighbour)
    assert offer is not None
    assert last.reach(offer.address, terms, neighbour) is not None
