"""Locks that are given back whatever a signal handler raises as a ``with`` takes them.

On Python 3.14, and no other, a handler may run between taking a lock and the body of the ``with``: what it raises there
passes the ``with`` by, and the lock stays locked for good. So there a lock is taken by a function of its own, which
gives it back; from that the interpreter returns without a look for signals. The lock has to know its owner for that, so
one that nobody enters twice is an RLock, too. What gives it back at the end stays a function of C's: one of Python's
could be interrupted before it has done anything.
"""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info[:2] == (3, 14):
    from _thread import RLock as _RLock

    class RLock(_RLock):
        """As that of ``threading``."""

        def __enter__(self) -> bool:
            taken = False
            try:
                taken = self.acquire()
            finally:
                if not taken and self._is_owned():
                    self.release()
            return taken

    class Lock(RLock):
        """One that nobody enters twice."""

else:
    from _thread import RLock as RLock
    from _thread import allocate_lock as Lock


__all__ = ["Lock", "RLock", "is_owned", "release"]


def release(lock: Any) -> None:
    """Let go of that RLock, once; nothing if this thread does not hold it (any more)."""
    try:
        lock.release()
    except RuntimeError:
        return


def is_owned(lock: Any) -> bool:
    """Whether this thread holds that RLock; as threading.Condition asks."""
    owned: bool = lock._is_owned()
    return owned
