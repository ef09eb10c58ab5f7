"""Handshakes between two cores, tied together with bytes: who gets in, who does not, and what either side learns."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.errors import PeerRefused, ProtocolError, RpcError, RpcUsageError
from aiorpc.protocol import handshake
from aiorpc.protocol.frames import Buffer, Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import MAX_BODY, NONCE_SIZE, VERSION, Handshake
from aiorpc.protocol.identity import WorkerInfo, WorkerRecord, check_name, legible
from aiorpc.protocol.states import HandshakeState

SECRET = b"s" * 32
OPENER = WorkerRecord("opener", 0, "1a", "host", "name", 10, "main", "/run/a.sock", "127.0.0.1", 1)
ACCEPTOR = WorkerRecord("acceptor", 1, "2b", "host", "name", 11, "main", "/run/b.sock", "127.0.0.1", 2)


def opening(secret: bytes = SECRET, expect: WorkerRecord = ACCEPTOR, sealed: bool = True) -> Handshake:
    return Handshake(OPENER, secret, expect=expect, sealed=sealed)


def accepting(
    secret: bytes = SECRET, record: WorkerRecord = ACCEPTOR, refuse: str | None = None, sealed: bool = True
) -> Handshake:
    return Handshake(record, secret, accept=lambda *_: refuse, sealed=sealed)


def read(written: list[Buffer]) -> list[Frame]:
    """The frames in what one side writes, through the decoder that the other side uses for strangers."""
    decoder = FrameDecoder(max_body=MAX_BODY)
    frames: list[Frame] = []
    for data in written:
        decoder.get_buffer()[: len(data)] = data
        frames += decoder.received(len(data))
    return frames


def one(written: list[Buffer]) -> Frame:
    (frame,) = read(written)
    return frame


def shake(opener: Handshake, acceptor: Handshake) -> list[Frame]:
    """Carry frames back and forth until neither has more to say; returns all of them in order."""
    said: list[Frame] = []
    frames, receiver = read(opener.start()), acceptor
    while frames:
        said += frames
        frames = read([part for frame in frames for part in receiver.feed(frame)])
        receiver = opener if receiver is acceptor else acceptor
    return said


SESSION = b"t" * 32


def going_on(
    theirs: bytes | None = SESSION, *, mine: int = 5, secret: bytes = SESSION, pipe: bool = False
) -> tuple[Handshake, Handshake, list[tuple[str, int, bool]]]:
    """Both sides of a new socket for link 3, and what the acceptor was asked. theirs: what it has kept of that link."""
    asked: list[tuple[str, int, bool]] = []

    def goes_on(record: WorkerRecord, link: int, second: bool) -> int:
        asked.append((record.name, link, second))
        return 8

    opener = Handshake(OPENER, secret, expect=ACCEPTOR, link=3, pipe=pipe, received=mine)
    acceptor = Handshake(ACCEPTOR, SECRET, session_of=lambda *_: theirs, goes_on=goes_on)
    return opener, acceptor, asked


@pytest.mark.parametrize("pipe", [False, True])
def test_a_connection_goes_on_where_it_was(pipe: bool) -> None:
    """Each side learns how much the other one has received; the acceptor is asked only behind the proof."""
    opener, acceptor, asked = going_on(pipe=pipe)
    acceptor.feed(one(opener.start()))
    assert not asked
    opener, acceptor, asked = going_on(pipe=pipe)
    shake(opener, acceptor)
    assert opener.state is acceptor.state is HandshakeState.READY
    assert (opener.theirs, acceptor.theirs, asked) == (8, 5, [("opener", 3, pipe)])


def test_only_the_same_two_workers_go_on() -> None:
    """Whoever has the secret of the group, and not what the first handshake has left, takes nothing over."""
    opener, acceptor, asked = going_on(secret=SECRET)
    with pytest.raises(PeerRefused, match="secret does not match"):
        shake(opener, acceptor)
    opener, acceptor, asked_too = going_on(theirs=None)
    with pytest.raises(PeerRefused, match="has ended here"):
        shake(opener, acceptor)
    assert not asked + asked_too


@pytest.mark.parametrize("secret", [SECRET, SESSION])
def test_a_second_connection_needs_a_first_one(secret: bytes) -> None:
    """Where that has ended the secret of the group does not stand in for what it has left, and the reason says so."""
    opener = Handshake(OPENER, secret, expect=ACCEPTOR, link=3, pipe=True)
    acceptor = Handshake(ACCEPTOR, SECRET, session_of=lambda *_: None)
    with pytest.raises(PeerRefused, match="the connection whose second one this is to be has ended here"):
        shake(opener, acceptor)


@pytest.mark.parametrize("byte", [0, 7, 8, 39])
@pytest.mark.parametrize("kind", [Kind.PROOF, Kind.WELCOME])
def test_what_was_received_is_under_the_proof(kind: Kind, byte: int) -> None:
    """Nobody on the way changes it."""
    opener, acceptor, _ = going_on()
    frames, receiver = read(opener.start()), acceptor
    with pytest.raises(PeerRefused, match="secret does not match"):
        while frames:
            if frames[0].kind == kind:
                body = bytearray(frames[0].body)
                body[byte] ^= 1
                frames = [frames[0]._replace(body=bytes(body))]
            frames = read([part for frame in frames for part in receiver.feed(frame)])
            receiver = opener if receiver is acceptor else acceptor


def test_each_side_says_how_much_it_takes() -> None:
    """And the other one knows that afterwards; whoever changes the number on its way is found out."""
    for changed in (None, Kind.PROOF, Kind.WELCOME):
        opener = Handshake(OPENER, SECRET, expect=ACCEPTOR, takes=1 << 40)
        acceptor = Handshake(ACCEPTOR, SECRET, takes=7)
        if changed is None:
            shake(opener, acceptor)
            assert (opener.theirs, acceptor.theirs) == (7, 1 << 40)
            continue
        proof = one(opener.feed(one(acceptor.feed(one(opener.start())))))
        welcome = one(acceptor.feed(proof)) if changed is Kind.WELCOME else proof
        more = Frame(changed, 0, (8).to_bytes(8, "little") + bytes(welcome.body[8:]))
        with pytest.raises(PeerRefused, match="secret does not match"):
            (opener if changed is Kind.WELCOME else acceptor).feed(more)


def test_both_sides_know_each_other_afterwards() -> None:
    """Same secret: both end READY with the other's whole record, after HELLO, HELLO, PROOF, WELCOME."""
    opener, acceptor = opening(), accepting()
    said = shake(opener, acceptor)
    assert [frame.kind for frame in said] == [Kind.HELLO, Kind.HELLO, Kind.PROOF, Kind.WELCOME]
    assert opener.state is acceptor.state is HandshakeState.READY
    assert (opener.peer, acceptor.peer) == (ACCEPTOR, OPENER)


def test_nobody_is_known_before_the_proof() -> None:
    """`peer` stays None on both sides until the other's proof was checked."""
    opener, acceptor = opening(), accepting()
    hello = one(acceptor.feed(one(opener.start())))
    assert (opener.peer, acceptor.peer) == (None, None)
    proof = one(opener.feed(hello))
    assert (opener.peer, acceptor.peer) == (None, None)
    assert opener.state is HandshakeState.PROVED and not acceptor.proved
    welcome = one(acceptor.feed(proof))
    assert (opener.peer, acceptor.peer) == (None, OPENER)
    opener.feed(welcome)
    assert opener.peer == ACCEPTOR


def test_wrong_secret_is_noticed_by_the_acceptor_first() -> None:
    """The opener proves itself first: an acceptor with another secret sends no proof."""
    opener, acceptor = opening(b"another"), accepting()
    proof = one(opener.feed(one(acceptor.feed(one(opener.start())))))
    with pytest.raises(PeerRefused, match="secret does not match"):
        acceptor.feed(proof)
    assert acceptor.state is HandshakeState.FAILED
    assert acceptor.peer is None and not acceptor.proved
    with pytest.raises(RpcUsageError, match="has no keys"):
        acceptor.keys()


def test_an_acceptor_says_nothing_of_itself_before_the_proof() -> None:
    """Its HELLO, and what it says to a wrong one, has none of its record, and nothing that was made with the secret."""
    record = replace(ACCEPTOR, name="worker-of-mine", host="host-of-mine", hostname="name-of-mine", pid=47114711)
    record = replace(record, incarnation="incarnation-of-mine", main="script-of-mine", unix_path="path-of-mine")
    said = [b"".join(map(bytes, accepting(record=record).feed(one(opening(expect=record).start()))))]
    assert len(said[0]) < 100
    for expect in (ACCEPTOR, replace(record, pid=1)):
        with pytest.raises(PeerRefused) as caught:
            accepting(record=record).feed(one(opening(expect=expect).start()))
        said.append(str(caught.value).encode())
    for text in said:
        assert b"of-mine" not in text and b"47114711" not in text and msgpack.packb(47114711) not in text


def test_an_opener_sends_no_call_before_the_acceptor_has_proved_itself() -> None:
    """Whoever took over a worker's address cannot welcome anybody."""
    opener = opening()
    impostor = accepting(b"another")
    assert one(opener.feed(one(impostor.feed(one(opener.start()))))).kind == Kind.PROOF
    for proof in (b"", bytes(32)):
        with pytest.raises(PeerRefused, match="secret does not match"):
            opener.feed(Frame(Kind.WELCOME, 0, proof))
        assert opener.state is HandshakeState.FAILED and opener.peer is None
        opener = opening()
        opener.feed(one(accepting(b"another").feed(one(opener.start()))))


@pytest.mark.parametrize("proof", [b"", b"x", bytes(32), b"\xff" * 100])
def test_wrong_proof_is_refused_by_the_acceptor(proof: bytes) -> None:
    """An opener that cannot prove the secret is refused, whatever it sends instead."""
    acceptor = accepting()
    acceptor.feed(one(opening().start()))
    with pytest.raises(PeerRefused, match="secret does not match"):
        acceptor.feed(Frame(Kind.PROOF, 0, proof))
    assert acceptor.state is HandshakeState.FAILED
    assert acceptor.peer is None


def test_replayed_proof_is_refused() -> None:
    """What an opener once sent opens nothing the second time: the acceptor's nonce is new."""
    said = shake(opening(), accepting())
    again = accepting()
    again.feed(said[0])
    with pytest.raises(PeerRefused, match="secret does not match"):
        again.feed(said[2])


def test_replayed_acceptor_is_refused() -> None:
    """What an acceptor once sent does not fool an opener: the opener's nonce is new."""
    said = shake(opening(), accepting())
    opener = opening()
    opener.start()
    opener.feed(said[1])
    with pytest.raises(PeerRefused, match="secret does not match"):
        opener.feed(said[3])


def test_reflected_proof_is_refused() -> None:
    """An opener's proof cannot be played back to it as an acceptor's: the roles are part of it."""
    opener, acceptor = opening(), accepting()
    proof = one(opener.feed(one(acceptor.feed(one(opener.start())))))
    with pytest.raises(PeerRefused, match="secret does not match"):
        opener.feed(Frame(Kind.WELCOME, 0, proof.body))


def test_changed_record_breaks_the_proof() -> None:
    """Somebody in the middle who changes a record, and not the secret, is found out."""
    opener, acceptor = opening(), accepting()
    body, _ = msgpack.unpackb(one(opener.start()).body)
    version, record, *rest = msgpack.unpackb(body)
    record[4] = "elsewhere"
    forged = msgpack.packb([msgpack.packb([version, record, *rest]), b""])
    proof = one(opener.feed(one(acceptor.feed(Frame(Kind.HELLO, 0, forged)))))
    with pytest.raises(PeerRefused, match="secret does not match"):
        acceptor.feed(proof)


def test_other_version_is_refused_by_name() -> None:
    """A peer of another version is refused by both sides, with both versions named."""
    body = msgpack.packb([VERSION + 1, ACCEPTOR.to_wire(), bytes(NONCE_SIZE), 0, False, True])
    frame = Frame(Kind.HELLO, 0, msgpack.packb([body, b""]))
    opener = opening()
    opener.start()
    for side in (opener, accepting()):
        with pytest.raises(PeerRefused, match=f"speaks version {VERSION + 1} of the protocol, we speak {VERSION}"):
            side.feed(frame)


@pytest.mark.parametrize("version", [b"\x91" * 1010 + b"\x01", msgpack.packb("5\n"), msgpack.packb(True)])
def test_a_version_that_is_no_number_is_not_shown(version: bytes) -> None:
    """However deep it is nested."""
    frame = Frame(Kind.HELLO, 0, msgpack.packb([b"\x91" + version, b""]))
    opener = opening()
    opener.start()
    for side in (opener, accepting()):
        with pytest.raises(ProtocolError) as caught:
            side.feed(frame)
        assert "5" not in str(caught.value) and str(caught.value).isprintable()
        assert side.state is HandshakeState.FAILED


@pytest.mark.parametrize("other", [replace(ACCEPTOR, name="other"), replace(ACCEPTOR, incarnation="3c")])
def test_wrong_worker_is_refused(other: WorkerRecord) -> None:
    """Another name, or the same name started again, is not whom the opener wanted."""
    opener, acceptor = opening(), accepting(record=other)
    with pytest.raises(PeerRefused, match=r"another worker .* may have been restarted|something else of itself"):
        shake(opener, acceptor)


@pytest.mark.parametrize("other", [replace(ACCEPTOR, tcp_port=7), replace(ACCEPTOR, host="b", unix_path="")])
def test_worker_that_says_something_else_than_the_store_is_refused(other: WorkerRecord) -> None:
    """The address that the store gave was not the one that the worker gave to the store."""
    with pytest.raises(PeerRefused, match="something else of itself than the rendezvous store"):
        shake(opening(), accepting(record=other))


@pytest.mark.parametrize("seals", [True, False])
def test_sides_that_do_not_agree_on_seals_are_refused(seals: bool) -> None:
    """Whichever side does without is not followed; the refusal names the option, on either side."""
    opener, acceptor = opening(sealed=seals), accepting(sealed=not seals)
    with pytest.raises(PeerRefused, match=r"worker 'opener' .* give authenticate_frames the same value"):
        shake(opener, acceptor)
    opener, acceptor = opening(sealed=seals), accepting(sealed=not seals)
    opener.start()
    answer = one(acceptor.feed(one(opening(sealed=not seals).start())))  # it has not looked
    with pytest.raises(PeerRefused, match=r"worker 'acceptor' .* give authenticate_frames the same value"):
        opener.feed(answer)


@pytest.mark.parametrize("safe", [True, False])
def test_sides_that_do_not_agree_on_serialization_are_refused(safe: bool) -> None:
    """Whoever reads no pickles does not talk to whoever sends some; the refusal names both, on either side."""

    def sides() -> tuple[Handshake, Handshake]:
        opener = Handshake(OPENER, SECRET, expect=ACCEPTOR, safe=safe)
        return opener, Handshake(ACCEPTOR, SECRET, safe=not safe)

    opener, acceptor = sides()
    with pytest.raises(PeerRefused, match=r"'opener' has serialization=.* and the worker that it called has .* same"):
        acceptor.feed(one(opener.start()))
    opener, _ = sides()
    opener.start()
    other = Handshake(OPENER, SECRET, expect=ACCEPTOR, safe=not safe)
    answer = one(sides()[1].feed(one(other.start())))
    with pytest.raises(PeerRefused, match=r"'acceptor' has serialization=.* and worker 'opener' has .* the same"):
        opener.feed(answer)


def test_keys_belong_to_one_connection_and_direction() -> None:
    """What one side seals with, the other opens with; all four keys of two connections differ."""
    keys: set[bytes] = set()
    for _ in range(2):
        opener, acceptor = opening(), accepting()
        with pytest.raises(RpcUsageError, match="has no keys"):
            opener.keys()
        shake(opener, acceptor)
        assert opener.keys() == acceptor.keys()[::-1]
        keys |= {*opener.keys()}
    assert len(keys) == 4 and {len(key) for key in keys} == {32}


def test_unwanted_opener_is_refused_with_the_reason() -> None:
    """The acceptor's reason reaches the opener as its error, under a seal; who has not proved himself hears none."""
    opener, acceptor = opening(), accepting(refuse="you were given up as lost")
    proof = one(opener.feed(one(acceptor.feed(one(opener.start())))))
    with pytest.raises(PeerRefused, match="given up") as caught:
        acceptor.feed(proof)
    assert acceptor.proved and acceptor.peer is None
    assert acceptor.keys() == opener.keys()[::-1]
    (refused,) = read(handshake.refusal(str(caught.value)))
    with pytest.raises(PeerRefused, match="other side refused the connection: you were given up as lost"):
        opener.feed(refused)


def test_a_refusal_is_one_line_whatever_its_text() -> None:
    """Whoever is on the way may have written it: no lines of his own, nor what controls a terminal."""
    with pytest.raises(PeerRefused) as caught:
        opening().feed(Frame(Kind.REFUSED, 0, "no\nCRITICAL all is lost\r\x1b[2J\x9b\u202e\u2028é".encode()))
    said = str(caught.value)
    assert said.endswith("refused the connection: no?CRITICAL all is lost??[2J???é")
    assert said.isprintable()


def sides() -> dict[str, Handshake]:
    """A handshake in each state it can be in."""
    opener, acceptor = opening(), accepting()
    shake(opener, acceptor)
    sent, challenged, proved, failed = opening(), accepting(), opening(), accepting()
    sent.start()
    challenged.feed(one(opening().start()))
    proved.feed(one(accepting().feed(one(proved.start()))))
    with pytest.raises(ProtocolError):
        failed.feed(Frame(Kind.CALL, 1, b""))
    return {
        "new opener": opening(),
        "new acceptor": accepting(),
        "sent": sent,
        "challenged": challenged,
        "proved": proved,
        "ready opener": opener,
        "ready acceptor": acceptor,
        "failed": failed,
    }


EXPECTED = {
    ("new acceptor", Kind.HELLO),
    ("sent", Kind.HELLO),
    ("challenged", Kind.PROOF),
    ("proved", Kind.WELCOME),
}


@pytest.mark.parametrize("state", list(sides()))
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.REFUSED])
def test_frames_out_of_turn_fail_it(state: str, kind: Kind) -> None:
    """In each state one kind of frame belongs; every other one ends the handshake with ProtocolError."""
    if (state, kind) in EXPECTED:
        return
    side = sides()[state]
    with pytest.raises(ProtocolError, match="does not belong in a handshake"):
        side.feed(Frame(kind, 0, b""))
    # What is settled stays so: a frame that comes later is an error of whoever sent it.
    assert side.state is (HandshakeState.READY if state.startswith("ready") else HandshakeState.FAILED)


RECORD = ACCEPTOR.to_wire()
NONCE = bytes(NONCE_SIZE)
WHOLE = msgpack.packb(RECORD)
HASHES = hashlib.sha256(ACCEPTOR.incarnation.encode()).digest(), hashlib.sha256(WHOLE).digest()
BROKEN_FIELDS: list[list[object]] = [
    [RECORD, b"short", NONCE, NONCE, 0, 2],
    [RECORD, NONCE, b"short", NONCE, 0, 2],
    [RECORD, NONCE, NONCE, "text", 0, 2],
    [RECORD[:-1], NONCE, *HASHES, 0, 2],
    [["bad name!", *RECORD[1:]], NONCE, *HASHES, 0, 2],
    [[[]] * 10, NONCE, *HASHES, 0, 2],
    [RECORD, NONCE, *HASHES, "0", 2],
    [RECORD, NONCE, *HASHES, 0, True],
    [RECORD, NONCE, *HASHES, 0, 64],
    [RECORD, NONCE, *HASHES, 0, -1],
    [b"short", 2],
    [NONCE, True],
    [NONCE, 64],
    [NONCE, -1],
]
BROKEN = [
    b"",
    b"\xc1",
    msgpack.packb(1),
    msgpack.packb([b""]),
    msgpack.packb(["text", b""]),
    msgpack.packb([b"", b""]),
    msgpack.packb([msgpack.packb({}), b""]),
    msgpack.packb([msgpack.packb([VERSION, RECORD]), b""]),
    *(msgpack.packb([msgpack.packb([VERSION, *fields]), b""]) for fields in BROKEN_FIELDS),
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 10_000,
]


@pytest.mark.parametrize("body", BROKEN)
def test_malformed_hello_is_a_protocol_error(body: bytes) -> None:
    """A HELLO that is none ends it on both sides, with nothing but ProtocolError."""
    opener = opening()
    opener.start()
    for side in (opener, accepting()):
        with pytest.raises(ProtocolError):
            side.feed(Frame(Kind.HELLO, 0, body))
        assert side.state is HandshakeState.FAILED


@given(st.integers(0, 3), st.data())
def test_mutated_handshake_fails_with_documented_errors_only(which: int, data: st.DataObject) -> None:
    """Change any bytes of any frame: the handshake fails with PeerRefused or ProtocolError, or it was not changed."""
    opener, acceptor = opening(), accepting()
    frames, receiver = read(opener.start()), acceptor
    turn = 0
    changed = False
    try:
        while frames:
            frame = frames[0]
            if turn == which:
                body = bytearray(frame.body)
                for _ in range(data.draw(st.integers(1, 3))):
                    if body:
                        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
                changed = bytes(body) != frame.body
                frame = frame._replace(body=bytes(body))
            frames = read(receiver.feed(frame))
            receiver = opener if receiver is acceptor else acceptor
            turn += 1
    except (PeerRefused, ProtocolError):
        assert changed
    assert not (changed and opener.state is HandshakeState.READY)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled_before_the_proof(tmp_path: Path) -> None:
    """A pickle in any place of any frame of a stranger is never loaded."""
    path = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(path))
    pickle.loads(bomb)
    assert path.exists(), "the bomb has to be able to explode"
    path.unlink()
    ext = msgpack.ExtType(1, bomb)
    bodies = [
        bomb,
        msgpack.packb([bomb, bomb]),
        msgpack.packb([msgpack.packb([VERSION, bomb, NONCE, *HASHES, 0, 2]), bomb]),
        msgpack.packb([msgpack.packb([VERSION, [ext, *RECORD[1:]], NONCE, *HASHES, 0, 2]), bomb]),
        msgpack.packb([ext, ext]),
    ]
    for body in bodies:
        for kind in Kind:
            for side in sides().values():
                with contextlib.suppress(RpcError):
                    side.feed(Frame(kind, 0, body))
    assert not path.exists()


def test_hello_of_a_long_record_fits_the_strict_limit() -> None:
    """A record with names as long as systems give them passes the limit on what strangers may send."""
    record = replace(OPENER, name="n" * 127, hostname="h" * 255, main="m" * 1000, unix_path="/" + "p" * 107)
    opener, acceptor = Handshake(record, SECRET, expect=ACCEPTOR, sealed=True), accepting()
    shake(opener, acceptor)
    assert acceptor.peer == record
    assert encode_frame(Kind.HELLO, 0, b"")


# --- names, workerinfo and the record that peers exchange -------------------------------------------------------------


NAMES = st.text("abcXYZ019-_:", min_size=1, max_size=127)
TEXTS = st.text(max_size=60)
IDENTITY_RECORD = WorkerRecord(
    "worker0", 0, "0af3", "boot:1:2", "node", 17, "file:/a.py:00", "/run/s", "10.0.0.1", 2000
)


def test_worker_info_prints_as_torch_prints_it() -> None:
    """repr names the id first, then the name."""
    assert repr(WorkerInfo("worker0", 0)) == "WorkerInfo(id=0, name=worker0)"


@pytest.mark.parametrize("name", ["worker0", "a", "A-b_c:0", "x" * 127])
def test_good_names_pass(name: str) -> None:
    """Letters, digits, minus, underscore and colon, up to 127 characters."""
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "must be non-empty"),
        ("x" * 128, "shorter than 128"),
        ("a b", r"Worker name must match \^\[A-Za-z0-9-_:\]\*\$"),
        ("a\n", "Worker name must match"),
        ("wörker", "Worker name must match"),
        ("٣", "Worker name must match"),
        (3, "must be a string"),
    ],
)
def test_bad_names_are_refused_in_torchs_words(name: object, text: str) -> None:
    """Each kind of bad name is a usage error that says which rule it breaks."""
    with pytest.raises(RpcUsageError, match=text):
        check_name(name)


@given(
    st.builds(
        WorkerRecord,
        name=NAMES,
        id=st.integers(0, 2**31 - 1),
        incarnation=TEXTS,
        host=TEXTS,
        hostname=TEXTS,
        pid=st.integers(1, 2**32 - 1),
        main=TEXTS,
        unix_path=TEXTS,
        tcp_host=TEXTS,
        tcp_port=st.integers(0, 65535),
        role=NAMES | st.just(""),
        tls=st.sampled_from(["", "1.3"]),
        python=st.sampled_from(["", "3.11.7"]),
        torch=TEXTS,
    )
)
def test_a_record_survives_the_wire(record: WorkerRecord) -> None:
    """to_wire, msgpack and from_wire give the same record, and its public part."""
    received = WorkerRecord.from_wire(msgpack.unpackb(msgpack.packb(record.to_wire())))
    assert received == record
    assert received.info == WorkerInfo(record.name, record.id)


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, "", "name must be one"),
        (0, 5, r"`str`.*\$\.name"),
        (1, -1, r">= 0.*\$\.id"),
        (1, True, r"`int`.*\$\.id"),
        (1, 1.5, r"`int`.*\$\.id"),
        (2, None, r"`str`.*\$\.incarnation"),
        (3, b"x", r"`str`.*\$\.host"),
        (4, "x" * 5000, r"<= 4096.*\$\.hostname"),
        (5, 0, r">= 1.*\$\.pid"),
        (9, 65536, r"<= 65535.*\$\.tcp_port"),
        (10, None, r"`str`.*\$\.role"),
        (10, "an actor", "role must be one"),
        (10, "*", "role must be one"),
        (13, 3, r"`str`.*\$\.python"),
        (14, "x" * 65, r"<= 64.*\$\.torch"),
        (15, None, r"`str`.*\$\.aiorpc"),
    ],
)
def test_a_malformed_part_of_a_record_is_a_protocol_error(index: int, value: object, text: str) -> None:
    """The error names the part and what it must be, and does not repeat a long value."""
    wire: list[object] = list(IDENTITY_RECORD.to_wire())
    wire[index] = value
    with pytest.raises(ProtocolError, match=text) as caught:
        WorkerRecord.from_wire(wire)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", [None, 3, "abcdefghijk", b"abcdefghijk", {}, [], IDENTITY_RECORD.to_wire()[:-1]])
def test_what_is_no_record_is_a_protocol_error(value: object) -> None:
    """Other types and other lengths are refused."""
    with pytest.raises(ProtocolError, match="a list of 16 items"):
        WorkerRecord.from_wire(value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | TEXTS | st.binary(), st.lists, max_leaves=12))
def test_anything_a_peer_may_send_gives_a_record_or_a_protocol_error(value: object) -> None:
    """No other exception escapes from_wire."""
    try:
        WorkerRecord.from_wire(value)
    except ProtocolError as error:
        assert str(error)


@given(st.text(st.characters(exclude_categories=())) | st.binary().map(os.fsdecode))
def test_a_record_carries_any_legible_text(text: str) -> None:
    """Whatever the kernel has for a name, with bytes that are no UTF-8 and control characters."""
    record = replace(IDENTITY_RECORD, hostname=legible(text))
    assert WorkerRecord.from_wire(json.loads(json.dumps(record.to_wire()).encode())) == record
    assert record.hostname.isprintable() and len(record.hostname) == len(text)
