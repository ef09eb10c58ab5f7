"""The targets of TLS: the bytes of the other side, before it has shown a certificate and behind that."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiorpc.errors import ProtocolError
from aiorpc.protocol.frames import Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import MAX_BODY
from aiorpc.transport.certificates import Credentials
from aiorpc.transport.tls import TlsLayer
from tests.authority import Authority
from tests.fuzz.trap import nothing_unpickled

Make = Callable[[bool], TlsLayer]


@contextmanager
def _layers() -> Iterator[Make]:
    """Makes one side of a TLS connection, of an opener or not; both have certificates of one authority."""
    with tempfile.TemporaryDirectory() as name:
        authority = Authority(Path(name))
        contexts = {
            opener: Credentials(authority.tls(worker), worker).context(opener=opener)
            for opener, worker in ((True, "w0"), (False, "w1"))
        }

        def make(opener: bool) -> TlsLayer:
            context, own = contexts[opener]
            decoder = FrameDecoder(max_body=MAX_BODY, max_segment=1 << 16)
            layer = TlsLayer(context, decoder, opener=opener, own=own)
            layer.start()
            return layer

        yield make


def _shaken(make: Make) -> tuple[TlsLayer, TlsLayer]:
    sides = make(True), make(False)
    while not (sides[0].open and sides[1].open):
        for source, target in (sides, sides[::-1]):
            target.feed(source.outgoing.read())
    return sides


def _fed(layer: TlsLayer, data: bytes, most: int) -> list[Frame]:
    """Raises what the layer raises; what it has to say then is taken as well."""
    frames: list[Frame] = []
    try:
        for at in range(0, len(data), most):
            frames += layer.feed(data[at : at + most])
    finally:
        layer.last_words()
    return frames


@contextmanager
def before() -> Iterator[Callable[[bytes], None]]:
    """The first byte says whether we have called, the second how much comes at once; nobody is let in."""
    with _layers() as make, nothing_unpickled():

        def taste(data: bytes) -> None:
            if len(data) < 2:
                return
            layer = make(bool(data[0] & 1))
            try:
                frames = _fed(layer, data[2:], 1 + data[1])
                assert not frames, "a frame came before a certificate"
            finally:
                assert not layer.open and layer.peer is None, "open without a certificate"

        yield taste


def seeds_of_before() -> list[bytes]:
    """What honest sides say, an alert, a frame, and rubbish in a record."""
    with _layers() as make:
        opener, acceptor = make(True), make(False)
        hello = opener.outgoing.read()
        acceptor.feed(hello)
        answer = acceptor.outgoing.read()
        opener.feed(answer)
        proof = opener.outgoing.read()
    said = [hello, answer, proof, hello + proof, b"\x15\x03\x03\x00\x02\x02\x28", b"\x16\x03\x03\x00\x04abcd"]
    said.append(b"".join(bytes(part) for part in encode_frame(Kind.HELLO, 0, b"body")))
    return [bytes((side, 255)) + each for side in (0, 1) for each in said]


@contextmanager
def behind() -> Iterator[Callable[[bytes], None]]:
    """A stream of frames that the other side has encrypted in pieces, with one byte changed on the way; or rubbish.

    The first four bytes: how long pieces are (0: the rest is rubbish), where what is changed, how much comes at once.
    Nothing behind a change gets through.
    """
    with _layers() as make, nothing_unpickled():

        def taste(data: bytes) -> None:
            if len(data) < 4:
                return
            how, place, change, most = data[:4]
            data = data[4:]
            opener, acceptor = _shaken(make)
            if not how:
                assert not _fed(acceptor, data, most + 1), "a frame came that nobody has encrypted"
                return
            stream, ends = bytearray(), [0]
            for at in range(0, len(data), how):
                opener.encrypt(data[at : at + how])
                stream += opener.outgoing.read()
                ends.append(len(stream))
            intact = len(data)
            if stream and change:
                changed = (place * 257) % len(stream)
                stream[changed] ^= change
                intact = how * sum(end <= changed for end in ends[1:])
            frames: list[Frame] = []
            refused: ProtocolError | None = None
            try:
                for at in range(0, len(stream), most + 1):
                    frames += acceptor.feed(bytes(stream[at : at + most + 1]))
            except ProtocolError as error:
                refused = error
            size = sum(len(b"".join(bytes(part) for part in encode_frame(*frame))) for frame in frames)
            assert size <= intact, "a frame came through that was changed on the way"
            if refused is not None:
                raise refused

        yield taste


def seeds_of_behind(frames: bytes) -> list[bytes]:
    """Those frames, whole and with a byte changed; and what is no record."""
    rubbish = bytes((0, 0, 0, 50)) + b"\x17\x03\x03\x00\x20" + bytes(32)
    heads = [(40, 0, 0, 30), (200, 1, 4, 3), (7, 2, 1, 99), (255, 9, 128, 255)]
    return [*(bytes(head) + frames for head in heads), rubbish]
