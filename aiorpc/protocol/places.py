"""The places of a group of fixed size, in the view of one worker: who has each, and who may take a vacant one.

A place is a rank with its name. A process that takes one is a new worker with a new id: what is kept by ids
(references, contexts, calls) cannot mistake it for the one before. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from .identity import WorkerRecord
from .states import PLACE, PlaceEvent, PlaceState


class Places:
    """holders: by rank, the member that has the place, or had it last. promised: by rank, the admitted worker."""

    def __init__(self, members: Iterable[WorkerRecord]) -> None:
        self.holders: dict[int, WorkerRecord] = {}
        self.promised: dict[int, WorkerRecord] = {}
        for record in sorted(members, key=lambda each: each.id):  # of two in one place the later one has it
            self.holders[record.rank] = record
        self._states = dict.fromkeys(self.holders, PLACE.initial)

    def state(self, rank: int) -> PlaceState:
        """The state of that place. KeyError if the group has no such rank."""
        return self._states[rank]

    def vacant(self) -> list[int]:
        """The ranks whose members are gone, and whose places are not taken."""
        return [rank for rank, state in self._states.items() if state in (PlaceState.VACANT, PlaceState.PROMISED)]

    def part(self, record: WorkerRecord) -> None:
        """A member is gone. Does nothing if another one has its place by now."""
        if self.holders.get(record.rank) == record and self._states[record.rank] is PlaceState.HELD:
            self._next(record.rank, PlaceEvent.GONE)

    def objection(self, record: WorkerRecord) -> str:
        """Why that joining member cannot have the place of its rank; "" if it can."""
        holder = self.holders.get(record.rank)
        if holder is None:
            return f"the group has no rank {record.rank}"
        if holder.name != record.name:
            return f"rank {record.rank} is the place of {holder.name!r}, and not of {record.name!r}"
        if self._states[record.rank] is PlaceState.HELD:
            return f"{holder.describe()} lives, and has that place"
        if record.id <= holder.id:
            return f"it has the number {record.id}, which is no new one"
        return ""

    def promise(self, record: WorkerRecord) -> None:
        """The leader admits a joining member without objection."""
        self._next(record.rank, PlaceEvent.ADMIT)
        self.promised[record.rank] = record

    def take(self, record: WorkerRecord) -> WorkerRecord:
        """A joining member has arrived at its promised place; returns the record of the member before."""
        self._next(record.rank, PlaceEvent.ARRIVED)
        del self.promised[record.rank]
        return self._hold(record)

    def introduce(self, record: WorkerRecord) -> WorkerRecord:
        """Another worker leads, and has given a vacant place; returns the record of the member before."""
        self._next(record.rank, PlaceEvent.INTRODUCED)
        return self._hold(record)

    def _hold(self, record: WorkerRecord) -> WorkerRecord:
        before, self.holders[record.rank] = self.holders[record.rank], record
        return before

    def _next(self, rank: int, event: PlaceEvent) -> None:
        self._states[rank] = PLACE.next(self._states[rank], event)
