"""A call to many workers, as it is measured: each way is taken, and the rows compare what they say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import aiorpc
import aiorpc.testing
from bench import group_clients, groups


@pytest.mark.parametrize(
    ("measure", "ways"),
    [
        (group_clients.alone, {"group"}),
        (group_clients.in_turn, {"group", "calls"}),
        (group_clients.one_by_one, {"one by one"}),
    ],
)
async def test_all_ways_are_taken_at_least_once(measure: Callable[..., Any], ways: set[str]) -> None:
    """However little time there is; each with a figure and with processor time."""
    async with aiorpc.testing.cluster(3) as workers:
        found = await measure(workers[0], ["worker1", "worker2"], 0.0)
        assert all(worker.statistics().calls_served >= len(ways) for worker in workers[1:])
    assert set(found) == ways | {f"{way} processor" for way in ways}
    assert all(figure > 0 for figure in found.values())


async def test_large_tensors_go_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the memory for them has grown."""
    monkeypatch.setattr(group_clients, "GROWTH", 0.0)
    async with aiorpc.testing.cluster(2) as workers:
        found = await group_clients.large_in_turn(workers[0], ["worker1"], 1 << 20, 0.0)
    assert {"group", "calls"} < set(found)


def test_the_loop_waits_for_all() -> None:
    """Of as many calls as there are names."""
    called: list[str] = []

    def rpc_async(name: str, _: Callable[..., Any]) -> aiorpc.Future[None]:
        called.append(name)
        future: aiorpc.Future[None] = aiorpc.Future()
        future.set_result(None)
        return future

    found = group_clients.loop_of_calls(SimpleNamespace(rpc_async=rpc_async), ["a", "b"], 0.0)
    assert (called, found["samples"]) == (["a", "b"], 1.0)


def test_the_rows_compare_what_they_say() -> None:
    """The group with torch's loop, and as shares of what our own calls take."""

    class Stage:
        plan = SimpleNamespace(seconds=0.1)

        @contextlib.contextmanager
        def start(self, side: str, names: list[str], style: str = "blocking") -> Any:
            assert len(names) == groups.MEMBERS + 1
            run = {"group": 1.0, "calls": 8.0}
            yield SimpleNamespace(side=side, names=names, run=lambda *_, **__: run)

        def activate(self, cohort: Any) -> Any:
            return cohort

        def alternate(self, cases: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
            own = {"group": 11.0, "calls": 22.0, "group processor": 3.0, "calls processor": 4.0}
            assert list(cases) == ["aiorpc", "torch", "in turn", "one by one"]
            return {
                "aiorpc": [{"group": 10.0}],
                "torch": [{"p50": 50.0}],
                "in turn": [own],
                "one by one": [{"one by one": 40.0}],
            }

    rows = groups.groups(Stage())  # type: ignore[arg-type]  # what it needs of one
    assert [row.aiorpc for row in rows] == [(10.0,), (0.5,), (0.25,), (0.75,), (0.125,)]
    assert rows[0].ratios == (5.0,)
    assert [row.passed for row in rows[:2]] == [True, True]
    assert rows[1].limit == pytest.approx(2 / 3)
