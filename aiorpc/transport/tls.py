"""TLS on one connection: bytes of the wire to frames, and frames to bytes of the wire. It does no I/O.

It takes the place of the MACs (protocol/seal.py): between the socket and the decoder of frames, and between the queue
of frames and the socket. The system calls, the turns of the loop and the threads that read their own answers are those
of any connection, and all of it can be tested with bytes. Its states are the table `TLS` of `protocol.states`.

Threads. Two threads must not use one side of TLS at once, in any directions: `lock` is held around each use of it, for
some 500 KB at most. It is the innermost lock.

Interruptions. A signal handler may raise between any two instructions of a thread that sends or reads for itself, and
inside the calls of the ssl module, which look for signals when their work is done. Nothing may be lost or done twice.
Therefore each step is announced first, in one assignment, and the next user finds out from TLS itself whether it was
done: by what waits to be sent (`SendQueue`), or by what is left of a record that was begun (`_settle`).
"""

from __future__ import annotations

import hashlib
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import call
from typing import Any, NamedTuple

from ..errors import PeerRefused, ProtocolError
from ..interrupts import SocketTurn, TurnEnded
from ..locks import RLock
from ..protocol.frames import READ_SIZE, Buffer, Frame, FrameDecoder, room
from ..protocol.handshake import refusal
from ..protocol.states import TLS, TlsEvent, TlsState
from .certificates import Certificate

# Bytes of one record of TLS, at most.
RECORD = 16 * 1024
# Bytes that one call encrypts, at most: whole records; more would not fit into the caches beside its copy.
PIECE = 8 * RECORD
# Bytes of one read before the other side has shown a certificate, and afterwards.
_FIRST_READ = 4 * 1024
_LATER_READ = READ_SIZE
# The first byte that a side of TLS may send: a record of the handshake, or an alert. A frame begins with 0.
_TLS_BEGINS = (22, 21)

# The reason why a side without TLS is refused, here and in the frame that it gets.
_PLAIN = (
    "it does not speak TLS, and this worker takes nothing else over TCP; give all workers of the group tls=, or none"
)
_TOLD = "this worker speaks nothing but TLS over TCP; give all workers of the group tls=, or none"


class _Step(NamedTuple):
    """How much is decrypted for the next reader, and which read was begun: what was left of a record, and the size.

    size: 0 if none was begun.
    """

    end: int = 0
    left: int = 0
    size: int = 0


_NOTHING = _Step()
_RUN: Callable[[Callable[[], object]], object] = call  # typed for mypy


class TlsLayer:
    """See the module. `outgoing` is what waits to be sent; `SendQueue` takes it.

    peer: the certificate of the other side, once OPEN. own: the hash of our own certificate, which ssl does not give.
    """

    filling = False  # for callers of decoders; TLS is always read in records

    def __init__(self, context: ssl.SSLContext, decoder: FrameDecoder, *, opener: bool, own: bytes = b"") -> None:
        self.state: TlsState = TLS.initial
        self.open: bool = False  # state is OPEN: the other side has shown its certificate, and frames go both ways
        self.peer: Certificate | None = None
        self.lock: RLock = RLock()  # reentrant: it knows its owner
        self.outgoing: ssl.MemoryBIO = ssl.MemoryBIO()
        self._incoming = ssl.MemoryBIO()
        self._opener = opener
        self._own = own
        self._decoder = decoder
        self._object = context.wrap_bio(self._incoming, self.outgoing, server_side=not opener)
        # Steps of turns (interrupts.py) are functions of C: the methods of `ssl.SSLObject` are Python, and may be
        # interrupted before they have done anything. `read` with a buffer returns the number of bytes.
        steps: Any = self._object._sslobj  # type: ignore[attr-defined]  # the stubs do not know it
        self._read: Callable[[int, memoryview], int] = steps.read
        #: Encrypts a piece of the stream of frames into `outgoing`, as a whole. With `lock` held.
        self.encrypt: Callable[[Buffer], int] = steps.write
        self._untouched = True  # nothing has come yet
        self._plain = False
        self._buffer = memoryview(bytearray(_FIRST_READ))
        self._clear = bytearray()
        self._step = _NOTHING

    # --- what is sent -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The opener's first step; the acceptor waits for what comes."""
        if self._opener:
            self._shake()

    def last_words(self) -> bytes:
        """The reason of the end, for the other side: an alert, or a frame if it does not speak TLS."""
        if self._plain:
            return b"".join(refusal(_TOLD))
        with self.lock:
            return self.outgoing.read()

    # --- what has come, on the loop -----------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether nothing decrypted is left, of a frame or for the loop. An incomplete record may be."""
        return not self._step.end and self._decoder.empty

    @property
    def left(self) -> bool:
        """Whether a thread has read bytes off the socket and left them to the loop."""
        return self._step != _NOTHING or self._incoming.pending > 0

    def get_buffer(self) -> memoryview:
        """Where to read the next bytes into."""
        return self._buffer

    def received(self, count: int) -> list[Frame]:
        """`count` bytes were read into the last buffer; returns the frames that this completed, after those that a
        thread has left.

        Raises PeerRefused for a side without a valid certificate, ProtocolError for bytes that were changed on the way.
        """
        frames: list[Frame] = []
        data = self._buffer[:count]
        if not self.open or self._step is not _NOTHING:
            frames += self._take_left()
            self._begin(data)
            if not self.open:
                return frames
        else:
            with self.lock:
                self._incoming.write(data)
        if count == len(self._buffer) < _LATER_READ:
            self._buffer = memoryview(room(_LATER_READ))
        # The path of each message: it runs as few functions of Python as possible.
        decoder, read, incoming = self._decoder, self._read, self._incoming
        more = True
        while more:
            buffer, filling = decoder.get_buffer(), decoder.filling
            with self.lock:
                try:
                    # The first record of a large frame shows where the next ones belong.
                    taken = self._fill(buffer) if filling else read(len(buffer), buffer)
                    if not taken:
                        raise self._ended()
                    # A read that does not fill the buffer has emptied its record.
                    more = incoming.pending > 0 or ((filling or taken == len(buffer)) and self._object.pending() > 0)
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLError as error:
                    raise self._broken(error) from error
            frames += decoder.received(taken)
        return frames

    def _fill(self, buffer: memoryview) -> int:
        """Decrypt all that has come of a large buffer to its place; returns how many bytes. With `lock` held.

        One call of C reads several records, each to its place if those before it are full; otherwise it is moved.
        """
        room = min(len(buffer), self._incoming.pending + RECORD)
        places = [buffer[at : at + RECORD] for at in range(0, room, RECORD)]
        counts: list[int] = []
        try:
            counts.extend(map(self._read, repeat(RECORD), places))
        except ssl.SSLWantReadError:
            if not counts:
                raise
        end = sum(counts)
        if end != len(counts) * RECORD:
            end = 0
            for count, place in zip(counts, places, strict=False):
                buffer[end : end + count] = place[:count]
                end += count
        return end

    def feed(self, data: Buffer = b"") -> list[Frame]:
        """Take bytes that were read elsewhere, after what a thread has left here; see `received`."""
        frames: list[Frame] = []
        rest = memoryview(data)
        while True:
            count = min(len(rest), len(self._buffer))
            self._buffer[:count] = rest[:count]
            frames += self.received(count)
            rest = rest[count:]
            if not rest:
                return frames

    def _take_left(self) -> list[Frame]:
        """The frames of what a thread has decrypted and left to the loop."""
        with self.lock:
            self._settle()
            clear = self._clear[: self._step.end]
            self._step = _NOTHING
        return self._decoder.feed(clear)

    def _begin(self, data: memoryview) -> None:
        """Take bytes that may be the first ones, or belong to the handshake of TLS."""
        with self.lock:
            if len(data):
                self._look_at_first(data)
                self._incoming.write(data)
            if self.state is TlsState.SHAKING:
                self._shake()

    def _look_at_first(self, data: Buffer) -> None:
        if self._untouched and data[0] not in _TLS_BEGINS:
            self._plain = True
            self._wrong()
            raise PeerRefused(_PLAIN)
        self._untouched = False

    def _shake(self) -> None:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            self._wrong()
            raise PeerRefused(_explained(error)) from error
        self.peer = Certificate.of(self._object.getpeercert(), self._object.getpeercert(True))
        self._enter(TlsEvent.PROVED)

    # --- what has come, in a thread that waits for it -----------------------------------------------------------------

    def look(self, unread: deque[bytes], most: int, turn: SocketTurn) -> bytes:
        """Decrypt `unread`, which is emptied; returns all decrypted bytes. They stay here until `taking`.

        most: bytes; the rest is left to the loop. turn: the reader's; each change here is one step with a check of it.
        Raises the errors of `feed`, and TurnEnded.
        """
        part = turn.__getitem__
        pending, read, incoming = self._object.pending, self._read, self._incoming
        with self.lock:
            if self._step is not _NOTHING:
                self._settle(turn)
            if len(self._clear) < most:
                larger = bytearray(most)
                self._clear = larger if turn else self._clear
            # By one call of C: no signal handler runs between `popleft` and `write`.
            deque(map(incoming.write, map(deque.popleft, map(part, repeat(2, len(unread))))), maxlen=0)
            clear = memoryview(self._clear)
            left = pending() if self._step.end else 0  # of a record, which `read` always finishes
            try:
                while True:
                    if not left and not incoming.pending:
                        break
                    end, size = self._step.end, left or 1
                    if not left and end + RECORD > most:  # begin only a record that fits completely
                        break
                    begun, done, place = _Step(end, left, size), _Step(end + size), clear[end : end + size]
                    self._step = begun if turn else self._step
                    steps: tuple[Callable[[], object], ...] = turn.__len__, partial(read, size, place)
                    if not all(map(_RUN, steps)):
                        if not turn:
                            raise TurnEnded
                        raise self._ended()
                    self._step = done if turn else self._step
                    left = 0 if left else pending()
            except ssl.SSLWantReadError:
                over = _Step(self._step.end)
                self._step = over if turn else self._step
            except ssl.SSLError as error:
                raise self._broken(error) from error
            return bytes(clear[: self._step.end])

    def taking(self) -> Callable[[], object]:
        """A step in C that uses up what `look` has returned."""
        return partial(setattr, self, "_step", _NOTHING)

    def _settle(self, turn: SocketTurn | None = None) -> None:
        """Find out whether a read was done that was begun before an exception. With `lock` held.

        A read of all that was left of a record was done if that is gone now. A read of the first byte of a record was
        done if more of the record is there: `SendQueue` never makes a record of a single byte.
        """
        end, left, size = self._step
        if size:
            done = self._object.pending() != left
            settled = _Step(end + size if done else end)
            self._step = settled if turn is None or turn else self._step

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _broken(self, error: ssl.SSLError) -> ProtocolError | PeerRefused | ConnectionResetError:
        """The error to raise for an error of a connection that was open."""
        if isinstance(error, ssl.SSLZeroReturnError):
            return self._ended()
        self._wrong()
        if "ALERT" in (error.reason or ""):
            return PeerRefused(_explained(error))
        return ProtocolError(f"what arrived was changed on its way: TLS says {_reason(error)}")

    def _ended(self) -> ConnectionResetError:
        """The error to raise after the other side's end of stream."""
        if self.open:
            self._enter(TlsEvent.ENDED)
        return ConnectionResetError("the other side closed the connection")

    def _wrong(self) -> None:
        if self.state in (TlsState.SHAKING, TlsState.OPEN):
            self._enter(TlsEvent.WRONG)

    def _enter(self, event: TlsEvent) -> None:
        self.state = TLS.next(self.state, event)
        self.open = self.state is TlsState.OPEN

    # --- what it proves -----------------------------------------------------------------------------------------------

    def binding(self) -> bytes:
        """32 bytes that both sides of this TLS connection have in common, and no other connection has. Once OPEN.

        The proof of the secret is made over it (protocol/handshake.py): that detects a relay which terminates TLS with
        any certificates of its own. Python's ssl cannot export keying material (RFC 9266). Its "tls-unique" is in TLS
        1.3 the Finished message of the opener: a keyed hash over the whole handshake, certificates and fresh keys
        included, with a key that only the two ends of this connection have. What makes it unfit in TLS 1.2 (resumed
        sessions, handshakes that are made to look alike) does not exist here: the key depends on the transcript, and
        sessions are not resumed. The hashes of both certificates, the opener's first, are added in case a build of
        OpenSSL lacks it.
        """
        assert self.peer is not None, "known once both certificates were shown"
        certificates: Sequence[bytes] = (self._own, self.peer.digest)
        if not self._opener:
            certificates = certificates[::-1]
        finished = self._object.get_channel_binding("tls-unique") or b""
        said = b"".join((b"aiorpc tls", len(finished).to_bytes(2, "big"), finished, *certificates))
        return hashlib.sha256(said).digest()


_REASONS = {
    "WRONG_VERSION_NUMBER": "what it sends is no TLS",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not speak TLS 1.3",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a certificate, and got none",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the authority (ca) of our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that our certificate has expired, or is not valid yet",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it says that our certificate is not right",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses our certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it says that our certificate is not made for this",
    "TLSV1_ALERT_DECRYPT_ERROR": "it says that the proof of our certificate's key is wrong",
}


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def _explained(error: ssl.SSLError) -> str:
    """Why the other side is refused, or has refused us."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not one that we take: {error.verify_message}"
    return "TLS: " + _REASONS.get(error.reason or "", _reason(error))
