"""A store that ends while its group lives: those who know each other go on, and meet newcomers at the next store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import aiorpc
from aiorpc import PeerLost, Worker
from aiorpc.errors import RendezvousError, StoreGone
from aiorpc.events import WorkerLeft
from aiorpc.protocol import leaving
from aiorpc.runtime import lifecycle
from aiorpc.runtime.engine.bounds import Bounds
from aiorpc.runtime.meeting.rendezvous import Rendezvous
from aiorpc.runtime.meeting.stores import serve
from tests.runtime.inside import set_bounds
from tests.runtime.test_rendezvous import make_record
from tests.runtime.waiting import LIMIT, until

pytestmark = pytest.mark.usefixtures("server_made_once")


def where() -> str:
    return aiorpc.current().name


def found(group: Rendezvous, name: str) -> list[str]:
    return [record.name for record in group.join(partial(make_record, name))]


@pytest.fixture
def quick_founding(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long whoever finds nobody waits for members of an earlier store."""
    return lambda seconds: monkeypatch.setattr(lifecycle, "Bounds", partial(Bounds, founding=seconds))


async def test_newcomers_at_another_store_find_who_is_there(quick_founding: Callable[[float], None]) -> None:
    """The store ends; calls go on; whoever begins another one at its address is found there by all, and finds them."""
    store, port = await asyncio.to_thread(serve, "127.0.0.1", 0)
    method = f"tcp://127.0.0.1:{port}"
    quick_founding(0.01)
    async with aiorpc.init("a", init_method=method) as a, aiorpc.init("b", init_method=method) as b:
        gone = await aiorpc.init("gone", init_method=method)
        await until(lambda: len(a.worker_infos()) == len(b.worker_infos()) == 3)
        await asyncio.sleep(2 * a._node.engine.bounds.serving_pause)  # they look at who is there so often
        del store
        await gone._drop()
        assert await a.call("b", where) == "b" and await b.call("a", where) == "a"
        with pytest.raises(PeerLost, match=r"gone .* was lost.*Nothing was sent"):
            await asyncio.wait_for(a.call("gone", where), LIMIT)
        with pytest.raises(PeerLost, match=r"gone .* was lost.*is not known: the store.*Nothing was sent"):
            a.remote("gone", dict)
        with pytest.raises(PeerLost, match=r"gone .* was lost.*is not known: the store.*Nothing was sent"):
            await asyncio.wait_for(a.call("gone", len, a.remote("b", dict)), LIMIT)  # type: ignore[call-overload]
        with pytest.raises(RendezvousError, match=r"cannot find 'nobody'.*Nothing was sent"):
            a.remote("nobody", dict)
        quick_founding(60.0)
        async with aiorpc.init("gone", init_method=method) as newcomer:
            assert newcomer.hosts_store and newcomer.id not in (a.id, b.id, gone.id)
            for one, other in ((newcomer, "a"), (newcomer, "b"), (a, "gone"), (b, "gone")):
                assert await one.call(other, where) == other
            async with aiorpc.init("late", init_method=method) as late:
                assert {info.name for info in late.worker_infos()} == {"a", "b", "gone", "late"}
                assert await b.call("late", where) == "late"
            await asyncio.gather(a.shutdown(), b.shutdown())


async def test_a_host_of_the_store_that_drains_is_heard(
    quick_founding: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Members without a connection to it read in its store that it leaves, before that ends: they do not lose it."""
    monkeypatch.setattr(leaving, "WATCHERS", 1)
    store, port = await asyncio.to_thread(serve, "127.0.0.1", 0)
    method = f"tcp://127.0.0.1:{port}"
    quick_founding(0.01)
    async with contextlib.AsyncExitStack() as stack:
        members = [await stack.enter_async_context(aiorpc.init(name, init_method=method)) for name in "abcd"]
        await until(lambda: all(len(each.worker_infos()) == 4 for each in members))
        await asyncio.sleep(2 * members[0]._node.engine.bounds.serving_pause)  # they look at who is there so often
        del store
        await until(lambda: caplog.text.count("has gone") == 4)
        quick_founding(60.0)  # these come first
        host = await aiorpc.init("host", init_method=method)
        assert host.hosts_store
        await until(lambda: all(len(each.worker_infos()) == 5 for each in members))
        await until(lambda: len(host._node.rendezvous.members()) == 5)
        set_bounds(host, serving_pause=1.0)  # on a slow machine, they look late
        events = [each.events() for each in members]
        assert (await host.drain()).lost == ()
        heard = [await asyncio.wait_for(anext(each), LIMIT) for each in events]
        assert heard == [WorkerLeft(host.info)] * 4
        await asyncio.gather(*(each.shutdown() for each in members))


async def test_a_store_that_has_gone_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line, whatever is asked for meanwhile; a name that was never seen ends with StoreGone's reason at once."""
    store, port = await asyncio.to_thread(serve, "127.0.0.1", 0)
    with caplog.at_level(logging.WARNING, "aiorpc"):
        async with aiorpc.init("a", init_method=f"tcp://127.0.0.1:{port}") as a:
            del store
            await until(lambda: "has gone" in caplog.text)
            for _ in range(20):
                with pytest.raises(RendezvousError, match=r"cannot find 'b'.*has gone.*Nothing was sent"):
                    await asyncio.wait_for(a.call("b", where), LIMIT)
    assert [record.message for record in caplog.records if "has gone" in record.message] == [
        f"worker a: the store at tcp://127.0.0.1:{port} has gone: the process that served it has ended. Members that "
        "know each other go on; joining members find none of them"
    ]


def test_another_group_at_the_place_is_not_mixed_with() -> None:
    """Who was not heard of while others began anew says so, and changes nothing for them."""
    store, port = serve("127.0.0.1", 0)
    opened = partial(Rendezvous.open, f"tcp://127.0.0.1:{port}", rank=None, world_size=None, timeout=LIMIT)
    with closing(opened()) as old, closing(opened()) as second:
        assert found(old, "a") == ["a"] and found(second, "b") == ["a", "b"]
        for each in (old, second):
            each.serve_joining()
        mine = old.members()[0]
        del store
        with pytest.raises(StoreGone, match="the process that served it has ended"):
            old.serve_joining()
        assert not old.meet_again(mine)
        store, _ = serve("127.0.0.1", port)
        with closing(opened()) as other:
            assert found(other, "a") == ["a"]
            with pytest.raises(RendezvousError, match=r"others have begun a group of their own at"):
                old.meet_again(mine)
            assert [record.name for record in other.members()] == ["a"]
            other.leave(other.members()[0])
            assert old.meet_again(mine)  # nobody is left there
            assert sorted(record.name for record in old.members()) == ["a", "b"]
        del store


@contextmanager
def one_of_two_is_back() -> Iterator[tuple[Callable[[], Rendezvous], Rendezvous, Rendezvous]]:
    """What opens the way to another store, where a is back; a, which has not heard of b; and b, which is to come."""
    store, port = serve("127.0.0.1", 0)
    opened = partial(Rendezvous.open, f"tcp://127.0.0.1:{port}", rank=None, world_size=None, timeout=LIMIT)
    with closing(opened()) as first, closing(opened()) as unseen:
        assert found(first, "a") == ["a"] and found(unseen, "b") == ["a", "b"]
        unseen.serve_joining()  # and the first one does not look again
        del store
        store, _ = serve("127.0.0.1", port)
        assert first.meet_again(first.record)
        yield opened, first, unseen
        del store


def test_a_newcomer_at_another_store_has_the_id_of_nobody_who_has_not_come_there_yet() -> None:
    """Whoever comes back first may not have seen the last ones who joined: their ids are theirs all the same."""
    with one_of_two_is_back() as (opened, _, unseen), closing(opened()) as newcomer:
        theirs = unseen.record
        assert found(newcomer, "c") == ["a", "c"]
        assert unseen.meet_again(theirs)
        ids = {record.name: record.id for record in newcomer.members()}
        assert len(set(ids.values())) == 3 and ids["b"] == theirs.id


def test_a_name_leads_to_one_worker_at_another_store() -> None:
    """Whoever comes back after somebody has joined there under its name says so, until that one is gone."""
    with one_of_two_is_back() as (opened, first, unseen), closing(opened()) as newcomer:
        mine, theirs = first.record, unseen.record
        assert found(newcomer, "b") == ["a", "b"]
        with pytest.raises(RendezvousError, match=r"b \(rank \d+, .*\) has joined under the name of b \(rank"):
            unseen.meet_again(theirs)
        assert sorted(record.name for record in first.members()) == ["a", "b"]
        newcomer.leave(newcomer.record)
        assert unseen.meet_again(theirs)
        assert first.members() == [mine, theirs]


def test_what_a_member_has_claimed_stays_claimed_at_another_store(caplog: pytest.LogCaptureFixture) -> None:
    """It stands there before the member does; where somebody else was first that is told, and changes nothing."""
    store, port = serve("127.0.0.1", 0)
    opened = partial(Rendezvous.open, f"tcp://127.0.0.1:{port}", rank=None, world_size=None, timeout=LIMIT)
    with closing(opened()) as first, closing(opened()) as second:
        assert found(first, "a") == ["a"] and found(second, "b") == ["a", "b"]
        for each, key in ((first, "x"), (second, "y"), (second, "z"), (first, "released")):
            assert each.swap(key, "", "before") == "before"
            assert each.swap(key, "before", each.record.name) == each.record.name
        assert first.swap("released", "a", "nobody's", lasting=False) == "nobody's"
        assert first.swap("y", "", "late") == "b"
        first.serve_joining()
        del store
        store, _ = serve("127.0.0.1", port)
        assert first.meet_again(first.record)
        assert [first.look_up(key) for key in ("x", "y", "released")] == ["a", None, None]
        with closing(opened()) as newcomer:
            found(newcomer, "c")
            assert newcomer.swap("x", "", "c") == "a"
            assert newcomer.swap("z", "", "c") == "c"
            with caplog.at_level(logging.WARNING, "aiorpc"):
                assert second.meet_again(second.record)
            assert "worker b: another worker has set z at the store that is here now" in caplog.text
            assert [newcomer.look_up(key) for key in "xyz"] == ["a", "b", "c"]
        del store


def test_a_file_that_was_removed_is_told_at_once(tmp_path: Path) -> None:
    """Whoever waits for the others there is told, long before the time is up; torch would wait for minutes."""
    folder = tmp_path / "meet"
    folder.mkdir()
    opened = Rendezvous.open(f"file://{folder}/store", rank=1, world_size=2, timeout=60.0)
    timer = threading.Timer(0.1, shutil.rmtree, [folder])
    timer.start()
    start = time.monotonic()
    with pytest.raises(StoreGone, match=r"the store at file://.*meet/store has gone: its file was removed"):
        opened.join(partial(make_record, "b"))
    assert time.monotonic() - start < 30
    opened.abandon()
    opened.close()
    timer.join()


def test_a_file_that_was_replaced_is_no_meeting_place(tmp_path: Path) -> None:
    """Those who come later would meet at another one."""
    path = tmp_path / "store"
    opened = Rendezvous.open(f"file://{path}", rank=None, world_size=None, timeout=LIMIT)
    opened.join(partial(make_record, "a"))
    (tmp_path / "other").touch()
    os.replace(tmp_path / "other", path)
    with pytest.raises(StoreGone, match="another file was put in its place"):
        opened.members()
    opened.close()


@pytest.mark.parametrize("kind", ["talks first", "answers requests"])
def test_a_port_of_another_program_is_told_at_once(kind: str) -> None:
    """What listens there has said something that no store says."""
    if kind == "talks first":
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        thread = threading.Thread(target=_greet, args=(server,))
    else:
        http = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        start = time.monotonic()
        with pytest.raises(RendezvousError, match=rf"cannot meet at .*:{port}: .*another program has that port"):
            Rendezvous.open(f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=60.0)
        assert time.monotonic() - start < 30
    finally:
        if kind == "talks first":
            server.shutdown(socket.SHUT_RDWR)
            server.close()
        else:
            http.shutdown()
            http.server_close()
        thread.join()


def _greet(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.recv(64)


async def test_a_fixed_group_meets_at_a_store_that_is_there_already() -> None:
    """Rank 0 takes it in place of one of its own; it outlives the group, and serves the next one."""
    store, port = await asyncio.to_thread(serve, "127.0.0.1", 0)
    for _ in range(2):
        method = f"tcp://127.0.0.1:{port}"
        workers = [Worker(f"w{rank}", rank=rank, world_size=2, init_method=method) for rank in range(2)]
        await asyncio.gather(*(worker.start() for worker in workers))
        assert not any(worker.hosts_store for worker in workers)
        assert await workers[0].call("w1", where) == "w1"
        await asyncio.gather(*(worker.shutdown() for worker in workers))
    del store
