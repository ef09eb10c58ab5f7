"""What is special about one call, beside what it calls, its arguments and its timeout."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...protocol.reference_messages import ReferenceId
from ...sites import CallSite


class CallOptions(NamedTuple):
    """What is special about a call; a plain one has none of it.

    wait: whether it waits for the worker to join, however long that takes. later: whether a call without large
    arguments leaves with the next message, or with `flush`. site: where it was made, if that is not the caller's frame.
    begun: whether it goes on with what was begun before, and so may be made while the worker leaves; it has no site.
    once, allowed: of one try of a call with retries: as in a Call, and the seconds that all tries have together; None
    for no limit. creates: ids of the reference whose value the result becomes. credit, stream: how many items the
    producer of a stream may send at first, and its consumer (`ItemSink`). keeps: a handle that lives no
    shorter than the call: where the value behind it is called, the word that it has died must not overtake the call,
    whose arguments may be long. part_of: see `CallEvent`.
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


PLAIN_CALL, WAITING_CALL = CallOptions(), CallOptions(wait=True)
