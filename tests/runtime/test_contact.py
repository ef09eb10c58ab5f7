"""Connections to a store that break or die without a word, while the store lives: they are made again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from torch.distributed import Store

import aiorpc
from aiorpc import Worker
from aiorpc.errors import StoreGone
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime.meeting import watch
from aiorpc.runtime.meeting.key_value import KeyValueClient
from aiorpc.runtime.meeting.meeting_place import MeetingPlace
from aiorpc.runtime.meeting.patience import Patience
from aiorpc.runtime.meeting.rendezvous import MeetingOptions, Rendezvous
from aiorpc.runtime.meeting.stores import reach_tcp, serve
from tests.limits import busy
from tests.runtime.forwarder import Forwarder, forwarded
from tests.runtime.stores import ROSTER
from tests.runtime.test_rendezvous import make_record
from tests.runtime.waiting import LIMIT, wait_until

pytestmark = pytest.mark.usefixtures("server_made_once")


@dataclass
class Way:
    """A store, and what leads to it."""

    store: Store | None
    line: Forwarder

    def reach(self, grace: float = LIMIT, port: int = 0) -> KeyValueClient:
        """The store, through there or by another port."""
        place = MeetingPlace(None, None, host="127.0.0.1", port=port or self.line.port)
        return reach_tcp(place, Patience(LIMIT), grace)

    def open(self, size: int | None = None, port: int = 0, grace: float = LIMIT) -> Rendezvous:
        """A worker's view of the store, so reached."""
        method = f"tcp://127.0.0.1:{port or self.line.port}"
        rank = None if size is None else 0
        return Rendezvous.open(method, rank=rank, world_size=size, timeout=LIMIT, options=MeetingOptions(grace=grace))


@pytest.fixture
def way() -> Iterator[Way]:
    """To a store that lives."""
    store, port = serve("127.0.0.1", 0)
    with forwarded(port) as line:
        way = Way(store, line)
        del store
        yield way
        way.store = None


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is silent for a second is asked no more over that connection."""
    monkeypatch.setattr(watch, "ANSWER", 1)


def get_at_last(kv: KeyValueClient, key: str) -> str | None:
    """What the store says, once it says something."""
    found: list[str | None] = []

    def answers() -> bool:
        with suppress(StoreGone):
            found.append(kv.get(key))
        return bool(found)

    wait_until(answers)
    return found[0]


def put(kv: KeyValueClient) -> str | None:
    """What stands there then."""
    kv.put("new", "2")
    return kv.get("new")


def say_closing(kv: KeyValueClient, closing: bool) -> bool:
    """Whether that is said then."""
    maker = make_record("w", 0)
    kv.announce_end(maker)
    if not closing:
        kv.take_back_end(maker)
    return bool(kv.closing())


OPERATIONS: dict[str, tuple[Callable[[KeyValueClient], Any], Any]] = {
    "has": (lambda kv: kv.has("there"), True),
    "has not": (lambda kv: kv.has("there", "nowhere"), False),
    "get": (lambda kv: kv.get("there"), "1"),
    "get nothing": (lambda kv: kv.get("nowhere"), None),
    "number": (lambda kv: kv.number("there"), 1),
    "get_all": (lambda kv: kv.get_all(["there", "there"]), ["1", "1"]),
    "put": (put, "2"),
    "swap": (lambda kv: kv.swap("there", "1", "2"), "2"),
    "swap in vain": (lambda kv: kv.swap("there", "2", "3"), "1"),
    "swap new": (lambda kv: kv.swap("new", "", "2"), "2"),
    "announce the end": (lambda kv: say_closing(kv, True), True),
    "take it back": (lambda kv: say_closing(kv, False), False),
}


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_the_store_is_asked_has_its_answer_though_the_connection_breaks(
    way: Way, operation: str, lost: str
) -> None:
    """Before it has arrived, or when it was done and the answer was lost."""
    do, expected = OPERATIONS[operation]
    with closing(way.reach()) as kv:
        kv.put("there", "1")
        was_lost = way.line.lose(lost)
        assert do(kv) == expected
        assert was_lost()


@pytest.mark.parametrize(
    ("lost", "at_most", "held"),
    [("request", False, 1), ("answer", False, 2), ("request", True, 0), ("answer", True, 1)],
)
def test_what_is_counted_though_the_connection_breaks(way: Way, lost: str, at_most: bool, held: int) -> None:
    """Ids are given to one worker alone; of those who have read something none is counted twice."""
    with closing(way.reach()) as kv:
        way.line.lose(lost)
        assert kv.count("many", at_most=at_most) == held == kv.number("many")
        assert kv.count("many", at_most=at_most) == held + 1


@pytest.mark.parametrize("size", [None, 1])
def test_connections_that_were_reset_are_made_again(way: Way, size: int | None) -> None:
    """For whatever the store is asked later, however often."""
    with closing(way.open(size)) as group:
        [record] = group.join(partial(make_record, "a"))
        for turn in range(3):
            way.line.reset()
            assert group.swap(f"key{turn}", "", "mine") == "mine" == group.look_up(f"key{turn}")
            way.line.reset()
            assert group.find("a", LIMIT) == record and group.find("b", LIMIT) is None
        way.line.reset()
        assert not group.has_left(record)
        way.line.reset()
        group.say_farewell(record)
        way.line.reset()
        assert group.has_left(record)


async def test_a_member_of_a_group_of_fixed_size_publishes_after_its_connection_to_the_store_was_reset() -> None:
    """And so does whoever wants to unpublish, or to leave."""
    store, port = await asyncio.to_thread(serve, "127.0.0.1", 0)
    with forwarded(port) as line:
        method = f"tcp://127.0.0.1:{line.port}"
        workers = [Worker(f"w{rank}", rank=rank, world_size=2, init_method=method) for rank in range(2)]
        await asyncio.gather(*(worker.start() for worker in workers))
        line.reset()
        await workers[0].publish("weights", 1)
        line.reset()
        with pytest.raises(aiorpc.RpcUsageError, match="'weights' is published by worker 'w0'"):
            await workers[1].publish("weights", 2)
        line.reset()
        await workers[0].unpublish("weights")
        line.reset()
        await workers[1].publish("weights", 3)
        line.reset()
        await asyncio.gather(*(worker.shutdown() for worker in workers))
    del store


@pytest.mark.usefixtures("short_answers")
def test_a_connection_that_has_died_without_a_word_is_given_up(way: Way) -> None:
    """No answer comes over it; the next connection has one. torch would wait for ever."""
    with closing(way.reach()) as kv:
        way.line.forget()
        assert kv.swap("key", "", "mine") == "mine"
        way.line.forget()
        kv.put("key", "yours")  # of which torch wants no answer
        assert kv.get("key") == "yours"


@pytest.mark.usefixtures("short_answers")
def test_a_store_that_is_not_reached_for_a_while_is_waited_for(way: Way) -> None:
    """For as long as the grace, from the beginning of what fails; then it is told how long it was away."""
    with closing(way.reach()) as patient, closing(way.reach(grace=0.5)) as hasty:
        way.line.silence(True)
        way.line.reset()
        timer = threading.Timer(1.5, way.line.silence, [False])
        timer.start()
        assert patient.swap("key", "", "mine") == "mine"
        timer.join()
        assert get_at_last(hasty, "key") == "mine"
        way.line.silence(True)
        way.line.forget()
        with pytest.raises(
            StoreGone, match=r"the store at tcp://.* has not been reached for \d+ s: .*; then timed out"
        ):
            hasty.get("key")
        way.line.silence(False)
        way.line.reset()
        assert get_at_last(hasty, "key") == "mine"


def test_a_store_that_has_ended_is_told_at_once_and_nobody_takes_its_place(way: Way) -> None:
    """Nobody listens there any more; or a store was begun anew, in which nothing stands."""
    port = way.line.to
    with closing(way.reach(port=port)) as first, closing(way.reach(port=port)) as second:
        first.put("key", "mine")
        start = time.monotonic()
        way.store = None
        with pytest.raises(StoreGone, match=r"the store at tcp://.* has gone: "):
            wait_until(lambda: first.get("key") is None)
        way.store, _ = serve("127.0.0.1", port)
        for kv in (first, second):
            with pytest.raises(StoreGone, match=r"the store at tcp://.* has gone: "):
                kv.get("key")
        assert time.monotonic() - start < LIMIT / 2 * busy()


def test_who_has_entered_the_list_without_hearing_so_is_in_it_once(way: Way) -> None:
    """The answer is lost, and somebody else enters the list before that is asked again."""
    with closing(way.open()) as one, closing(way.open(port=way.line.to)) as other:
        found: list[list[WorkerRecord]] = []

        def loses(what: str) -> bool:
            assert way.store is not None
            if what == "request" or found or not way.store.check([ROSTER]):
                return False
            found.append(other.join(partial(make_record, "b")))
            return True

        way.line.loses = loses
        mine = one.join(partial(make_record, "a"))
        assert sorted(record.name for record in mine) == ["a", "b"] == sorted(record.name for record in found[0])
        assert other.members() == mine


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_group_is_joined_though_the_connection_breaks(way: Way, size: int | None, lost: str) -> None:
    """At whatever point of joining, and of leaving."""
    turn = 0
    while True:
        with closing(way.open(size)) as group:
            was_lost = way.line.lose(lost, turn)
            [record] = group.join(partial(make_record, "a"))
            group.say_farewell(record)
            group.leave(record)
            way.line.loses = lambda what: False
            assert group.has_left(record)
        if not was_lost():
            break
        turn += 1
    assert turn > 5
