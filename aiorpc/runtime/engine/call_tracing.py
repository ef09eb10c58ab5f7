"""The tracer of calls, which makes their spans (`aiorpc.observability.traces` has the one of OpenTelemetry).

Without a tracer a step of a call costs the test whether there is one, or whether the call has a span. Methods of the
tracer and of its spans are called in any thread, also on the loop: they return at once, and raise nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ...protocol.identity import WorkerRecord
from ...protocol.states import CallOutcome
from ...protocol.trace_context import TraceContext

#: What a program does with a queue, or with a published value.
Exchange = Literal["put", "get", "publish", "receive"]
#: What has failed in part: a call with retries, or that of a group.
Part = Literal["retry", "member_failed"]


class Failing(Protocol):
    """A call, or anything else with a span: it has its error once it has settled."""

    @property
    def _error(self) -> BaseException | None: ...


@dataclass(frozen=True)
class Raised:
    """An error that the program gets in place of a Future."""

    _error: BaseException | None


class Callee(Protocol):
    """The worker that a call is made to. record: None as long as it is not known."""

    name: str
    record: WorkerRecord | None


class Traceable(Protocol):
    """A served call (`ServedCall`). trace: its context as it came."""

    function: str
    record: WorkerRecord | None
    started: float
    trace: TraceContext | None
    credit: int | None


class MadeSpan(Protocol):
    """What the program does: one call, all tries of one, the call of a group; or an exchange."""

    @property
    def context(self) -> TraceContext | None:
        """The context of the span, which travels to other workers."""

    def linked(self, context: TraceContext | None) -> None:
        """What it takes was made in that context."""

    def failed_in_part(self, part: Part, worker: str, error: BaseException) -> None:
        """A try has failed and another one follows, or a member of a group has failed."""

    def ended(self, outcome: CallOutcome | None, of: Failing) -> None:
        """It has ended. outcome: None takes that of the error. of: settles at once or soon. Later ends do nothing."""


class ServedSpan(Protocol):
    """One served call, from its arrival to its answer; or the run of a batch."""

    def enter(self) -> None:
        """Make it the current span of this thread's context."""

    def failed(self, error: BaseException) -> None:
        """The answer is that error."""

    def ended(self, outcome: CallOutcome) -> None:
        """It has ended."""


class CallTracer(Protocol):
    """Makes the spans of one worker. None: there is no span."""

    def made(self, function: str, to: Callee | None, *, stream: bool = False) -> MadeSpan | None:
        """A call of users begins. Its parent is the span of the calling code. to: None for several workers."""

    def exchanged(self, exchange: Exchange, name: str) -> MadeSpan | None:
        """A program begins to exchange something under that name."""

    def served(self, call: Traceable, *, known: bool = True) -> ServedSpan | None:
        """A call of users has arrived, and its function was found. known: False if it was not."""

    def batch(self, function: str, spans: Sequence[ServedSpan]) -> ServedSpan | None:
        """A batch of these calls is run now."""

    def close(self) -> None:
        """The worker ends, or the tracer is taken away: end the spans that have ended by now."""
