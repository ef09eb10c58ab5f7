"""Attacks by whoever reaches the rendezvous store and does not know the group's secret: none of them runs code."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

import aiorpc as rpc
from aiorpc.protocol.frames import Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import Handshake
from aiorpc.protocol.identity import WorkerRecord

from .workers import Children, Link, Place, processes

CHOSEN = b"chosen by the attacker, 32 bytes"
PATIENCE = 8.0  # seconds that an attack goes on
TRIES = range(3)


@pytest.fixture(autouse=True)
def no_secret_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's environment holds does not decide these tests."""
    monkeypatch.delenv("AIORPC_SECRET", raising=False)


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def join_and_stay(place: Place, link: Link) -> str:
    """Body: join, stay until told; the error of joining instead if there is one."""
    try:
        place.init_rpc(rpc_timeout=5.0)
    except rpc.RendezvousError as error:
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


def read(store: Store, key: str) -> Any:
    """What stands under a key, once it is there."""
    deadline = time.monotonic() + PATIENCE
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(key)
        time.sleep(0.002)
    return json.loads(store.get(key))


def record_in(member: Any) -> WorkerRecord:
    """The record of a member as it stands in the store."""
    return WorkerRecord.from_wire(member[0])


def frames_from(sock: socket.socket, decoder: FrameDecoder) -> Iterator[Frame]:
    """The frames that come, until the other side closes."""
    while data := sock.recv(65536):
        yield from decoder.feed(data)


def call(kind: Kind = Kind.CALL, *, path: str) -> bytes:
    """A call of os.mkdir."""
    body = msgpack.packb([[1, "os:mkdir"], None, None, [], None, [path]])
    return b"".join(encode_frame(kind, 1, body))


def run_code(target: WorkerRecord, secret: bytes, path: str) -> None:
    """Call os.mkdir at a worker over TCP as a member that knows this secret would; OSError or RpcError if refused."""
    mine = replace(target, name="stranger", id=99, incarnation="ab" * 16)
    decoder = FrameDecoder(max_body=1 << 20, max_segment=1 << 20)
    with socket.create_connection((target.tcp_host, target.tcp_port), 2) as sock:
        sock.settimeout(2)
        shaking = Handshake(mine, secret, opener=True)
        sock.sendall(b"".join(shaking.start()))
        for frame in frames_from(sock, decoder):
            sock.sendall(b"".join(shaking.feed(frame)))
            if shaking.peer is not None:
                break
        sock.sendall(call(path=path))
        for _ in frames_from(sock, decoder):  # its answer, or its end
            return


def try_until_it_runs(attempt: Callable[[], None], path: str) -> bool:
    """Go on with it for a while, also when the store has gone; whether code has run."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not Path(path).exists():
        with contextlib.suppress(OSError, RuntimeError, rpc.RpcError, KeyError):
            attempt()
        time.sleep(0.02)
    return Path(path).exists()


def forge_value(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: before the group is complete, offer a secret of one's own in the name of rank 0."""
    store = reach(place)
    first = record_in(read(store, "1/slot/0"))
    offer = {"owner": first.incarnation, "host": first.host, "path": "/nowhere", "value": CHOSEN.hex()}
    store.set("1/secret", json.dumps(offer))
    link.tell("forged")
    victim = record_in(read(store, "1/slot/1"))
    return try_until_it_runs(lambda: run_code(victim, CHOSEN, path), path)


def pretend_another_host(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: say that a rank is on another host, so that rank 0 puts the secret into the store."""
    store = reach(place)
    first = read(store, "1/slot/0")
    link.tell("forged")
    victim = read(store, "1/slot/1")
    far = replace(record_in(victim), host="elsewhere:1:1")
    store.set("1/slot/1", json.dumps([far.to_wire(), *victim[1:]]))

    def attempt() -> None:
        secret = bytes.fromhex(json.loads(store.get("1/secret"))["value"]) if store.check(["1/secret"]) else CHOSEN
        run_code(record_in(first), secret, path)

    return try_until_it_runs(attempt, path)


def forge_in_a_free_group(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: replace the offer of a group's secret; its next member believes it."""
    store = reach(place)
    read(store, "1/secret")
    owner = record_in(read(store, "1/roster")["members"][0])
    offer = {"owner": owner.incarnation, "host": owner.host, "path": "/nowhere", "value": CHOSEN.hex()}
    store.set("1/secret", json.dumps(offer))
    link.tell("forged")

    def attempt() -> None:
        for member in read(store, "1/roster")["members"]:
            if record_in(member).name == "w1":
                run_code(record_in(member), CHOSEN, path)

    return try_until_it_runs(attempt, path)


def ask_in_a_free_group(place: Place, link: Link, path: str) -> bool:
    """Body of an attacker: enter the list as a member on another host, and ask for the secret."""
    store = reach(place)
    read(store, "1/secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a member that does not answer yet is not lost
        roster = read(store, "1/roster")
        roster["version"] += 1
        owner = record_in(roster["members"][0])
        port = silent.getsockname()[1]
        stranger = replace(owner, name="stranger", id=7, incarnation="ab" * 16, host="elsewhere:1:1", tcp_port=port)
        roster["members"].append([stranger.to_wire(), False, False, roster["members"][0][3]])
        store.set("1/roster", json.dumps(roster))
        link.tell("forged")

        def attempt() -> None:
            store.set("1/wanted", stranger.incarnation)
            run_code(owner, bytes.fromhex(json.loads(store.get("1/secret"))["value"]), path)

        return try_until_it_runs(attempt, path)


# --- the tests --------------------------------------------------------------------------------------------------------


def attack(children: Children, body: Callable[..., bool], path: Path, world_size: int | None) -> list[str]:
    """Two workers and an attacker between them: what joining said to each; AssertionError if code has run."""
    method = f"tcp://127.0.0.1:{free_port()}"
    victims = [Place(f"w{rank}", rank, world_size, method) for rank in range(2)]
    first = children.start(victims[0], join_and_stay)
    attacker = children.start(Place("attacker", 9, None, method), body, str(path))
    assert attacker.hear() == "forged"
    second = children.start(victims[1], join_and_stay)
    ran = attacker.hear()
    said = [child.hear() for child in (first, second)]
    for child, word in zip((first, second), said, strict=True):
        if word == "joined":
            child.tell("end")
            child.hear()
    assert not ran and not path.exists(), f"the attacker's code has run; joining said {said}"
    return said


@pytest.mark.slow
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("number", TRIES)
def test_forged_secret_is_refused(number: int, tmp_path: Path) -> None:
    """A secret that somebody else put into the store in rank 0's name: both ranks raise, and say what was done."""
    with processes() as children:
        said = attack(children, forge_value, tmp_path / "ran", 2)
        children.check_ended()
    assert all("store" in text and "AIORPC_SECRET" in text for text in said), said


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_secret_is_not_published_for_a_rank_that_seems_to_be_elsewhere(tmp_path: Path) -> None:
    """A group that meets at a loopback address has no member on another host, whatever the store says."""
    with processes() as children:
        said = attack(children, pretend_another_host, tmp_path / "ran", 2)
        children.check_ended()
    assert any("store" in text and "AIORPC_SECRET" in text for text in said), said


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_forged_secret_of_a_free_group_is_refused(tmp_path: Path) -> None:
    """The newcomer raises; the member that was there has the true secret."""
    with processes() as children:
        said = attack(children, forge_in_a_free_group, tmp_path / "ran", None)
        children.check_ended()
    assert said[0] == "joined" and "store" in said[1] and "AIORPC_SECRET" in said[1], said


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_secret_is_not_published_for_whoever_asks(tmp_path: Path) -> None:
    """A stranger in the list that asks for the secret does not get it where all members can read the file."""
    with processes() as children:
        attack(children, ask_in_a_free_group, tmp_path / "ran", None)
        children.check_ended()
