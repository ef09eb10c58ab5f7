"""Wake-ups of threads that also wait for a descriptor: an eventfd and an epoll."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ...locks import RLock
from .host import most_descriptors

# The share of the process's descriptors that wake-ups may take.
_SHARE = 0.5


class Source(Protocol):
    """An owner of a descriptor for which a thread can wait."""

    def attach(self, epoll: select.epoll) -> bool:
        """Add the descriptor to the epoll of the calling thread; False if that is impossible now.

        While the thread does not wait, the loop reads the descriptor.
        """


class WakeUp:
    """An eventfd of one thread, and an epoll with it and one more descriptor. The thread waits there; other threads
    call `release`, as of a lock.

    event: the descriptor of the eventfd. watched: returns the source whose descriptor was added last, which is held
    weakly; None if there is none.
    """

    def __init__(self) -> None:
        """Raises OSError if there can be no more descriptors."""
        self.event: int = os.eventfd(0, os.EFD_CLOEXEC)
        self.watched: Callable[[], Any] = _nothing
        # Reentrant for signal handlers. Keeps `event` from being closed, and reused, during a write.
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
        """Add the source's descriptor, in place of the one before; False if that is impossible now. By the thread."""
        try:
            if self.watched is not _nothing:
                fresh = self._make()
                self.epoll.close()  # its descriptors go back to the loop
                self.epoll, self.watched = fresh, _nothing
            if not source.attach(self.epoll):
                return False
        except OSError:  # no descriptors are left
            return False
        self.watched = weakref.ref(source)
        return True

    @classmethod
    def make(cls) -> WakeUp | None:
        """One more, if the process has plenty of descriptors. The system gives the lowest, so a high one shows that few
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
        """Wake the thread up, also if it does not wait yet. Does nothing after `close`."""
        with self._lock:
            if self.event >= 0:
                os.eventfd_write(self.event, 1)

    def take(self) -> None:
        """Consume one `release`, which has come or follows at once."""
        os.eventfd_read(self.event)

    def close(self) -> None:
        """Close the descriptors. By the thread, which ends."""
        with self._lock:
            event, self.event = self.event, -1
        self.epoll.close()
        os.close(event)


def _nothing() -> None:
    return None
