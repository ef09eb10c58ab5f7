"""The tables of states: each is whole, what it does not have is refused, and document and code are as it says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc.errors import PeerRefused, ProtocolError
from aiorpc.protocol.frames import Frame, Kind
from aiorpc.protocol.handshake import Handshake
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.states import (
    ACCEPTOR,
    OPENER,
    PEER,
    WORKER,
    IllegalTransition,
    PeerEvent,
    PeerState,
    Table,
    Transition,
    WorkerEvent,
    WorkerState,
    from_each,
)
from tests.documents import STATES, TABLES, AnyTable, differences, states_document
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


def test_a_table_leads_from_state_to_state() -> None:
    """`next` and `allows` say what the rows say."""
    table = light(GOOD)
    assert table.next(Light.RED, Press.GO) is Light.GREEN
    assert table.next(Light.GREEN, Press.BREAK) is Light.OFF
    assert table.allows(Light.GREEN, Light.RED)
    assert not table.allows(Light.RED, Light.OFF)
    assert not table.allows(Light.RED, Light.RED)


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
def test_all_members_of_the_enums_are_used(table: AnyTable) -> None:
    """No state and no event of a life stands in its Enum and in no table."""
    states: set[Enum] = set(type(table.initial).__members__.values())
    events: set[Enum] = set(type(table.transitions[0].event).__members__.values())
    family = [other for other in TABLES if isinstance(other.initial, type(table.initial))]
    assert {state for other in family for state in other.states} == states
    assert {row.event for other in family for row in other.transitions} == events


@by_name
def test_a_table_can_be_shown(table: AnyTable) -> None:
    """No text of it breaks a table or a diagram in Markdown, and every state has a meaning."""
    for row in table.transitions:
        assert not set(row.event.value) & set(":;|\n#")
        assert not set(row.what + row.on) & set("|\n")
        assert not row.what or row.what.endswith(".")
    assert all(meaning.endswith(".") and "|" not in meaning for meaning in table.meanings.values())


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


def test_a_fault_is_no_runtime_error() -> None:
    """The package catches RuntimeError of torch and of closed loops; a wrong transition must not pass for one."""
    assert not issubclass(IllegalTransition, RuntimeError)
    with pytest.raises(AssertionError, match="peer: nothing leads on from GONE when CONNECTED comes"):
        PEER.next(PeerState.GONE, PeerEvent.CONNECTED)


@by_name
@settings(max_examples=30)
@given(data=st.data())
def test_a_walk_stays_inside_and_can_end(table: AnyTable, data: st.DataObject) -> None:
    """Any events, one after the other: the state is one of the table's, and ends are never left."""
    state = table.initial
    for event in data.draw(st.lists(st.sampled_from(type(table.transitions[0].event)), max_size=30)):
        try:
            following = table.next(state, event)
        except IllegalTransition:
            continue
        assert table.allows(state, following)
        assert following in table.states
        assert state not in table.final
        state = following


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


def changed(table: AnyTable) -> Iterator[AnyTable]:
    """The table with one thing otherwise, in all ways that leave it whole."""
    rows = table.transitions
    for index, row in enumerate(rows):
        others = (*rows[:index], *rows[index + 1 :])
        yield from made(table, others)
        yield from made(table, (*rows[:index], row._replace(what=row.what + "!"), *rows[index + 1 :]))
        for target in table.states:
            if target is not row.target:
                yield from made(table, (*rows[:index], row._replace(target=target), *rows[index + 1 :]))


def made(table: AnyTable, rows: tuple[Transition[Enum, Enum], ...]) -> list[AnyTable]:
    """A table with those rows, if they make one."""
    try:
        return [
            Table(
                table.name,
                about=table.about,
                initial=table.initial,
                meanings=table.meanings,
                transitions=rows,
                final=table.final,
            )
        ]
    except ValueError:
        return []


@by_name
def test_a_changed_table_differs_from_the_document(table: AnyTable) -> None:
    """Remove a row, change where it leads or what it says: the comparison sees each of these, and names the command."""
    text = STATES.read_text(encoding="utf-8")
    mutants = [tuple(mutant if each is table else each for each in TABLES) for mutant in changed(table)]
    assert len(mutants) >= len(table.transitions)
    assert all(states_document(tables) != text for tables in mutants)
    assert "python -m tests.documents --write" in differences(text, mutants[0])


def test_a_changed_document_differs() -> None:
    """A word that was changed by hand is found."""
    text = STATES.read_text(encoding="utf-8")
    edited = text.replace("| IDLE | There is no connection", "| IDLE | There may be a connection")
    assert edited != text
    assert "There may be a connection" in differences(edited)


# --- the code ---------------------------------------------------------------------------------------------------------


class Lamp:
    """Has a state."""

    def __init__(self, state: Light = Light.RED) -> None:
        self.state = state


def test_an_observer_sees_transitions() -> None:
    """It knows what was seen and what was not, and leaves the class as it was."""
    with observe(light(GOOD), Lamp) as observed:
        lamp = Lamp()
        lamp.state = Light.GREEN
        lamp.state = Light.OFF
        assert lamp.state is Light.OFF
    assert observed.seen == {(Light.RED, Light.GREEN), (Light.GREEN, Light.OFF)}
    assert observed.unseen() == {(Light.GREEN, Light.RED)}
    assert "state" not in Lamp.__dict__


def test_an_observer_finds_what_a_table_does_not_allow() -> None:
    """A wrong beginning and a wrong step are told when the block ends; nothing is raised in between."""
    with pytest.raises(AssertionError) as caught, observe(light(GOOD), Lamp):
        Lamp(Light.GREEN)
        lamp = Lamp()
        lamp.state = Light.OFF
    assert "light: a life began in GREEN" in str(caught.value)
    assert "light: RED was followed by OFF" in str(caught.value)


def test_rows_from_several_states() -> None:
    """`from_each` makes one row for each of them."""
    rows = from_each((Light.RED, Light.GREEN), Press.BREAK, Light.OFF, "Dark.")
    assert [row.source for row in rows] == [Light.RED, Light.GREEN]
    assert {(row.target, row.what) for row in rows} == {(Light.OFF, "Dark.")}


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
