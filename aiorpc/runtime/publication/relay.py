"""A name as one reader fetches it for all readers of its host: from the publisher, or from the leader before it.

Versions come in pieces, some of which are under way at a time; each is given to the next host as soon as it is there.
If the worker that they come from has gone, or has let go of the version, the rest comes from the publisher.
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

# Bytes of a piece, and how many are under way at a time. Not more than a chunk: chunks of several transfers take turns,
# so that all pieces under way would come late, and each host could hand on the first one only when it has them all.
PIECE_SIZE, UNDER_WAY = CHUNK_SIZE, 8
# Seconds after the last reader has gone until a relay ends: another one of its host may come.
_END_PAUSE = 0.01
# Seconds after which a relay that fetches says something to the publisher.
_REPORT_LATEST = 1.0
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 1.0


class Relay(VersionStore):
    """See the module. On the loop. publisher: whose versions these are. number: of its subscription there."""

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
        self._passed_by: set[WorkerRecord] = set()  # who have handed on something else than was published
        self._ending = False
        self._said_at = 0.0  # when the publisher has heard last that this goes on
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
        """Get the next version; its number."""
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
        origin = Origin(edition.publisher, edition.worker, edition.main, [self.publisher.role])
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
        """Compare what has come by way of another worker with what the publisher has published, if need be."""
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
        """Fetch all bytes of a version. Whether all of them have come from its publisher."""
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
        """Fetch what is missing, in order, some pieces at a time."""
        size, at = len(stored.data), stored.filled
        # Who has stalled is passed by; the publisher may take its time. It counts from the piece before: a slow link
        # needs long for all that are under way.
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
                    raise ProtocolError(f"{source.describe()} has sent a piece of {self.name!r} that is none")
                stored.data[stored.filled : stored.filled + length] = piece.numpy()
                self.filled_to(stored, stored.filled + length)
                if time.monotonic() - self._said_at > _REPORT_LATEST:
                    self._said_at = time.monotonic()
                    self._outbound.tell(self.publisher, StillFetching(self.name))
        finally:
            for _, future in under_way:
                future.cancel()
                future._mark_seen()
            if stored.filled < size:  # behind the pieces: the source keeps the version no longer for this worker
                self._outbound.tell(source, VersionsReleased(self.name, IN_PIECES, [stored.version]))

    async def _within(self, patience: float, future: Future[object], source: WorkerRecord) -> object:
        """A piece. RpcTimeout after so many seconds; 0 for no limit."""
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
