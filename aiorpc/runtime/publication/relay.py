"""A leader's version store: it fetches a name for all readers of its host, from the publisher or an earlier leader.

Versions come in pieces, several under way at a time; the next host gets each piece as soon as it is here. If the source
is gone, or has dropped the version, the rest comes from the publisher.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import torch

from ...channels.bulk import CHUNK_SIZE
from ...errors import NotAllowed, PeerLeft, PeerLost, ProtocolError, RpcError, RpcTimeout, RpcUsageError
from ...futures import Future
from ...logs import logger
from ...protocol.identity import WorkerRecord
from ...protocol.publication import (
    EDITION,
    Edition,
    PieceWanted,
    StillFetching,
    SubscriptionClosed,
    VersionsReleased,
    Want,
    read,
)
from ...undoing import on_error
from ..calls.values import Results
from .digests import changed, is_digest
from .home import Home
from .outbound import Outbound
from .version_store import IN_PIECES, Origin, Stored, VersionStore

# Bytes of a piece, and how many are under way at a time. A piece is one chunk: chunks of several transfers take turns,
# so larger pieces would all arrive late, and the next host would wait.
PIECE_SIZE, UNDER_WAY = CHUNK_SIZE, 8
# Seconds after the last reader until a relay ends: another reader may come.
_END_PAUSE = 0.01
# Seconds between two reports of a fetching relay to the publisher.
_REPORT_LATEST = 1.0
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 1.0


class Relay(VersionStore):
    """A leader's store. On the loop. publisher: of the versions. number: of the relay's subscription there."""

    def __init__(
        self,
        home: Home,
        outbound: Outbound,
        name: str,
        publisher: WorkerRecord,
        number: int,
        ended: Callable[[Relay], None],
    ) -> None:
        """ended: called when no reader is left, or the publisher has gone."""
        super().__init__(home, name)
        self.publisher = publisher
        self.number = number
        self._outbound = outbound
        self._ended = ended
        self._passed_by: set[WorkerRecord] = set()  # handed on something other than was published
        self._ending = False
        self._said_at = 0.0  # when the last report to the publisher was sent
        self._task = self._engine.tasks.spawn(self._run())

    async def _run(self) -> None:
        pause, have = _FIRST_PAUSE, 0
        reason = f"worker {self._engine.name!r} fetches {self.name!r} for its host no more"
        try:
            while True:
                try:
                    have = await self._fetch(have)
                    pause = _FIRST_PAUSE
                except (PeerLost, PeerLeft, NotAllowed, ProtocolError, RpcUsageError):  # another one fetches now
                    raise
                except RpcError as error:
                    logger.debug("worker %s: fetching %r again: %s", self._engine.name, self.name, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LAST_PAUSE)
        except Exception as error:
            reason = f"{reason}: {error}"
            logger.info("%s", reason)
            self._say_closed()
        finally:
            self.end(reason)
            self._ended(self)

    async def _fetch(self, have: int) -> int:
        """Get the next version. Returns its number."""
        want = Want(self.name, self.number, have, False, [], True)
        answer = await self._outbound.want(self.publisher, want)
        if type(answer) is not Results:
            raise ProtocolError(f"{self.publisher.describe()} has answered with no version of {self.name!r}")
        edition, bodies = read(EDITION, answer[0]), tuple(answer[1:])
        if edition.publisher != self.publisher.id:
            raise ProtocolError(f"{self.publisher.describe()} has sent a version of another worker")
        if edition.version <= have or edition.source is None or not 1 <= len(bodies) <= 2:
            raise ProtocolError(f"{self.publisher.describe()} has sent version {edition.version} after {have}")
        if not all(type(body) is bytes for body in bodies):
            raise ProtocolError(f"{self.publisher.describe()} has sent a version without what it says of its value")
        origin = Origin(edition.publisher, edition.worker, edition.main, [self.publisher.role], edition.trace)
        spans = [(start, length) for start, length in edition.spans]
        if edition.size > self._engine.options.max_tensor_bytes:
            raise ProtocolError(f"a version of {edition.size} bytes, which is more than max_tensor_bytes")
        stored = self.begin(edition.version, origin, bodies, spans, edition.size)
        source = self._outbound.member(edition.source)
        if source is None or source in self._passed_by:
            source = self.publisher
        with on_error(self.give_up, stored):
            if not await self._fill(stored, source):
                await self._check(stored, edition, source)
        self.finish(stored)
        self.on_readers()
        return edition.version

    async def _check(self, stored: Stored, edition: Edition, source: WorkerRecord) -> None:
        """Compare a version that came through another worker with the publisher's digest, if rights are limited."""
        if self._engine.rights.unlimited:  # any member may have anything run here
            return
        wanted = await self._outbound.digest(self.publisher, self.name, stored.version)
        if await is_digest(self._engine, wanted, self.name, edition, stored.bodies, stored.data):
            return
        self._passed_by.add(source)
        reason = changed(source, stored.version, self.name, self.publisher)
        logger.warning("worker %s: %s", self._engine.name, reason)
        raise RpcError(reason)

    async def _fill(self, stored: Stored, source: WorkerRecord) -> bool:
        """Fetch all bytes of a version. Returns whether all of them came from its publisher."""
        pure = source == self.publisher
        while stored.filled < len(stored.data):
            try:
                await self._fill_from(stored, source)
            except RpcError as error:
                if source == self.publisher:
                    raise
                logger.info(
                    "worker %s: the rest of version %d of %r comes from its publisher: %s",
                    self._engine.name,
                    stored.version,
                    self.name,
                    error,
                )
                if not stored.filled:
                    pure = True
                source = self.publisher
        return pure

    async def _fill_from(self, stored: Stored, source: WorkerRecord) -> None:
        """Fetch the missing pieces, in order, some at a time."""
        size, at = len(stored.data), stored.filled
        # A stalled leader is passed by; the publisher gets a whole rpc_timeout. Counted for each piece, because a slow
        # link needs long for all that are under way.
        patience = self._engine.options.rpc_timeout if source == self.publisher else self._engine.bounds.stalled
        under_way: deque[tuple[int, Future[object]]] = deque()
        try:
            while stored.filled < size:
                while at < size and len(under_way) < UNDER_WAY:
                    length = min(PIECE_SIZE, size - at)
                    wanted = PieceWanted(self.name, stored.version, at, length)
                    under_way.append((length, self._outbound.piece(source, wanted)))
                    at += length
                length, future = under_way.popleft()
                piece = await self._within(patience, future, source)
                if type(piece) is not torch.Tensor or piece.dtype is not torch.uint8 or piece.shape != (length,):
                    raise ProtocolError(f"{source.describe()} has sent an invalid piece of {self.name!r}")
                stored.data[stored.filled : stored.filled + length] = piece.numpy()
                self.filled_to(stored, stored.filled + length)
                if time.monotonic() - self._said_at > _REPORT_LATEST:
                    self._said_at = time.monotonic()
                    self._outbound.tell(self.publisher, StillFetching(self.name))
        finally:
            for _, future in under_way:
                future.cancel()
                future._mark_seen()
            if stored.filled < size:  # sent after the pieces: the source need not keep the version for this worker
                self._outbound.tell(source, VersionsReleased(self.name, IN_PIECES, [stored.version]))

    async def _within(self, patience: float, future: Future[object], source: WorkerRecord) -> object:
        """Wait for a piece. Raises RpcTimeout after `patience` seconds; 0 for no limit."""
        try:
            async with asyncio.timeout(patience or None):
                return await future
        except TimeoutError:
            raise RpcTimeout(f"{source.describe()} has sent nothing of {self.name!r} for {patience:g} s") from None

    # --- readers ------------------------------------------------------------------------------------------------------

    def on_readers(self) -> None:
        """End soon, if no worker reads any more."""
        if not self.subscribers and not self._ending:
            self._ending = True
            self._engine.loop.call_later(_END_PAUSE, self._end_if_idle)

    def _end_if_idle(self) -> None:
        self._ending = False
        if self._over is None and not self.subscribers:
            self.stop()

    def stop(self) -> None:
        """Fetch no more: no worker reads, or this worker ends."""
        self._say_closed()
        self._task.cancel()

    def _say_closed(self) -> None:
        self._outbound.tell(self.publisher, SubscriptionClosed(self.name, self.number, []))
