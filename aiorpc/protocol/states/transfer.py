"""The life of a transfer of the bulk channel, at the end to which it comes."""

from __future__ import annotations

from .table import Label, Table, Transition, from_each


class TransferState(Label):
    """See `TRANSFER`."""

    UNKNOWN = "unknown"
    ARRIVING = "arriving"
    NAMED = "named"
    WHOLE = "whole"
    GONE = "gone"
    HANDED_OVER = "handed over"
    FORGOTTEN = "forgotten"


class TransferEvent(Label):
    """What the state of a transfer depends on."""

    CHUNK = "a chunk begins to come"
    LAST_CHUNK = "the last chunk is in place"
    MESSAGE = "its message came"
    GIVEN_UP_POSTED = "given up, its message was sent"
    GIVEN_UP_UNPOSTED = "given up, its message will not be sent"
    CLOSED = "the channel is closed"


_S, _E = TransferState, TransferEvent

TRANSFER: Table[TransferState, TransferEvent] = Table(
    "incoming transfer of the bulk channel",
    about=(
        "Chunks of a transfer and its message come over two connections, so either may be first. The buffer is handed "
        "over, or the reason why there is none."
    ),
    initial=_S.UNKNOWN,
    meanings={
        _S.UNKNOWN: "Nothing of it has come.",
        _S.ARRIVING: "Chunks come; its message has not come.",
        _S.NAMED: "Its message has come, and waits for chunks.",
        _S.WHOLE: "All chunks are in place; its message has not come.",
        _S.GONE: "Its sender has given it up; its message has not come.",
        _S.HANDED_OVER: "The message has the buffer, or the reason why there is none.",
        _S.FORGOTTEN: "Nothing of it is kept.",
    },
    transitions=(
        Transition(_S.UNKNOWN, _E.CHUNK, _S.ARRIVING, "Memory for all of it is taken, or the reason why not is kept."),
        Transition(_S.UNKNOWN, _E.MESSAGE, _S.NAMED, "Memory for all of it is taken, or the reason why not is kept."),
        Transition(_S.UNKNOWN, _E.GIVEN_UP_POSTED, _S.GONE),
        Transition(_S.ARRIVING, _E.CHUNK, _S.ARRIVING),
        Transition(_S.ARRIVING, _E.LAST_CHUNK, _S.WHOLE),
        Transition(_S.ARRIVING, _E.MESSAGE, _S.NAMED),
        Transition(_S.ARRIVING, _E.GIVEN_UP_POSTED, _S.GONE, "Its memory is let go."),
        Transition(_S.NAMED, _E.CHUNK, _S.NAMED),
        Transition(_S.NAMED, _E.LAST_CHUNK, _S.HANDED_OVER),
        Transition(_S.NAMED, _E.GIVEN_UP_POSTED, _S.HANDED_OVER, "The message fails with RpcCancelled."),
        Transition(_S.WHOLE, _E.MESSAGE, _S.HANDED_OVER),
        Transition(_S.GONE, _E.MESSAGE, _S.HANDED_OVER, "The message fails with RpcCancelled."),
        *from_each((_S.UNKNOWN, _S.ARRIVING, _S.WHOLE), _E.GIVEN_UP_UNPOSTED, _S.FORGOTTEN),
        *from_each((_S.ARRIVING, _S.NAMED, _S.WHOLE, _S.GONE), _E.CLOSED, _S.FORGOTTEN),
    ),
    final=(_S.HANDED_OVER, _S.FORGOTTEN),
)
