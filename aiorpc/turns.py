"""Turns at a connection, which a thread gives back before it blocks.

A thread that waits for an answer reads the socket itself, and one that sends writes it itself. Code of the program may
run in the midst of that, at any instruction: a signal handler, a trace function, a finalizer. A blocking verb in there
waits for what only the owner of the turn, the interrupted frame below it, would read or write. So whatever is about to
block calls `give_back`, which ends the turns of this thread: the loop goes on from there. The interrupted frame finds
its turn ended as it comes back.

Whatever a turn does to what it shares with others is one call of C that takes its arguments from the turn. `give_back`
empties it, so that such a call raises `TurnEnded` and does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

# Where the steps of turns are.
_STEPS = f"{__package__}.transport."
#: What a call of C raises that takes an argument from a turn which has ended.
TurnEnded = IndexError


class SocketTurn(list[Any]):
    """What one turn needs in its calls of C; empty once it has ended. end: has others go on; idempotent."""

    __slots__ = ("end",)

    def __init__(self, end: Callable[[], None], *parts: Any) -> None:
        super().__init__(parts)
        self.end: Callable[[], None] = end

    def has_raised(self, error: BaseException) -> bool:
        """Whether it has ended, and that error says so: none that a signal handler has raised."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else trace.tb_frame.f_globals["__name__"]
        return not self and where.startswith(_STEPS)


class _SocketTurns(threading.local):
    def __init__(self) -> None:
        self.mine: list[SocketTurn] = []


_turns = _SocketTurns()


def begin(turn: SocketTurn) -> None:
    """The calling thread is about to take that turn; `leave` has to follow."""
    _turns.mine.append(turn)


def leave(turn: SocketTurn) -> None:
    """That turn is over."""
    mine = _turns.mine
    while mine and mine[-1] is not turn:  # one of a frame above that was interrupted before it could leave it
        mine.pop()
    mine.pop()


def give_back() -> None:
    """The calling thread is about to block: it ends the turns that it has.

    They stay where they are until they are left: an interrupted frame may just be about to take its lock, and go on
    until it looks at its turn.
    """
    for turn in _turns.mine:
        turn.clear()
        turn.end()
