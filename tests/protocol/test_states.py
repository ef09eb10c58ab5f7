"""The tables of states: each is whole, what it does not have is refused, and document and code are as it says."""

from __future__ import annotations

import dataclasses
import itertools
from enum import Enum

import pytest

from aiorpc.errors import PeerRefused, ProtocolError
from aiorpc.protocol.frames import Frame, Kind
from aiorpc.protocol.handshake import Handshake
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.states import (
    ACCEPTOR,
    OPENER,
    WORKER,
    IllegalTransition,
    Table,
    Transition,
    WorkerEvent,
    WorkerState,
)
from tests.documents import STATES, TABLES, AnyTable, differences
from tests.observed import observe
from tests.protocol.test_handshake import one

by_name = pytest.mark.parametrize("table", TABLES, ids=[table.name for table in TABLES])


class Light(Enum):
    """States of a made-up table."""

    RED = "red"
    GREEN = "green"
    OFF = "off"


class Press(Enum):
    """Its events."""

    GO = "go"
    STOP = "stop"
    BREAK = "break"


GOOD = (
    Transition(Light.RED, Press.GO, Light.GREEN),
    Transition(Light.GREEN, Press.STOP, Light.RED),
    Transition(Light.GREEN, Press.BREAK, Light.OFF),
)


def light(transitions: tuple[Transition[Light, Press], ...], states: tuple[Light, ...] = tuple(Light)) -> AnyTable:
    """A made-up table."""
    meanings = {state: "" for state in states}
    return Table("light", about="", initial=Light.RED, meanings=meanings, transitions=transitions, final=[Light.OFF])


@pytest.mark.parametrize(
    ("transitions", "states", "problem"),
    [
        (GOOD[:2], tuple(Light), "nothing leads to OFF"),
        (GOOD[1:], tuple(Light), "nothing leads to GREEN"),
        (GOOD[:1], (Light.RED, Light.GREEN, Light.OFF), "from GREEN nothing leads to an end"),
        ((*GOOD, Transition(Light.OFF, Press.GO, Light.RED)), tuple(Light), "OFF is final, and left when GO comes"),
        ((*GOOD, Transition(Light.RED, Press.GO, Light.OFF)), tuple(Light), "twice for the same state"),
        (GOOD, (Light.RED, Light.OFF), "GREEN has no meaning"),
    ],
)
def test_a_table_that_contradicts_itself_is_not_made(
    transitions: tuple[Transition[Light, Press], ...], states: tuple[Light, ...], problem: str
) -> None:
    """Each rule for tables has a table that breaks it, and is told."""
    with pytest.raises(ValueError, match=f"the table of the light contradicts itself.*{problem}"):
        light(transitions, states)


@by_name
def test_what_a_table_does_not_have_is_refused(table: AnyTable) -> None:
    """In each state each event leads where the rows say, or raises what names table, state and event."""
    targets = {(row.source, row.event): row.target for row in table.transitions}
    for state in table.states:
        for event in type(table.transitions[0].event):
            if (state, event) in targets:
                assert table.next(state, event) is targets[state, event]
                assert table.allows(state, targets[state, event])
                continue
            with pytest.raises(IllegalTransition) as caught:
                table.next(state, event)
            assert all(word in str(caught.value) for word in (table.name, state.name, event.name, event.value))


def test_a_worker_that_leaves_refuses_verbs_before_its_parts_end() -> None:
    """The way of a graceful shutdown; a fork or an exit ends it from any state that has something to let go of."""
    state = WorkerState.NEW
    for event in ("START", "JOINED", "SHUTDOWN", "LEFT", "ENDED"):
        state = WORKER.next(state, WorkerEvent[event])
    assert state is WorkerState.CLOSED
    for alive in set(WorkerState) - {WorkerState.NEW, WorkerState.CLOSED}:
        assert WORKER.next(alive, WorkerEvent.FORKED) is WORKER.next(alive, WorkerEvent.EXITED) is WorkerState.CLOSED


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_document_is_as_the_tables_are() -> None:
    """docs/inside/states.md has what the tables have; the message names the command that makes it anew."""
    found = differences(STATES.read_text(encoding="utf-8"))
    assert not found, found


# --- the code ---------------------------------------------------------------------------------------------------------


RECORD = WorkerRecord("one", 0, "1", "h", "h", 1, "", "", "", 0)


class Opener(Handshake):
    """A handshake whose side is known by its class."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(dataclasses.replace(RECORD, name="two", id=1), secret, expect=RECORD)


class Acceptor(Handshake):
    """The other one."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(RECORD, secret)


def test_handshakes_go_the_ways_of_their_tables() -> None:
    """Break a handshake before each frame, or not at all: all that the tables have is seen, and nothing else."""
    with observe(OPENER, Opener) as openers, observe(ACCEPTOR, Acceptor) as acceptors:
        for broken in (0, 1, 2, 3, None):
            converse(Opener(b"secret"), Acceptor(b"secret"), broken)
        converse(Opener(b"one"), Acceptor(b"other"), None)
        refuse(Opener(b"secret"), Frame(Kind.REFUSED, 0, b"no"))
    assert openers.unseen() == acceptors.unseen() == set()


def converse(opener: Handshake, acceptor: Handshake, broken: int | None) -> None:
    """Carry frames between the two until nobody answers; the one of that number is no frame of a handshake."""
    receiver, answer = acceptor, opener.start()
    for number in itertools.count():
        if number == broken:
            refuse(receiver, Frame(Kind.CALL, 1, b""))
        if not answer or number == broken:
            return
        try:
            answer = receiver.feed(one(answer))
        except PeerRefused:  # the secrets differ
            return
        receiver = opener if receiver is acceptor else acceptor


def refuse(side: Handshake, frame: Frame) -> None:
    """A side is fed what it cannot take."""
    with pytest.raises((PeerRefused, ProtocolError)):
        side.feed(frame)
