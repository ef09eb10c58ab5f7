"""Counts what the readers of one name have, for the deliveries that wait for them. Without I/O.

The counts follow each change: a delivery costs one step for each reader that gets its version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...protocol.identity import WorkerInfo
from ...protocol.publication import needed

# Stands for the number of a subscription of a worker that may subscribe and has not asked yet.
_EXPECTED = 0
# How many lost readers are remembered.
_MOST_LOST = 256


@dataclass(frozen=True)
class Delivery:
    """How far a version has come: the readers that have it or a newer one whole, and those that do not.

    version: its number. has, missing: workers that subscribe to the name. lost: those that left or were lost before
    they had it. reached: whether as many have it as were asked for.
    """

    version: int
    has: tuple[WorkerInfo, ...]
    missing: tuple[WorkerInfo, ...]
    lost: tuple[WorkerInfo, ...]
    reached: bool


@dataclass(eq=False)
class AwaitedVersion:
    """A version whose delivery is waited for. quorum: as of `needed`. has: how many readers have it."""

    version: int
    quorum: float | None
    has: int = 0


@dataclass(eq=False)
class _ReadingWorker:
    """One worker. has: what each of its subscriptions has, by number. least: what all of them have."""

    has: dict[int, int] = field(default_factory=dict)
    least: int = 0


class Readers:
    """The readers of one name. On one thread."""

    def __init__(self) -> None:
        self._readers: dict[WorkerInfo, _ReadingWorker] = {}
        self._lost: dict[WorkerInfo, tuple[int, int]] = {}  # the version that it had, and the newest one then
        self._awaited: set[AwaitedVersion] = set()

    # --- readers ------------------------------------------------------------------------------------------------------

    def expect(self, info: WorkerInfo) -> None:
        """A worker may subscribe, and has not asked yet."""
        if info not in self._readers:
            self._put(info, _EXPECTED, 0)

    def expect_no_more(self, info: WorkerInfo) -> None:
        """Do not wait for a worker, unless it has asked meanwhile."""
        self._drop(info, _EXPECTED)

    def has(self, info: WorkerInfo, subscription: int, version: int) -> None:
        """A subscription of a worker has a whole version; 0 for none."""
        self._put(info, subscription, version)
        self._drop(info, _EXPECTED)

    def ended(self, info: WorkerInfo, subscription: int) -> None:
        """A subscription of a worker has ended, or has become a leader's."""
        self._drop(info, subscription)

    def lost(self, info: WorkerInfo, subscription: int, version: int, newest: int) -> None:
        """The worker of a subscription has left or was lost. version: what it had; newest: the newest one then."""
        self._drop(info, subscription)
        self._lost[info] = version, newest
        while len(self._lost) > _MOST_LOST:
            del self._lost[next(iter(self._lost))]

    def _put(self, info: WorkerInfo, subscription: int, version: int) -> None:
        reader = self._readers.get(info)
        if reader is None:
            reader = self._readers[info] = _ReadingWorker()
        if reader.has.get(subscription) != version:
            reader.has[subscription] = version
            self._count(reader)

    def _drop(self, info: WorkerInfo, subscription: int) -> None:
        reader = self._readers.get(info)
        if reader is not None and reader.has.pop(subscription, None) is not None:
            self._count(reader)
            if not reader.has:
                del self._readers[info]

    def _count(self, reader: _ReadingWorker) -> None:
        before, reader.least = reader.least, min(reader.has.values(), default=0)
        for awaited in self._awaited if before != reader.least else ():
            awaited.has += (reader.least >= awaited.version) - (before >= awaited.version)

    # --- deliveries ---------------------------------------------------------------------------------------------------

    def await_version(self, awaited: AwaitedVersion) -> None:
        """Begin to count the readers that have a version."""
        awaited.has = sum(reader.least >= awaited.version for reader in self._readers.values())
        self._awaited.add(awaited)

    def leave(self, awaited: AwaitedVersion) -> None:
        """Stop counting for a delivery."""
        self._awaited.discard(awaited)

    def reached(self, awaited: AwaitedVersion) -> bool:
        """Whether enough readers have the version."""
        return awaited.has >= needed(awaited.quorum, len(self._readers))

    def delivery(self, awaited: AwaitedVersion) -> Delivery:
        """How far a version has come, with all readers by name."""
        version = awaited.version
        has = sorted(info for info, reader in self._readers.items() if reader.least >= version)
        missing = sorted(info for info, reader in self._readers.items() if reader.least < version)
        lost = tuple(info for info, (had, newest) in self._lost.items() if had < version <= newest)
        return Delivery(version, tuple(has), tuple(missing), lost, self.reached(awaited))
