"""Watches processes of this host and sees them die, even where their children hold their sockets open.

There is one pidfd for each process (Linux 5.3).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from ...protocol.identity import WorkerRecord


class ProcessWatch:
    """Calls `on_exit` on the loop once for each watched worker whose process has ended.

    On a system without pidfd, a death shows only by the end of the connections. All methods belong to the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[WorkerRecord], None]) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._descriptors: dict[str, int] = {}

    def add(self, record: WorkerRecord) -> bool:
        """Watch the process of a worker on this host, if it is not watched already. False if the system cannot."""
        if record.incarnation in self._descriptors:
            return True
        if not hasattr(os, "pidfd_open"):
            return False
        try:
            descriptor = os.pidfd_open(record.pid)
        except ProcessLookupError:
            self._loop.call_soon(self._on_exit, record)
            return True
        except (OSError, OverflowError):  # OverflowError for an impossible pid
            return False
        self._descriptors[record.incarnation] = descriptor
        self._loop.add_reader(descriptor, self._exited, record)
        return True

    def _exited(self, record: WorkerRecord) -> None:
        self.remove(record)
        self._on_exit(record)

    def remove(self, record: WorkerRecord) -> None:
        """Stop watching."""
        descriptor = self._descriptors.pop(record.incarnation, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """Stop watching all."""
        for descriptor in self._descriptors.values():
            self._loop.remove_reader(descriptor)
        self.close_in_child()

    def close_in_child(self) -> None:
        """After a fork: close the copies; the loop is the parent's."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
