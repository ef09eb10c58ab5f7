"""The second connection of a link: when it is opened, what goes over it, and what its end means.

    CHANNEL 0, "pipe", reason or ""    acceptor: I need one; opener: there will be none, for that reason
    CHANNEL 0, "pipe"                  opener, first on the second connection: here it is

The opener of the link opens it, when the first chunk is to be sent or, for the acceptor, when that asks for it. If it
cannot be had, chunks go between the frames of the first connection.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ...errors import ProtocolError
from ...protocol.frames import Frame, Kind
from ...transport.connection import Connection

if TYPE_CHECKING:
    from .link import Link

logger = logging.getLogger("aiorpc")

# What messages of a link about this begin with.
PIPE = "pipe"
# Seconds until a second connection is opened that nothing waits for yet.
PIPE_PAUSE = 0.02
# Seconds in which the end of the first connection says why the second one has ended.
PIPE_GRACE = 1.0
# Frames that wait in the second connection, so that it never runs dry and a withdrawal takes effect soon.
_AHEAD = 2


class SecondConnection:
    """See the module. `wake` from any thread, the rest on the loop. connection: None until there is one."""

    def __init__(self, link: Link) -> None:
        self.connection: Connection | None = None
        self._link = link
        self._asked = False
        self._pumping = False

    def wake(self) -> None:
        """There are chunks to send. From any thread."""
        if not self._pumping:
            self._pumping = True
            self._link.worker.call_on_loop(self._pump)

    def _pump(self) -> None:
        """Keep the pipe full, and no fuller."""
        self._pumping = False
        link, pipe = self._link, self.connection
        if pipe is None:
            if link.bulk.sending:
                self._need()
            else:  # it will be of use: not at the cost of the message that has shown it
                link.worker.loop.call_later(PIPE_PAUSE, self._need)
            return
        while pipe.unsent < _AHEAD and not link.closed:
            frame = link.bulk.next_frame()
            if frame is None:
                link.all_sent()
                return
            pipe.send(frame)

    def _need(self) -> None:
        link = self._link
        if self._asked or link.closed:
            return
        self._asked = True
        if link.opener:
            link.worker.open_pipe(link)
        else:
            link.connection.send(link.own_frame(PIPE, ""))

    def on_message(self, reason: str) -> None:
        """What the other end says of it."""
        if self._link.opener:
            self._need()
        elif self.connection is None:
            self.refused(reason)

    def refused(self, reason: str) -> None:
        """There is no second connection to be had: chunks go over the first."""
        link = self._link
        if link.closed:
            return
        logger.info("no second connection to %s: %s; large tensors go over the first", link.record.describe(), reason)
        if link.opener:
            link.connection.send(link.own_frame(PIPE, reason))
        self._use(link.connection)

    def attach(self, pipe: Connection) -> None:
        """The second connection is there, and both sides have proved who they are.

        The acceptor waits for the opener's word: what it sent right behind the end of the handshake could be read
        together with that, and by then nobody has told the opener's decoder where chunks belong.
        """
        link = self._link
        if link.closed or self.connection is not None:
            pipe.abort()
            return
        pipe.decoder.place = link.bulk.place
        pipe.on_frames = partial(self._on_frames, pipe)
        if link.opener:
            pipe.send(link.own_frame(PIPE))
            self._use(pipe)

    def _use(self, pipe: Connection) -> None:
        self.connection = pipe
        self._link.bulk.ready = True
        pipe.on_drained = self._pump
        self._pump()

    def _on_frames(self, pipe: Connection, frames: list[Frame]) -> None:
        link = self._link
        for frame in frames:
            if frame.kind == Kind.CHUNK:
                link.on_chunk(frame)
            elif frame.kind == Kind.CHANNEL and not link.opener and self.connection is None:
                self._use(pipe)
            else:
                raise ProtocolError(f"{frame} does not belong on a connection for chunks")

    def closed(self, cause: BaseException | None) -> None:
        """The second connection has ended; if the first goes on without it, that is a loss."""
        link = self._link
        if not link.closed and cause is not None:
            link.worker.loop.call_later(PIPE_GRACE, link.connection.abort, cause)
