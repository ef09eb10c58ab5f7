"""Who publishes which name, as far as one worker has heard of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ...logs import logger
from ...protocol.publication import Lease

# Names that other workers publish, as far as this one keeps who does; and how many have to come before it looks which
# of them it need not know any more.
_MOST_NAMES, _MANY_NAMES = 65_536, 64


class KnownLeases:
    """The lease to each name that is known: as it stands in the store of the group (`told.py`). On the loop.

    worker: the name of this worker, for the log. read_here: gives the names that are read here, whose leases are kept
    in any case; has_gone: whether the worker of that id is gone. A lease that is not here is found in the
    store. changed: is set, and another one is put in its place, when a lease has come, or the group has changed.
    """

    def __init__(self, worker: str, read_here: Callable[[], Collection[str]], has_gone: Callable[[int], bool]) -> None:
        self.changed: asyncio.Event = asyncio.Event()
        self._worker = worker
        self._read_here = read_here
        self._has_gone = has_gone
        self._leases: dict[str, Lease] = {}
        self._unseen, self._look_after = 0, _MANY_NAMES  # names since the last look at them, and before the next one
        self._full = False  # whether it was said that there is no room for more
        self._over: dict[
            tuple[str, int], int
        ] = {}  # by name and publisher: turns of leases that have ended, the latest

    def get(self, name: str) -> Lease | None:
        """The lease to that name, None if none is known."""
        return self._leases.get(name)

    def hear(self, lease: Lease) -> None:
        """A lease that this worker needs, or has room for; nothing if it has ended."""
        known = self._leases.get(lease.name)
        if lease.turn <= self._over.get((lease.name, lease.publisher), 0):  # it was read in the store before it ended
            return
        if known != lease:
            if known is None:
                self._look()
            self._leases[lease.name] = lease
            self.wake()

    def offer(self, lease: Lease) -> None:
        """A lease of which another worker has told: it is kept if the name is read here, or if there is room."""
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
        """That lease of that worker has ended, as it says itself. Whether it was the one that was known."""
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
        """Wake those that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _look(self) -> None:
        """One more name: forget the leases of workers that are gone, for names that are not read here.

        All are looked at once as many have come as were left the last time, or as there was room for, but not before
        some have come (`_MANY_NAMES`): so it costs little on average.
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
