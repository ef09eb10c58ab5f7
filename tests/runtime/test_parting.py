"""Two members of a group of fixed size that lose each other, while the others see both."""

from __future__ import annotations

import pytest

from aiorpc import PeerLost, Worker
from aiorpc.testing import cluster
from tests.runtime.waiting import until


def lose(worker: Worker, other: Worker) -> None:
    """The connection between the two has broken, as far as that worker can see."""
    worker._node.group.on_lost(other._node.engine.record, "the connection to it broke")


def lost(worker: Worker) -> list[str]:
    return sorted(info.name for info in worker._node.group.lost.values())


@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_that_lose_each_other_the_leader_stays(first: int) -> None:
    """The other one leads in its own view, and reports the leader to all: nobody believes it."""
    async with cluster(4) as workers:
        for each in workers[1:]:
            assert await each.call("worker0", abs, -3) == 3
        lose(workers[first], workers[1 - first])
        lose(workers[1 - first], workers[first])
        await until(lambda: lost(workers[2]) == lost(workers[3]) == ["worker1"] or lost(workers[2]) == ["worker0"])
        for each in workers[2:]:
            assert await each.call("worker0", abs, -3) == await workers[0].call(each.name, abs, -3) == 3
            with pytest.raises(PeerLost, match="worker1"):
                await each.call("worker1", abs, -3)
            assert lost(each) == ["worker1"]
        assert lost(workers[0]) == ["worker1"]


async def test_a_leader_that_is_gone_is_lost_by_the_word_of_the_next_one() -> None:
    """As it does not say that it is there."""
    async with cluster(3) as workers:
        assert await workers[1].call("worker0", abs, -3) == 3
        await workers[0]._drop()
        lose(workers[1], workers[0])
        await until(lambda: lost(workers[2]) == ["worker0"])
        assert workers[1]._node.group.leads
        assert await workers[2].call("worker1", abs, -3) == 3
