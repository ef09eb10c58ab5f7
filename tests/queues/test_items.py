"""Items on their way: packed and unpacked, and what is no item."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy
import pytest
import torch

from aiorpc.errors import ProtocolError, SerializationError
from aiorpc.protocol.messages import Reply, Values, write
from aiorpc.protocol.trace_context import TraceContext
from aiorpc.queues.items import Taken
from aiorpc.queues.packing import join, layout_of, split, unpack
from aiorpc.queues.tickets import TICKET, Tickets, split_tickets

BODY = write(Reply(Values([1])))
BUFFERS = [b"a" * 100, b"", b"bcd"]
MAIN = "file:/here.py"
OTHER = write(Reply(Values([2])))


def joined(body: bytes, buffers: list[bytes]) -> bytes:
    layout = layout_of(len(body), [len(each) for each in buffers])
    item = bytearray(layout.size)
    join(body, buffers, layout, numpy.frombuffer(item, numpy.uint8))
    return bytes(item)


@pytest.mark.parametrize("buffers", [[], BUFFERS])
def test_an_item_is_what_was_joined(buffers: list[bytes]) -> None:
    """Its body and its buffers, which are aligned; in memory of either kind."""
    item = joined(BODY, buffers)
    body, found = split(memoryview(item))
    assert (body, [bytes(each) for each in found]) == (BODY, buffers)
    for each in buffers:
        assert not each or item.index(each) % 64 == 0
    assert unpack(item, safe=True, main=MAIN) == 1
    assert unpack(torch.frombuffer(bytearray(item), dtype=torch.uint8), safe=False, main=MAIN) == 1


def in_two_forms(*forms: object) -> bytes:
    return joined(write(Reply(Values([*forms]))), BUFFERS)


@pytest.mark.parametrize(("main", "value"), [(MAIN, 1), ("file:/there.py", 2)])
def test_of_two_forms_the_one_for_the_main_module_here_is_read(main: str, value: int) -> None:
    """The first one where that is the main module of the producer, and the other one anywhere else."""
    assert unpack(in_two_forms(MAIN, BODY, OTHER, 3, 1), safe=True, main=main) == value


def test_an_item_without_a_form_for_this_main_module_says_why() -> None:
    """It is there for those that run the same script as its producer."""
    item = in_two_forms(MAIN, BODY, "(a Point) cannot be serialised: it has a lock", 3, 0)
    assert unpack(item, safe=True, main=MAIN) == 1
    with pytest.raises(SerializationError, match=r"another main module.*by value the item \(a Point\) .* has a lock"):
        unpack(item, safe=True, main="file:/there.py")


TRACE = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=x")


@pytest.mark.parametrize(
    ("said", "told"), [(TRACE, [TRACE]), (TRACE._replace(tracestate=""), [TRACE._replace(tracestate="")]), ("ab", [])]
)
def test_an_item_tells_its_trace_context(said: Sequence[str], told: list[TraceContext]) -> None:
    """In either form, to whoever asks; what is none is left out."""
    body, heard = write(Reply(Values(["", *said]))), list[TraceContext]()
    for item in (joined(body, []), in_two_forms(MAIN, body, OTHER, 3, 0)):
        assert unpack(item, safe=True, main=MAIN) == ""
        assert unpack(item, True, MAIN, heard.append) == ""
    assert heard == told * 2


@pytest.mark.parametrize(
    "item",
    [
        b"",
        b"short",
        joined(BODY, BUFFERS)[:-1],
        joined(BODY, BUFFERS) + b"x",
        struct.pack("<QQ", 1 << 63, 0),
        struct.pack("<QQ", 0, 1 << 63),
        struct.pack("<QQQQ", 0, 2, 1 << 63, 1 << 63),
        joined(b"no body", []),
        joined(write(Reply(Values([1, 2]))), []),
        joined(write(Reply(Values([1, "", None]))), []),
        joined(write(Reply(Values([]))), []),
        in_two_forms(MAIN, BODY, OTHER, 4, 1),
        in_two_forms(MAIN, BODY, OTHER, -1, 1),
        in_two_forms(MAIN, BODY, OTHER, 1, 4),
        in_two_forms(MAIN, BODY, OTHER, "1", 1),
        in_two_forms(MAIN, BODY, None, 1, 1),
        in_two_forms(MAIN, OTHER.decode("latin-1"), OTHER, 1, 1),
        in_two_forms(MAIN, b"no body", b"no body", 1, 1),
        in_two_forms(MAIN, write(Reply(Values([MAIN, BODY, OTHER, 3, 1]))), OTHER, 1, 1),
    ],
    ids=str,
)
def test_what_is_no_item_is_refused(item: bytes) -> None:
    """Before memory is taken for it."""
    with pytest.raises(ProtocolError):
        unpack(item, safe=False, main=MAIN)


def test_a_tensor_that_is_no_bytes_is_refused() -> None:
    """A producer may give what it likes."""
    for found in (torch.ones(3), [1, 2], "text"):
        with pytest.raises(ProtocolError):
            unpack(found, safe=False, main=MAIN)  # type: ignore[arg-type]  # on purpose


# --- tickets ----------------------------------------------------------------------------------------------------------


def given(owner: Tickets, worker: int, *items: bytes) -> list[Taken]:
    """These items, as they are given to that worker."""
    return [*map(Taken, split_tickets(owner.issue(worker, items)), items)]


def test_what_was_given_comes_back_once() -> None:
    """In any order and any company; some of it in vain brings none of it back."""
    owner = Tickets()
    first, second, third = given(owner, 1, b"a", b"b", b"b")
    assert owner.redeem(1, 0, [third, first])
    assert not owner.redeem(1, 0, [second, first]) and not owner.redeem(1, 0, [second, second])
    assert owner.redeem(1, 0, [second]) and not owner.redeem(1, 0, [second])


def test_nobody_else_can_make_a_ticket() -> None:
    """For another worker, another item, another number, or another queue."""
    owner, other = Tickets(), Tickets()
    first, second = given(owner, 1, b"a", b"b")
    assert not owner.redeem(2, 0, [first])
    assert not owner.redeem(1, 0, [Taken(first.ticket, b"b")])
    assert not owner.redeem(1, 0, [Taken(second.ticket[:8] + first.ticket[8:], b"a")])
    assert not owner.redeem(1, 0, given(other, 1, b"a"))
    assert not owner.redeem(1, 0, [Taken(bytes(TICKET), b"a")])
    assert owner.redeem(1, 0, [first, second])
