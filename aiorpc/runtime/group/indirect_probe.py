"""What is said of a member by somebody who may not be it: it is asked itself before that is believed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ..._typing import Function
from ...errors import RpcError
from ...logs import logger
from ...protocol.identity import WorkerRecord
from ..engine.host import provably_dead
from .interface import MembershipContext

# Seconds before each time that a member is asked whether it is there, when somebody says that it is not.
_PAUSES = (0.0, 0.05, 0.5)
# Whoever has asked for so many times as long as it asks at most was stopped meanwhile.
_STOOD_STILL = 1.5
# So often it asks then at most.
_TRIES = 3


class IndirectProbe:
    """See the module. On the loop.

    is_gone: whether a member has left or was lost. vouch: the handler that is called on others.
    """

    def __init__(self, context: MembershipContext, is_gone: Callable[[WorkerRecord], bool], vouch: Function) -> None:
        self._context = context
        self._engine = context.engine
        self._is_gone = is_gone
        self._vouch = vouch
        self._asked: dict[int, asyncio.Task[None]] = {}  # of whom something is looked into

    def look_into(
        self,
        record: WorkerRecord,
        other: WorkerRecord,
        believed: Callable[[], None],
        what: str,
        told: WorkerRecord | None = None,
    ) -> None:
        """Ask a member whether `other` and it have parted, before that is believed. told: by whom, if not by itself.

        Only a proof of who has connected would make that unnecessary: over unix sockets the kernel's word, over TCP a
        certificate. Whoever is gone does not answer.
        """
        if self._engine.closed or self._is_gone(record) or record.id in self._asked:
            return
        if record.id == self._engine.id:
            return  # we know that better
        if provably_dead(record, self._engine.record.host):
            believed()
            return
        self._asked[record.id] = self._engine.tasks.spawn(self._ask(record, other, believed, what, told))

    async def settle(self, limit: float) -> None:
        """Wait until all that is looked into now is known, for so many seconds at most."""
        if self._asked:
            await asyncio.wait(list(self._asked.values()), timeout=limit)

    async def _ask(
        self,
        record: WorkerRecord,
        other: WorkerRecord,
        believed: Callable[[], None],
        what: str,
        told: WorkerRecord | None,
    ) -> None:
        try:
            for pause in _PAUSES:  # it may come to see only now what the other one has seen
                await asyncio.sleep(pause)
                if self._is_gone(record):
                    return
                if not await self.is_together(record, other):
                    believed()
                    return
            if told is not None and self._is_gone(told):
                return  # the two had lost each other
        finally:
            self._asked.pop(record.id, None)
        logger.warning(
            "worker %s: it seemed that %s %s, but that worker is there, and says otherwise: a member may be lying",
            self._engine.name,
            record.describe(),
            what,
        )

    async def is_together(self, record: WorkerRecord, other: WorkerRecord) -> bool:
        """Whether a member says of itself that it is there, and has not parted with the other one."""
        patience = self._engine.bounds.vouch
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                async with asyncio.timeout(patience):
                    await self._context.probe(record)  # to call alone would try for longer where nobody listens
                    peer = self._context.peers.of(record)
                    together: bool = await peer.call(self._vouch, (other.id,), None, patience, system=True)
                    return together
            except (OSError, RpcError):
                if time.monotonic() - began < _STOOD_STILL * patience:
                    break  # else it is this process that was stopped, and the other one's silence says nothing
        return False
