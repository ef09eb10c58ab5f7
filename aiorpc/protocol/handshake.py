"""Who is on the other end: versions, identities and a mutual proof of the shared secret.

    opener                                   acceptor
    HELLO version, record, nonce    -->
                                    <--      HELLO version, record, nonce, proof("acceptor")
    PROOF proof("opener")           -->      ready
    ready                           <--      WELCOME, the first that bears a seal

The acceptor proves itself first, so that the opener never sends a call to somebody who does not know the secret. A
proof is HMAC-SHA256 over the role and both HELLOs; the role label keeps one side's proof from being played back as the
other's. Bodies are msgpack of plain values; nothing is unpickled before both proofs were checked.

The opener sends nothing before the WELCOME, so that the acceptor's strict limits hold for every byte before the proof.

Both say in their HELLO whether what follows is sealed (seal.py); if they differ the connection is refused. The keys,
one for each direction, come from the secret and both HELLOs: they are good for this connection alone. The acceptor
seals from its WELCOME on, the opener behind it; each takes nothing without a seal once it has checked the other's
proof. So no byte behind a proof goes without one, and whoever carries a handshake to and fro gets nothing out of it.

The states of both sides are the tables `OPENER` and `ACCEPTOR` of `states`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import msgpack

from ..errors import PeerRefused, ProtocolError, RpcUsageError
from .frames import Buffer, Frame, Kind, encode_frame
from .identity import WorkerRecord
from .states import ACCEPTOR, OPENER, HandshakeEvent, HandshakeState

VERSION = 3
NONCE_SIZE = 32
# Longest body taken from somebody who has not proved anything yet, in bytes.
MAX_BODY = 16 * 1024


class Hello(NamedTuple):
    """Who I am, and a proof if the other side has said that before. In this form for ever, whatever the version."""

    #: An Introduction, as bytes: both sides' are what the proofs are made from.
    introduction: bytes
    #: The acceptor's; empty in the opener's.
    proof: bytes


class Introduction(NamedTuple):
    """What a Hello says. Its first field keeps its place for ever; the others may differ between versions."""

    #: Of the protocol.
    version: int
    #: Of the worker (`identity.WorkerRecord`).
    record: tuple[Any, ...]
    #: 32 random bytes, never used again.
    nonce: bytes
    #: The number that the opener gave to its link with the acceptor.
    link: int
    #: PIPE: this is the second connection of that link, for chunks. SEALED: what follows the handshake bears seals.
    flags: int


PIPE, SEALED = 1, 2


class Handshake:
    """One side of the exchange. `start` (opener only) and `feed` return what to write; `peer` is set once READY.

    expect: whom the opener wants to reach, to the last word; None takes whoever proves the secret.
    accept: asked by the acceptor about the opener's record; returns a reason to refuse it, or None.
    link, pipe: the number that the opener gave to its link with the acceptor, and whether this is the second connection
    of it, for chunks (runtime/link.py); the acceptor learns both. sealed: what follows bears seals, see `keys`.
    """

    def __init__(
        self,
        record: WorkerRecord,
        secret: bytes,
        *,
        opener: bool,
        expect: WorkerRecord | None = None,
        accept: Callable[[WorkerRecord], str | None] | None = None,
        link: int = 0,
        pipe: bool = False,
        sealed: bool = False,
    ) -> None:
        self.record = record
        self.link = link
        self.pipe = pipe
        self.sealed = sealed
        self._table = OPENER if opener else ACCEPTOR
        self.state = self._table.initial
        self.peer: WorkerRecord | None = None
        self._candidate: WorkerRecord | None = None
        self._secret = secret
        self._opener = opener
        self._expect = expect
        self._accept = accept
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        self._mine = b""
        self._theirs = b""

    def start(self) -> list[Buffer]:
        """The opener's HELLO. RpcUsageError on the acceptor's side, and the second time."""
        if not self._opener or self.state is not HandshakeState.START:
            side = "opener's" if self._opener else "acceptor's"
            raise RpcUsageError(f"an {side} handshake that is {self.state.value} cannot be started")
        self._mine = self._hello()
        self.state = self._table.next(self.state, HandshakeEvent.BEGUN)
        return encode_frame(Kind.HELLO, 0, write_hello(Hello(self._mine, b"")))

    def feed(self, frame: Frame) -> list[Buffer]:
        """The peer's next frame. Raises PeerRefused or ProtocolError, with `refusal` as the frame to send first."""
        try:
            return self._feed(frame)
        except (PeerRefused, ProtocolError):
            if self.state not in self._table.final:
                self.state = self._table.next(self.state, HandshakeEvent.REFUSED)
            raise

    def keys(self) -> tuple[bytes, bytes]:
        """For the seals of what we send, and of what we receive. Once the other side's proof was checked."""
        if self.state not in (HandshakeState.PROVED, HandshakeState.READY):
            raise RpcUsageError(f"a handshake that is {self.state.value} has no keys")
        ours, theirs = ("opener", "acceptor") if self._opener else ("acceptor", "opener")
        return self._keyed(f"seal of {ours}"), self._keyed(f"seal of {theirs}")

    def _feed(self, frame: Frame) -> list[Buffer]:
        if frame.kind == Kind.REFUSED:
            raise PeerRefused(f"the other side refused the connection: {frame.body[:500].decode('utf-8', 'replace')}")
        if self.state is HandshakeState.START and not self._opener and frame.kind == Kind.HELLO:
            self._theirs = read_hello(frame.body).introduction
            self._candidate = self._check_record()
            self._mine = self._hello()
            self.state = self._table.next(self.state, HandshakeEvent.HELLO)
            return encode_frame(Kind.HELLO, 0, write_hello(Hello(self._mine, self._proof("acceptor"))))
        if self.state is HandshakeState.SENT and frame.kind == Kind.HELLO:
            self._theirs, proof = read_hello(frame.body)
            self._candidate = self._check_record()
            self._check_proof("acceptor", proof)
            self.state = self._table.next(self.state, HandshakeEvent.HELLO)
            return encode_frame(Kind.PROOF, 0, self._proof("opener"))
        if self.state is HandshakeState.PROVED and frame.kind == Kind.WELCOME and self._candidate is not None:
            self._ready(self._candidate, HandshakeEvent.WELCOME)
            return []
        if self.state is HandshakeState.CHALLENGED and frame.kind == Kind.PROOF and self._candidate is not None:
            self._check_proof("opener", frame.body)
            self._ready(self._candidate, HandshakeEvent.PROOF)
            return encode_frame(Kind.WELCOME, 0, b"")
        raise ProtocolError(f"{frame} does not belong in a handshake that is {self.state.value}")

    def _ready(self, peer: WorkerRecord, event: HandshakeEvent) -> None:
        self.peer = peer
        self.state = self._table.next(self.state, event)

    def _hello(self) -> bytes:
        flags = (PIPE if self.pipe else 0) | (SEALED if self.sealed else 0)
        return write_introduction(Introduction(VERSION, tuple(self.record.to_wire()), self._nonce, self.link, flags))

    def _check_record(self) -> WorkerRecord:
        theirs = read_introduction(self._theirs)
        if not self._opener:
            self.link, self.pipe = theirs.link, bool(theirs.flags & PIPE)
        sealed = bool(theirs.flags & SEALED)
        peer = WorkerRecord.from_wire(theirs.record)
        self._check_expected(peer)
        if sealed != self.sealed:
            says, we = ("seals", "do not") if sealed else ("does not seal", "do")
            raise PeerRefused(
                f"worker {peer.name!r} {says} what it sends on this connection, and we {we}; give authenticate_frames "
                "the same value on all workers"
            )
        reason = self._accept(peer) if self._accept is not None else None
        if reason is not None:
            raise PeerRefused(reason)
        return peer

    def _check_expected(self, peer: WorkerRecord) -> None:
        expect = self._expect
        if expect is None or peer == expect:
            return
        if (peer.name, peer.incarnation) != (expect.name, expect.incarnation):
            raise PeerRefused(
                f"worker {peer.name!r} answers where {expect.name!r} should be; it may have been restarted"
            )
        differ = [each.name for each in fields(peer) if getattr(peer, each.name) != getattr(expect, each.name)]
        raise PeerRefused(
            f"worker {peer.name!r} says something else of itself than the rendezvous store says of it "
            f"({', '.join(differ)}): somebody else has written into the store"
        )

    def _proof(self, role: str) -> bytes:
        return self._keyed(role)

    def _keyed(self, label: str) -> bytes:
        hellos = (self._mine, self._theirs) if self._opener else (self._theirs, self._mine)
        message = b"\0".join((b"aiorpc", label.encode(), *(hashlib.sha256(hello).digest() for hello in hellos)))
        return hmac.digest(self._secret, message, "sha256")

    def _check_proof(self, role: str, proof: bytes) -> None:
        if not hmac.compare_digest(self._proof(role), proof):
            raise PeerRefused("the shared secret does not match (AIORPC_SECRET, or another group of workers)")


def refusal(reason: str) -> list[Buffer]:
    """The frame that tells the other side why its connection is closed."""
    return encode_frame(Kind.REFUSED, 0, reason.encode()[:500])


def write_hello(hello: Hello) -> bytes:
    """The body of a HELLO."""
    body: bytes = msgpack.packb(hello)
    return body


def read_hello(body: Buffer) -> Hello:
    """The Hello of a body. Raises ProtocolError."""
    fields = _unpack(body)
    if len(fields) != len(Hello._fields) or not all(isinstance(field, bytes) for field in fields):
        raise ProtocolError("a HELLO that is none")
    return Hello(*fields)


def write_introduction(introduction: Introduction) -> bytes:
    """The bytes of it that go into a Hello."""
    introduced: bytes = msgpack.packb(introduction)
    return introduced


def read_introduction(data: Buffer) -> Introduction:
    """What a Hello says; its record is not looked at. Raises PeerRefused for another version, or ProtocolError."""
    fields = _unpack(data)
    match fields:
        case [version, *_] if version != VERSION:
            theirs = f"version {version!r:.40} of the protocol"
            raise PeerRefused(f"it speaks {theirs}, we speak {VERSION}; use one aiorpc everywhere")
    if len(fields) != len(Introduction._fields):
        raise ProtocolError("a HELLO that is none")
    introduction = Introduction(*fields)
    if not isinstance(introduction.nonce, bytes) or len(introduction.nonce) != NONCE_SIZE:
        raise ProtocolError("a HELLO without a nonce")
    flags = introduction.flags
    if type(introduction.link) is not int or type(flags) is not int or not 0 <= flags <= PIPE | SEALED:
        raise ProtocolError("a HELLO that does not say what the connection is for")
    return introduction


def _unpack(data: Buffer) -> list[Any]:
    try:
        unpacked = msgpack.unpackb(data, max_array_len=64, max_map_len=0)
    except Exception as error:
        raise ProtocolError(f"a HELLO that is no msgpack: {error}") from None
    if type(unpacked) is not list:
        raise ProtocolError("a HELLO that is none")
    return unpacked
