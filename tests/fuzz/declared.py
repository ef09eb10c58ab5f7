"""Arguments of the runtime's own handlers, each of which reads what it declares."""

from __future__ import annotations

from aiorpc.errors import ProtocolError
from aiorpc.protocol.messages import Call, TensorEntry, Values, read_call, write
from aiorpc.runtime import surface
from aiorpc.runtime.calls import functions
from aiorpc.runtime.calls.declared import declaration_of, pack
from tests.fuzz.stored import RECORD

# Those of the drop-in need its modules.
DECLARED = [
    declaration_of(place.found)
    for handler in surface.HANDLERS
    if ".compat." not in handler.name and (place := functions.find_place(handler.name, ask=False)) is not None
]
LONGEST_TEXT = 1000  # characters of an error, which shows nothing of what was sent


def taste(data: bytes) -> None:
    """Which of them is called, whether what follows is a call or one argument of it, and that."""
    if len(data) < 2:
        raise ProtocolError("nothing")
    declaration, said = DECLARED[data[0] % len(DECLARED)], data[2:]
    arguments = read_call(said).payload if data[1] % 2 else Values([said])
    try:
        declaration.read(arguments)
    except ProtocolError as error:
        assert len(str(error)) <= LONGEST_TEXT, "it shows what was sent"
        raise


def seeds() -> list[bytes]:
    """Calls of each as honest members make them, and as they make those of others."""
    record, entry = pack(RECORD.to_wire()), TensorEntry(-1, 0, 0, [0], None, 0, None)
    given = [
        *(Values([]), Values([1]), Values([b""]), Values([True]), Values([record])),
        *(Values([record, "why"]), Values(["tag", pack([0, 1]), 1.5]), Values([True, 1, 2, 3])),
        *(Values([True, 1, b"item"]), Values([None], opaque_at=[0], pickled=b"\x80\x05N.")),
        Values([1, 2, bytes(16), None], tensors_at=[3], table=[entry]),
        Values([1, 2, bytes(16), False, 0.5, b"", b"", None, None], tensors_at=[8], table=[entry]),
    ]
    calls = [b"\x01" + write(Call(1, each)) for each in given]
    packed = [b"\x00" + each for each in (record, pack([0, 1, 2]), b"\xdd\xff\xff\xff\xff")]
    return [bytes((place,)) + each for place in range(len(DECLARED)) for each in (*calls, *packed)]
