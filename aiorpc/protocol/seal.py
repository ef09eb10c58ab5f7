"""Message authentication codes (MACs) after a handshake over TCP: without the key a third party cannot add, change,
repeat, move or drop a byte.

The stream of frames is cut into pieces, independent of the ends of frames:

    head      u32 length of the payload, little-endian
    payload   at most MAX_PAYLOAD bytes of the stream; many small frames, or a part of a large one
    tag       16 bytes: AES-GMAC over the payload, with the number of the piece (u64) and the head as its nonce

Each direction has a key of its own (handshake.py), for one connection, and numbers its pieces from 0. A piece that is
repeated, left out, moved, sent back or taken from another connection therefore has a wrong tag. Nothing is encrypted.
The decoder of frames hands on only checked bytes. A large buffer is read straight into its place, as without MACs, and
the decoder gets it piece by piece, once their tags were right.

AES-GMAC is AES-GCM of an empty text whose associated data is the payload (NIST SP 800-38D, section 3). A nonce must
never serve for two payloads, as their tags together would give the key of the hash away: a number never comes twice in
one direction of one connection. A forged payload has a right tag with a chance of less than 2^-113 (blocks of 16 bytes
in a payload, by 2^128), and the first wrong one ends the connection. With the instructions of today's processors 256
KiB take 15 µs, where Poly1305 takes 25; short payloads take 1 µs, as with a keyed hash.

A piece is a copy: programs may change a tensor while it is being sent (parameters that are being trained), and a tag
over changed bytes would be wrong. The bytes under a number are made once (`SendQueue._begin_pieces` takes the number in
the same step): no nonce serves for two payloads.
"""

from __future__ import annotations

import hmac
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..errors import ProtocolError
from .frames import READ_SIZE, Buffer, Frame, FrameDecoder, room

HEAD = struct.Struct("<I")
TAG_SIZE = 16
OVERHEAD = HEAD.size + TAG_SIZE
# Four pieces for a chunk of a large buffer (channels/bulk.py): one is checked while the next one is made.
MAX_PAYLOAD = READ_SIZE
# Below so many bytes, joining head, payload and tag costs less than writing them separately.
SHORT = 4096
# Bytes of one read without a known place: they are copied once more.
_AT_ONCE = READ_SIZE // 4
_NONCE = struct.Struct("<QI")  # the number, and the head
_BROKEN = "what arrived does not bear the other side's seal: a third party has changed it"


class Seal:
    """Makes the tags (MACs) of one direction. Any thread."""

    def __init__(self, key: bytes) -> None:
        self._encrypt = AESGCM(key).encrypt

    def tag(self, number: int, payload: Buffer) -> bytes:
        """The tag of the piece with that number and that payload."""
        return self._encrypt(_NONCE.pack(number, len(payload)), b"", payload)

    def piece(self, number: int, parts: Sequence[Buffer], size: int) -> list[Buffer]:
        """The bytes on the wire for parts of the stream of so many bytes, copied."""
        payload = b"".join(parts)
        head, tag = HEAD.pack(size), self.tag(number, payload)
        return [head + payload + tag] if size <= SHORT else [head, payload, tag]


class Unsealer:
    """Checks what arrives and hands it to the decoder of frames; has the interface of the decoder.

    a piece             its bytes are read into      and then
    in the middle of    the place of the buffer      are checked there; wrong bytes are never handed on, as the
    a large buffer                                   connection ends before that buffer is whole
    all others          `_buffer`                    are checked there, and copied by the decoder

    The tag of a piece in a large buffer, and the head of the next one, are read along with it: into the place of the
    next piece, or, after the last piece with such a place, into separate memory.
    """

    def __init__(self, seal: Seal, decoder: FrameDecoder) -> None:
        self._seal = seal
        self._decoder = decoder
        self._numbers = deque((0,), maxlen=1)  # the number of the next piece
        self._buffer = room(2 * READ_SIZE)
        self._end = 0  # of the bytes of incomplete pieces
        self._place: memoryview | None = None  # the place of the whole payload of the current piece
        self._tail = memoryview(b"")  # where the bytes after it are read into: its tag, and the head of the next piece
        self._next = memoryview(b"")  # the target of the next read
        self._placed = 0  # bytes that are there, of the payload and after it

    @property
    def filling(self) -> bool:
        """Whether a large buffer is under way."""
        return self._place is not None

    @property
    def empty(self) -> bool:
        """Whether no frame and no piece is incomplete."""
        return not self._end and self._place is None and self._decoder.empty

    def get_buffer(self) -> memoryview:
        """Where to read the next bytes into; never empty, as a whole piece never stays."""
        if self._place is not None:
            return self._next
        end = self._end
        # While a large buffer is under way read the head first: the rest of the piece may have a place.
        most = HEAD.size if self._decoder.filling and end < HEAD.size else end + _AT_ONCE
        return memoryview(self._buffer)[end:most]

    def received(self, count: int) -> list[Frame]:
        """`count` bytes were read into the last buffer; returns the frames that this completed. ProtocolError: a wrong
        tag."""
        if self._place is not None:
            return self._received_in_place(self._place, count)
        end = self._end + count
        start = 0
        frames: list[Frame] = []
        with memoryview(self._buffer)[:end] as data:
            while (stop := _end_of_piece(data, start)) <= end:
                frames += self._decoder.feed(self._checked(data, start, stop, self._numbers[0]))
                self._numbers.append(self._numbers[0] + 1)
                start = stop
            if self._decoder.filling and end - start >= HEAD.size:
                start += self._begin_place(data[start:])
        if start:
            self._buffer[: end - start] = self._buffer[start:end]
        self._end = end - start
        return frames

    def _begin_place(self, data: memoryview) -> int:
        """Read the piece that begins there into its place, if all of it belongs to the current large buffer.

        Returns how many bytes are taken: all of them, or none if it does not.
        """
        (length,) = HEAD.unpack_from(data)
        left = self._decoder.get_buffer()
        if length > len(left):
            return 0
        line = left[: length + OVERHEAD if len(left) >= length + OVERHEAD else length]
        self._place, self._tail = line[:length], line[length:] or memoryview(bytearray(OVERHEAD))
        come = data[HEAD.size :]
        payload, behind = come[:length], come[length:]
        self._place[: len(payload)] = payload
        self._tail[: len(behind)] = behind
        self._placed = placed = len(come)
        self._next = line[placed:] or self._tail[placed - length :]
        return len(data)

    def _received_in_place(self, place: memoryview, count: int) -> list[Frame]:
        self._placed += count
        behind = self._placed - len(place)
        if behind < TAG_SIZE:
            self._next = self._next[count:] or self._tail[behind:]
            return []
        tail = self._tail[:behind].tobytes()  # a copy: this may be the place of the next piece
        if not hmac.compare_digest(self._seal.tag(self._numbers[0], place), tail[:TAG_SIZE]):
            raise ProtocolError(_BROKEN)
        self._numbers.append(self._numbers[0] + 1)
        self._place = None
        frames = self._decoder.received(len(place))
        rest = tail[TAG_SIZE:]
        self._buffer[: len(rest)] = rest
        return frames + self.received(len(rest))

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes that were read elsewhere; see `received`."""
        frames: list[Frame] = []
        rest = memoryview(data)
        while rest:
            buffer = self.get_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            frames += self.received(count)
            rest = rest[count:]
        return frames

    def look(self, data: bytes) -> tuple[bytes, int, int]:
        """The payloads of the pieces that these bytes begin with, the number of pieces, and the bytes that are missing
        from the last one.

        Takes nothing: see `taking`. ProtocolError: a wrong tag.
        """
        payloads: list[memoryview] = []
        start = 0
        view = memoryview(data)
        while (stop := _end_of_piece(view, start)) <= len(data):
            payloads.append(self._checked(view, start, stop, self._numbers[0] + len(payloads)))
            start = stop
        return b"".join(payloads), len(payloads), stop - len(data) if start < len(data) else 0

    def taking(self, count: int) -> Callable[[], object]:
        """A step in C that takes so many pieces that were looked at."""
        return partial(self._numbers.append, self._numbers[0] + count)

    def _checked(self, data: memoryview, start: int, stop: int, number: int) -> memoryview:
        """The payload of the piece there, checked."""
        end = stop - TAG_SIZE
        payload = data[start + HEAD.size : end]
        if not hmac.compare_digest(self._seal.tag(number, payload), data[end:stop]):
            raise ProtocolError(_BROKEN)
        return payload


def _end_of_piece(data: memoryview, start: int) -> int:
    """The end of the piece that begins there, as far as it is known; beyond the data if the piece is not whole."""
    if len(data) - start < HEAD.size:
        return max(start + OVERHEAD, len(data) + 1)
    (length,) = HEAD.unpack_from(data, start)
    if not 0 < length <= MAX_PAYLOAD:
        raise ProtocolError("what arrived is not sealed, or a third party has changed it")
    return start + OVERHEAD + int(length)
