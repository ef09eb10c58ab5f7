"""One member's call of a group call, at its caller: its end is one outcome of the group call."""

from __future__ import annotations

from typing import Protocol

from ...channels.landing import Arrival
from ...errors import RpcError
from ...sites import CallSite
from ..engine.call_events import CallKind
from ..engine.call_tracing import MadeSpan
from .future import PeerOfCall
from .known import FunctionEntry


class CallOfGroup(Protocol):
    """The call of the whole group (`GroupCall`). _number: among the group calls of this worker."""

    _number: int

    def _take(self, place: int, value: object, error: BaseException | None) -> None:
        """The member of that place has answered, or will not. Any thread; the first outcome counts. Raises nothing."""


class MemberCall:
    """A call with the settling side of a `CallFuture`; it is no Future, because no thread or task waits for it.

    Its fields are those of a CallFuture. place: of the member in the group.
    """

    patient: bool
    streamed: bool
    system: bool

    allowed: float | None = None  # no retries
    parked = False
    kind: CallKind = "call"
    span: MadeSpan | None = None  # the call of the group has one

    __slots__ = (
        "_arrival",
        "_deadline",
        "_error",
        "_group",
        "_site",
        "again",
        "call_id",
        "entry",
        "parent",
        "part_of",
        "patient",
        "peer",
        "place",
        "size",
        "started",
        "streamed",
        "system",
    )

    def __init__(
        self,
        group: CallOfGroup,
        place: int,
        peer: PeerOfCall,
        entry: FunctionEntry,
        call_id: int,
        started: float,
        deadline: float | None,
        site: CallSite | None,
        parent: tuple[str, int] | None = None,
    ) -> None:
        self._group = group
        self._error: BaseException | None = None
        self.place: int = place
        self.peer: PeerOfCall = peer
        self.entry: FunctionEntry = entry
        self.call_id: int = call_id
        self.started: float = started
        self._deadline: float | None = deadline
        self._site: CallSite | None = site
        self.parent: tuple[str, int] | None = parent
        self.part_of: tuple[str, int | str] = "group", group._number
        self.size: int = 0
        self.system = self.streamed = self.patient = False
        self.again: bool | None = None
        self._arrival: Arrival | None = None

    @property
    def function(self) -> str:
        """The name of the function."""
        return self.entry.name

    @property
    def _subject(self) -> str:
        """The call, in words."""
        return f"the call of {self.entry.name} on worker {self.peer.name!r}"

    def _describe(self) -> str:
        """The same: the group call has the line of the program."""
        return self._subject

    def _settle(self, value: object, error: BaseException | None = None) -> bool:
        """End it. Only the thread that got it from `PendingCalls.end` calls this."""
        self._error = error
        self._group._take(self.place, value, error)
        del self._group  # breaks the reference cycle
        return True

    def _end_overdue(self, now: float) -> float:
        """As of a Future."""
        return self.peer.pending.end_overdue(self.call_id, now)

    def cancel(self) -> None:
        """Its answer is not wanted any more: send CANCEL. Any thread."""
        self.peer.pending.cancel(self.call_id)

    def refuse(self, error: RpcError) -> None:
        """The call cannot be sent, and ends with that error. Any thread."""
        self.peer.pending.fail_one(self.call_id, error)
