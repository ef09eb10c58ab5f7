"""What a thread waits at that may have two reasons to go on: it is woken, or a descriptor has something."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ...locks import RLock
from .host import most_descriptors

# Of the descriptors that the process may have, wakeups take none beyond this share: others need them more.
_SHARE = 0.5


class Source(Protocol):
    """What has a descriptor that a thread can wait for."""

    def attach(self, epoll: select.epoll) -> bool:
        """Have the epoll of the calling thread tell it when there is something; False if that cannot be now.

        While the thread does not wait, others have to see to it.
        """


class WakeUp:
    """An eventfd of one thread, and an epoll with that and one more descriptor. The thread waits there; `release`
    is for all others, as the method of a lock is.

    event: the eventfd, as the epoll tells of it. watched: gives the source whose descriptor was added last; None if
    there is none, or it is not there any more, as it is not kept alive.
    """

    def __init__(self) -> None:
        """Raises OSError if there can be no more descriptors."""
        self.event: int = os.eventfd(0, os.EFD_CLOEXEC)
        self.watched: Callable[[], Any] = _nothing
        # Reentrant: a signal handler may ask for the same. It keeps the descriptor from being another's by then.
        self._lock = RLock()
        try:
            self.epoll: select.epoll = self._make()
        except OSError:
            os.close(self.event)
            raise

    def _make(self) -> select.epoll:
        epoll = select.epoll()
        epoll.register(self.event, select.EPOLLIN)
        return epoll

    def watch(self, source: Source) -> bool:
        """Add the descriptor of that, in place of the one before; False if that cannot be now. By the thread."""
        try:
            if self.watched is not _nothing:
                fresh = self._make()
                self.epoll.close()  # whose descriptors others are told of from now on
                self.epoll, self.watched = fresh, _nothing
            if not source.attach(self.epoll):
                return False
        except OSError:  # there are no more descriptors
            return False
        self.watched = weakref.ref(source)
        return True

    @classmethod
    def make(cls) -> WakeUp | None:
        """One more, if the process has plenty of descriptors: the system gives the lowest, so a high one says that few
        are left.
        """
        try:
            made = cls()
        except OSError:
            return None
        if made.epoll.fileno() < most_descriptors() * _SHARE:
            return made
        made.close()
        return None

    def release(self) -> None:
        """Have the thread wake up, also if it does not wait yet. Nothing after `close`."""
        with self._lock:
            if self.event >= 0:
                os.eventfd_write(self.event, 1)

    def take(self) -> None:
        """Wait for `release`, which follows or has been there."""
        os.eventfd_read(self.event)

    def close(self) -> None:
        """Let go of the descriptors. By the thread, which ends."""
        with self._lock:
            event, self.event = self.event, -1
        self.epoll.close()
        os.close(event)


def _nothing() -> None:
    return None
