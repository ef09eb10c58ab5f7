"""What both processes do for `messages`: count what they send, as numbers alone, or each message by what it is."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiorpc
from aiorpc.protocol import reference_messages
from aiorpc.protocol.frames import Kind
from aiorpc.protocol.packing import unpack
from aiorpc.runtime.caller.future import CallFuture
from aiorpc.runtime.calls.current import ServedCall
from aiorpc.runtime.engine.observing import Passage

from .count_clients import Counts, Run
from .sides import SERVER

ALL = "all"  # the name under which a worker's own number stands
REST_SECONDS = 0.05  # after a batch: what nobody waits for is sent by then


class Watch:
    """An observer that counts what leaves, by what it is, and lets it go at once. Any thread."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._lock = threading.Lock()

    def leaving(self, passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
        """Count it, and send it."""
        with self._lock:
            self.sent[said(passage)] += 1
        send()

    def holds(self) -> bool:
        """It keeps nothing."""
        return False

    def arriving(self, passage: Passage) -> None:
        """What arrives is counted at its sender."""


def said(passage: Passage) -> str:
    """What a message is: its kind, and which function or method was called, or what it says of a reference."""
    kind, call = Kind(passage.kind).name, passage.call
    if isinstance(call, CallFuture):
        return f"{kind} {call.entry.name}"
    if isinstance(call, ServedCall):
        return f"{kind} {call.function}"
    if passage.kind == Kind.REFERENCE:
        return f"{kind} {reference_messages.MESSAGES.word(reference_messages.read(unpack(passage.body)))}"
    return kind


@functools.cache
def watch() -> Watch:
    """The one watch of this process, made on first use."""
    return Watch()


def begin_to_watch() -> None:
    """Have the worker of this process show its messages from now on."""
    engine = aiorpc.current()._node.engine
    if watch() not in engine.observers:
        engine.observers = (*engine.observers, watch())


def sent() -> Counter[str]:
    """What the worker of this process has sent so far."""
    return Counter({**watch().sent, ALL: aiorpc.current().statistics().messages_sent})


def count_messages(rpc: Any, make: Callable[[], Run], times: int, batches: int, watched: bool) -> Counts:
    """What both processes send in pairs of batches: one of no operation, and one of so many.

    The former has what asking for the numbers takes, which the latter has as well. watched: also by what they are.
    """
    if watched:
        begin_to_watch()
        rpc.rpc_sync(SERVER, begin_to_watch)
    run = make()
    run(times)  # to warm up
    found: Counts = {"caller": [], "callee": []}
    for _ in range(batches):
        for each in (0, times):
            before = sent(), rpc.rpc_sync(SERVER, sent)
            run(each)
            time.sleep(REST_SECONDS)
            after = sent(), rpc.rpc_sync(SERVER, sent)
            for counts, earlier, later in zip(found.values(), before, after, strict=True):
                counts.append(later - earlier)
    return found
