"""Ends of connections for tests, what tests wait for, and interruptions."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import fcntl
import inspect
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

from aiorpc.protocol.frames import Frame, FrameDecoder, Kind, encode_frame
from aiorpc.transport.connection import Connection
from aiorpc.transport.tls import TlsLayer
from tests.conditions import unmet

LONG = 20.0
SOON = 6.0  # for what would otherwise never happen; no test waits for it that passes


class End:
    """A connection with what it has received, and the socket that it was given."""

    def __init__(self, sock: socket.socket, label: str, tls: Callable[[FrameDecoder], TlsLayer] | None = None) -> None:
        self.sock = sock
        decoder = FrameDecoder(max_body=1 << 24, max_segment=1 << 28)
        layer = None if tls is None else tls(decoder)
        self.connection = Connection(asyncio.get_running_loop(), sock, decoder, label=label, tls=layer)
        self.frames: list[Frame] = []
        self.causes: list[BaseException | None] = []
        self.changed = asyncio.Event()
        self.connection.on_frames = self.on_frames
        self.connection.on_closed = self.on_closed

    def on_frames(self, frames: list[Frame]) -> None:
        self.frames += frames
        self.changed.set()

    def on_closed(self, cause: BaseException | None) -> None:
        self.causes.append(cause)
        self.changed.set()

    def send(self, call_id: int, body: bytes = b"", *segments: bytes | bytearray, urgent: bool = False) -> None:
        self.connection.send(encode_frame(Kind.CALL, call_id, body, segments), urgent=urgent)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for frames or the end until the condition holds."""
        async with asyncio.timeout(LONG):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def received(self, count: int) -> list[Frame]:
        await self.until(lambda: len(self.frames) >= count)
        return self.frames

    async def closed(self) -> BaseException | None:
        await self.until(lambda: bool(self.causes))
        (cause,) = self.causes
        return cause


async def until(condition: Callable[[], bool], seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(unmet(condition, value, seconds))
        await asyncio.sleep(0.0005)


def encoded(call_id: int, body: bytes = b"", kind: Kind = Kind.REPLY) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(kind, call_id, body))


def takes_little(sock: socket.socket, size: int = 64 * 1024) -> None:
    """Have the socket of a connection take about so many bytes at once; the connection has asked for far more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


def unread(sock: socket.socket) -> int:
    """How many bytes have arrived at that socket and were read by nobody yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
    return int(count)


class Interruption(BaseException):
    """Raised where a signal handler might."""


def interrupted(work: Callable[[], object], at: int, *files: str, signals: bool = False) -> str | None:
    """Run `work`, and raise before the instruction of that number in those files: the place, None if it is done.

    signals: of those before which the interpreter calls signal handlers.
    """
    place = None

    def interrupt(where: str) -> None:
        nonlocal place
        place = where
        raise Interruption

    with contextlib.suppress(Interruption):
        meanwhile(work, at, interrupt, *files, signals=signals)
    return place


def meanwhile(
    work: Callable[[], object], at: int, act: Callable[[str], None], *files: str, signals: bool = False
) -> bool:
    """Run `work`, and `act` once, before the instruction of that number in those files, as another thread might.

    `act` is told the place. False if there was no such instruction. signals: as of `interrupted`.
    """
    left = at
    last: dict[int, str] = {}  # what was done in each frame, by its id: the frames are nobody's business here

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if event == "call" and last.get(id(frame.f_back), "CALL_FUNCTION_EX") != "CALL_FUNCTION_EX":
            last[id(frame.f_back)] = "a function of Python's"  # from which the interpreter returns without a look
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            last.pop(id(frame), None)
        elif event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if name == "NOT_TAKEN":  # Python 3.14 guards no such place by a `try`, as nothing happens there
                return trace
            before, last[id(frame)] = last.get(id(frame), ""), name
            if signals and not before.startswith(("RESUME", "CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")):
                return trace
            left -= 1
            if left == -1:
                act(f"{frame.f_code.co_name}, line {frame.f_lineno}, byte {frame.f_lasti}")
        elif event == "exception":
            last[id(frame)] = event
        return trace

    before = sys.gettrace()
    here = inspect.currentframe()
    assert here is not None
    here.f_trace_opcodes = True  # Python 3.12 looks for such a frame in settrace, and not again
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return left < 0


class Watched:
    """A socket that notes the sizes of what it is given to send. Once held, it is in the midst of a `send` until `go`;
    `inside` says when."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.writes: list[int] = []
        self.held = False
        self.inside, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def send(self, data: bytes, flags: int) -> int:
        """As of a socket."""
        self.writes.append(len(data))
        if self.held:
            self.inside.set()
            assert self.go.wait(LONG)
        return self.sock.send(data, flags)


async def read_all(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    async with asyncio.timeout(LONG):
        while part := await loop.sock_recv(sock, 1 << 16):
            parts.append(part)
    return b"".join(parts)
