"""The life of a message with buffers that arrives on a link (an envelope), until it is handed over."""

from __future__ import annotations

from .table import Label, Table, Transition, from_each


class MessageState(Label):
    """See `MESSAGE`."""

    OPENED = "opened"
    WAITING = "waiting"
    BROKEN = "broken"
    HANDED_OVER = "handed over"
    FAILED = "failed"
    DROPPED = "dropped"


class MessageEvent(Label):
    """What the state of a message depends on."""

    ALL_THERE = "all buffers are there"
    SOME_MISSING = "some buffers are missing"
    ONE_CAME = "a buffer came"
    ONE_FAILED = "a buffer is lost"
    LAST_CAME = "the last missing buffer came"
    LAST_FAILED = "the last missing buffer is lost"
    DEVICE_FAILED = "the device has an error"
    CLOSED = "the link is closed"


_S, _E = MessageState, MessageEvent
_LAST_FAILS = "Its call fails, and no other; then what waited behind it is handed over."

MESSAGE: Table[MessageState, MessageEvent] = Table(
    "message with buffers, as it arrives",
    about=(
        "While a message is WAITING or BROKEN, later frames of the same call wait behind it; other calls do not. All "
        "on the loop."
    ),
    initial=_S.OPENED,
    meanings={
        _S.OPENED: "The channels are asked for its buffers.",
        _S.WAITING: "Buffers are missing.",
        _S.BROKEN: "One buffer is lost, and others are still missing; they are taken first, and dropped.",
        _S.HANDED_OVER: "The receiver of the link's messages has it, whole.",
        _S.FAILED: "The receiver of the link's messages has it, without buffers and with the reason.",
        _S.DROPPED: "It is dropped, and the frames behind it.",
    },
    transitions=(
        Transition(_S.OPENED, _E.ALL_THERE, _S.HANDED_OVER, "Nothing waits."),
        Transition(_S.OPENED, _E.SOME_MISSING, _S.WAITING),
        Transition(_S.OPENED, _E.ONE_FAILED, _S.BROKEN, "Some are still missing."),
        Transition(_S.OPENED, _E.LAST_FAILED, _S.FAILED, "Its call fails, and no other."),
        Transition(_S.OPENED, _E.DEVICE_FAILED, _S.FAILED, "Buffers that come later are dropped."),
        Transition(_S.WAITING, _E.ONE_CAME, _S.WAITING),
        Transition(_S.WAITING, _E.ONE_FAILED, _S.BROKEN),
        Transition(_S.WAITING, _E.LAST_CAME, _S.HANDED_OVER, "Then what waited behind it, in order."),
        Transition(_S.WAITING, _E.LAST_FAILED, _S.FAILED, _LAST_FAILS),
        Transition(_S.BROKEN, _E.ONE_CAME, _S.BROKEN),
        Transition(_S.BROKEN, _E.ONE_FAILED, _S.BROKEN),
        Transition(_S.BROKEN, _E.LAST_CAME, _S.FAILED, _LAST_FAILS),
        Transition(_S.BROKEN, _E.LAST_FAILED, _S.FAILED, _LAST_FAILS),
        *from_each((_S.WAITING, _S.BROKEN), _E.CLOSED, _S.DROPPED, "The calls fail with their connection."),
    ),
    final=(_S.HANDED_OVER, _S.FAILED, _S.DROPPED),
)
