"""A live worker behind its socket: what a stranger sends it, and what a member sends that knows the secret."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc.protocol.frames import Frame, FrameDecoder, encode_frame
from aiorpc.protocol.handshake import Handshake

PATIENCE = 20.0  # seconds until a worker that does not close a connection counts as hanging
# After so many connections the worker is replaced: it remembers for good which members were lost.
LIFE = 250
_SEGMENT = 1 << 12  # bytes of the longest that `frames_of` makes


class Faults(logging.Handler):
    """What the runtime says that it should never have to say: that something of its own has failed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


class Victim:
    """A worker on a loop of its own, which runs while an input is tried. To be closed.

    proved: whether inputs come from somebody who has proved that he knows the secret.
    """

    def __init__(self, proved: bool) -> None:
        self._proved = proved
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_exception)
        self._faults = Faults()
        self._logger = logging.getLogger("aiorpc")
        self._before = self._logger.propagate
        self._logger.addHandler(self._faults)
        self._logger.propagate = False
        self._shots = 0
        self._worker: rpc.Worker | None = None

    def close(self) -> None:
        """End the worker; raises AssertionError if it does not end well."""
        try:
            self._end()
        finally:
            self._logger.removeHandler(self._faults)
            self._logger.propagate = self._before
            self._loop.close()

    def shoot(self, data: bytes) -> None:
        """Send this on a connection of its own; the worker has to close that in time and to live on."""
        self._shots += 1
        if self._worker is None or self._shots % LIFE == 0:
            self._end()
            self._begin()
        self._loop.run_until_complete(asyncio.wait_for(self._shoot(data), PATIENCE))
        assert not self._faults.said, self._faults.said

    def on_loop(self, function: Callable[[], object]) -> None:
        """Run something on the loop while the next input is tried."""
        self._loop.call_soon(function)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._faults.said.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _begin(self) -> None:
        options = rpc.RpcBackendOptions(transports=("unix",), max_frame_bytes=1 << 20, max_tensor_bytes=1 << 20)
        options = replace(options, num_worker_threads=2, shared_memory=8 << 20)
        self._worker = rpc.Worker("victim", rank=0, world_size=1, options=options, store=HashStore())
        self._loop.run_until_complete(self._worker.start())

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return

        async def last_words() -> None:
            assert await worker.call("victim", operator.add, 1, 2) == 3
            await worker.shutdown(graceful=False)

        self._loop.run_until_complete(asyncio.wait_for(last_words(), PATIENCE))
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("aiorpc-victim")]
        assert len(left) <= 4, left

    async def _shoot(self, data: bytes) -> None:
        assert self._worker is not None
        node = self._worker._node
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.connect(node.engine.record.unix_path)
            with contextlib.suppress(ConnectionError):
                if self._proved:
                    await self._prove(sock)
                    data = frames_of(data)
                await self._loop.sock_sendall(sock, data)
                sock.shutdown(socket.SHUT_WR)
            answers = await self._read(sock)
        if not self._proved:
            assert not node.services, "somebody was let in without a proof"
            assert len(answers) < 2048, "a stranger was told more than a HELLO and a refusal"
        for _ in range(2000):  # some ten seconds, on a busy machine more
            if not node.services and all(each.ended for each in list(node.engine.connections)):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{len(node.services)} connections are still served")

    async def _read(self, sock: socket.socket) -> bytes:
        answers = bytearray()
        with contextlib.suppress(ConnectionError):
            while chunk := await self._loop.sock_recv(sock, 65536):
                answers += chunk
        return bytes(answers)

    async def _prove(self, sock: socket.socket) -> None:
        """The handshake, as a member makes it that was not here before."""
        assert self._worker is not None
        node = self._worker._node
        number = 1 + self._shots
        mine = replace(
            node.engine.record, name=f"m{number}", id=number, incarnation=f"{number:032x}", unix_path="", tcp_port=0
        )
        shaking = Handshake(mine, node.acceptor.secret, expect=node.engine.record, link=1)
        decoder = FrameDecoder(max_body=1 << 16)
        await self._loop.sock_sendall(sock, b"".join(shaking.start()))
        while shaking.peer is None:
            data = await self._loop.sock_recv(sock, 65536)
            if not data:
                raise ConnectionResetError
            for frame in decoder.feed(data):
                if shaking.peer is None and (reply := b"".join(shaking.feed(frame))):
                    await self._loop.sock_sendall(sock, reply)


def frames_of(data: bytes) -> bytes:
    """What goes over the wire for an input: frames that are whole, so that it matters what is in them; behind a first
    byte of 0 the bytes as they are.

    Of a frame the input has kind, call, number of segments, length of the body (2 bytes), body, and 2 bytes for the
    length of each segment.
    """
    if data[:1] == b"\0":
        return data[1:]
    made: list[Any] = []
    at = 1
    while at + 5 <= len(data):
        kind, call_id, count = data[at : at + 3]
        length = int.from_bytes(data[at + 3 : at + 5], "little")
        body = data[at + 5 : at + 5 + length]
        at += 5 + length
        segments = []
        for _ in range(count % 3):
            segments.append(bytes(int.from_bytes(data[at : at + 2], "little") % _SEGMENT))
            at += 2
        made += encode_frame(kind, call_id, body, segments)
    return b"".join(bytes(part) for part in made)


def input_of(frames: list[Frame]) -> bytes:
    """The input that `frames_of` makes these frames of; their segments are zeros."""
    parts = [b"\1"]
    for kind, call_id, body, segments in frames:
        parts.append(bytes((kind, call_id, len(segments))) + len(body).to_bytes(2, "little") + body)
        parts += [len(segment).to_bytes(2, "little") for segment in segments]
    return b"".join(parts)
