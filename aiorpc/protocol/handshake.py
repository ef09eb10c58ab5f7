"""The handshake: versions, identities and a mutual proof of the shared secret.

    opener                                   acceptor
    HELLO version, record, nonce, whom -->
                                    <--      HELLO version, nonce
    PROOF takes, proof("opener")    -->      ready
    ready                           <--      WELCOME takes, proof("acceptor"), the first with a MAC

The opener proves itself first, and names the worker that it wants, which it knows from the store. A stranger who
connects to a worker without the secret learns the version and whether there are MACs, but no name, host, process or
script. The acceptor compares the wanted worker with itself, by hashes. A proof is HMAC-SHA256 over the role, both
HELLOs and the acceptor's whole record, which each side takes from its own knowledge; the role label keeps one side's
proof from being played back as the other's. The opener sends no call before it has checked the acceptor's proof. Bodies
are msgpack of plain values; nothing is unpickled before the other side's proof was checked.

What a proof gives away: anyone who has one and the two HELLOs can test guessed secrets offline, at full speed. A secret
chosen by people therefore goes through a hash that is slow and takes memory (`runtime/meeting/secret.py`).
docs/inside/decisions/secret.md lists who can get a proof, and why that cannot be prevented. TLS hides the proofs from
readers of the network.

Each side announces with its proof how much it takes (`max_incoming_bytes`): the other side sends no message that would
end the connection.

The opener sends nothing between its proof and the WELCOME: the acceptor's strict limits hold for every byte before the
proof.

Both announce in their HELLO whether MACs follow (seal.py); if they differ the connection is refused. The keys, one for
each direction, come from the secret and both HELLOs: they are good for this connection alone. The acceptor uses MACs
from its WELCOME on, the opener from its next frame on; after its own proof the opener accepts only bytes with a MAC,
and so does the acceptor after the opener's. Every byte after a proof therefore has a MAC, and a relay of the handshake
gains nothing. A refusal of a wrong proof has no MAC, as there is no key for it: an opener that waits for a WELCOME with
a MAC takes it for a secret that does not match.

The states of both sides are the tables `OPENER` and `ACCEPTOR` of `states`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from ..errors import PeerRefused, ProtocolError, RpcUsageError
from .frames import Buffer, Frame, Kind, encode_frame
from .identity import WorkerRecord, legible
from .messages import Fields, reader
from .packing import pack
from .states import ACCEPTOR, OPENER, HandshakeEvent, HandshakeState

VERSION = 7
NONCE_SIZE = HASH_SIZE = 32
WRONG_SECRET = "the shared secret does not match (AIORPC_SECRET, or another group of workers)"
# Longest body that is accepted before the other side's proof, in bytes.
MAX_BODY = 16 * 1024
# A worker without a limit announces that it takes so much.
MOST = 1 << 62
# Characters that are shown of the other side's text.
SHOWN = 300
# Bits of `Introduction.flags`.
PIPE, SEALED, SAFE, LASTING, RESUME = 1, 2, 4, 8, 16

_Nonce = Annotated[bytes, Meta(min_length=NONCE_SIZE, max_length=NONCE_SIZE)]
_Hash = Annotated[bytes, Meta(min_length=HASH_SIZE, max_length=HASH_SIZE)]
_Flags = Annotated[int, Meta(ge=0, le=PIPE | SEALED | SAFE | LASTING | RESUME)]


class Hello(Fields):
    """The first message of either side. Its form never changes, in any version."""

    #: An Introduction of the opener, or a Challenge of the acceptor, as bytes: the proofs are made from both.
    introduction: bytes
    #: Empty. Earlier versions had a proof here.
    proof: bytes


class Introduction(Fields):
    """The opener's HELLO. Its first field never changes; the others may differ between versions."""

    #: Of the protocol.
    version: int
    #: Of the worker (`identity.WorkerRecord`).
    record: list[str | int]
    #: 32 random bytes, never used again.
    nonce: _Nonce
    #: The wanted worker: the SHA-256 of its incarnation.
    whom: _Hash
    #: What the opener knows of it: the SHA-256 of its record, as msgpack.
    known: _Hash
    #: The number that the opener gave to its link with the acceptor.
    link: int
    #: PIPE: this is the second connection of that link, for chunks. SEALED: MACs follow the handshake. SAFE: the sender
    #: reads no pickles, and sends none. LASTING: this side acknowledges what it receives, and keeps what it sends until
    #: it is acknowledged, if the other side does so too. RESUME: this is a new socket for a broken connection, the
    #: first one of that link, or with PIPE the second one; each side begins again after the frames that the other one
    #: has, according to PROOF and WELCOME.
    flags: _Flags


class Challenge(Fields):
    """The acceptor's HELLO. Its first field never changes; the others may differ between versions."""

    #: Of the protocol.
    version: int
    #: 32 random bytes, never used again.
    nonce: _Nonce
    #: SEALED, SAFE and LASTING, see Introduction.
    flags: _Flags


# A number in front of the proof: how many bytes of tensors of one message the sender takes, or for a resumed connection
# how many frames it has received.
_NUMBER = 8  # bytes


class Handshake:
    """One side of the exchange. `start` (opener only) and `feed` return what to write; `peer` is set once READY.

    proved: whether the acceptor has checked the opener's proof: from then on it uses MACs.
    expect: the record of the worker that the opener wants to reach; None makes an acceptor.
    accept: asked by the acceptor about the record of an opener that has proved itself, and whether that opens a link;
    returns a reason to refuse it, or None. link, pipe: the number that the opener gave to its link with the acceptor,
    and whether this is the second connection of it, for chunks; the acceptor learns both. sealed: MACs follow, see
    `keys`. session_of: asked by the acceptor for the `session` of the first connection of the link of that worker with
    that number; None if there is none, which ends the handshake. The proofs of a second connection are made with it,
    which only the two sides of the first one know: no other member can open it in their name.
    binding: a value that both ends of the connection below have in common and nothing in between can have
    (`TlsLayer.binding`); proofs and keys are made over it. It has to be set before the first frame; empty without TLS.
    safe: whether this side reads no pickles. lasting: whether this side wants a session (protocol/session.py), and once
    READY whether both sides do.
    received: how many frames of a broken connection the opener has received, if this is a new socket for it.
    goes_on: asked by the acceptor, once the opener of a resumed connection has proved itself: how many frames of it the
    acceptor has received. The proofs are made with the `session` of its link. takes: how many bytes of tensors of one
    message this side takes. theirs: the number from the other side's proof (see above), once READY.
    """

    def __init__(
        self,
        record: WorkerRecord,
        secret: bytes,
        *,
        expect: WorkerRecord | None = None,
        accept: Callable[[WorkerRecord, bool], str | None] | None = None,
        link: int = 0,
        pipe: bool = False,
        sealed: bool = False,
        session_of: Callable[[WorkerRecord, int], bytes | None] | None = None,
        safe: bool = False,
        lasting: bool = False,
        received: int | None = None,
        goes_on: Callable[[WorkerRecord, int, bool], int] | None = None,
        takes: int = MOST,
    ) -> None:
        self.record = record
        self.link: int = link
        self.pipe: bool = pipe
        self.sealed = sealed
        self.binding = b""
        self.safe = safe
        self.lasting: bool = lasting
        self.resumes: bool = received is not None
        self.theirs: int = 0
        self._takes = takes
        self._received = received or 0
        self._goes_on = goes_on
        self._table = ACCEPTOR if expect is None else OPENER
        self.state: HandshakeState = self._table.initial
        self.peer: WorkerRecord | None = None
        self._secret = secret
        self._opener = expect is not None
        self._acceptor = expect or record
        self._candidate = expect
        self.proved: bool = False
        self._accept = accept
        self._session_of = session_of
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        self._mine = b""
        self._theirs = b""

    def start(self) -> list[Buffer]:
        """The opener's HELLO. RpcUsageError on the acceptor's side, and the second time."""
        if not self._opener or self.state is not HandshakeState.START:
            side = "opener's" if self._opener else "acceptor's"
            raise RpcUsageError(f"an {side} handshake that is {self.state.value} cannot be started")
        whom, known = _hashes(self._acceptor)
        flags = (PIPE if self.pipe else 0) | (RESUME if self.resumes else 0) | self._flags()
        record = self.record.to_wire()
        self._mine = pack(Introduction(VERSION, record, self._nonce, whom, known, self.link, flags))
        self.state = self._table.next(self.state, HandshakeEvent.BEGUN)
        return encode_frame(Kind.HELLO, 0, pack(Hello(self._mine, b"")))

    def feed(self, frame: Frame) -> list[Buffer]:
        """Take the peer's next frame. Raises PeerRefused or ProtocolError; then send the frame of `refusal` first."""
        try:
            return self._feed(frame)
        except (PeerRefused, ProtocolError):
            if self.state not in self._table.final:
                self.state = self._table.next(self.state, HandshakeEvent.REFUSED)
            raise

    def keys(self) -> tuple[bytes, bytes]:
        """The keys of the MACs of what we send, and of what we receive. Once both HELLOs were exchanged."""
        if self.state not in (HandshakeState.PROVED, HandshakeState.READY) and not self.proved:
            raise RpcUsageError(f"a handshake that is {self.state.value} has no keys")
        ours, theirs = ("opener", "acceptor") if self._opener else ("acceptor", "opener")
        return self._keyed(f"seal of {ours}"), self._keyed(f"seal of {theirs}")

    def session(self) -> bytes:
        """A value that only the two sides of this connection know."""
        return self._keyed("session")

    def _feed(self, frame: Frame) -> list[Buffer]:
        if frame.kind == Kind.REFUSED:
            said = bytes(frame.body[:500]).decode("utf-8", "replace")
            raise PeerRefused(f"the other side refused the connection: {shown(said)}")
        if self.state is HandshakeState.START and not self._opener and frame.kind == Kind.HELLO:
            self._theirs = read_hello(frame.body).introduction
            self._candidate = self._check_introduction()
            self._mine = pack(Challenge(VERSION, self._nonce, self._flags()))
            self.state = self._table.next(self.state, HandshakeEvent.HELLO)
            return encode_frame(Kind.HELLO, 0, pack(Hello(self._mine, b"")))
        if self.state is HandshakeState.SENT and frame.kind == Kind.HELLO:
            self._theirs = read_hello(frame.body).introduction
            self._check_flags(self._acceptor, read_challenge(self._theirs).flags)
            self.state = self._table.next(self.state, HandshakeEvent.HELLO)
            return encode_frame(Kind.PROOF, 0, self._proof("opener"))
        if self.state is HandshakeState.PROVED and frame.kind == Kind.WELCOME and self._candidate is not None:
            self._check_proof("acceptor", frame.body)
            self._ready(self._candidate, HandshakeEvent.WELCOME)
            return []
        if self.state is HandshakeState.CHALLENGED and frame.kind == Kind.PROOF and self._candidate is not None:
            self._check_proof("opener", frame.body)
            self.proved = True
            opens = not (self.pipe or self.resumes)
            reason = self._accept(self._candidate, opens) if self._accept is not None else None
            if reason is not None:
                raise PeerRefused(reason)
            if self.resumes and self._goes_on is not None:
                self._received = self._goes_on(self._candidate, self.link, self.pipe)
            self._ready(self._candidate, HandshakeEvent.PROOF)
            return encode_frame(Kind.WELCOME, 0, self._proof("acceptor"))
        raise ProtocolError(f"{frame} does not belong in a handshake that is {self.state.value}")

    def _ready(self, peer: WorkerRecord, event: HandshakeEvent) -> None:
        self.peer = peer
        self.state = self._table.next(self.state, event)

    def _check_introduction(self) -> WorkerRecord:
        theirs = read_introduction(self._theirs)
        self.link, self.pipe, self.resumes = theirs.link, bool(theirs.flags & PIPE), bool(theirs.flags & RESUME)
        peer = WorkerRecord.from_wire(theirs.record)
        whom, known = _hashes(self.record)
        # Refuse without our name: the opener has proved nothing yet.
        if theirs.whom != whom:
            raise PeerRefused("another worker is here than the one that is wanted; that one may have been restarted")
        if theirs.known != known:
            raise PeerRefused(
                "the worker that is wanted is here, but it says something else of itself than the rendezvous store "
                "says of it: another process has written into the store"
            )
        self._check_flags(peer, theirs.flags)
        if (self.pipe or self.resumes) and self._session_of is not None:
            session = self._session_of(peer, self.link)
            if session is None:
                ended = "that is to go on" if self.resumes else "whose second one this is to be"
                raise PeerRefused(f"the connection {ended} has ended here")
            self._secret = session
        return peer

    def _flags(self) -> int:
        return (SEALED if self.sealed else 0) | (SAFE if self.safe else 0) | (LASTING if self.lasting else 0)

    def _check_flags(self, peer: WorkerRecord, flags: int) -> None:
        self.lasting = self.lasting and bool(flags & LASTING)
        sealed = bool(flags & SEALED)
        if sealed != self.sealed:
            says, we = ("seals", "do not") if sealed else ("does not seal", "do")
            raise PeerRefused(
                f"worker {peer.name!r} {says} what it sends on this connection, and we {we}; give authenticate_frames "
                "the same value on all workers"
            )
        if bool(flags & SAFE) != self.safe:
            ours, theirs = ("safe", "free") if self.safe else ("free", "safe")
            # The opener gets no name of ours before its proof; the acceptor's name is known to the opener.
            we = f"worker {self.record.name!r} has" if self._opener else "the worker that it called has"
            raise PeerRefused(
                f"worker {peer.name!r} has serialization={theirs!r}, and {we} {ours!r}; give it the same value on all "
                "workers"
            )

    def _keyed(self, label: str) -> bytes:
        hellos = (self._mine, self._theirs) if self._opener else (self._theirs, self._mine)
        hashes = [hashlib.sha256(said).digest() for said in (*hellos, self.binding)]
        message = b"\0".join((b"aiorpc", label.encode(), *hashes, _hashes(self._acceptor)[1]))
        return hmac.digest(self._secret, message, "sha256")

    def _proof(self, role: str) -> bytes:
        """The body of PROOF or WELCOME."""
        number = self._received if self.resumes else self._takes
        return number.to_bytes(_NUMBER, "little") + self._keyed(self._label(role, number))

    def _label(self, role: str, number: int) -> str:
        return f"{role} has received {number}" if self.resumes else f"{role} takes {number}"

    def _check_proof(self, role: str, proof: Buffer) -> None:
        if self.resumes and len(proof) < _NUMBER:
            raise ProtocolError("a proof that does not say how much was received")
        self.theirs = int.from_bytes(proof[:_NUMBER], "little")
        if not hmac.compare_digest(self._keyed(self._label(role, self.theirs)), memoryview(proof)[_NUMBER:]):
            raise PeerRefused(WRONG_SECRET)


def _hashes(record: WorkerRecord) -> tuple[bytes, bytes]:
    """The hashes of its incarnation, and of the whole record."""
    whole = pack(record.to_wire())
    return hashlib.sha256(record.incarnation.encode()).digest(), hashlib.sha256(whole).digest()


def shown(said: str) -> str:
    """Text of another process, for logs and errors: one line of bounded length."""
    return legible(said[:SHOWN])


def refusal(reason: str) -> list[Buffer]:
    """The frame that tells the other side why its connection is closed."""
    return encode_frame(Kind.REFUSED, 0, reason.encode()[:500])


class _Versioned(Struct, array_like=True):
    """The first field of an introduction of any version; the rest is ignored."""

    version: int


_read_version = reader(_Versioned)
_read_introduction = reader(Introduction)
_read_challenge = reader(Challenge)
read_hello: Callable[[Buffer], Hello] = reader(Hello)


def read_introduction(data: Buffer) -> Introduction:
    """The opener's part of a Hello; its record is not checked. PeerRefused: another version. ProtocolError."""
    _check_version(data)
    return _read_introduction(data)


def read_challenge(data: Buffer) -> Challenge:
    """The acceptor's part of a Hello. Raises PeerRefused for another version, or ProtocolError."""
    _check_version(data)
    return _read_challenge(data)


def _check_version(data: Buffer) -> None:
    theirs = _read_version(data).version
    if theirs != VERSION:
        raise PeerRefused(f"it speaks version {theirs} of the protocol, we speak {VERSION}; use one aiorpc everywhere")
