"""A host that is silent, and one whose process is only busy."""

from __future__ import annotations

import socket

from aiorpc.transport import sockets
from aiorpc.transport.silence import Heard, Silence, hear
from tests.transport.ends import until


def test_silence_lasts_from_the_first_look_that_saw_it() -> None:
    """As long as an answer is owed and none comes."""
    silence = Silence()
    assert silence.look(Heard(True, 50.0), 100.0) == 0.0  # what was sent a moment ago may be answered
    assert silence.look(Heard(True, 52.0), 102.0) == 2.0
    assert silence.look(Heard(True, 70.0), 120.0) == 20.0


def test_an_answer_ends_a_silence() -> None:
    """Also one between two looks, though the next answer is owed by then; and so does having nothing to answer."""
    silence = Silence()
    silence.look(Heard(True, 0.0), 100.0)
    assert silence.look(Heard(True, 0.5), 110.0) == 0.5
    assert silence.look(Heard(True, 5.5), 115.0) == 5.5
    assert silence.look(Heard(False, 6.5), 116.0) == 0.0
    assert silence.look(Heard(True, 12.0), 122.0) == 0.0


async def test_a_closed_window_is_no_silence() -> None:
    """A process that reads nothing is not silent: its host acknowledges, and answers probes of the closed window."""
    with (
        sockets.listen_tcp("127.0.0.1", None) as listener,
        await sockets.connect_tcp("127.0.0.1", listener.getsockname()[1]) as sock,
    ):
        listener.setblocking(True)
        with listener.accept()[0]:
            full = False
            while not full:
                try:
                    sock.send(bytes(1 << 20))
                except BlockingIOError:
                    full = True
            asked: list[float] = []

            def probed() -> bool:
                heard = hear(sock)
                assert heard is not None and not (heard.owes and heard.ago > 5.0)
                if not asked or heard.ago < asked[-1]:
                    asked.append(heard.ago)  # it was answered anew
                else:
                    asked[-1] = heard.ago
                return len(asked) >= 4

            await until(probed)


async def test_a_connection_that_is_over_is_seen() -> None:
    """Whoever has closed it; some loops do not tell of all errors of a socket."""
    with sockets.listen_tcp("127.0.0.1", None) as listener:
        listener.setblocking(True)
        with await sockets.connect_tcp("127.0.0.1", listener.getsockname()[1]) as sock:
            far = listener.accept()[0]
            before = hear(sock)
            assert before is not None and not before.over
            far.close()
            await until(lambda: (heard := hear(sock)) is not None and heard.over)


def test_nothing_is_said_of_unix_sockets() -> None:
    """Nor of one that is closed."""
    left, right = socket.socketpair()
    with left, right:
        assert hear(left) is None
    tcp = socket.socket()
    tcp.close()
    assert hear(tcp) is None
