"""Copies by two threads: all pieces once, whoever comes late or fails; and into pages that are not there yet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest

from aiorpc.channels.copying import Assist, together, write_cold
from aiorpc.channels.segments import create_segment
from aiorpc.channels.space import KIB, MIB, PAGE
from tests.channels.ends import pattern


@pytest.fixture
def assist() -> Iterator[Assist]:
    """Another thread for each function; all have ended when the test has."""
    threads: list[threading.Thread] = []

    def start(work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def test_both_threads_take_pieces_until_none_is_left(assist: Assist) -> None:
    """Each piece is worked on once, and the one who called returns when the other one is done, too."""
    meeting = threading.Barrier(2, timeout=60.0)
    done: list[tuple[int, int]] = []

    def work(piece: int) -> None:
        if piece < 2:
            meeting.wait()
        done.append((piece, threading.get_ident()))

    together(work, range(100), assist)
    assert sorted(piece for piece, _ in done) == list(range(100)) and len({thread for _, thread in done}) == 2


def test_nobody_waits_for_a_thread_that_never_comes() -> None:
    """All pieces are worked on by the one who called."""
    done: list[int] = []
    together(done.append, range(10), lambda work: None)
    assert done == list(range(10))


def test_what_the_other_thread_raises_is_raised(assist: Assist) -> None:
    """And what is left is left."""
    here = threading.get_ident()
    meeting = threading.Barrier(2, timeout=60.0)

    def work(piece: int) -> None:
        meeting.wait()
        if threading.get_ident() != here:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        together(work, range(2), assist)


@pytest.mark.parametrize("assisted", [False, True])
@pytest.mark.parametrize("length", [1, 300 * KIB + 1, 3 * MIB])
def test_cold_memory_holds_what_was_written(assist: Assist, length: int, assisted: bool) -> None:
    """That, and zeros around it."""
    data = pattern(1, length)
    segment = create_segment(0, 4 * MIB)
    try:
        write_cold(segment.mapping, PAGE, numpy.frombuffer(data, numpy.uint8), 64 * KIB, assist if assisted else None)
        assert bytes(segment.mapping.array[PAGE : PAGE + length]) == data
        assert not segment.mapping.array[PAGE + length :].any()
    finally:
        os.close(segment.fd)


def test_one_piece_is_written_by_its_sender_alone() -> None:
    """A thread could only be late for it."""
    asked: list[Callable[[], None]] = []
    segment = create_segment(0, MIB)
    try:
        for length, others in ((64 * KIB, 0), (64 * KIB + 1, 2)):
            write_cold(segment.mapping, PAGE, numpy.zeros(length, numpy.uint8), 64 * KIB, asked.append)
            assert len(asked) == others
    finally:
        os.close(segment.fd)
