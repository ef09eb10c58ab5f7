"""Attacks by whoever reaches the rendezvous store and does not know the group's secret: none of them runs code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

import aiorpc as rpc
from aiorpc.protocol.handshake import Handshake
from aiorpc.runtime.meeting.membership import Member
from aiorpc.runtime.meeting.secret import CERTIFIED, fingerprint
from aiorpc.testing import cluster
from aiorpc.transport.certificates import Credentials
from tests.authority import Authority
from tests.ports import free_port

from .attackers import call, record_in, run_code
from .workers import Link, Place, processes, until

CHOSEN = b"chosen by the attacker, 32 bytes"
PATIENCE = 8.0  # seconds that an attack goes on
TRIES = [0, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 2))]


@pytest.fixture(autouse=True)
def no_secret_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's environment holds does not decide these tests."""
    monkeypatch.delenv("AIORPC_SECRET", raising=False)


def join_and_stay(place: Place, link: Link, options: dict[str, Any]) -> str:
    """Body: join, stay until told; the error of joining instead if there is one."""
    try:
        place.init_rpc(rpc_timeout=15.0, **options)
    except rpc.errors.RendezvousError as error:
        return str(error)
    link.tell("joined")
    link.hear()
    rpc.shutdown(graceful=False)
    return ""


# --- the attacker -----------------------------------------------------------------------------------------------------


def reach(place: Place) -> Store:
    """The store that the workers meet at, as anybody on the machine reaches it."""
    deadline = time.monotonic() + PATIENCE
    port = int(place.init_method.rpartition(":")[2])
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return PrefixStore("aiorpc", TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), False))
        time.sleep(0.01)
    raise TimeoutError("nobody hosts the store")


def wait_for(store: Store, key: str) -> None:
    """Until something stands under a key."""
    deadline = time.monotonic() + PATIENCE
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(key)
        time.sleep(0.002)


def read(store: Store, key: str) -> Any:
    """What stands under a key, once it is there."""
    wait_for(store, key)
    return json.loads(store.get(key))


def try_until_it_runs(attempt: Callable[[], None], path: str) -> bool:
    """Go on with it for a while, also when the store has gone; whether code has run."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not Path(path).exists():
        with contextlib.suppress(OSError, RuntimeError, rpc.RpcError, KeyError):
            attempt()
        time.sleep(0.02)
    return Path(path).exists()


def forge_value(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: before the group is complete, offer a secret of one's own in the name of the members."""
    store = reach(place)
    read(store, "1/slot/0")
    store.set("1/secret", fingerprint(CHOSEN))
    store.set("1/secret/value", CHOSEN.hex())
    link.tell("forged")
    victim = record_in(read(store, "1/slot/1"))
    return try_until_it_runs(lambda: run_code(victim, CHOSEN, path), path)


def published(store: Store) -> bytes:
    """The secret that stands in the store, or else one of the attacker's own."""
    return bytes.fromhex(store.get("1/secret/value").decode()) if store.check(["1/secret/value"]) else CHOSEN


def pretend_another_host(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: say that a rank is on another host, so that the others put the secret into the store."""
    store = reach(place)
    first = read(store, "1/slot/0")
    link.tell("forged")
    victim = read(store, "1/slot/1")
    far = replace(record_in(victim), host="elsewhere:1:1")
    store.set("1/slot/1", json.dumps([far.to_wire(), *victim[1:]]))
    return try_until_it_runs(lambda: run_code(record_in(first), published(store), path), path)


def forge_in_a_free_group(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: replace what stands there of a group's secret; its next member believes it."""
    store = reach(place)
    wait_for(store, "1/secret")
    store.set("1/secret", fingerprint(CHOSEN))
    store.set("1/secret/value", CHOSEN.hex())
    link.tell("forged")

    def attempt() -> None:
        for member in read(store, "1/roster")["members"]:
            if record_in(member).name == "w1":
                run_code(record_in(member), CHOSEN, path)

    return try_until_it_runs(attempt, path)


def ask_in_a_free_group(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: enter the list as a member on another host that requires no secret."""
    store = reach(place)
    wait_for(store, "1/secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a member that does not answer yet is not lost
        roster = read(store, "1/roster")
        roster["version"] += 1
        owner = record_in(roster["members"][0])
        port = silent.getsockname()[1]
        stranger = replace(owner, name="stranger", id=7, incarnation="ab" * 16, host="elsewhere:1:1", tcp_port=port)
        roster["members"].append(Member(stranger, require_secret=False).to_json())
        store.set("1/roster", json.dumps(roster))
        link.tell("forged")
        return try_until_it_runs(lambda: run_code(owner, published(store), path), path)


class Relay(threading.Thread):
    """Carries what two workers say to each other, and puts something of its own behind the handshake.

    at, port: where the opener comes to. change: what becomes of the bytes that the opener sends behind the handshake.
    """

    def __init__(
        self,
        target: tuple[str, int],
        put_in: bytes = b"",
        change: Callable[[bytes], bytes] = bytes,
        at: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        super().__init__()
        self._listener = socket.create_server(at)
        self._listener.settimeout(PATIENCE)
        self.port: int = self._listener.getsockname()[1]
        self._target = target
        self._put_in = put_in
        self._change = change
        self.start()

    def run(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with near, socket.create_connection(self._target, 2) as far, contextlib.suppress(OSError):
                    self._carry(near, far)

    def stop(self) -> None:
        """No other connection is taken; that which is there goes on until one side ends it."""
        with contextlib.suppress(OSError):  # it may have ended
            self._listener.shutdown(socket.SHUT_RDWR)  # to close it alone wakes nobody who waits for a connection

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        heard = 0  # HELLO, WELCOME, and what comes later
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for sock in select.select([near, far], [], [], 0.1)[0]:
                data = sock.recv(65536)
                if not data:
                    return
                if sock is near:
                    far.sendall(self._change(data) if heard >= 2 else data)
                    continue
                heard += 1
                near.sendall(data)
                if heard == 2:
                    far.sendall(self._put_in)


def relay_in_a_free_group(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: say that the first member is where we are, and carry what the next one says to it."""
    store = reach(place)
    read(store, "1/roster")
    time.sleep(0.3)
    roster = read(store, "1/roster")
    owner = record_in(roster["members"][0])
    relay = Relay((owner.tcp_host, owner.tcp_port), call(path=path))
    roster["members"][0][0][9] = relay.port
    roster["version"] += 1
    store.set("1/roster", json.dumps(roster))
    link.tell("forged")
    ran = try_until_it_runs(lambda: None, path)
    relay.stop()
    relay.join()
    return ran


def join_and_call(place: Place, link: Link, options: dict[str, Any]) -> str:
    """Body: join, and call the first member; what became of both."""
    try:
        place.init_rpc(rpc_timeout=15.0, **options)
    except rpc.errors.RendezvousError as error:
        return str(error)
    link.tell("joined")
    try:
        said = f"it answered {rpc.rpc_sync('w0', abs, args=(-3,), timeout=15.0)}"
    except rpc.RpcError as error:
        said = f"{type(error).__name__}: {error}"
    link.hear()
    rpc.shutdown(graceful=False)
    return said


def stand_in_with_other_certificates(place: Place, link: Link, path: str, tls: rpc.Tls) -> bool:
    """Body of an attacker: say that the first member is where we are, and play it; and call it, with and without TLS.

    tls: a certificate for that member, of an authority of our own.
    """
    store = reach(place)
    roster = read(store, "1/roster")
    owner = record_in(roster["members"][0])
    credentials = Credentials(replace(tls, verify_names=False), "w0")
    believed: list[bytes] = []

    def call_with_tls() -> None:
        sock = socket.create_connection((owner.tcp_host, owner.tcp_port), 2)
        with sock, credentials.context(opener=True)[0].wrap_socket(sock) as shaken:
            mine = replace(owner, name="w1", id=1, incarnation="ab" * 16)
            shaken.sendall(b"".join(Handshake(mine, CERTIFIED, expect=owner).start()))
            believed.append(shaken.recv(1))  # an alert is an error

    def play() -> None:
        listener.settimeout(0.2)
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(2)
            with credentials.context(opener=False)[0].wrap_socket(sock, server_side=True) as shaken:
                believed.append(shaken.recv(1))

    def attempt() -> None:
        for way in (play, call_with_tls, partial(run_code, owner, CERTIFIED, path)):
            with contextlib.suppress(OSError, rpc.RpcError):
                way()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        roster["members"][0][0][9] = listener.getsockname()[1]
        roster["version"] += 1
        store.set("1/roster", json.dumps(roster))
        link.tell("forged")
        ran = try_until_it_runs(attempt, path)
    return ran or any(believed)


# --- the tests --------------------------------------------------------------------------------------------------------


def attack(
    body: Callable[..., bool],
    path: Path,
    world_size: int | None,
    *with_it: Any,
    newcomer: Callable[..., str] = join_and_stay,
    **env: str,
) -> list[str]:
    """Two workers and an attacker between them: what joining said to each; AssertionError if code has run."""
    options = {"transports": ("tcp",)} if env else {}
    method = f"tcp://127.0.0.1:{free_port()}"
    victims = [Place(f"w{rank}", rank, world_size, method) for rank in range(2)]
    with processes() as children:
        first = children.start(victims[0], join_and_stay, options, env=env)
        # A free group has formed when its first member is in: a forgery that comes earlier keeps that one out, too.
        said = [first.hear()] if world_size is None else []
        attacker = children.start(Place("attacker", 9, None, method), body, str(path), *with_it)
        assert attacker.hear() == "forged"
        second = children.start(victims[1], newcomer, options, env=env)
        ran = attacker.hear()
        said += [child.hear() for child in (first, second)[len(said) :]]
        for child, word in zip((first, second), tuple(said), strict=True):
            if word == "joined":
                child.tell("end")
                said.append(child.hear())
        assert not ran and not path.exists(), f"the attacker's code has run; joining said {said}"
        children.check_ended()
    return said


@pytest.mark.slow
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("number", TRIES)
def test_forged_secret_is_refused(number: int, tmp_path: Path) -> None:
    """A secret that somebody else put into the store in rank 0's name: both ranks raise, and say what was done."""
    said = attack(forge_value, tmp_path / "ran", 2)
    assert all("store" in text and "AIORPC_SECRET" in text for text in said), said


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_secret_is_not_published_for_a_rank_that_seems_to_be_elsewhere(tmp_path: Path) -> None:
    """A group that meets at a loopback address has no member on another host, whatever the store says."""
    for _ in range(5):  # a forgery that comes after rank 0 has looked changes nothing: the attacker tries again
        said = attack(pretend_another_host, tmp_path / "ran", 2)
        if "joined" not in said:
            break
    assert any("store" in text and "AIORPC_SECRET" in text for text in said), said


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_forged_secret_of_a_free_group_is_refused(tmp_path: Path) -> None:
    """The newcomer raises; the member that was there has the true secret."""
    said = attack(forge_in_a_free_group, tmp_path / "ran", None)
    assert said[0] == "joined" and "store" in said[1] and "AIORPC_SECRET" in said[1], said


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_secret_is_not_published_for_whoever_asks(tmp_path: Path) -> None:
    """A stranger in the list that asks for the secret does not get it where all members can read the file."""
    attack(ask_in_a_free_group, tmp_path / "ran", None)


@pytest.mark.slow
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("number", TRIES)
def test_relay_is_refused(number: int, tmp_path: Path) -> None:
    """With AIORPC_SECRET, somebody who changes an address in the store is noticed by whoever reads it."""
    said = attack(relay_in_a_free_group, tmp_path / "ran", None, AIORPC_SECRET="long enough, and random")
    assert said[0] == "joined" and "AIORPC_SECRET" in said[1], said


def variables(tls: rpc.Tls) -> dict[str, str]:
    return {f"AIORPC_TLS_{name}": str(getattr(tls, name.lower())) for name in ("CERT", "KEY", "CA")}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_a_relay_is_refused_with_certificates_alone(tmp_path: Path) -> None:
    """Without AIORPC_SECRET what stands in the store may be a lie: TLS shows who is there, and that it is not he."""
    tls = Authority(tmp_path / "authority").tls("w*")
    said = attack(relay_in_a_free_group, tmp_path / "ran", None, newcomer=join_and_call, **variables(tls))
    assert said[:2] == ["joined", "joined"], said
    assert "PeerRefused" in said[3] and "another process has written into the store" in said[3], said


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_nobody_stands_in_for_a_worker_whose_certificate_he_has_not(tmp_path: Path) -> None:
    """Whoever can write the store and has certificates of his own is neither called nor served: he keeps some out."""
    tls = Authority(tmp_path / "authority").tls("w*")
    own = Authority(tmp_path / "other").tls("w0")
    body = stand_in_with_other_certificates
    said = attack(body, tmp_path / "ran", None, own, newcomer=join_and_call, **variables(tls))
    assert said[:2] == ["joined", "joined"], said
    assert "w0" in said[3] and "certificate" in said[3], said


@contextlib.asynccontextmanager
async def relayed(seals: bool, **relaying: Any) -> AsyncIterator[tuple[list[rpc.Worker], Relay]]:
    """Two workers, and somebody on the way from the first to the second, at the address that this one gives."""
    options = rpc.RpcBackendOptions(transports=("tcp",), authenticate_frames=seals, shutdown_timeout=0.1)
    elsewhere = replace(options, address="127.0.0.2")
    async with cluster(2, options=[options, elsewhere]) as workers:
        port = workers[1]._node.engine.record.tcp_port
        relay = Relay(("127.0.0.1", port), **relaying, at=("127.0.0.2", port))
        try:
            yield workers, relay
        finally:
            relay.stop()
            await workers[0].shutdown(graceful=False)
            await asyncio.to_thread(relay.join)


@pytest.mark.slow
@pytest.mark.parametrize("seals", [False, True], ids=["open", "sealed"])
async def test_what_is_put_in_on_the_way_is_not_run(seals: bool, tmp_path: Path) -> None:
    """Whoever carries an honest handshake to and fro and adds a call of his own: with seals the connection ends."""
    ran = tmp_path / "ran"
    async with relayed(seals, put_in=call(path=str(ran))) as (workers, _):
        with contextlib.suppress(rpc.RpcError):
            await workers[0].peer("worker1", timeout=5).call(abs, -3)
        if not seals:  # the attack is one
            await until(ran.exists)
            return
        with pytest.raises(rpc.PeerLost, match="worker1"):
            await workers[0].peer("worker1", timeout=30).call(abs, -3)
    assert not ran.exists()


@pytest.mark.slow
async def test_what_is_changed_on_the_way_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """One bit of what follows the handshake is enough; the callee says why, and runs nothing."""

    def change(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    with caplog.at_level("WARNING", "aiorpc"):
        async with relayed(True, change=change) as (workers, _):
            with pytest.raises(rpc.PeerLost, match="worker1"):
                await workers[0].peer("worker1", timeout=30).call(abs, -3)
    assert "does not bear the other side's seal" in caplog.text


@pytest.mark.parametrize("seals", [False, True])
async def test_workers_that_do_not_agree_on_seals_do_not_talk(seals: bool) -> None:
    """Nobody is talked into doing without, and the error names the option."""
    each = [
        rpc.RpcBackendOptions(transports=("tcp",), authenticate_frames=value, shutdown_timeout=0.1)
        for value in (seals, not seals)
    ]
    async with cluster(2, options=each) as workers:
        with pytest.raises(rpc.RpcError, match="authenticate_frames"):
            await workers[0].peer("worker1", timeout=30).call(abs, -3)
