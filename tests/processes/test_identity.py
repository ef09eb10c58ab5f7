"""A bad member that speaks in the name of another harms itself only: what it says of the other is looked into."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import torch

import aiorpc as rpc
from aiorpc.runtime.calls.declared import pack
from aiorpc.runtime.group import group as handlers

from . import bodies
from .attackers import GOODBYE, pretend
from .workers import group, until


def lost_here() -> list[str]:
    """Handler: whom this worker has lost, or seen leave."""
    table = rpc.current()._node.group
    return [record.name for record in table.members.values() if table.is_gone(record)]


async def reach(name: str) -> int:
    """Handler: call that worker."""
    answer: int = await rpc.peer(name, timeout=20).call(bodies.add, 1, 2)
    return answer


def secret_of(worker: rpc.Worker) -> bytes:
    """What every member knows."""
    return worker._node.acceptor.secret


@pytest.mark.slow
@pytest.mark.parametrize("says", [b"", GOODBYE, b"rubbish " * 100], ids=["nothing", "goodbye", "rubbish"])
async def test_who_hangs_up_in_the_name_of_another_does_not_expel_it(says: bytes) -> None:
    """Over TCP nothing proves a name: the worker itself is asked before it is taken for lost, or for one that left."""
    async with group(3, transports=("tcp",), rpc_timeout=20.0) as (worker, _):
        records = {record.name: record for record in worker._node.group.members.values()}
        for _ in range(3):
            assert (
                await asyncio.to_thread(pretend, records["w2"], records["w1"], secret_of(worker), "tcp", says) == ""
            ), "the attack is one"
        for caller, callee in (("w1", "w2"), ("w2", "w1")):
            assert await rpc.call(caller, reach, callee) == 3
        for name in ("w1", "w2"):
            assert await rpc.call(name, lost_here) == []
        assert lost_here_of(worker) == []


def lost_here_of(worker: rpc.Worker) -> list[str]:
    """The same for a worker of this process."""
    table = worker._node.group
    return [record.name for record in table.members.values() if table.is_gone(record)]


@pytest.mark.slow
async def test_nobody_opens_the_second_connection_of_another() -> None:
    """Its proof is made of what only the two ends of the first one know; transfers go on."""
    async with group(3, transports=("tcp",), rpc_timeout=20.0) as (worker, _):
        records = {record.name: record for record in worker._node.group.members.values()}
        assert await rpc.call("w2", reach, "w1") == 3
        said = [
            await asyncio.to_thread(pretend, records["w2"], records["w1"], secret_of(worker), "tcp", link=number)
            for number in (1, 2, 3)
        ]
        assert sorted("has ended here" in reason for reason in said) == [False, True, True], "one of them leads to w1"
        assert all(said)
        assert await rpc.call("w2", send_much, "w1") == 1 << 20
        assert await rpc.call("w1", lost_here) == []


async def send_much(name: str) -> int:
    """Handler: send that worker what goes by a second connection."""
    size: int = await rpc.peer(name, timeout=20).call(len, torch.zeros(1 << 20, dtype=torch.float32))
    return size


async def test_nobody_speaks_for_another_process_over_a_unix_socket() -> None:
    """There the kernel says which process connects: it has to be that of the record."""
    async with group(3) as (worker, _):
        records = {record.name: record for record in worker._node.group.members.values()}
        refused = await asyncio.to_thread(pretend, records["w2"], records["w1"], secret_of(worker), "unix")
        assert "is not the process" in refused and "w2" in refused
        assert await rpc.call("w1", reach, "w2") == 3
        assert await rpc.call("w1", lost_here) == []


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_record_that_is_not_in_the_roster_is_refused(transport: str) -> None:
    """A member that says something else of itself than the store said, or an id that nobody has."""
    async with group(2, transports=(transport,)) as (worker, _):
        records = {record.name: record for record in worker._node.group.members.values()}
        others = [
            replace(records["w0"], incarnation="ab" * 16),
            replace(records["w0"], name="w9"),
            replace(records["w0"], main="elsewhere"),
            replace(records["w0"], id=77, name="w77", incarnation="cd" * 16),
        ]
        for other in others:
            refused = await asyncio.to_thread(pretend, other, records["w1"], secret_of(worker), transport)
            assert "roster" in refused, other
        assert await rpc.call("w1", reach, "w0") == 3


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_report_of_a_loss_is_looked_into(transport: str) -> None:
    """A member says of another that it was lost: that one says itself whether it has lost the reporter, too."""
    async with group(3, transports=(transport,), rpc_timeout=20.0) as (worker, _):
        records = {record.name: record for record in worker._node.group.members.values()}
        for lie in (records["w2"], replace(records["w2"], pid=1), replace(records["w2"], host="h", tcp_port=1)):
            report = worker.peer("w1", timeout=20).call(handlers.report_lost, pack(lie.to_wire()), "so they say")  # type: ignore[call-overload]
            await report
            assert await rpc.call("w1", reach, "w2") == 3
        stranger = replace(records["w2"], id=9, name="w9")
        lies = worker.peer("w1", timeout=20).call(handlers.attend, pack(stranger.to_wire()))  # type: ignore[call-overload]
        with pytest.raises(rpc.RpcError, match="for itself"):
            await lies
        assert await rpc.call("w1", lost_here) == []
        assert await rpc.call("w1", reach, "w2") == 3


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_member_that_has_died_is_lost_all_the_same(transport: str) -> None:
    """Also where nobody but the leader had a connection to it: it is asked, and does not answer."""
    async with group(3, ended=("w2",), transports=(transport,), rpc_timeout=20.0) as (worker, children):
        assert await rpc.call("w1", reach, "w2") == 3
        assert await rpc.call("w2", reach, "w1") == 3
        next(child for child in children if child.place.name == "w2").kill()
        await until(partial(_is_lost, worker, "w2"))
        with pytest.raises(rpc.PeerLost, match="w2"):
            await rpc.call("w1", reach, "w2")


def _is_lost(worker: rpc.Worker, name: str) -> bool:
    return name in lost_here_of(worker)
