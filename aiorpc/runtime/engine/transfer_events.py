"""Transfer events: what observers see of buffers that leave and arrive by channels.

Only messages whose buffers do not go with a short frame are shown. Without observers such a message costs the test
whether `Engine.transfer_observers` is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ... import foreign
from ...logs import logger
from ...sites import spates


@dataclass(frozen=True, slots=True)
class BufferTransfer:
    """The buffers of one message.

    side: "sent": they were given to their channels, which copies those for shared memory. "received": they have come
    after their message, which has waited for them. worker: at the other end. call_id: of the message. channels: the
    names of those that carry buffers of it, without those in its frame. size: bytes of all its buffers. started, ended:
    of the copying or of the waiting, in seconds of ``time.monotonic()``. copied: whether a channel has copied any of
    them before it returned.
    """

    side: Literal["sent", "received"]
    worker: str
    call_id: int
    channels: tuple[str, ...]
    size: int
    started: float
    ended: float
    copied: bool


class TransferObserver(Protocol):
    """Sees transfers, in the thread that gives the buffers away or takes them. It returns at once."""

    def transferred(self, transfer: BufferTransfer) -> None:
        """The transfer has ended on this side."""


TransferObservers = tuple[TransferObserver, ...]


def tell_transfer(observers: Sequence[TransferObserver], event: BufferTransfer) -> None:
    """Call the observers."""
    for observer in observers:
        try:
            observer.transferred(event)
        except Exception as error:
            name = f"{type(observer).__qualname__}.transferred"
            more = spates.line(f"{name} raised")
            if more is not None:
                foreign.log_error(logger, logging.ERROR, error, "the observer of transfers %s raised%s", name, more)
