"""Locks that are released even if a signal handler raises while a ``with`` takes them. Only on Python 3.14 a handler
may run between taking a lock and the body of the ``with``; its exception would leave the lock locked for good. So on
3.14 ``__enter__`` is a Python function that releases the lock on an error; the interpreter returns from it without
looking for signals. It must know the owner, so `Lock` is an RLock there. ``__exit__`` stays a C function: a Python one
could be interrupted before it begins.
"""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info[:2] == (3, 14):
    from _thread import RLock as _RLock

    class RLock(_RLock):
        """As ``threading.RLock``."""

        def __enter__(self) -> bool:
            taken = False
            try:
                taken = self.acquire()
            finally:
                if not taken and self._is_owned():
                    self.release()
            return taken

    class Lock(RLock):
        """A lock that no thread enters twice."""

else:
    from _thread import RLock as RLock
    from _thread import allocate_lock as Lock


__all__ = ["Lock", "RLock", "is_owned", "release"]


def release(lock: Any) -> None:
    """Release an RLock once; no effect if this thread does not hold it (any more)."""
    try:
        lock.release()
    except RuntimeError:
        return


def is_owned(lock: Any) -> bool:
    """Whether this thread holds an RLock, as threading.Condition asks."""
    owned: bool = lock._is_owned()
    return owned
