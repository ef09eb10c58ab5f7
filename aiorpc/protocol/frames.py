"""Frames: what travels on a connection, and the decoder that finds them in a stream of bytes.

Layout, little-endian:

    head      u64 call id, u32 body length, u32 number of segments, u8 kind, u8 magic
    table     one u64 length for each segment
    body      msgpack
    segments  raw bytes of tensors and other large buffers, in order

Invariants
1. Every length is compared with its limit before any memory is taken for it. What is only announced takes no memory: a
   segment gets its own when its first byte is due, and long ones lie in memory whose pages the system allocates at the
   first write. So a decoder takes the memory of what has come, once more while a body is handed out, and a buffer to
   read into (`read_size`). Growing memory would copy or move the bytes several times; instead address space is bounded
   (`max_frame`).
2. A frame is handed out whole, with buffers of its own: the decoder keeps no reference to them and never reuses them.
3. After an error the decoder cannot be used any more; its position in the stream is unknown.
4. `get_buffer` never returns an empty view.
5. Call ids name calls of the side that opened the connection; both sides use that number. An id is never reused.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from ..errors import ProtocolError

Buffer = bytes | bytearray | memoryview

HEAD = struct.Struct("<QIIBB")
MAGIC = 0xA1
# A receive buffer of this size takes a burst of small frames in one system call.
READ_SIZE = 256 * 1024
# Enough for a handshake; strangers may open many connections.
FIRST_READ_SIZE = 4 * 1024
# Segments of at least so many bytes are written from their own memory; below it a copy into the frame is cheaper.
DIRECT_SIZE = 32 * 1024
MAX_SEGMENTS = 1 << 20
# The first bytes of TLS: a record of the handshake, in any version.
_TLS_BEGINS = b"\x16\x03"


class Kind(IntEnum):
    """What a frame means. Direction: > from the side that opened the connection, < from the other, = both."""

    HELLO = 1  # = the sender's identity and a nonce (handshake.py)
    PROOF = 2  # > proof of the shared secret
    REFUSED = 3  # < why this connection is not wanted
    CALL = 4  # > run a function
    REPLY = 5  # < its result
    ERROR = 6  # < the exception that it raised
    CANCEL = 7  # > stop working on it
    ITEM = 8  # < one item of a stream
    CREDIT = 9  # > so many more items may come
    REFERENCE = 10  # > a message of reference counting (references.py)
    GOODBYE = 11  # = the sender leaves in good order
    WELCOME = 12  # < the proof was good, and here is mine; calls may come
    CHANNEL = 13  # = from a channel's one end to its other (channels/)
    PARCEL = 14  # = a message some of whose buffers go by channels (runtime/links/link.py)
    CHUNK = 15  # = a piece of a large buffer; the call id is the number of its transfer (channels/bulk.py)
    ACK = 16  # = so many frames have come since the handshake; that number stands in place of the call id (session.py)
    RELEASE = 17  # = blocks of shared memory go back to the receiver (channels/shared.py)
    PARTING = 18  # < the sender takes no more calls, and answers those that it has


# Members of an IntEnum cost a look-up and a conversion each time; the hot paths use these.
CALL, REPLY, ERROR, ITEM = int(Kind.CALL), int(Kind.REPLY), int(Kind.ERROR), int(Kind.ITEM)
CHANNEL, PARCEL, CHUNK, ACK = int(Kind.CHANNEL), int(Kind.PARCEL), int(Kind.CHUNK), int(Kind.ACK)
RELEASE = int(Kind.RELEASE)


class Frame(NamedTuple):
    """One frame. body: msgpack bytes. segments: writable buffers, which belong to the holder of the frame."""

    kind: int
    call_id: int
    body: bytes
    segments: Sequence[bytearray | memoryview] = ()

    def __str__(self) -> str:
        name = Kind(self.kind).name if self.kind in Kind._value2member_map_ else str(self.kind)
        head = bytes(self.body[:24])
        return f"<{name} {self.call_id}: {len(self.body)} bytes {head!r}, {len(self.segments)} segments>"


def encode_frame(kind: int, call_id: int, body: bytes, segments: Sequence[Buffer] = ()) -> list[Buffer]:
    """The buffers to write, in order, for one frame. Segments are borrowed until they are written."""
    if not segments:
        return [HEAD.pack(call_id, len(body), 0, kind, MAGIC) + body]
    table = struct.pack(f"<{len(segments)}Q", *map(len, segments))
    head = HEAD.pack(call_id, len(body), len(segments), kind, MAGIC) + table + body
    if sum(map(len, segments)) < DIRECT_SIZE:
        return [b"".join((head, *segments))]
    return [head, *filter(len, segments)]


_new_frame = tuple.__new__


_MUCH = 16 * mmap.PAGESIZE
_NOTHING = memoryview(bytearray())  # a segment without bytes: nothing can be written to it, so all share it
# A table of more lengths is kept as an array: as Python's numbers it would take several times its bytes.
_FEW_SEGMENTS = 64


def _lengths(buffer: Buffer | mmap.mmap, at: int, count: int) -> Sequence[int]:
    lengths = array("Q", memoryview(buffer)[at : at + 8 * count].tobytes())
    if sys.byteorder == "big":
        lengths.byteswap()
    return lengths


def room(size: int) -> bytearray | mmap.mmap:
    """Memory for bytes that arrive. Large memory is mapped: a page is allocated at the first write to it."""
    if size < _MUCH:
        return bytearray(size)
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ProtocolError(f"there is no memory here to receive {size} bytes: {error}") from None


def whole_frames(data: bytes) -> tuple[list[Frame], int]:
    """The whole frames at the beginning of these bytes, and their length. Limits are not checked."""
    # `least_length` inlined: a call less for each frame.
    frames: list[Frame] = []
    start, there = 0, len(data)
    size = HEAD.size
    while there - start >= size:
        call_id, body_length, count, kind, magic = HEAD.unpack_from(data, start)
        body = start + size + 8 * count
        at = body + body_length
        if magic != MAGIC or at > there:
            break
        segments: list[bytearray] | tuple[()] = ()
        if count:
            lengths = struct.unpack_from(f"<{count}Q", data, start + size)
            if at + sum(lengths) > there:
                break
            segments = []
            for length in lengths:
                segments.append(bytearray(data[at : at + length]))
                at += length
        frames.append(_new_frame(Frame, (kind, call_id, data[body : body + body_length], segments)))
        start = at
    return frames, start


def least_length(data: bytes, start: int = 0) -> int:
    """Least bytes of the frame that begins there, exact once its lengths are there; 0: not a frame of ours."""
    size = HEAD.size
    if len(data) - start < size:
        return size
    _, body_length, count, _, magic = HEAD.unpack_from(data, start)
    if magic != MAGIC:
        return 0
    length: int = size + 8 * count + body_length
    if count and len(data) - start >= size + 8 * count:
        length += sum(struct.unpack_from(f"<{count}Q", data, start + size))
    return length


class FrameDecoder:
    """Turns a stream of bytes into frames. Feed it with `get_buffer` and `received`.

    max_body, max_segment: limits in bytes; no segments are allowed while the latter is 0. max_frame: of the segments of
    a frame together. read_size: bytes of one read while nothing large is under way; a change holds from the next time
    on that nothing is half read.
    allocate: makes the writable buffer for one large segment of so many bytes.
    place: returns where the segment of a CHUNK belongs, from transfer, body and length; None while none may come.
    """

    def __init__(
        self,
        *,
        max_body: int,
        max_segment: int = 0,
        max_frame: int = 1 << 62,
        read_size: int = READ_SIZE,
        allocate: Callable[[int], bytearray | memoryview] = bytearray,
    ) -> None:
        self.max_body = max_body
        self.max_segment = max_segment
        self.max_frame = max_frame
        self.read_size = read_size
        self.allocate = allocate
        self.place: Callable[[int, bytes, int], memoryview] | None = None
        self._buffer = room(read_size)
        self._start = 0  # of the unparsed bytes
        self._end = 0
        self._large: _LargeFrame | None = None
        #: Whether a large buffer is under way.
        self.filling: bool = False
        #: Whether the stream began as TLS does: the other side uses it, and this one does not.
        self.saw_tls: bool = False

    @property
    def empty(self) -> bool:
        """Whether no frame is incomplete."""
        return self._large is None and self._start == self._end

    @property
    def unfinished(self) -> tuple[int, int] | None:
        """The transfer of the CHUNK that is under way, and the bytes of that chunk; None if there is none."""
        large = self._large
        return (large.call_id, large.size) if large is not None and large.kind == CHUNK else None

    def feed(self, data: Buffer) -> list[Frame]:
        """Take bytes of the stream that were read elsewhere; returns and raises the same as `received`."""
        rest = memoryview(data)
        frames: list[Frame] = []
        while rest:
            buffer = self.get_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            frames += self.received(count)
            rest = rest[count:]
        return frames

    def get_buffer(self) -> memoryview:
        """Where to read the next bytes into; as long as one read should be."""
        if self._large is not None:
            return self._large.remaining()
        return memoryview(self._buffer)[self._end :]

    def received(self, count: int) -> list[Frame]:
        """`count` bytes were read into the last buffer; returns the frames that this completed.

        Raises ProtocolError for a stream that is not ours, or exceeds the limits.
        """
        if self._large is not None:
            return self._received_large(count)
        frames: list[Frame] = []
        self._end += count
        buffer, start, end = self._buffer, self._start, self._end
        need = size = HEAD.size
        while end - start >= need:
            call_id, body_length, count, kind, magic = HEAD.unpack_from(buffer, start)
            if magic != MAGIC or body_length > self.max_body or count:
                need, start = self._parse_other(frames, start)
                continue
            need = size + body_length
            if end - start < need:
                break
            # Most frames are made here: `tuple.__new__` saves a call.
            frames.append(_new_frame(Frame, (kind, call_id, bytes(buffer[start + size : start + need]), ())))
            start += need
            need = size
        if start == end and len(buffer) == self.read_size:
            self._start = self._end = 0  # as `_make_room` does, for most that comes
        else:
            self._make_room(start, need)
        return frames

    def _received_large(self, count: int) -> list[Frame]:
        large = self._large
        assert large is not None, "looked at before"
        if not large.filled(count):
            return []
        self._large = None
        self.filling = False
        return [large.frame()]

    def _check(self, start: int, magic: int, body_length: int, count: int) -> None:
        if magic != MAGIC:
            if not start and self._buffer[: len(_TLS_BEGINS)] == _TLS_BEGINS:
                self.saw_tls = True
                raise ProtocolError(
                    "it speaks TLS, and this worker does not; give all workers of the group tls=, or none"
                )
            raise ProtocolError("not an aiorpc stream: a frame does not begin as frames do")
        if body_length > self.max_body:
            raise ProtocolError(f"a frame announces a body of {body_length} bytes; the limit is {self.max_body}")
        if count and not self.max_segment:
            raise ProtocolError("a frame announces tensors before the handshake is done")
        if count > MAX_SEGMENTS:
            raise ProtocolError(f"a frame announces {count} segments; the limit is {MAX_SEGMENTS}")

    def _parse_other(self, frames: list[Frame], start: int) -> tuple[int, int]:
        """Parse a frame with segments; or refuse what is no frame, or beyond the limits.

        Returns how many bytes must be there to go on, and from where: with this frame, or, if it was taken, whole or as
        the large frame under way, with the next one.
        """
        end = self._end
        call_id, body_length, count, kind, magic = HEAD.unpack_from(self._buffer, start)
        self._check(start, magic, body_length, count)
        prefix: int = HEAD.size + 8 * count + body_length
        if end - start < prefix:
            return prefix, start
        lengths: Sequence[int]
        if count <= _FEW_SEGMENTS:
            lengths = struct.unpack_from(f"<{count}Q", self._buffer, start + HEAD.size)
        else:
            lengths = _lengths(self._buffer, start + HEAD.size, count)
        longest = max(lengths)
        if longest > self.max_segment:
            raise ProtocolError(f"a frame announces a tensor of {longest} bytes; the limit is {self.max_segment}")
        whole = sum(lengths)
        if whole > self.max_frame:
            raise ProtocolError(f"a frame announces {whole} bytes of tensors; the limit is {self.max_frame}")
        at = start + prefix
        body = bytes(self._buffer[at - body_length : at])
        if kind == CHUNK:
            if self.place is None or count != 1:
                raise ProtocolError("a chunk where there can be none")
            large = _LargeFrame(kind, call_id, body, lengths, partial(self.place, call_id, body))
        elif end - at >= whole:
            segments: list[bytearray | memoryview] = []
            with memoryview(self._buffer) as data:
                for length in lengths:
                    segments.append(bytearray(data[at : at + length]) if length else _NOTHING)
                    at += length
            frames.append(Frame(kind, call_id, body, segments))
            return HEAD.size, at
        else:
            large = _LargeFrame(kind, call_id, body, lengths, self.allocate)
        start = at + large.take(memoryview(self._buffer)[at:end])
        if large.complete:
            frames.append(large.frame())
        else:
            self._large = large
            self.filling = True
        return HEAD.size, start

    def _make_room(self, start: int, need: int) -> None:
        """Move the unparsed rest to the front, and grow when one frame needs more than there is."""
        self._start = start
        if self._large is not None:
            self._start = self._end = 0
            return
        rest = self._end - self._start
        if rest == 0:
            self._start = self._end = 0
            if not self.read_size <= len(self._buffer) <= 4 * READ_SIZE:
                self._buffer = room(self.read_size)
            return
        if self._start + need > len(self._buffer) or self._end == len(self._buffer):
            data = self._buffer[self._start : self._end]
            if need > len(self._buffer):
                self._buffer = room(need)
            self._buffer[:rest] = data
            self._start, self._end = 0, rest


class _LargeFrame:
    """A frame whose segments are received straight into their own memory, which is allocated one after the other."""

    def __init__(
        self,
        kind: int,
        call_id: int,
        body: bytes,
        lengths: Sequence[int],
        allocate: Callable[[int], bytearray | memoryview],
    ) -> None:
        self.kind = kind
        self.call_id = call_id
        self.body = body
        self.segments: list[bytearray | memoryview] = []
        self._lengths = lengths
        self._allocate = allocate
        self._view: memoryview | None = None  # the rest of the current segment
        self._begin()

    def _begin(self) -> None:
        """Allocate the next segment with bytes."""
        self._view = None
        while self._view is None and len(self.segments) < len(self._lengths):
            length = self._lengths[len(self.segments)]
            if not length:
                self.segments.append(_NOTHING)
                continue
            try:
                segment = self._allocate(length)
            except MemoryError:
                raise ProtocolError(f"there is no memory here for a tensor of {length} bytes") from None
            self.segments.append(segment)
            self._view = memoryview(segment)

    @property
    def size(self) -> int:
        return sum(self._lengths)

    @property
    def complete(self) -> bool:
        return self._view is None

    def remaining(self) -> memoryview:
        assert self._view is not None, "a complete one is dropped"
        return self._view

    def filled(self, count: int) -> bool:
        view = self.remaining()
        if count == len(view):
            self._begin()
        else:
            self._view = view[count:]
        return self._view is None

    def take(self, data: memoryview) -> int:
        """Copy bytes that have arrived already; returns how many belong to this frame."""
        taken = 0
        while self._view is not None and taken < len(data):
            view = self._view
            count = min(len(view), len(data) - taken)
            view[:count] = data[taken : taken + count]
            taken += count
            self.filled(count)
        return taken

    def frame(self) -> Frame:
        return Frame(self.kind, self.call_id, self.body, self.segments)
