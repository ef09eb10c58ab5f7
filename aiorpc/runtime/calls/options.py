"""Options of one call beside its function, its arguments and its timeout."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...protocol.reference_messages import ReferenceId
from ...sites import CallSite
from ..engine.call_tracing import MadeSpan


class CallOptions(NamedTuple):
    """Options of a call; a plain call has the defaults.

    wait: whether it waits for the worker to join, without a limit. later: whether a call without large arguments leaves
    with the next message, or with `flush`. site: where it was made, if not in the caller's frame. begun: whether it
    continues earlier work, and so may be made while the worker leaves; it has no site. once, allowed: of one try of a
    call with retries: as in a Call, and the seconds of all tries together; None for no limit. creates: ids of the
    reference whose value the result becomes. credit, stream: how many items the producer of a stream may send at first,
    and its consumer (`ItemSink`). keeps: a handle that has to live as long as the call: the message of its death must
    not overtake a long call of its value. part_of: see `CallEvent`. span: of what the call is a part of; it then
    has none of its own.
    """

    wait: bool = False
    later: bool = False
    site: CallSite | None = None
    begun: bool = False
    once: tuple[int, int] | None = None
    allowed: float | None = None
    creates: ReferenceId | None = None
    credit: int | None = None
    stream: Any = None
    keeps: object = None
    part_of: tuple[str, int | str] | None = None
    span: MadeSpan | None = None


PLAIN_CALL, WAITING_CALL = CallOptions(), CallOptions(wait=True)
