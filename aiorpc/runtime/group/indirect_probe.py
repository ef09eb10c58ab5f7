"""Indirect probes: a member is asked itself before an unproved sign of its end is believed."""

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

# Seconds before each probe of a member.
_PAUSES = (0.0, 0.05, 0.5)
# If a probe took so many times its limit, this process was stopped meanwhile.
_STOOD_STILL = 1.5
# Probes at most in that case.
_TRIES = 3


class IndirectProbe:
    """See the module. On the loop.

    is_gone: whether a member has left or was lost. vouch: the handler that is called on the probed member.
    """

    def __init__(self, context: MembershipContext, is_gone: Callable[[WorkerRecord], bool], vouch: Function) -> None:
        self._context = context
        self._engine = context.engine
        self._is_gone = is_gone
        self._vouch = vouch
        self._asked: dict[int, asyncio.Task[None]] = {}  # the running probes, by the member's id

    def look_into(
        self,
        record: WorkerRecord,
        other: WorkerRecord,
        believed: Callable[[], None],
        what: str,
        told: WorkerRecord | None = None,
    ) -> None:
        """Ask a member whether it and `other` have parted; call `believed` if so. told: the reporter, if it was another
        member.

        Signs over proved connections need no probe (unix sockets, certificates). A lost member does not answer.
        """
        if self._engine.closed or self._is_gone(record) or record.id in self._asked:
            return
        if record.id == self._engine.id:
            return  # this worker itself
        if provably_dead(record, self._engine.record.host):
            believed()
            return
        self._asked[record.id] = self._engine.tasks.spawn(self._ask(record, other, believed, what, told))

    async def settle(self, limit: float) -> None:
        """Wait for the end of the running probes, for so many seconds at most."""
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
            for pause in _PAUSES:  # it may learn only now what the other one knows
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
        """Whether a member answers that it is there and has not parted with the other one."""
        patience = self._engine.bounds.vouch
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                async with asyncio.timeout(patience):
                    await self._context.probe(record)  # fails at once without a listener, unlike the call
                    peer = self._context.peers.of(record)
                    together: bool = await peer.call(self._vouch, (other.id,), None, patience, system=True)
                    return together
            except (OSError, RpcError):
                if time.monotonic() - began < _STOOD_STILL * patience:
                    break  # a slower failure means that this process was stopped
        return False
