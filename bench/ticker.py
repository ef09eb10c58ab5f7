"""How late an event loop is."""

from __future__ import annotations

import asyncio
import time

TICK = 0.001  # seconds


class Ticker:
    """A task that sleeps for one tick after another; ``stop`` says by how much the latest of them was late."""

    def __init__(self) -> None:
        self._largest = 0.0
        self._stopping = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while not self._stopping:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            self._largest = max(self._largest, time.perf_counter() - before - TICK)

    async def stop(self) -> float:
        """Seconds; the tick that is under way counts too."""
        self._stopping = True
        await self._task
        return self._largest
