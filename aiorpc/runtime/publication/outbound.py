"""The questions and notices of this worker to others about published values."""

from __future__ import annotations

import contextlib
from functools import partial

from msgspec import Struct

from ...errors import Overloaded, RpcError
from ...futures import Future
from ...protocol.identity import WorkerRecord
from ...protocol.publication import DigestWanted, PieceWanted, StillFetching, Want, write
from ..calls.options import CallOptions
from .handlers import SAID, digest, pieced, wanted
from .home import Home

# Seconds until an overloaded worker gets a notice again.
_TOLD_PAUSE = 0.1


class Outbound:
    """Sends questions and notices about published values. On the loop."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._engine = home.engine

    def member(self, worker_id: int) -> WorkerRecord | None:
        """The live member of an id, or None."""
        record = self.known(worker_id)
        return record if record is not None and not self._home.group.is_gone(record) else None

    def known(self, worker_id: int) -> WorkerRecord | None:
        """The record of a member, which may have gone; None if it is unknown here."""
        return self._home.group.members.get(worker_id)

    def piece(self, record: WorkerRecord, message: PieceWanted) -> Future[object]:
        """Ask a worker for some bytes of a version, without a limit."""
        return self._home.peers.of(record).call(pieced, (write(message),), None, 0.0, system=True)

    def digest(self, record: WorkerRecord, name: str, version: int) -> Future[object]:
        """Ask the publisher of a name for the digest of a version."""
        said, limit = write(DigestWanted(name, version)), self._engine.options.rpc_timeout
        options = CallOptions(part_of=("published", name))
        return self._home.peers.of(record).call(digest, (said,), None, limit, system=True, options=options)

    def want(self, record: WorkerRecord, message: Want, limit: float = 0.0) -> Future[object]:
        """Ask a worker for its newest version. limit: seconds, 0 for none."""
        options = CallOptions(part_of=("published", message.name))
        return self._home.peers.of(record).call(wanted, (write(message),), None, limit, system=True, options=options)

    def tell(self, record: WorkerRecord, message: Struct) -> None:
        """Send a notice that needs no answer. An overloaded worker gets it again; otherwise it would keep memory that
        no reader holds, and wait for readers that are gone.
        """
        function = SAID[type(message)]
        with contextlib.suppress(RpcError):  # it is gone, or this worker is
            limit = self._engine.options.rpc_timeout
            call = self._home.peers.of(record).call(function, (write(message),), None, limit, system=True)
            call._when_settled(partial(self._told, record, message))

    def _told(self, record: WorkerRecord, message: Struct, future: Future[object]) -> None:
        """Any thread."""
        if isinstance(future.exception(), Overloaded):
            self._engine.call_on_loop(self._engine.loop.call_later, _TOLD_PAUSE, self._tell_again, record, message)

    def _tell_again(self, record: WorkerRecord, message: Struct) -> None:
        if not isinstance(message, StillFetching):  # the next one follows anyway
            self.tell(record, message)
