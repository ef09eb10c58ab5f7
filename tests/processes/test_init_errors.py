"""A group that cannot be formed: every rank gets a clear error, within the timeout, and can try again."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

import aiorpc as rpc
from tests.limits import busy

from . import bodies
from .workers import Link, Place, meeting_file, processes

SLACK = 4.0  # seconds beside the timeout, on a busy machine


def stay_after_init(place: Place, link: Link, timeout: float) -> None:
    """Body: `try_init`, and stay until told: whoever comes later must not find that all others are dead."""
    link.tell(try_init(place, link, timeout))
    link.hear(60)


def try_init(place: Place, link: Link, timeout: float) -> Any:
    """Body: the error of init_rpc, and how long it took; then all is as before."""
    started = time.monotonic()
    try:
        place.init_rpc(rpc_timeout=timeout)
    except rpc.RpcError as error:
        with pytest.raises(rpc.errors.NotInitialized):
            rpc.rpc_sync("w0", bodies.pid)
        return type(error).__name__, str(error), time.monotonic() - started
    rpc.shutdown()
    return "no error", "", time.monotonic() - started


def outcomes(places: list[Place], timeout: float) -> list[tuple[str, str, float]]:
    """What init_rpc does at each of these places, at the same time."""
    with processes() as children:
        started = [children.start(place, stay_after_init, timeout) for place in places]
        found = [child.hear(timeout + 20) for child in started]
        for child in started:
            child.tell("end")
        children.check_ended()
    return found


def test_names_that_are_not_unique_fail_on_every_rank() -> None:
    """Each rank is told which name, and which ranks have it, long before the timeout."""
    with meeting_file() as method:
        names = ["same", "other", "same"]
        found = outcomes([Place(name, rank, 3, method) for rank, name in enumerate(names)], 30.0)
    for kind, text, seconds in found:
        assert kind == "RendezvousError"
        assert "'same' is not unique" in text
        assert "ranks 0 and 2" in text
        assert seconds < 15


def test_world_sizes_that_differ_fail_on_every_rank() -> None:
    """Both sizes are named on both ranks."""
    with meeting_file() as method:
        found = outcomes([Place("a", 0, 2, method), Place("b", 1, 3, method)], 30.0)
    for kind, text, seconds in found:
        assert kind == "RendezvousError"
        assert "world_size" in text
        assert "2" in text and "3" in text
        assert seconds < 15


def test_rank_taken_twice_fails() -> None:
    """Both holders are named to the one that comes second; the others hear of it too."""
    with meeting_file() as method:
        found = outcomes([Place("a", 0, 3, method), Place("b", 1, 3, method), Place("c", 1, 3, method)], 30.0)
    assert {kind for kind, _, _ in found} == {"RendezvousError"}
    assert all("rank 1 was taken twice" in text for _, text, _ in found), found


def test_rank_that_does_not_come_is_named_within_the_timeout() -> None:
    """Those that are there fail in time, and say who is missing."""
    with meeting_file() as method:
        found = outcomes([Place("a", 0, 3, method), Place("c", 2, 3, method)], 1.5)
    for kind, text, seconds in found:
        assert kind == "RendezvousError"
        assert "rank 1 of 3" in text
        assert 1.0 < seconds < 1.5 + SLACK * busy()


@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "somebody never answers"])
def test_store_that_cannot_be_reached_fails_within_the_timeout(answers: bool) -> None:
    """The address is named, whether the port is closed or belongs to a program that says nothing."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        if answers:
            holder.listen()
        port = holder.getsockname()[1]
        ((kind, text, seconds),) = outcomes([Place("b", 1, 2, f"tcp://127.0.0.1:{port}")], 1.5)
    assert kind == "RendezvousError"
    assert f"127.0.0.1:{port}" in text
    assert seconds < 1.5 + SLACK * busy()


def test_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """env:// without its variables says at once which one is missing."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(rpc.errors.RendezvousError, match="MASTER_ADDR"):
        rpc.init_rpc("w0", rank=0, world_size=1)
    with pytest.raises(rpc.errors.RendezvousError, match="MASTER_PORT"):
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        rpc.init_rpc("w0", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("name", "rank", "world_size", "method"),
    [
        ("", 0, 1, "file:///tmp/x"),
        ("with space", 0, 1, "file:///tmp/x"),
        ("w0", 0, 0, "file:///tmp/x"),
        ("w0", None, 2, "file:///tmp/x"),
        ("w0", 0, 1, "http://host:1"),
        ("w0", 0, 1, "tcp://host"),
    ],
)
async def test_arguments_that_make_no_sense_are_refused(
    name: str, rank: int | None, world_size: int, method: str
) -> None:
    """Before anything is started."""
    with pytest.raises(rpc.RpcUsageError):
        await rpc.init(name, rank=rank, world_size=world_size, init_method=method)


def second_worker(place: Place, link: Link) -> None:
    """Body: init_rpc twice."""
    place.init_rpc()
    with pytest.raises(rpc.RpcUsageError, match="already initialized"):
        place.init_rpc()
    assert rpc.rpc_sync("w0", bodies.add, args=(1, 2)) == 3
    rpc.shutdown()


def test_second_init_rpc_is_refused_and_the_first_worker_goes_on() -> None:
    """One process, one worker of init_rpc."""
    with processes() as children, meeting_file() as method:
        children.start(Place("w0", 0, 1, method), second_worker).hear()
        children.check_ended()


def test_member_killed_while_it_joins_is_replaced_by_its_next_start() -> None:
    """A rank that dies before the group is complete may be started again; the group then forms."""
    with processes() as children, meeting_file() as method:
        dying = children.start(Place("b", 1, 3, method), try_init, 30.0)
        first = children.start(Place("a", 0, 3, method), try_init, 30.0)
        dying.process.join(0.7)  # both are waiting for the third by then; if not, the test is only easier
        dying.kill()
        dying.join()
        again = children.start(Place("b", 1, 3, method), try_init, 30.0)
        last = children.start(Place("c", 2, 3, method), try_init, 30.0)
        for child in (first, again, last):
            assert child.hear()[0] == "no error"
