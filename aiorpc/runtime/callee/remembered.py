"""The answers of idempotent calls of one connection: a call that comes again gets its first answer.

A caller numbers its idempotent calls, and sends with each how often it has sent it before. The answers belong to the
connection: no other caller gets them, and they end with it. Their number and bytes are bounded, and the oldest are
dropped. A call that comes again later is refused, because it may have run, unless its number is among the calls that
came and were not run. These numbers are kept, too, and bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...channels import AnyBuffer
from ...channels.accelerator import DeviceBuffer
from ...errors import Overloaded, RpcError
from ...locks import Lock
from ...options import RpcBackendOptions
from ...protocol.frames import Buffer
from ..calls.current import ServedCall

# Numbers of calls that were not run, kept for each answer: they take less memory than the answers.
_NUMBERS = 8


class KeptAnswer(NamedTuple):
    """An answer. kind, body, buffers: of its message. unkept: why it cannot be given again, in place of a message."""

    kind: int
    body: bytes
    buffers: Sequence[Buffer]
    unkept: str = ""

    @property
    def size(self) -> int:
        """Bytes of body and buffers."""
        return len(self.body) + sum(map(len, self.buffers))


class _Running(NamedTuple):
    """A call without an answer yet. waiting: later tries, which get the same answer."""

    call: ServedCall
    waiting: list[ServedCall]


class Remembered:
    """See the module. Any thread."""

    def __init__(self, options: RpcBackendOptions) -> None:
        self._most, self._most_bytes = options.max_remembered_answers, options.max_remembered_bytes
        self._running: dict[int, _Running] = {}  # by number
        self._kept: dict[int, KeptAnswer] = {}  # by number, the oldest first
        self._bytes = 0
        self._forgotten = -1  # the highest number of a dropped answer
        self._refused: dict[int, None] = {}  # numbers of calls that were not run, the latest last
        self._lock = Lock()

    def __len__(self) -> int:
        """The number of kept answers."""
        return len(self._kept)

    def admit(self, call: ServedCall) -> KeptAnswer | RpcError | bool:
        """An idempotent call has come: True to run it, its kept answer, False if an earlier try still runs, or the
        error that ends it.
        """
        number, before = _once(call)
        with self._lock:
            running = self._running.get(number)
            if running is not None:
                running.waiting.append(call)
                return False
            answer = self._kept.get(number)
            if answer is not None:
                return answer if not answer.unkept else not_there(answer)
            if not self._is_new(number, before):
                return RpcError(
                    "an earlier try of this call may have been run, and what it answered was forgotten "
                    f"({self._most} answers, max_remembered_answers, or {self._most_bytes} bytes, max_remembered_bytes)"
                )
            self._refused.pop(number, None)
            self._running[number] = _Running(call, [])
            return True

    def _is_new(self, number: int, before: int) -> bool:
        """Whether a call that is not running, and has no answer here, was certainly not run. With the lock."""
        return not before or number > self._forgotten or number in self._refused

    def has(self, call: ServedCall) -> bool:
        """Whether an answer of that call is kept."""
        return _once(call)[0] in self._kept

    def snapshot(self, kind: int, body: bytes, buffers: Sequence[AnyBuffer], references: bool = False) -> KeptAnswer:
        """A copy of an answer: the program may change the returned value later.

        references: whether it has references inside.
        """
        size = len(body) + sum(map(len, buffers))
        if references:
            return unkept("references were in it, and each travels once")
        if any(type(buffer) is DeviceBuffer for buffer in buffers):
            return unkept("tensors on devices were in it")
        if size > self._most_bytes:
            return unkept(f"it has {size} bytes, more than are kept (max_remembered_bytes)")
        return KeptAnswer(kind, body, [bytes(buffer) for buffer in buffers])  # type: ignore[arg-type]  # as asked above

    def keep(self, call: ServedCall, answer: KeptAnswer) -> list[ServedCall]:
        """Keep the answer of a call. Returns the later tries that wait for it."""
        number, _ = _once(call)
        with self._lock:
            running = self._running.get(number)
            if running is None or running.call is not call:
                return []
            del self._running[number]
            self._kept[number] = answer
            self._bytes += answer.size
            while True:
                if len(self._kept) <= self._most and self._bytes <= self._most_bytes:
                    break
                oldest = next(iter(self._kept))
                self._bytes -= self._kept.pop(oldest).size
                self._forgotten = max(self._forgotten, oldest)
        return running.waiting

    def drop(self, call: ServedCall) -> list[ServedCall]:
        """Forget a call that was not run, or was given up. Returns the later tries that waited for it."""
        number, before = _once(call)
        not_run = not (call.begun or call.cancelled)
        with self._lock:
            running = self._running.get(number)
            if running is None:
                # It was refused before it was admitted, or the answer of an earlier try had no room. That answer may
                # have been dropped just now: then the call is not new.
                if not_run and number not in self._kept and self._is_new(number, before):
                    self._note_refused(number)
                return []
            if running.call is not call:
                if call in running.waiting:
                    running.waiting.remove(call)
                return []
            del self._running[number]
            if not_run:
                self._note_refused(number)
        return running.waiting

    def _note_refused(self, number: int) -> None:
        """Note that no try of the call with that number was run. With the lock."""
        self._refused.pop(number, None)  # moved to the end
        self._refused[number] = None
        while len(self._refused) > self._most * _NUMBERS:
            del self._refused[next(iter(self._refused))]


def unkept(reason: str) -> KeptAnswer:
    """The entry for an answer that cannot be kept."""
    return KeptAnswer(0, b"", (), reason)


def not_there(answer: KeptAnswer) -> RpcError:
    """The error of a call whose answer cannot be given again."""
    return RpcError(f"an earlier try of this call was run, and its answer cannot be given again: {answer.unkept}")


def not_begun(call: ServedCall) -> Overloaded:
    """The error of a call that waited for the answer of an earlier try, which was given up."""
    return Overloaded(f"an earlier try of {call.function} was given up before it was answered; this one was not run")


def _once(call: ServedCall) -> Sequence[int]:
    assert call.once is not None, "it is asked of idempotent calls alone"
    return call.once
