"""How the observers of a worker are asked about a message that leaves, and told of one that has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...protocol.frames import HEAD, Buffer
from ...protocol.identity import WorkerRecord
from ..engine.observing import Observer, Passage


def ask(observers: Sequence[Observer], passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
    """Ask one observer after the other; the last one that lets the message pass has it sent."""
    if observers:
        following = partial(ask, observers[1:], passage, send, drop)
        observers[0].leaving(passage, following, drop)
    else:
        send()


def tell(observers: Sequence[Observer], passage: Passage) -> None:
    """That message has arrived."""
    for observer in observers:
        observer.arriving(passage)


def frame_passage(kind: int, call_id: int, frame: Sequence[Buffer], call: object, record: WorkerRecord) -> Passage:
    """A message that leaves whole in its frame."""
    _, length, count, _, _ = HEAD.unpack_from(frame[0])
    start = HEAD.size + 8 * count
    return Passage(kind, call_id, bytes(frame[0][start : start + length]), sum(map(len, frame)) - start, call, record)
