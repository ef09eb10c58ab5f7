"""How long messages take to write and to read: ``python -m bench.wire``. One line for each, in microseconds.

The least of several rounds counts: what else runs on the machine only adds to it.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

from aiorpc.protocol import messages, reference_messages
from aiorpc.protocol.frames import Kind
from aiorpc.protocol.messages import Call, Error, Goodbye, Item, Reply, TensorEntry, Values
from aiorpc.protocol.packing import pack, unpack
from aiorpc.protocol.reference_messages import Add, PassedReference, ReferenceId

TIMES, ROUNDS = 20_000, 15
_RREF, _FORK = ReferenceId(1, 2, 1 << 63), ReferenceId(3, 4)
#: What users send, by its name.
VALUES = {
    "nothing": Values([]),
    "three plain values": Values([1, "hello", None]),
    "bytes": Values([b"x" * 100]),
    "a list of numbers": Values([[1, 2, 3, 4]]),
    "a pickle": Values([None], opaque_at=[0], pickled=b"x" * 100),
    "a tensor": Values([None], tensors_at=[0], table=[TensorEntry(0, 0, 6, [4, 4], None, 0, None)]),
    "a reference": Values([None], references=[PassedReference(_RREF, 1, _FORK, 0)]),
}


def seconds(function: Callable[[], object]) -> float:
    """How long it takes, once."""
    return min(timeit.repeat(function, number=TIMES, repeat=ROUNDS)) / TIMES


def main() -> None:
    """The table."""
    rows: list[tuple[str, float, float]] = []
    for name, values in VALUES.items():
        call, reply = Call(7, values, remaining=10.0), Reply(values)
        for kind, message in ((Kind.CALL, call), (Kind.REPLY, reply)):
            body = messages.write(message)
            made = seconds(lambda message=message: messages.write(message))  # type: ignore[misc]  # of this turn
            read = seconds(lambda kind=kind, body=body: messages.read(kind, body))  # type: ignore[misc]  # the same
            rows.append((f"{kind.name} with {name}", made, read))
    frame = seconds(lambda: messages.write_plain(Kind.ITEM, 9, Item(Values([1, "hello", None])), 1 << 20))
    rows.append(("a whole frame of an ITEM", frame, 0.0))
    for other in (Error("ValueError", "text", "traceback", "w0", None, False), Goodbye("KeyError")):
        kind = Kind.ERROR if isinstance(other, Error) else Kind.GOODBYE
        body = messages.write(other)
        made = seconds(lambda other=other: messages.write(other))  # type: ignore[misc]  # of this turn
        read = seconds(lambda kind=kind, body=body: messages.read(kind, body))  # type: ignore[misc]  # the same
        rows.append((kind.name, made, read))
    add = Add(_RREF, _FORK)
    body = pack(reference_messages.MESSAGES.write(add))
    made = seconds(lambda: pack(reference_messages.MESSAGES.write(add)))
    rows.append(("REFERENCE", made, seconds(lambda: reference_messages.read(unpack(body)))))
    print(f"{'':32} {'write':>8} {'read':>8}  µs")
    for name, made, read in rows:
        print(f"{name:32} {1e6 * made:8.3f} {1e6 * read:8.3f}")


if __name__ == "__main__":
    main()
