"""Exceptions whose own code raises can be shown, copied and logged all the same."""

from __future__ import annotations

import logging

import pytest

from aiorpc import foreign
from aiorpc.logs import logger
from tests.runtime import hostile


@pytest.mark.parametrize("raised", hostile.RAISED)
@pytest.mark.parametrize("place", hostile.PLACES)
def test_no_function_runs_into_what_the_class_raises(
    place: str, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Text, traceback, copy, cause and log line are made, or it is said that they cannot be."""
    error = hostile.make(place, raised)
    cause = KeyError("why")
    foreign.set_cause(error, cause)
    assert foreign.field(error, "__cause__") is cause
    assert foreign.name_of(error) in foreign.said(error)
    assert foreign.traceback_of(error)
    twin = foreign.copy_of(error)
    assert twin is not None and twin is not error and type(twin) is type(error)
    assert foreign.field(twin, "args") == ("told",) and foreign.field(twin, "__cause__") is cause
    assert foreign.is_a(error, hostile.Hostile) and not foreign.is_a(error, OSError)
    foreign.log_error(logger, logging.ERROR, error, "it %s", "failed")
    assert "it failed" in caplog.text


def test_what_stands_in_slots_is_copied() -> None:
    """pickle and copy would forget it."""

    class Slotted(Exception):
        __slots__ = ("code", "empty")
        code: int

    error = Slotted("text")
    error.code = 5
    twin = foreign.copy_of(error)
    assert isinstance(twin, Slotted) and twin.code == 5 and not hasattr(twin, "empty")


def test_what_cannot_be_made_again_has_no_copy() -> None:
    """Its arguments are others by now than those that it was made of."""
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
    error.args = ("what",)
    assert foreign.copy_of(error) is None
