"""An arena that grows by itself, where a worker's does so in the background once a message has found no room."""

from __future__ import annotations

from aiorpc.channels.arena import GROW_SIZE, Arena, Block


class GrowingArena(Arena):
    """For tests of blocks, which need not see to room first. What it takes is not touched before it is used."""

    def allocate(self, size: int) -> Block | None:
        """As of an Arena; where that has no room there may be some then."""
        block = super().allocate(size)
        if size <= 0:
            return block
        while block is None:  # each turn the arena grows, and it is bounded
            with self._growth:
                extent = self._take_cold(size, GROW_SIZE)
                if extent is None:
                    return None
                self._give_room(extent)
            block = super().allocate(size)
        return block
