"""Shared memory in the registry of channels: what a worker announces of it, and the channel's context."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from ...channels import ChannelContext, ChannelLink
from ...channels.shared import NAME, SharedMemory, descriptor, obstacle
from .channel_link import ChannelEnd
from .links import Links
from .memory import Memory

# Seconds that a thread waits until the other end has mapped memory into which a large buffer was copied; mapping takes
# about one millisecond. After that the buffer goes another way.
MAP_PATIENCE = 0.25


class SharingContext(ChannelContext):
    """See the module. The first segment proves whether memory really is shared (`channels/shared.py`)."""

    name = NAME
    priority = 100

    def __init__(self, worker: Links) -> None:
        self._engine = worker.engine
        self._memory = worker.memory

    def descriptor(self, link: ChannelLink) -> object:
        """This process, on links within one host."""
        return descriptor() if link.local and self._engine.options.shared_memory else None

    def obstacle(self, opener: object, acceptor: object) -> str:
        """See `shared.obstacle`."""
        return obstacle(opener, acceptor)

    def refused(self, link: ChannelLink, reason: str) -> None:
        """Log it, once for each reason."""
        self._memory.cannot_share(link.record, reason or "it does not share memory")

    def open(self, link: ChannelLink) -> SharedMemory:
        """An end that lends blocks of the worker's arena."""
        assert isinstance(link, ChannelEnd), "it belongs to a link of this package"
        memory = self._memory
        channel = SharedMemory(
            memory.arena,
            link.record.pid,
            _Surroundings(link, memory),
            least=self._engine.options.min_shared_bytes,
            keeper=memory.keeper,
        )
        memory.add(channel, link.record, prepare=link.opener)  # a caller sends more, and first
        return channel


class _Surroundings(ChannelEnd):
    def __init__(self, end: ChannelEnd, memory: Memory) -> None:
        super().__init__(end.link, end.number)
        self._memory = memory
        self.on_cold: Callable[[int], None] = memory.want
        self.on_closed: Callable[[SharedMemory], None] = memory.ended

    def may_wait(self) -> bool:
        # Nor may a loop of the program wait, if the worker has another one (`dedicated_loop`).
        return threading.get_ident() != self.link.engine.thread and asyncio._get_running_loop() is None

    def wait(self, wait: Callable[[float], object]) -> None:
        # Two workers that send to each other wait in all of their background threads, which are needed for mapping.
        pools = self.link.engine.pool, self.link.engine.background
        for pool in pools:
            pool.enter_blocked()
        try:
            wait(MAP_PATIENCE)
        finally:
            for pool in pools:
                pool.exit_blocked()

    def on_refused(self, reason: str) -> None:
        self._memory.cannot_share(self.record, reason)
