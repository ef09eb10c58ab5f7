"""A table of states: which event leads from which state to which, checked when the table is made and when it is used.

The owner of a state keeps it in an attribute and changes it in one way only:

    peer.state = PEER.next(peer.state, PeerEvent.CONNECTED)

docs/inside/states.md is made from the tables of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar


class Label(Enum):
    """A state or an event. Its hash is that of the object: Enum's own hash is a function of Python, and some tables are
    used several times for each message.
    """

    if not TYPE_CHECKING:  # a checker expects that of Enum
        __hash__ = object.__hash__


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)

LOOP = "the loop"


class IllegalTransition(AssertionError):
    """An event came in a state in which it cannot come: a fault in aiorpc, which no user can cause or handle.

    It is an AssertionError, because the package catches RuntimeError where torch or a closed event loop raises it, and
    must not catch a fault there.
    """


class Transition(NamedTuple, Generic[S, E]):
    """One row of a table. what: sentences about what happens. on: the thread on which the event comes, if it matters.

    The value of the event's Enum member is the phrase that the documents have.
    """

    source: S
    event: E
    target: S
    what: str = ""
    on: str = ""


def from_each(sources: Iterable[S], event: E, target: S, what: str = "", on: str = "") -> list[Transition[S, E]]:
    """The rows of an event that leads from several states to the same one."""
    return [Transition(source, event, target, what, on) for source in sources]


class Table(Generic[S, E]):
    """The life of one kind of thing.

    name: of the kind. about: sentences for the documents. meanings: what holds in each state; its keys are the states,
    which may be some members of an Enum only. final: states in which a life ends, and which are never left; none if it
    has no end.
    Raises ValueError if the table contradicts itself; the tables are made at import, so a wrong one is never used.
    """

    def __init__(
        self,
        name: str,
        *,
        about: str,
        initial: S,
        meanings: Mapping[S, str],
        transitions: Sequence[Transition[S, E]],
        final: Iterable[S],
    ) -> None:
        self.name = name
        self.about = about
        self.initial = initial
        self.meanings: dict[S, str] = dict(meanings)
        self.transitions: tuple[Transition[S, E], ...] = tuple(transitions)
        self.final: frozenset[S] = frozenset(final)
        self._targets = {(row.source, row.event): row.target for row in self.transitions}
        self._pairs = frozenset((row.source, row.target) for row in self.transitions)
        problems = list(self._problems())
        if problems:
            raise ValueError(f"the table of the {name} contradicts itself: {'; '.join(problems)}")

    @property
    def states(self) -> tuple[S, ...]:
        """All states, in the order of the documents."""
        return tuple(self.meanings)

    def next(self, state: S, event: E) -> S:
        """The state after an event. IllegalTransition if the event cannot come in that state."""
        try:
            return self._targets[state, event]
        except KeyError:
            raise IllegalTransition(
                f"{self.name}: nothing leads on from {state.name} when {event.name} comes ({event.value})"
            ) from None

    def after(self, state: S, event: E) -> S | None:
        """The state after an event that another worker reports; None if it cannot come in that state."""
        return self._targets.get((state, event))

    def allows(self, state: S, target: S) -> bool:
        """Whether one event may lead from the one state to the other."""
        return (state, target) in self._pairs

    def _problems(self) -> Iterator[str]:
        known = set(self.meanings)
        named = {self.initial, *self.final, *(row.source for row in self.transitions)}
        named |= {row.target for row in self.transitions}
        for state in named - known:
            yield f"{state.name} has no meaning"
        if len(self._targets) != len(self.transitions):
            yield "an event is there twice for the same state"
        for row in self.transitions:
            if row.source in self.final:
                yield f"{row.source.name} is final, and left when {row.event.name} comes"
        for state in known - self._reached({self.initial}, forward=True):
            yield f"nothing leads to {state.name}"
        for state in known - self._reached(set(self.final), forward=False) if self.final else ():
            yield f"from {state.name} nothing leads to an end"

    def _reached(self, begin: set[S], *, forward: bool) -> set[S]:
        """The states on all ways from the given ones, or to them."""
        reached = set(begin)
        while True:
            more = {b if forward else a for a, b in self._pairs if (a if forward else b) in reached} - reached
            if not more:
                return reached
            reached |= more
