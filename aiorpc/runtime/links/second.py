"""The second connection of a link: when it is opened, what goes over it, and what its end means.

Its messages are in `messages`: Pipe over the first connection, Attach over the second one. The opener of the link opens
it, when the first chunk is to be sent or the acceptor asks for it. If that is impossible, chunks go between the frames
of the first connection. If only the network is down for a while, the link waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from ...channels.bulk import Bulk
from ...errors import ProtocolError
from ...logs import logger
from ...protocol import messages
from ...protocol.frames import CHANNEL, CHUNK, Buffer, Frame, encode_frame
from ...protocol.handshake import shown
from ...protocol.messages import read_channel, write
from ...transport.connection import Connection
from ..engine.coalesced import CoalescedCallback
from .channel_link import LinkFacts
from .messages import LINK, MESSAGES, Attach, Pipe

# Seconds until a second connection is opened before chunks wait for it.
PIPE_PAUSE = 0.02
# Frames that wait in the second connection: it never runs dry, and a withdrawal takes effect soon.
_AHEAD = 2


class LinkForSecond(LinkFacts, Protocol):
    """What its second connection needs of a link."""

    @property
    def closed(self) -> bool: ...

    def open_pipe(self) -> None:
        """Begin to open a second connection; `SecondConnection.attach` or `refused` follows."""

    def say(self, channel: int, fields: list[object]) -> None:
        """Send a message of the link or a channel, over the first connection."""

    def send_over(self, pipe: Connection, kind: int, frame: Sequence[Buffer]) -> None:
        """Send a message over that connection."""

    def on_pipe_frames(self, pipe: Connection, frames: Sequence[Frame]) -> None:
        """Frames have arrived over that connection. Raises ProtocolError."""


class SecondConnection:
    """See the module. `wake` from any thread, the rest on the loop.

    connection: None until there is one. bulk: the channel whose chunks go over it.
    """

    def __init__(self, link: LinkForSecond) -> None:
        self.connection: Connection | None = None
        self.attached: Connection | None = None  # the connection, before it may be written to
        self._link = link
        self._asked = False
        #: There are chunks to send. From any thread.
        self.wake: CoalescedCallback = CoalescedCallback(link.engine.call_on_loop, self._pump)
        options = link.engine.options
        self.bulk: Bulk = Bulk(
            limit=options.max_tensor_bytes,
            total=options.max_incoming_bytes,
            wake=self.wake,
            least=options.min_bulk_bytes,
        )

    def _pump(self) -> None:
        """Hand as many chunks to the second connection as it can take now."""
        link, pipe = self._link, self.connection
        if pipe is None:
            if self.bulk.busy:
                self._need()
            else:  # a short transfer went another way: opening it now would slow that down
                link.engine.loop.call_later(PIPE_PAUSE, self._need)
            return
        while pipe.unsent < _AHEAD and not link.closed:
            frame = self.bulk.next_frame()
            if frame is None:
                return
            link.send_over(pipe, CHUNK, frame)

    def _need(self) -> None:
        link = self._link
        if self._asked or link.closed:
            return
        self._asked = True
        if link.opener:
            link.open_pipe()
        else:
            self._say("")

    def _say(self, reason: str) -> None:
        self._link.say(LINK, MESSAGES.write(Pipe(reason)))

    def on_message(self, reason: str) -> None:
        """A Pipe has come: the acceptor needs a second connection, or the opener cannot make one."""
        if self._link.opener:
            self._need()
        elif self.connection is None:
            self.refused(shown(reason))  # text of another process, which goes to the log

    def refused(self, reason: str) -> None:
        """There can be no second connection: chunks go over the first one."""
        link = self._link
        if link.closed:
            return
        logger.info("no second connection to %s: %s; large tensors go over the first", link.record.describe(), reason)
        if link.opener:
            self._say(reason)
        self._use(link.connection)

    def attach(self, pipe: Connection) -> None:
        """The second connection is there, and both sides have proved who they are.

        The opener uses it at once, and begins with an Attach. The acceptor waits for that frame: chunks right behind
        its last message of the handshake could be read by the opener together with that, before its decoder knows where
        chunks belong.
        """
        link = self._link
        if link.closed or self.connection is not None:
            pipe.abort()
            return
        former, self.attached = self.attached, pipe
        if former is not None:  # its opener has given it up
            former.abort()
        pipe.on_cut = self.bulk.displace
        pipe.decoder.place = self.bulk.place
        pipe.on_frames = partial(link.on_pipe_frames, pipe)
        if link.opener:
            greeting = write(messages.ChannelMessage(LINK, MESSAGES.write(Attach())))
            link.send_over(pipe, CHANNEL, encode_frame(CHANNEL, 0, greeting))
            self._use(pipe)

    def _use(self, pipe: Connection) -> None:
        self.connection = pipe
        self.bulk.ready = True
        pipe.on_drained = self._pump
        self._pump()

    def on_frame(self, pipe: Connection, frame: Frame) -> None:
        """A frame has come over the second connection. Raises ProtocolError."""
        link = self._link
        if frame.kind == CHUNK:
            self.on_chunk(frame)
        elif frame.kind == CHANNEL and not link.opener and self.connection is None:
            _check_greeting(frame)
            self._use(pipe)
        else:
            raise ProtocolError(f"{frame} does not belong on a connection for chunks")

    def on_chunk(self, frame: Frame) -> None:
        """A CHUNK, over either connection. Raises ProtocolError."""
        if not self._link.closed:
            self.bulk.on_frame(frame)

    def closed(self, pipe: Connection, cause: BaseException | None) -> None:
        """A second connection has ended. If the first one does not end as well, it is aborted: a link needs both.

        Exception: its opener has given it up before it knew that the acceptor had taken it. Nothing was on it then, and
        the opener opens another one, or reports over the first connection that there will be none.
        """
        link = self._link
        if pipe is not self.attached:
            return
        if self.connection is not self.attached:
            self.attached = None
        elif not link.closed and cause is not None:
            link.engine.loop.call_later(link.engine.bounds.pipe_grace, link.connection.abort, cause)


def _check_greeting(frame: Frame) -> None:
    """Raise ProtocolError if the first frame of a second connection is not the opener's Attach."""
    code, fields = read_channel(frame.body)
    if code != LINK or not isinstance(MESSAGES.read(fields), Attach):
        raise ProtocolError(f"{frame} does not begin a connection for chunks")
