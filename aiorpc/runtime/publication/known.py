"""The leases to names that one worker knows of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ...logs import logger
from ...protocol.publication import Lease

# The most names whose leases are kept, and the fewest new names before leases are dropped that are not needed any more.
_MOST_NAMES, _MANY_NAMES = 65_536, 64


class KnownLeases:
    """The known lease to each name, as it stands in the group's store (`told.py`). On the loop.

    worker: the name of this worker, for the log. read_here: returns the names that are read here; their leases are
    always kept. has_gone: whether the worker of an id is gone. changed: an event that is set, and replaced by a new
    one, when a lease has come or the group has changed.
    """

    def __init__(self, worker: str, read_here: Callable[[], Collection[str]], has_gone: Callable[[int], bool]) -> None:
        self.changed: asyncio.Event = asyncio.Event()
        self._worker = worker
        self._read_here = read_here
        self._has_gone = has_gone
        self._leases: dict[str, Lease] = {}
        self._unseen, self._look_after = 0, _MANY_NAMES  # new names since the last clean-up, and until the next
        self._full = False  # whether the log has the warning of no room
        # The last turn of leases that have ended, by name and publisher.
        self._over: dict[tuple[str, int], int] = {}

    def get(self, name: str) -> Lease | None:
        """The known lease to a name, or None."""
        return self._leases.get(name)

    def hear(self, lease: Lease) -> None:
        """Keep a lease, unless it has ended."""
        known = self._leases.get(lease.name)
        if lease.turn <= self._over.get(
            (lease.name, lease.publisher), 0
        ):  # this one was read in the store before it ended
            return
        if known != lease:
            if known is None:
                self._look()
            self._leases[lease.name] = lease
            self.wake()

    def offer(self, lease: Lease) -> None:
        """Keep a lease that another worker has announced, if the name is read here or there is room."""
        if lease.name in self._leases or len(self._leases) < _MOST_NAMES or lease.name in self._read_here():
            self.hear(lease)
            return
        self._look()
        if not self._full:
            self._full = True
            logger.warning(
                "worker %s keeps who publishes %d names, and no more: of further ones it asks the store of the group",
                self._worker,
                _MOST_NAMES,
            )

    def end(self, name: str, turn: int, publisher: int) -> bool:
        """A worker has ended its lease. Returns whether that was the known one."""
        self._over.pop((name, publisher), None)
        self._over[name, publisher] = turn
        if len(self._over) > _MANY_NAMES:
            del self._over[next(iter(self._over))]
        lease = self._leases.get(name)
        if lease is None or lease.publisher != publisher or lease.turn != turn:
            return False
        del self._leases[name]
        return True

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _look(self) -> None:
        """Count a new name; from time to time forget leases of gone workers to names that are not read here.

        The next clean-up comes after as many new names as were left by the last one, so it costs little on average.
        """
        self._unseen += 1
        if self._unseen < self._look_after:
            return
        read_here = self._read_here()
        for name, lease in list(self._leases.items()):
            if name not in read_here and self._has_gone(lease.publisher):
                del self._leases[name]
        left = len(self._leases)
        self._unseen, self._look_after = 0, max(_MANY_NAMES, min(left, _MOST_NAMES - left))
