"""What is said of a condition that was waited for in vain."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tests.conditions import unmet
from tests.processes import workers
from tests.runtime.waiting import until, wait_until

served = [1, 2, 3]


def is_never() -> bool:
    """A condition with a name."""
    return False


def test_a_comparison_says_what_it_found() -> None:
    """The text as it stands in the test, over several lines too, and the value at its left."""
    count = 2
    assert unmet(lambda: len(served) == count, False, 1.5) == (
        "not within 1.5 s: len(served) == count, which gave False: len(served) is 3"
    )
    text = unmet(
        lambda: [each for each in served if each != count]
        == [1],
        False,
        1,
    )  # fmt: skip
    assert text.endswith("[each for each in served if each != count] == [1], which gave False: "
                         "[each for each in served if each != count] is [1, 3]")  # fmt: skip


def test_other_conditions_say_what_they_are() -> None:
    """Their text or their name, and what they returned; what cannot be looked at again is left out."""
    event = threading.Event()
    assert unmet(lambda: event.is_set() or None, None, 1) == "not within 1 s: event.is_set() or None, which gave None"
    assert unmet(is_never, False, 1) == "not within 1 s: is_never, which gave False"
    assert "is_set" in unmet(event.is_set, False, 1)
    assert "partial" in unmet(partial(is_never), False, 1)
    assert unmet(lambda: served.pop(99) == 1, False, 1) == "not within 1 s: served.pop(99) == 1, which gave False"
    assert unmet(eval("lambda: 1 == 2"), False, 1).endswith("<lambda>, which gave False")


async def test_those_who_wait_in_vain_say_it() -> None:
    """In a coroutine and in a thread, of workers in this process and in others."""
    with pytest.raises(AssertionError, match=r"len\(served\) == 7, which gave False: len\(served\) is 3"):
        await until(lambda: len(served) == 7, 0.01)
    with pytest.raises(AssertionError, match=r"len\(served\) == 7, which gave False: len\(served\) is 3"):
        wait_until(lambda: len(served) == 7, 0.01)
    with pytest.raises(AssertionError, match=r"len\(served\) == 7, which gave False: len\(served\) is 3"):
        await workers.until(lambda: len(served) == 7, 0.01)
    with pytest.raises(AssertionError, match=r"len\(served\) == 7, which gave False: len\(served\) is 3"):
        workers.wait_for(lambda: len(served) == 7, 0.01)
