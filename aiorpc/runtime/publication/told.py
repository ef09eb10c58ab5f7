"""Leases that other workers have told of: none is believed before the store of the group has it.

A worker that publishes a name tells so to all members. That is a reason to look in the store, and no more: what stands
there is taken, whatever was told. Only while the store does not answer is the word of a worker taken, and only for a
name that no member that lives is known to publish; the store is asked again until it answers.
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

# Names that wait for the store. A worker that reads one of further ones asks the store itself.
_MOST_TOLD = 65_536
# Names that are looked up at a time.
_AT_ONCE = 256


class ToldLeases:
    """See the module. On the loop.

    read_here: gives the names that are read here. take: is given a name and the lease that stands in the store, None if
    none does. stand_in: is given one that was told, as the store does not answer.
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
        self._told: dict[str, Lease] = {}  # by name, the one that was told first
        self._running = False

    def tell(self, lease: Lease) -> None:
        """A worker has told of a lease of its own."""
        if len(self._told) < _MOST_TOLD or lease.name in self._told or lease.name in self._read_here():
            self._told.setdefault(lease.name, lease)
            self._run()

    def end(self, name: str, publisher: int) -> None:
        """A worker has told that its lease has ended."""
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
        """The names to look up next: those that are read here first, as a member may tell of any number of others."""
        read = [name for name in self._read_here() if name in self._told]
        return read or [*itertools.islice(self._told, _AT_ONCE)]

    async def _find(self, names: Sequence[str]) -> dict[str, Lease | None]:
        """The leases that stand in the store; without those that it does not say."""

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
