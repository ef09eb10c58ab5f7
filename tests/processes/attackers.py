"""What attackers say to a worker, byte by byte: strangers, and members that speak in the name of others."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
import struct
import threading
from dataclasses import replace
from typing import Any

import msgpack

import aiorpc as rpc
from aiorpc.protocol import handshake, messages
from aiorpc.protocol.frames import HEAD, MAGIC, Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import Handshake
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.messages import ByName, Call, Values, write
from aiorpc.protocol.packing import pack
from aiorpc.protocol.seal import Seal, Unsealer
from aiorpc.protocol.states import HandshakeState
from aiorpc.transport.certificates import Credentials
from aiorpc.transport.tls import TlsLayer

PATIENCE = 20.0
REFUSED = Kind.REFUSED
Target = tuple[socket.AddressFamily, Any]


def targets(record: WorkerRecord) -> dict[str, Target]:
    """Where a worker listens."""
    return {
        "unix": (socket.AF_UNIX, record.unix_path),
        "tcp": (socket.AF_INET, (record.tcp_host, record.tcp_port)),
    }


def talk(target: Target, data: bytes, timeout: float = 20.0) -> bytes:
    """Send bytes as a stranger and read until the worker closes; TimeoutError if it does not."""
    family, address = target
    received = bytearray()
    with socket.socket(family) as sock:
        sock.settimeout(timeout)
        sock.connect(address)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(data)
            while chunk := sock.recv(65536):
                received += chunk
    return bytes(received)


def head(kind: int, body: int, segments: int = 0, call_id: int = 0) -> bytes:
    """The head of a frame that announces so much."""
    return HEAD.pack(call_id, body, segments, kind, MAGIC)


def frame(kind: Kind, body: bytes) -> bytes:
    """One small frame."""
    return b"".join(encode_frame(kind, 0, body))


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (self.path,)


def hello(wanted: list[Any], sealed: bool, version: int = handshake.VERSION, record: Any = None) -> bytes:
    """A HELLO for the worker that is wanted, with that record or with its own."""
    record = wanted if record is None else record
    flags = handshake.SEALED if sealed else 0
    target = WorkerRecord.from_wire(wanted)
    whom = hashlib.sha256(target.incarnation.encode()).digest()
    known = hashlib.sha256(msgpack.packb(target.to_wire())).digest()
    introduction = handshake.Introduction(version, [*record], bytes(handshake.NONCE_SIZE), whom, known, 0, flags)
    return frame(Kind.HELLO, pack(handshake.Hello(pack(introduction), b"")))


def attacks(record: WorkerRecord, bomb: str, sealed: bool) -> dict[str, bytes]:
    """What strangers send, by name."""
    pickled = pickle.dumps(Bomb(bomb))
    function = messages.Values([None], opaque_at=[0], pickled=pickled)
    first = messages.Call(None, function)
    mine = record.to_wire()
    return {
        "garbage": os.urandom(4096),
        "zeros": bytes(4096),
        "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "a TLS hello": bytes.fromhex("160301020001000000fc0303") + os.urandom(200),
        "a huge body": head(Kind.HELLO, 0xFFFF_FFFF) + b"x" * 100,
        "a body over the limit": head(Kind.HELLO, handshake.MAX_BODY + 1) + b"x" * (handshake.MAX_BODY + 1),
        "huge segments": head(Kind.HELLO, 8, 4) + struct.pack("<4Q", *[1 << 62] * 4) + b"x" * 8,
        "very many segments": head(Kind.HELLO, 0, 0xFFFF_FFFF) + b"x" * 100,
        "a call first": frame(Kind.CALL, messages.write(first)),
        "a bare pickle": pickled,
        "a pickle as HELLO": frame(Kind.HELLO, pickled),
        "a pickle in HELLO": frame(Kind.HELLO, msgpack.packb([pickled, pickled])),
        "a pickle as record": hello(mine, sealed, record=[pickled] * len(mine)),
        "an extension type": frame(Kind.HELLO, msgpack.packb(msgpack.ExtType(1, pickled))),
        "another version": hello(mine, sealed, version=handshake.VERSION + 1),
        "a proof that is none": hello(mine, sealed) + frame(Kind.PROOF, bytes(32)),
        "a proof out of turn": frame(Kind.PROOF, bytes(32)),
        "a call instead of the proof": hello(mine, sealed) + frame(Kind.CALL, pickled),
        "an unknown kind": head(99, 4) + b"abcd",
        "a goodbye": frame(Kind.GOODBYE, b""),
    }


GOODBYE = b"".join(encode_frame(Kind.GOODBYE, 0, b"\x91\xa0"))


RESET = struct.pack("ii", 1, 0)


def pretend(
    me: WorkerRecord, target: WorkerRecord, secret: bytes, transport: str, says: bytes = b"", link: int = 0
) -> str:
    """Connect as that worker, with the group's secret, say something and hang up; the reason of a refusal."""
    family, address = targets(target)[transport]
    sealed = transport == "tcp"
    shaking = Handshake(me, secret, expect=target, sealed=sealed, link=link, pipe=link > 0)
    decoder = FrameDecoder(max_body=1 << 20, max_segment=1 << 20)
    source: FrameDecoder | Unsealer = decoder
    with socket.socket(family) as sock:
        sock.settimeout(5)
        sock.connect(address)
        sock.sendall(b"".join(shaking.start()))
        try:
            while shaking.peer is None:
                for frame in _frames(sock, source):
                    if shaking.peer is None:
                        sock.sendall(b"".join(shaking.feed(frame)))
                if shaking.sealed and shaking.state is HandshakeState.PROVED and source is decoder:
                    source = Unsealer(Seal(shaking.keys()[1]), decoder)
        except (
            rpc.errors.PeerRefused,
            rpc.errors.ProtocolError,
        ) as error:  # the second: a refusal has no seal before the proof
            return str(error)
        if says:
            sock.sendall(b"".join(Seal(shaking.keys()[0]).piece(0, [says], len(says))) if shaking.sealed else says)
        if says not in (b"", GOODBYE):
            _frames(sock, source)
        if says != GOODBYE and transport == "tcp":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return ""


def _frames(sock: socket.socket, source: FrameDecoder | Unsealer) -> list[Frame]:
    while data := sock.recv(65536):
        if frames := source.feed(data):
            return frames
    return []


def record_in(member: Any) -> WorkerRecord:
    """The record of a member as it stands in the store."""
    return WorkerRecord.from_wire(member[0])


def some_frames(sock: socket.socket, source: FrameDecoder | Unsealer) -> list[Frame]:
    """The next frames that come; ConnectionError when the other side closes."""
    while data := sock.recv(65536):
        if frames := source.feed(data):
            return frames
    raise ConnectionError


def call(kind: Kind = Kind.CALL, *, path: str) -> bytes:
    """A call of os.mkdir."""
    body = Call(ByName(1, "os:mkdir"), Values([path]))
    return b"".join(encode_frame(kind, 1, write(body)))


def run_code(target: WorkerRecord, secret: bytes, path: str) -> None:
    """Call os.mkdir at a worker over TCP as a member that knows this secret would; OSError or RpcError if refused."""
    mine = replace(target, name="stranger", id=99, incarnation="ab" * 16)
    decoder = FrameDecoder(max_body=1 << 20, max_segment=1 << 20)
    with socket.create_connection((target.tcp_host, target.tcp_port), 2) as sock:
        sock.settimeout(2)
        shaking = Handshake(mine, secret, expect=target, sealed=True)
        sock.sendall(b"".join(shaking.start()))
        source: FrameDecoder | Unsealer = decoder
        while shaking.peer is None:
            for frame in some_frames(sock, source):
                sock.sendall(b"".join(shaking.feed(frame)))
            if shaking.state is HandshakeState.PROVED:
                source = Unsealer(Seal(shaking.keys()[1]), decoder)
        said = call(path=path)
        sock.sendall(b"".join(Seal(shaking.keys()[0]).piece(0, [said], len(said))))
        some_frames(sock, source)  # its answer, or its end


def unfinished(record: WorkerRecord) -> list[bytes]:
    """What strangers begin with who do not go on."""
    return [b"", head(Kind.HELLO, 100), head(Kind.HELLO, 100)[:7], hello(record.to_wire(), False)]


STRANGER = WorkerRecord("stranger", 7, "ab" * 16, "host", "name", 4711, "main", "", "127.0.0.1", 1)


def unproved(wanted: list[Any], sealed: bool, record: WorkerRecord) -> bytes:
    """A HELLO with that record, and a proof that is none."""
    return hello(wanted, sealed, record=record.to_wire()) + frame(Kind.PROOF, bytes(32))


def told_to_log(record: WorkerRecord, forged: bytes) -> list[bytes]:
    """Those words wherever a refusal may quote a stranger."""
    long = replace(record, host="h" * 4000, hostname=forged[:4000].decode(), pid=1, main="m" * 4000)
    said = [frame(kind, forged) for kind in (Kind.REFUSED, Kind.CALL, Kind.HELLO)]
    return [*said, unproved(record.to_wire(), True, long)]


FIELDS = len(handshake.Introduction.__struct_fields__)


def nested_hello(record: WorkerRecord, place: int | None, depth: int) -> bytes:
    """A HELLO with lists in lists in the place of one field, or of all."""
    nested = b"\x91" * depth + b"\x01"
    if place is None:
        return frame(Kind.HELLO, pack(handshake.Hello(nested, b"")))
    honest = handshake.read_hello(hello(record.to_wire(), True)[HEAD.size :]).introduction
    said = handshake.read_introduction(honest)
    fields = [pack(getattr(said, name)) for name in said.__struct_fields__]
    fields[place] = nested
    return frame(Kind.HELLO, pack(handshake.Hello(b"".join((bytes([0x90 + len(fields)]), *fields)), b"")))


def call_first() -> bytes:
    """A call before any handshake."""
    return frame(Kind.CALL, b"")


def said_by(data: bytes) -> list[tuple[int, bytes]]:
    """Kind and body of each frame."""
    return [(frame.kind, frame.body) for frame in FrameDecoder(max_body=10_000).feed(data)]


def started_tls(tls: rpc.Tls) -> TlsLayer:
    """TLS as worker w1 begins it when it opens a connection."""
    context, own = Credentials(tls, "w1").context(opener=True)
    layer = TlsLayer(context, FrameDecoder(max_body=1000), opener=True, own=own)
    layer.start()
    return layer


class Between(threading.Thread):
    """Somebody on the way who ends TLS himself, with a certificate that he has, and carries on what is inside."""

    def __init__(self, at: tuple[str, int], to: tuple[str, int], tls: rpc.Tls, honest: rpc.Tls) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(at)
        self._listener.settimeout(PATIENCE)
        self._at, self._to, self._over = at, to, False
        self._acceptor = Credentials(tls, "x").context(opener=False)[0]
        self._opener = Credentials(honest, "x").context(opener=True)[0]
        self.carried = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock:
                    if self._over:
                        return
                    sock.settimeout(PATIENCE)
                    with contextlib.suppress(OSError):
                        self._relay(sock)

    def _relay(self, sock: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            near = stack.enter_context(self._acceptor.wrap_socket(sock, server_side=True))
            onward = stack.enter_context(socket.create_connection(self._to, PATIENCE))
            far = stack.enter_context(self._opener.wrap_socket(onward))
            for source, target in ((near, far), (far, near), (near, far), (far, near)):
                data = source.recv(65536)
                if not data:
                    return
                self.carried += 1
                target.sendall(data)

    def stop(self) -> None:
        self._over = True
        with contextlib.suppress(OSError), socket.create_connection(self._at, PATIENCE):
            self.join()
        self._listener.close()
