"""Memory of the arena that this process fills first and lends later.

A value that must be copied before it is sent is copied into such a block, and lent from there without a second copy.
The owner of the array only reads it once it may have been lent.

    state of the block    holders, as the arena counts them
    kept                  this process, as long as any view of the array lives
    kept and lent         this process, and each peer that it is lent to
    lent                  these peers: the last view has died here

The last view may die in any thread, at any time. That only notes it; `collect` then gives the block back.
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
    """Notes when the last view of an array over a block has died: all views keep the array itself alive."""

    address: int
    block: Block


class Keeper:
    """What one process keeps in its arena. Any thread.

    on_keep: called from any thread when `collect` may soon have something to give back. on_cold: called with the number
    of bytes that the arena had no warm room for. Fractions of the arena's limit: share: the most that may be kept;
    soft: if more is in use in all, nothing more is kept.
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
        #: By address; public, for a cheap check whether there is anything to `find`.
        self.keeps: dict[int, _Keep] = {}
        self._dead: deque[_Keep] = deque()

    @property
    def kept(self) -> int:
        """Bytes of all kept blocks, including those that `collect` has yet to give back."""
        return sum(keep.block.size for keep in self.keeps.copy().values())

    def _has_room(self, size: int) -> bool:
        used = self._arena.used + size
        return used <= self._share or (used <= self._soft and self.kept + size <= self._share)

    def keep(self, size: int) -> Bytes | None:
        """Memory for so many bytes, to be written now; None if there is no warm room for it, or too much in use."""
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
        """The kept block that this buffer covers exactly; None for any other memory."""
        try:
            keep = self.keeps.get(_address_of(buffer))
        except (TypeError, ValueError):  # read-only memory, or no bytes: not a kept block
            return None
        return keep.block if keep is not None and keep.block.size == len(buffer) else None

    def collect(self) -> bool:
        """Give blocks without views back to the arena; returns whether there were any."""
        found = False
        while self._dead:
            try:
                keep = self._dead.popleft()
            except IndexError:  # another thread has found it
                break
            self.keeps.pop(keep.address, None)  # first: once the block is free the next one may have its address
            self._arena.free(keep.block)
            found = True
        return found

    def close(self) -> None:
        """The arena is closed: nothing is to be given back. Kept arrays stay valid as long as they live."""
        self.keeps.clear()  # a deleted weak reference calls nothing
        self._dead.clear()


def _address_of(buffer: Any) -> int:
    """Address of bytes that may be written to. Takes a fifth of the time of numpy's array interface."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
