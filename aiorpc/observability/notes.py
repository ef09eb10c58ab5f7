"""What workers send of a recording to the worker that asked for it: declared here, for both ends.

Times are seconds of ``time.monotonic()`` of the worker that has noted them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..errors import ProtocolError

#: Characters of a name; longer ones are cut.
NAME_LIMIT = 1024
#: Seconds that no clock shows.
MOST_TIME = 1e12
Text = Annotated[str, Meta(max_length=NAME_LIMIT)]
Time = Annotated[float, Meta(ge=-MOST_TIME, le=MOST_TIME)]
Duration = Annotated[float, Meta(ge=0, le=MOST_TIME)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class StepNote(Struct, array_like=True, tag=0, forbid_unknown_fields=True, gc=False):
    """A step of a call: see `aiorpc.events.CallEvent`. step: the method of the observer that was called. outcome: empty
    but for the last step. thread: Python's number of the thread that took the step."""

    step: Text
    side: Text
    caller: Text
    worker: Text
    call_id: Count
    function: Text
    kind: Text
    own: bool
    parent: tuple[Text, Count] | None
    part_of: tuple[Text, Count | Text] | None
    started: Time
    time: Time
    request_bytes: Count
    answer_bytes: Count
    outcome: Text
    thread: Count


class TransferNote(Struct, array_like=True, tag=1, forbid_unknown_fields=True, gc=False):
    """Buffers that went by channels: see `BufferTransfer`."""

    side: Text
    worker: Text
    call_id: Count
    channels: Text
    size: Count
    started: Time
    ended: Time
    copied: bool
    thread: Count


class RangeNote(Struct, array_like=True, tag=2, forbid_unknown_fields=True, gc=False):
    """An event of torch's profiler. thread: the system's number; 0 on a device: see track."""

    name: Text
    category: Text
    started: Time
    seconds: Duration
    thread: Count
    track: Text


Note = StepNote | TransferNote | RangeNote


class Summary(Struct, array_like=True, forbid_unknown_fields=True):
    """What a worker tells at the end of a recording, before its notes.

    began, ended: when it noted. notes: how many it has. dropped: how many more there were. threads: names of its
    threads and the system's numbers of them, by Python's. loop: Python's number of the thread that runs its loop.
    profiled: what went wrong with torch's profiler; empty if nothing did. profile_error: seconds by which its events
    may be off from the others.
    """

    began: Time
    ended: Time
    notes: Count
    dropped: Count
    threads: dict[Count, tuple[Text, Count]]
    loop: Count
    profiled: Text
    profile_error: Duration


T = TypeVar("T")

write: Callable[[object], bytes] = msgspec.msgpack.encode
_notes: msgspec.msgpack.Decoder[list[Note]] = msgspec.msgpack.Decoder(list[Note], strict=True)
_summary: msgspec.msgpack.Decoder[Summary] = msgspec.msgpack.Decoder(Summary, strict=True)


def read_notes(data: bytes) -> list[Note]:
    """The notes in one piece of a recording. Raises ProtocolError."""
    return _read(_notes, data)


def read_summary(data: bytes) -> Summary:
    """What a worker tells at the end. Raises ProtocolError."""
    return _read(_summary, data)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError(f"a piece of a recording cannot be read: {error}") from None
