"""Workers that speak TLS: everything works, and whoever has no certificate for what he says he is gets nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc
from aiorpc.testing import cluster
from tests.authority import Authority
from tests.scripts import set_bounds

from . import bodies
from .attackers import GOODBYE, PATIENCE, REFUSED, Between, hello, said_by, started_tls
from .test_strangers import warnings_of
from .workers import Link, Place, group, meeting_file, places, processes, until


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's environment holds does not decide these tests."""
    for name in ("SECRET", "TLS_CERT", "TLS_KEY", "TLS_CA", "TLS_VERIFY_NAMES"):
        monkeypatch.delenv(f"AIORPC_{name}", raising=False)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def options(tls: rpc.Tls | None, **more: Any) -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(transports=("tcp",), tls=tls, shutdown_timeout=0.1, **more)


def connections(worker: rpc.Worker) -> list[Any]:
    """Those that a worker has now."""
    return [each for each in worker._node.engine.connections if not each.closed]


@pytest.mark.slow
async def test_everything_works_over_tls(authority: Authority) -> None:
    """Two processes: calls both ways, errors, large tensors both ways over second connections; nothing goes plain."""
    tls = authority.tls("w*")
    async with group(2, transports=("tcp",), tls=tls) as (worker, _):
        assert worker._node.engine.record.tls == "1.3"
        assert await rpc.call("w1", bodies.call_back, "w0", 5) == 5
        with pytest.raises(TypeError):
            await rpc.call("w1", bodies.add, 1)  # type: ignore[call-overload]
        large = torch.arange(6_000_000)
        assert torch.equal(await rpc.call("w1", bodies.echo, large), large)
        assert await asyncio.to_thread(rpc.rpc_sync, "w1", bodies.add, (1, 2)) == 3
        assert worker.statistics().channels["bulk"].sent > 0
        assert len(connections(worker)) >= 3  # to each other, and a second one
        assert all(each.tls is not None and each.tls.open for each in connections(worker))


def join_by_environment(place: Place, link: Link) -> Any:
    """Body: join, say whether TLS is used and what a call gives; the error of joining instead if there is one."""
    try:
        place.init_rpc(transports=("tcp",), rpc_timeout=20.0)
    except rpc.RpcError as error:
        return f"{type(error).__name__}: {error}"
    result = rpc.current()._node.engine.record.tls, rpc.rpc_sync("w1", bodies.add, args=(1, 2))
    rpc.shutdown()
    return result


def variables(tls: rpc.Tls) -> dict[str, str]:
    return {f"AIORPC_TLS_{name}": str(getattr(tls, name.lower())) for name in ("CERT", "KEY", "CA")}


def test_the_environment_names_the_files(authority: Authority) -> None:
    """AIORPC_TLS_CERT, _KEY and _CA do what the option does."""
    with processes() as children, meeting_file() as init_method:
        for place in places(2, init_method):
            children.start(place, join_by_environment, env=variables(authority.tls(place.name)))
        assert [child.hear() for child in children] == [("1.3", 3)] * 2
        children.check_ended()


def test_plain_and_tls_do_not_meet(authority: Authority) -> None:
    """Each of the two says at joining who has TLS and who has not."""
    with processes() as children, meeting_file() as init_method:
        first, second = places(2, init_method)
        children.start(first, join_by_environment, env=variables(authority.tls("w0")))
        children.start(second, join_by_environment)
        said = [child.hear() for child in children]
        children.check_ended()
    assert "worker 'w0' has TLS" in said[0] and "w1 (rank 1" in said[0] and "have none" in said[0]
    assert "worker 'w1' has no TLS" in said[1] and "w0 (rank 0" in said[1]
    assert all(text.startswith("RendezvousError") for text in said)


def test_all_members_hear_of_files_that_cannot_be_used(authority: Authority) -> None:
    """The worker itself is told what is wrong, and the others by whom, at once: they would wait for it."""
    with processes() as children, meeting_file() as init_method:
        first, second = places(2, init_method)
        children.start(first, join_by_environment, env=variables(authority.tls("w0")))
        children.start(second, join_by_environment, env=variables(authority.tls("w1", of="somebody")))
        said = [child.hear() for child in children]
        children.check_ended()
    assert said[0].startswith("RendezvousError: w1 (rank 1") and "is for 'somebody'" in said[0]
    assert said[1].startswith("RpcUsageError: worker 'w1' cannot use TLS") and "is for 'somebody'" in said[1]


# --- on the wire ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dialled(worker: rpc.Worker) -> Iterator[socket.socket]:
    """A stranger's connection to a worker."""
    record = worker._node.engine.record
    with socket.create_connection((record.tcp_host, record.tcp_port), PATIENCE) as sock:
        sock.settimeout(PATIENCE)
        yield sock


def rest(sock: socket.socket) -> bytes:
    """All that comes until the worker closes."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            received += data
    return bytes(received)


async def test_a_plain_member_is_told_on_the_wire(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the store says: a plain HELLO is answered by a plain refusal that names TLS, and logged."""
    async with cluster(1, options=options(authority.tls("worker0"))) as (worker,):
        with warnings_of(caplog) as logged, dialled(worker) as sock:
            sock.sendall(hello(worker._node.engine.record.to_wire(), True))
            ((kind, body),) = said_by(await asyncio.to_thread(rest, sock))
            await until(lambda: worker.statistics().connections_refused)
        assert kind == REFUSED and b"nothing but TLS" in body
        assert any("does not speak TLS" in line for line in logged)


async def test_a_member_with_tls_is_told_on_the_wire(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """A worker without TLS answers the beginning of TLS by a refusal in the clear, which the other side understands."""
    layer = started_tls(authority.tls("w1"))
    async with cluster(1, options=options(None)) as (worker,):
        with warnings_of(caplog) as logged, dialled(worker) as sock:
            sock.sendall(layer.outgoing.read())
            answer = await asyncio.to_thread(rest, sock)
            await until(lambda: worker.statistics().connections_refused)
        ((kind, body),) = said_by(answer)
        assert kind == REFUSED and b"speaks TLS, and this worker does not" in body
        assert any("speaks TLS" in line for line in logged)
    with pytest.raises(rpc.errors.PeerRefused, match="does not speak TLS"):
        layer.feed(answer)


@pytest.mark.parametrize("what", ["nothing", "half of the beginning", "the beginning", "rubbish", "a long record"])
async def test_a_stranger_who_stops_is_closed(
    authority: Authority, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """In the midst of TLS or with rubbish: the patience of the handshake bounds it, and the worker serves on."""
    first = started_tls(authority.tls("w1")).outgoing.read()
    data = {
        "nothing": b"",
        "half of the beginning": first[: len(first) // 2],
        "the beginning": first,
        "rubbish": b"\x16" + os.urandom(5000),
        "a long record": b"\x16\x03\x01\xff\xff" + bytes(65_535),
    }[what]
    async with cluster(1, options=options(authority.tls("worker*"))) as (worker,):
        set_bounds(worker, handshake=0.05)
        with warnings_of(caplog) as logged, dialled(worker) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
            await asyncio.to_thread(rest, sock)
            await until(lambda: worker.statistics().connections_refused)
        assert len(logged) == 1
        set_bounds(worker, handshake=10.0)
        assert await worker.call("worker0", abs, -3) == 3


@pytest.mark.slow
async def test_a_worker_that_is_killed_while_it_shakes_hands(authority: Authority) -> None:
    """It was stopped before the other connected: the call fails with its death, and nothing is left of the attempt."""
    tls = authority.tls("w*")
    async with group(3, transports=("tcp",), tls=tls, ended=("w2",)) as (worker, children):
        assert await rpc.call("w1", bodies.add, 1, 2) == 3
        await children["w2"].stop()
        call = rpc.call("w2", bodies.add, 1, 2)
        await until(lambda: any(each.tls is not None and not each.tls.open for each in connections(worker)))
        children["w2"].kill(signal.SIGKILL)
        with pytest.raises(rpc.PeerLost, match="w2"):
            await asyncio.wait_for(call, PATIENCE)


# --- certificates -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def relayed(
    each: list[rpc.RpcBackendOptions], between: Callable[[], tuple[rpc.Tls, rpc.Tls]]
) -> AsyncIterator[tuple[list[rpc.Worker], Between]]:
    """Two workers, and somebody at the address that the second one gives."""
    there = dataclasses.replace(each[1], address="127.0.0.2")
    async with cluster(2, options=[each[0], there]) as workers:
        port = workers[1]._node.engine.record.tcp_port
        relay = Between(("127.0.0.2", port), ("127.0.0.1", port), *between())
        try:
            yield workers, relay
        finally:
            await workers[0].shutdown(graceful=False)
            await asyncio.to_thread(relay.stop)


def nameless(tls: rpc.Tls) -> rpc.Tls:
    return dataclasses.replace(tls, verify_names=False)


@pytest.mark.slow
async def test_a_member_with_another_name_cannot_stand_in_between(authority: Authority) -> None:
    """A certificate of the same authority for another worker: the opener sends no HELLO, and says whose it is."""
    each = [options(authority.tls(name)) for name in ("worker0", "worker1")]

    def between() -> tuple[rpc.Tls, rpc.Tls]:
        mine = nameless(authority.tls("worker2"))
        return mine, mine

    async with relayed(each, between) as (workers, relay):
        with pytest.raises(rpc.errors.PeerRefused, match="'worker2', and not for worker 'worker1'"):
            await workers[0].peer("worker1", timeout=PATIENCE).call(abs, -3)
        assert relay.carried == 0


@pytest.mark.slow
async def test_stolen_certificates_do_not_carry_the_proof(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the certificates of both, but not the secret, relays an honest handshake: the proof is another's."""
    monkeypatch.setenv("AIORPC_SECRET", "long enough, and random")
    each = [options(authority.tls(name)) for name in ("worker0", "worker1")]

    def between() -> tuple[rpc.Tls, rpc.Tls]:
        return nameless(each[1].tls or authority.tls("x")), nameless(each[0].tls or authority.tls("x"))

    async with relayed(each, between) as (workers, relay):
        with pytest.raises(rpc.errors.PeerRefused, match="secret does not match"):
            await workers[0].peer("worker1", timeout=PATIENCE).call(abs, -3)
        assert relay.carried > 0


@pytest.mark.slow
async def test_the_acceptor_looks_at_names_too(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of the group who shows somebody else's certificate is not served."""
    monkeypatch.setenv("AIORPC_SECRET", "long enough, and random")  # one that verifies no names needs it
    each = [options(authority.tls("worker0")), options(nameless(authority.tls("worker1", of="worker7")))]
    with caplog.at_level("WARNING", "aiorpc"):
        async with cluster(2, options=each) as workers:
            with pytest.raises(rpc.RpcError, match="'worker7', and not for worker 'worker1'"):
                await workers[1].peer("worker0", timeout=PATIENCE).call(abs, -3)
            await workers[0].shutdown(graceful=False)  # nobody tells it that the other leaves
    assert "is for 'worker7', and not for worker 'worker1'" in caplog.text


@pytest.mark.parametrize("own", [True, False], ids=["a certificate for one", "a certificate for many"])
async def test_a_goodbye_is_sure_with_a_certificate_for_one_worker(
    authority: Authority, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    """It is believed at once; where others may have said it in its name the worker is asked, and says that it stays."""
    each = [options(authority.tls("worker*", of=f"worker{rank}" if own else "")) for rank in range(2)]
    with caplog.at_level("WARNING", "aiorpc"):
        async with cluster(2, options=each) as (first, second):
            assert await second.call("worker0", abs, -3) == 3
            link = second._node.peers.find("worker0").link
            assert link is not None
            link.connection.send([GOODBYE], urgent=True)
            record = second._node.engine.record
            if own:
                await until(lambda: first._node.group.is_gone(record))
            else:
                await until(lambda: "a member may be lying" in caplog.text)
                assert not first._node.group.is_gone(record)
                assert await second.call("worker0", abs, -4) == 4
            await second.shutdown(graceful=False)
            await first.shutdown(graceful=False)


async def test_new_connections_use_new_files(authority: Authority) -> None:
    """Without a restart; what is open stays open, and goes on."""
    tls = authority.tls("worker*")
    async with cluster(2, options=options(tls), dynamic=True) as workers:
        assert await workers[0].call("worker1", abs, -3) == 3
        (open_before,) = [each for each in connections(workers[0]) if each.label.startswith("worker0 to worker1")]
        authority.make("worker*")
        new = ssl.PEM_cert_to_DER_cert(Path(tls.cert).read_text())
        link = workers[0]._node.peers.find("worker1").link
        assert link is not None
        link.open_pipe()
        await until(lambda: link.second.connection is not None)
        shown = {each.tls.peer.digest for each in connections(workers[0])}
        assert hashlib.sha256(new).digest() in shown
        assert len(shown) == 2
        assert await workers[0].call("worker1", abs, -4) == 4
        assert not open_before.closed
