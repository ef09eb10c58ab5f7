"""Memory of the arena that this process writes before anybody asks for it, and that is lent as it is later.

What is copied anyway, as it must not change until it is sent, is copied to where it can be lent from: there is no
second copy. Whoever has the array reads it; nobody writes to it any more once it may have been lent.

    state of the block    holders, as the arena counts them
    kept                  this process, as long as any view of the array lives
    kept and lent         this process, and each peer that it is lent to
    lent                  these peers: the last view has died here

Nobody is told when the last view dies, which may be in any thread and in the midst of anything: `collect` finds it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..protocol.frames import Buffer
from .arena import Arena, Block
from .segments import Bytes


class _Keep(weakref.ref[Bytes]):
    """Knows when the last view of an array over a block has died: all of them keep the array itself alive."""

    address: int
    block: Block


class Keeper:
    """What one process keeps in its arena. Any thread.

    on_keep: called whenever `collect` has something to look for from now on; from any thread. on_cold: called with how
    many bytes the arena had no warm room for. Fractions of the arena's limit: share: what may be kept, soft: what may
    be in use in all before nothing more is kept.
    """

    def __init__(
        self,
        arena: Arena,
        on_keep: Callable[[], None],
        on_cold: Callable[[int], None],
        *,
        share: float = 0.25,
        soft: float = 0.5,
    ) -> None:
        self._arena = arena
        self._on_keep = on_keep
        self._on_cold = on_cold
        self._share = int(share * arena.limit)
        self._soft = int(soft * arena.limit)
        #: By address; public so that one can look cheaply whether there is anything to `find`.
        self.keeps: dict[int, _Keep] = {}
        self._dead: deque[_Keep] = deque()

    @property
    def kept(self) -> int:
        """Bytes that are kept, and those that `collect` has not found yet."""
        return sum(keep.block.size for keep in self.keeps.copy().values())

    def _has_room(self, size: int) -> bool:
        used = self._arena.used + size
        return used <= self._share or (used <= self._soft and self.kept + size <= self._share)

    def keep(self, size: int) -> Bytes | None:
        """Memory for so many bytes, to be written now; None where there is no warm room for it, or too much in use."""
        self.collect()
        if not self._has_room(size):
            return None
        block = self._arena.allocate(size)
        if block is None:
            if not self._arena.closed:
                self._on_cold(size)
            return None
        try:
            array = self._arena.view(block)
        except ValueError:  # closed meanwhile
            return None
        keep = _Keep(array, self._dead.append)
        keep.address, keep.block = _address_of(array), block
        self.keeps[keep.address] = keep
        self._on_keep()
        return array

    def find(self, buffer: Buffer) -> Block | None:
        """The block that is this very buffer, all of it; None for any other memory."""
        try:
            keep = self.keeps.get(_address_of(buffer))
        except (TypeError, ValueError):  # memory that nobody may write to, or no bytes: none of ours
            return None
        return keep.block if keep is not None and keep.block.size == len(buffer) else None

    def collect(self) -> bool:
        """Give back to the arena what nobody here has any more; whether there was any."""
        found = False
        while self._dead:
            try:
                keep = self._dead.popleft()
            except IndexError:  # another thread has found it
                break
            self.keeps.pop(keep.address, None)  # before the block is free: the next one may have its address
            self._arena.free(keep.block)
            found = True
        return found

    def close(self) -> None:
        """The arena is closed: nothing is to be given back. What is kept stays valid as long as it lives."""
        self.keeps.clear()  # a weak reference that is gone calls nobody
        self._dead.clear()


def _address_of(buffer: Any) -> int:
    """Of bytes that may be written to. A fifth of the time that the array interface of numpy takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
