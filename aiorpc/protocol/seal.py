"""A seal on what follows a handshake over TCP: without the key nobody adds, changes, repeats, moves or drops a byte.

The stream of frames is cut into pieces, without regard to where a frame ends:

    head      u32 length of the payload, little-endian
    payload   at most MAX_PAYLOAD bytes of the stream; many small frames, or a part of a large one
    tag       16 bytes: keyed BLAKE2b over the number of the piece (u64), the head and the payload;
              of a payload longer than LONG Poly1305, by a key that keyed BLAKE2b makes of number and head

Each direction has a key of its own (handshake.py), for one connection, and numbers its pieces from 0. So a piece that
is repeated, left out, moved, sent back or taken from another connection has a wrong tag. Nothing is encrypted. The
decoder of frames sees only what has been checked.

Poly1305 (RFC 8439, section 2.5) is several times as fast as a hash, and may use each of its keys once. A number never
comes twice in one direction of one connection, so that the key made of it does not either. It is derived as
ChaCha20-Poly1305 derives one from its nonce (section 2.6), by BLAKE2b in place of ChaCha20; that it has another
`digest_size` than tags makes it another function than theirs (RFC 7693, section 2.5). Whoever makes a payload up has
its tag right with a chance of less than 2^-88, and the first wrong one ends the connection. For short payloads the one
call of BLAKE2b costs less. The head, which is under tag or key, says which it is.

A piece is a copy of what it was made of: programs may change a tensor while it is being sent (parameters that others
train on), and a tag over what was sent a moment later would be wrong. What is written under a number is written once
(`SendQueue._begin_piece` takes the number in the same step), so that no key serves for two payloads.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call

from cryptography.hazmat.primitives.poly1305 import Poly1305

from ..errors import ProtocolError
from .frames import READ_SIZE, Buffer, Frame, FrameDecoder, room

HEAD = struct.Struct("<I")
TAG_SIZE = 16
KEY_SIZE = 32
OVERHEAD = HEAD.size + TAG_SIZE
MAX_PAYLOAD = READ_SIZE - OVERHEAD
LONG = 4096
_NUMBER = struct.Struct("<Q")
_RUN: Callable[[Callable[[], object]], object] = call  # as mypy understands it


class Seal:
    """Makes the tags of one direction. Any thread."""

    def __init__(self, key: bytes) -> None:
        self._short = hashlib.blake2b(key=key, digest_size=TAG_SIZE)
        self._keys = hashlib.blake2b(key=key, digest_size=KEY_SIZE)

    def tag(self, number: int, piece: Buffer) -> bytes:
        """Of a piece with that number: its head and payload."""
        if len(piece) - HEAD.size > LONG:
            whole = memoryview(piece)
            made = self._keys.copy()
            made.update(_NUMBER.pack(number) + whole[: HEAD.size])
            return Poly1305.generate_tag(made.digest(), whole[HEAD.size :])
        made = self._short.copy()
        made.update(_NUMBER.pack(number))
        made.update(piece)
        return made.digest()

    def piece(self, number: int, parts: Sequence[Buffer], size: int) -> list[Buffer]:
        """What goes over the wire for parts of the stream of so many bytes, copied."""
        piece = b"".join((HEAD.pack(size), *parts))
        tag = self.tag(number, piece)
        return [piece + tag] if size <= LONG else [piece, tag]


class Unsealer:
    """Checks what arrives and hands it to the decoder of frames; used as that is."""

    filling = False  # whatever is under way: it is read in pieces

    def __init__(self, seal: Seal, decoder: FrameDecoder) -> None:
        self._seal = seal
        self._decoder = decoder
        self._numbers = deque((0,), maxlen=1)  # of the next piece
        self._buffer = room(2 * READ_SIZE)
        self._end = 0  # of what is there of pieces that are not whole

    @property
    def empty(self) -> bool:
        """Whether all that came were whole frames in whole pieces."""
        return not self._end and self._decoder.empty

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty, as a whole piece never stays."""
        return memoryview(self._buffer)[self._end :]

    def received(self, count: int) -> list[Frame]:
        """`count` bytes were put into the last buffer; the frames that this completed. ProtocolError: a wrong seal."""
        end = self._end + count
        start = 0
        frames: list[Frame] = []
        with memoryview(self._buffer)[:end] as data:
            while (stop := _end_of_piece(data, start)) <= end:
                frames += self._decoder.feed(self._checked(data, start, stop, self._numbers[0]))
                self._numbers.append(self._numbers[0] + 1)
                start = stop
        if start:
            self._buffer[: end - start] = self._buffer[start:end]
        self._end = end - start
        return frames

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes that were read elsewhere; as `received`."""
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
        """What pieces say that begin where a piece is due, how many they are, and what they still lack, in bytes.

        Nothing is settled by it: see `take`. ProtocolError: a wrong seal.
        """
        payloads: list[memoryview] = []
        start = 0
        view = memoryview(data)
        while (stop := _end_of_piece(view, start)) <= len(data):
            payloads.append(self._checked(view, start, stop, self._numbers[0] + len(payloads)))
            start = stop
        return b"".join(payloads), len(payloads), stop - len(data) if start < len(data) else 0

    def take(self, unread: deque[bytes], count: int) -> None:
        """So many pieces that were looked at are used, and what holds them is emptied: both or, interrupted, none."""
        steps: list[Callable[[], object]] = [unread.clear]
        steps.append(partial(self._numbers.append, self._numbers[0] + count))
        list(map(_RUN, steps))

    def _checked(self, data: memoryview, start: int, stop: int, number: int) -> memoryview:
        """The payload of the piece that lies there."""
        end = stop - TAG_SIZE
        if not hmac.compare_digest(self._seal.tag(number, data[start:end]), data[end:stop]):
            raise ProtocolError("what arrived does not bear the other side's seal: somebody in between has changed it")
        return data[start + HEAD.size : end]


def _end_of_piece(data: memoryview, start: int) -> int:
    """Where the piece ends that begins there, as far as that is known; beyond the data if it is not whole."""
    if len(data) - start < HEAD.size:
        return max(start + OVERHEAD, len(data) + 1)
    (length,) = HEAD.unpack_from(data, start)
    if not 0 < length <= MAX_PAYLOAD:
        raise ProtocolError("what arrived is not sealed, or somebody in between has changed it")
    return start + OVERHEAD + int(length)
