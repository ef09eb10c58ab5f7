"""For tests that drive code whose states are a table: what was seen of the table, and what it does not allow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

from aiorpc.protocol.states import Table

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Observed(Generic[S, E]):
    """What was seen of the lives that a table describes. Any thread may tell it.

    seen: pairs of states that followed each other. wrong: what the table does not allow, as sentences.
    """

    def __init__(self, table: Table[S, E]) -> None:
        self.table = table
        self.seen: set[tuple[S, S]] = set()
        self.wrong: list[str] = []

    def begun(self, state: S) -> None:
        """A life has begun."""
        if state is not self.table.initial:
            self.wrong.append(f"{self.table.name}: a life began in {state.name}")

    def moved(self, source: S, target: S) -> None:
        """A state was followed by another, or by itself."""
        self.seen.add((source, target))
        if not self.table.allows(source, target):
            self.wrong.append(f"{self.table.name}: {source.name} was followed by {target.name}")

    def check(self) -> None:
        """AssertionError if anything was seen that the table does not allow."""
        assert not self.wrong, "\n".join(self.wrong)

    def unseen(self) -> set[tuple[S, S]]:
        """The pairs of states that the table has and nobody has seen."""
        return {(row.source, row.target) for row in self.table.transitions} - self.seen


@contextlib.contextmanager
def observe(table: Table[S, E], cls: type[Any]) -> Iterator[Observed[S, E]]:
    """See each value that `state` gets in all objects of a class; checks them at the end of the block.

    Members of another Enum than the table's are taken for those of the table with the same names.
    """
    observed = Observed(table)
    states = {state.name: state for state in table.states}

    def get(self: Any) -> Any:
        try:
            return self.__dict__["state"]
        except KeyError:
            raise AttributeError("state") from None

    def put(self: Any, value: Enum) -> None:
        before = self.__dict__.get("state")
        self.__dict__["state"] = value
        if before is None:
            observed.begun(states[value.name])
        else:
            observed.moved(states[before.name], states[value.name])

    assert "state" not in cls.__dict__, "two observers of one class"
    cls.state = property(get, put)
    try:
        yield observed
    finally:
        del cls.state
    observed.check()
