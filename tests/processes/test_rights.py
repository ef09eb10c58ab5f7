"""A learner that trusts nobody, and an actor that belongs to somebody else: in processes, with and without rights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc

from .workers import Link, Place, meeting_file, places, processes

# What the learner serves to actors: enough to do their work.
RULES = {"actor": [f"{__name__}:weights", rpc.exposed], "learner": "*"}
received: list[Any] = []


def weights() -> torch.Tensor:
    return torch.ones(3)


@rpc.exposed
def take(rewards: Any) -> int:
    received.append(rewards)
    return len(received)


def join(place: Place, role: str, **options: Any) -> None:
    """Join the group of that place in a role."""
    chosen = rpc.RpcBackendOptions(init_method=place.init_method, **options)
    rpc.init_rpc(place.name, rank=place.rank or 0, world_size=place.world_size, rpc_backend_options=chosen, role=role)


def learn(place: Place, link: Link, rules: Any) -> list[Any]:
    """Body: serve until all have left; what has come."""
    join(place, "learner", allow=rules)
    rpc.shutdown()
    return received


def work(place: Place, link: Link, to: str) -> list[Any]:
    """Body of an honest actor."""
    join(place, "actor", allow=[])
    got = [
        rpc.rpc_sync(to, weights).sum().item(),
        rpc.rpc_sync(to, take, (1.0,)),
        rpc.remote(to, take, (2.0,)).to_here(),
    ]
    rpc.shutdown()
    return got


def misbehave(place: Place, link: Link, to: str, folder: str) -> list[str]:
    """Body of an actor that wants to leave traces at the learner: what has refused it, by the number of its attempt."""
    join(place, "actor", allow=[])
    folders = [f"{folder}/{number}" for number in range(5)]
    attempts: list[Callable[[str], Any]] = [
        lambda path: rpc.rpc_sync(to, os.mkdir, (path,)),
        lambda path: rpc.rpc_sync(to, lambda: os.mkdir(path)),
        lambda path: rpc.remote(to, os.mkdir, (path,)).to_here(),
        lambda path: rpc.remote(to, Path, (path,)).rpc_sync().mkdir(),
        lambda path: rpc.nn.RemoteModule(to, leave, (path,)),
    ]
    said = []
    for attempt, path in zip(attempts, folders, strict=True):
        try:
            attempt(path)
            said.append("ran")
        except rpc.NotAllowed as error:
            said.append(f"{error.caller} {error.role} {error.worker}")
        except Exception as error:
            said.append(type(error).__name__)
    rpc.shutdown()
    return said


def leave(path: str) -> torch.nn.Module:
    """What makes a module, and leaves a trace."""
    os.mkdir(path)
    return torch.nn.Identity()


@pytest.mark.slow
@pytest.mark.parametrize("rules", [None, RULES], ids=["everything", "rights"])
def test_an_actor_does_its_work_and_no_more(rules: Any, tmp_path: Path) -> None:
    """Without rights each attempt leaves its trace; with them each is refused by name, and the honest actor works."""
    with processes() as children, meeting_file() as method:
        first, honest, bad = places(3, method)
        learner = children.start(first, learn, rules)
        actor = children.start(honest, work, first.name)
        attacker = children.start(bad, misbehave, first.name, str(tmp_path))
        assert actor.hear()[0] == 3.0
        said = attacker.hear()
        learner.hear()
        children.check_ended()
    traces = sorted(int(each.name) for each in tmp_path.iterdir())
    if rules is None:
        assert traces == [0, 1, 2, 3, 4], said
    else:
        assert traces == [] and set(said) == {f"{bad.name} actor {first.name}"}, said
