"""Leases that other workers have announced: each is checked in the group's store.

A worker announces its lease to all members. They look in the store, and take what the store has. Only while the store
does not answer, an announced lease counts, and only for a name that no live member is known to publish. The store is
asked again until it answers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence

from ...errors import RendezvousError, StoreGone
from ...logs import logger
from ...protocol.publication import Lease
from ..engine.engine import Engine
from ..meeting.rendezvous import Rendezvous
from .leases import find_lease

# The most names that wait for the store. A subscription to any other name asks the store itself.
_MOST_TOLD = 65_536
# How many names are looked up at a time.
_AT_ONCE = 256


class ToldLeases:
    """Checks announced leases. On the loop.

    read_here: returns the names that are read here. take: takes a name and its lease in the store, or None. stand_in:
    takes an announced lease while the store does not answer.
    """

    def __init__(
        self,
        engine: Engine,
        rendezvous: Rendezvous,
        read_here: Callable[[], Collection[str]],
        take: Callable[[str, Lease | None], None],
        stand_in: Callable[[Lease], None],
    ) -> None:
        self._engine = engine
        self._rendezvous = rendezvous
        self._read_here = read_here
        self._take = take
        self._stand_in = stand_in
        self._told: dict[str, Lease] = {}  # by name, the first one announced
        self._running = False

    def tell(self, lease: Lease) -> None:
        """A worker has announced a lease of its own."""
        if len(self._told) < _MOST_TOLD or lease.name in self._told or lease.name in self._read_here():
            self._told.setdefault(lease.name, lease)
            self._run()

    def end(self, name: str, publisher: int) -> None:
        """A worker has announced the end of its lease."""
        if name in self._told and self._told[name].publisher == publisher:
            del self._told[name]

    def _run(self) -> None:
        if not self._running:
            self._running = True
            self._engine.tasks.spawn(self._look())

    async def _look(self) -> None:
        patience, look, asked = self._engine.bounds.vouch, None, self._told
        try:
            while self._told or look is not None:
                if look is None:
                    asked = {name: self._told.pop(name) for name in self._next()}
                    look = self._engine.tasks.spawn(self._find([*asked]))
                await asyncio.wait((look,), timeout=patience)
                if not look.done():  # one thread waits for the store at a time
                    unsure = self._told | asked
                else:
                    found, look = look.result(), None
                    for name, lease in found.items():
                        self._take(name, lease)
                    unsure = {name: lease for name, lease in asked.items() if name not in found}
                    self._told |= unsure
                for lease in unsure.values():
                    self._stand_in(lease)
                if unsure and look is None:
                    await asyncio.sleep(patience)
        finally:
            self._running = False

    def _next(self) -> list[str]:
        """The names to look up next. Names that are read here come first: members may announce any number of others."""
        read = [name for name in self._read_here() if name in self._told]
        return read or [*itertools.islice(self._told, _AT_ONCE)]

    async def _find(self, names: Sequence[str]) -> dict[str, Lease | None]:
        """The leases in the store. A name is missing if the store does not answer."""

        def look() -> dict[str, Lease | None]:
            found: dict[str, Lease | None] = {}
            for name in names:
                try:
                    stands = find_lease(self._rendezvous, name)
                except StoreGone as error:
                    logger.debug("worker %s cannot see who publishes %r: %s", self._engine.name, name, error)
                    break
                except RendezvousError as error:  # what stands there is no lease
                    logger.info("worker %s: %s", self._engine.name, error)
                    stands = None
                found[name] = None if stands is None else stands.lease
            return found

        return await self._engine.steps.run(look)
