"""Calls of a worker counted by function and other worker, only while a program looks from outside. Any thread."""

from __future__ import annotations

from functools import partial

from ..runtime.engine.engine import Engine
from ..runtime.engine.tally import Pairs, Tally
from .report import SeenFunction


def counted(engine: Engine) -> list[SeenFunction]:
    """What was counted so far. Counting begins with the first of these questions, and goes on for a while after each.

    Calls that end afterwards are counted. Another thread that asks at the same time may begin anew; counts that have
    become less have begun anew.
    """
    tally = engine.tally
    if tally is None:
        tally = engine.tally = Tally()
        tally.pairs = Pairs(partial(_end_all, engine))
    elif tally.pairs is None:
        tally.pairs = Pairs(partial(_end_pairs, tally))
    else:
        tally.pairs.prolong()
    return [
        SeenFunction(
            side, function, worker, int(sum(row[:-2])), int(row[-2]), row[-1], [int(count) for count in row[:-2]]
        )
        for side, function, worker, row in tally.pairs.rows()
    ]


def _end_all(engine: Engine) -> None:
    engine.tally = None


def _end_pairs(tally: Tally) -> None:
    tally.pairs = None
