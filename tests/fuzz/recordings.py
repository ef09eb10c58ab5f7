"""What workers send of a recording. Whatever it is, a trace is made of it."""

from __future__ import annotations

from aiorpc.errors import ProtocolError
from aiorpc.observability.notes import (
    Note,
    RangeNote,
    StepNote,
    Summary,
    TransferNote,
    read_notes,
    read_summary,
    write,
)
from aiorpc.observability.timeline import Clock, WorkerRecording, as_json
from tests.fuzz.stored import RECORD

CLOCK = Clock((0.0, 0.0), (0.0, 0.0), 1e-6, True, 0.0)


def taste(data: bytes) -> None:
    """Whether it is the end of a recording or a piece of it, and that."""
    if not data:
        raise ProtocolError("nothing")
    if data[0] % 2:
        as_json("a", [WorkerRecording(RECORD, CLOCK, [], read_summary(data[1:]), "")])
        return
    summary = Summary(0.0, 10.0, 1, 0, {5: ("MainThread", 6)}, 5, "", 0.0)
    as_json("a", [WorkerRecording(RECORD, CLOCK, read_notes(data[1:]), summary, "")])


def seeds() -> list[bytes]:
    """Those that a worker sends, and one of another version."""
    steps: list[Note] = [
        StepNote(step, side, "a", "b", 1, "m:f", "call", False, ("c", 2), ("group", 1), 1.0, 2.0, 10, 20, outcome, 5)
        for step, outcome in (("started", ""), ("queued", ""), ("running", ""), ("ended", "value"))
        for side in ("made", "served")
    ]
    others: list[Note] = [
        TransferNote("sent", "b", 1, "bulk", 1000, 1.0, 2.0, True, 5),
        TransferNote("received", "b", 1, "bulk", 1000, 1.0, 2.0, False, 5),
        RangeNote("aten::mm", "cpu_op", 1.0, 0.5, 5, ""),
        RangeNote("kernel", "kernel", 1.0, 0.5, 0, "device 0 stream 7"),
    ]
    pieces = [b"\x00" + write(each) for each in ([], steps, others, [*steps, *others])]
    pieces.append(b"\x00" + write([[9, "unknown"]]))
    return [*pieces, b"\x01" + write(Summary(0.0, 10.0, 1, 2, {5: ("MainThread", 6)}, 5, "trouble", 1e-6))]
