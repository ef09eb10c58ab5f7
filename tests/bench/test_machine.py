"""How fast the machine is: each of the three figures, and the sentence made of them."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from bench import machine
from bench.stats import BenchError


def test_python_and_memory_have_a_speed() -> None:
    """Both are positive and finite, on whatever machine."""
    assert 0 < machine.python_turn() < 1e9
    assert 0 < machine.copied(1 << 16) < 1e6


def test_each_byte_comes_back_from_who_is_woken() -> None:
    """A round trip takes time; whoever is woken ends when nobody sends any more."""
    ours, theirs = multiprocessing.Pipe()
    other = threading.Thread(target=machine.answer, args=(theirs,))
    other.start()
    try:
        assert machine.round_trips(ours) > 0
    finally:
        ours.close()
        other.join()
        theirs.close()


def test_who_is_woken_and_is_gone_is_an_error() -> None:
    """Nobody waits for it any longer."""
    ours, theirs = multiprocessing.Pipe()
    with ours:
        theirs.close()
        with pytest.raises(BenchError, match="gave no answer"):
            machine.round_trips(ours)


def test_line_says_all_figures_with_their_units() -> None:
    """Facts of before there were any give no line."""
    facts = {machine.PYTHON: "107 ns", machine.MEMORY: "8.02 GB/s", machine.WAKE_UP: "7.24 µs"}
    assert all(figure in machine.line(facts) for figure in facts.values())
    assert machine.line({"cpu": "some CPU"}) == ""
