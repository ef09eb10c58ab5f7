"""Many Futures as one: `collect_all` and `wait_all`."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from aiorpc.collecting import collect_all, wait_all
from aiorpc.compat.torch.futures import collect_all as collect_as_torch
from aiorpc.errors import RpcTimeout
from aiorpc.futures import Future, outcome, when_done
from tests.settling import (
    LONG,
    all_at_once,
    arriving,
    pending,
    running,
    settled,
    torch_future,
    wait_until,
)


def test_our_helpers_take_bare_torch_futures() -> None:
    """wait_all, collect_all, when_done and outcome take any torch Future, also the C++ base that torch's then gives."""
    source: torch.futures.Future[int] = torch.futures.Future()
    bare = source.then(lambda done: done.value() + 1)
    ran: list[Any] = []
    when_done(bare, lambda done: ran.append(outcome(done)))
    both = collect_all([settled(1), bare])
    assert not both.done()
    source.set_result(4)
    assert both.wait(LONG)[1] is bare
    assert ran == [(5, None)]
    assert wait_all([settled(1), bare, torch_future(2)]) == [1, 5, 2]
    error = ValueError("no")
    assert outcome(torch_future(error=error)) == (None, error)


def test_wait_all_raises_the_first_error_after_all_are_done() -> None:
    """wait_all waits for all, then raises the first error in the order of the list."""
    first, second, third = pending(), pending(), torch_future(error=KeyError("third"))
    with running(wait_all, [first, second, third]) as result:
        second.set_exception(ValueError("second"))
        wait_until(lambda: first._waiters == 1)
        assert not result
        first.set_result(0)
    assert repr(result[0]) == "ValueError('second')"


def test_collect_all_keeps_identity_and_refuses_others() -> None:
    """The list holds the very Futures that were given; none at all is complete at once; other things are refused."""
    futures = [settled(1), settled(error=ValueError("no"))]
    assert all(mine is theirs for mine, theirs in zip(collect_all(futures).wait(LONG), futures, strict=True))
    assert collect_all([]).wait(LONG) == []
    with pytest.raises(TypeError, match="not int"):
        collect_all([1])  # type: ignore[list-item]  # misuse


def test_collect_all_completes_once_when_many_threads_settle() -> None:
    """However many threads settle its members at once, the collection completes once, after the last."""

    def race() -> None:
        futures = [pending() for _ in range(8)]
        done: list[bool] = []
        collect_all(futures).add_done_callback(lambda all_of: done.append(all(f.done() for f in all_of.value())))
        all_at_once(*(partial(future.set_result, None) for future in futures))
        wait_until(lambda: bool(done))
        assert done == [True]

    for _ in range(30):
        race()


def test_collect_all_leaves_the_joining_to_its_members() -> None:
    """The collection is a list of Futures: whoever takes a value from one of them joins that one's streams."""
    (first, one), (second, two) = arriving(), arriving()
    both = collect_all([first, second])
    first._settle(1)
    second._settle(2)
    members = both.wait(LONG)
    assert one.threads + two.threads == []
    assert members[1].value() == 2
    assert (len(one.threads), len(two.threads)) == (0, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_collections_of_collections_may_be_longer_than_a_stack_is_deep(fails: bool) -> None:
    """Whoever waits for the last one is told, and whoever settles the first one does not suffer."""
    first = last = pending()
    for _ in range(3000):
        last = collect_all([last])
    with running(last.wait, LONG) as result:
        wait_until(lambda: last._waiters == 1)
        assert first._settle(None, ValueError("no") if fails else None)
    assert result == [[last.value()[0]]]
    assert first.done()


def test_a_wait_is_judged_soon_however_many_ways_lead_to_what_it_waits_for() -> None:
    """A Future that is in two collections, which are in two others each, and so on: it is looked at once."""

    async def main() -> None:
        last = pending()
        for _ in range(60):
            last = collect_all([last, last])
        for _ in range(3000):
            last = collect_all([last])
        with pytest.raises(RpcTimeout):
            last.wait(0)

    asyncio.run(main())


def test_what_is_gathered_step_by_step_takes_memory_for_each_step_alone() -> None:
    """A running total of many Futures: no step repeats what the steps before it wait for."""
    total = pending()
    tracemalloc.start()
    try:
        for _ in range(2000):
            total = collect_all([total, pending()]).then(lambda both: both.value())
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


class Failed(Exception):
    """Of nothing else."""


def collect_twice(futures: list[Future[Any]]) -> Future[Any]:
    """A collection of a collection."""
    return collect_all([collect_all(futures)])


@pytest.mark.parametrize("collect", [collect_all, collect_twice, collect_as_torch])
def test_whoever_raises_an_error_of_a_collection_keeps_nothing_of_it(collect: Callable[..., Any]) -> None:
    """The frames that an error was raised in have the collection, as a rule: the garbage collector takes all of it."""

    def look() -> weakref.ref[Failed]:
        both = collect([settled(1), settled(error=Failed("no"))])
        try:
            for each in both.wait(LONG) if collect is collect_all else wait_all(both.wait(LONG))[0]:
                each.wait(LONG)
        except Failed as error:
            return weakref.ref(error)
        raise AssertionError

    kept = look()
    gc.collect()
    assert kept() is None


def test_helpers_of_torch_see_what_has_become_of_each() -> None:
    """Also where nobody has the collection itself any more."""
    last = pending()
    of_torch = torch.futures.collect_all([collect_all([settled(1), last, settled(error=Failed("too"))])])
    last.set_exception(Failed("no"))
    first, second, third = of_torch.wait()[0].wait()
    assert first.wait(LONG) == 1
    for each, text in ((second, "no"), (third, "too")):
        with pytest.raises(Failed, match=text):
            each.wait(LONG)
