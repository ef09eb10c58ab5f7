"""Sessions: one stream of frames each way that is resumed over a new socket after the old one has broken.

Both ends count the frames of each direction from the end of the handshake on; ACKs are frames like any other. A frame
has no number on the wire: it is the next one. The receiver reports from time to time how many frames it has received
(ACK), and the sender keeps unacknowledged ones. When a socket breaks, each end reports in the handshake of the next one
how many it has received, and the other one begins again with the next. The states are the table
`protocol.states.SESSION`.

Invariants
1. A frame is handed on exactly once, and in order: a whole frame is counted when it is handed on; a partial one is
   dropped with the socket, and is sent again as a whole.
2. The kept frames are the frames themselves, not copies. Their buffers are borrowed until they are acknowledged.
3. `limit` bytes are kept at most, and one frame more. Then only ACKs are sent until something is acknowledged; they
   overtake the waiting frames. Otherwise two ends with much to send would wait for each other without end.
4. An end that has received only ACKs since its last ACK has nothing to acknowledge, until they are many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import ProtocolError
from .frames import ACK, HEAD, Buffer, Frame, encode_frame
from .states import SESSION, SessionEvent, SessionState

# Frames, or bytes of them, that are acknowledged at once; fewer are acknowledged soon.
ACK_FRAMES = 64
ACK_BYTES = 2 << 20


class Session:
    """One end of a session. The writer and the reader use it; each of them is one thread at a time.

    limit: bytes that are kept. kept: the frames that were handed to the socket as a whole, and are not acknowledged.
    size: bytes of these and of what was begun. received: how many frames were handed on here. due: whether an ACK is
    to be sent. said_at: bytes that had come when the last one became due.
    """

    def __init__(self, limit: int) -> None:
        self.state: SessionState = SESSION.initial
        self.limit = limit
        self.kept: deque[Sequence[Buffer]] = deque()
        self.size: int = 0
        self.received: int = 0
        self.due: bool = False
        self._acknowledged = 0  # how many frames came before the kept ones
        self._heard = 0  # the number of the other end's latest ACK
        self._said = 0  # the number of our latest ACK
        self.said_at: int = 0
        self._acks = 0  # ACKs that have come since

    def enter(self, event: SessionEvent) -> None:
        """Apply an event to the state."""
        self.state = SESSION.next(self.state, event)

    @property
    def suspended(self) -> bool:
        """Whether it has no socket."""
        return self.state is SessionState.SUSPENDED

    # --- receiving ----------------------------------------------------------------------------------------------------

    def arrived(self, frames: list[Frame], count: int, begun: int = 0) -> list[Frame]:
        """Frames that have come, to be handed on now, without those for the session itself.

        count: bytes of the connection that have come so far. begun: frames that the writer has under way, beside the
        kept ones. Raises ProtocolError for an ACK of frames that were not sent.
        """
        self.received += len(frames)
        for frame in frames:
            if frame.kind == ACK:
                frames = self._take_acks(frames, begun)
                break
        if not self.due:
            self.due = self.received - self._said >= ACK_FRAMES or (count - self.said_at >= ACK_BYTES and self.fresh)
        if self.due:
            self.said_at = count
        return frames

    @property
    def fresh(self) -> bool:
        """Whether something has come that the other end waits to have acknowledged."""
        return self.received - self._said > self._acks

    def ack(self) -> list[Buffer]:
        """The ACK that is due; `told` follows once it is queued."""
        return encode_frame(ACK, self.received, b"")

    def told(self, ack: Sequence[Buffer]) -> None:
        """That ACK is on its way."""
        self.due = False
        self._said = HEAD.unpack(ack[0])[0]
        self._acks = 0

    def taking(self, count: int) -> Callable[[], object]:
        """A step in C that counts so many frames as received, which a thread has read while no other thread reads."""
        return partial(setattr, self, "received", self.received + count)

    def _take_acks(self, frames: list[Frame], begun: int) -> list[Frame]:
        rest: list[Frame] = []
        for frame in frames:
            if frame.kind != ACK:
                rest.append(frame)
                continue
            self._acks += 1
            self._acknowledge(frame.call_id, begun)
        return rest

    def _acknowledge(self, number: int, begun: int) -> None:
        count = number - self._acknowledged
        # The writer may be about to keep begun frames that were received already: see `settle`.
        if count > len(self.kept) + begun:
            raise ProtocolError(f"an acknowledgement of {number} frames, of which {count} were not sent")
        self._heard = max(self._heard, number)
        self.settle()

    @property
    def unsettled(self) -> bool:
        """Whether frames are kept that were acknowledged before the writer kept them. Any thread."""
        return self._acknowledged < self._heard and bool(self.kept)

    def settle(self) -> None:
        """Let go of acknowledged frames. By the reader; the other end does not repeat an ACK."""
        kept = self.kept
        while kept and self._acknowledged < self._heard:
            size = sum(map(len, kept[0]))
            self.size -= size  # in one step, without a call: the writer may add to it meanwhile
            kept.popleft()  # in one step with that: the writer may count anew
            self._acknowledged += 1

    # --- going on over a new socket -----------------------------------------------------------------------------------

    def resume(self, received: int, begun: Sequence[Sequence[Buffer]] = ()) -> list[Sequence[Buffer]]:
        """The frames that have to be sent again, before all that wait; afterwards nothing is kept.

        received: how many frames the other end has. begun: frames that were under way, after the kept ones.
        Raises ProtocolError if the number is impossible.
        """
        whole = [*self.kept, *begun]
        done = received - self._acknowledged
        if not 0 <= done <= len(whole):
            raise ProtocolError(
                f"the other end has received {received} frames; {self._acknowledged} were acknowledged, and "
                f"{len(whole)} sent beyond that"
            )
        self.enter(SessionEvent.RESUMED)
        self.kept.clear()
        self.size = 0
        self._acknowledged = self._heard = received
        # The handshake has told the other end.
        self._said, self._acks, self.due = self.received, 0, False
        return whole[done:]

    def end(self) -> None:
        """The connection has ended: let go of all kept frames. Idempotent."""
        if self.state is not SessionState.ENDED:
            self.enter(SessionEvent.ENDED)
        self.kept.clear()
        self.size = 0
