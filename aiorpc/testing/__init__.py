"""For users' tests: groups of workers in the test's process or in processes of their own, and fault injection.

    import aiorpc, aiorpc.testing

    async def test_double():
        async with aiorpc.testing.cluster(2) as workers:
            assert await workers[0].call("worker1", double, 21) == 42

The workers are real ones: calls travel over sockets, are encoded and decoded, handlers run in their worker's threads.
`blocking_cluster` is the same for tests without a loop, `process_cluster` has a process for each worker. With pytest
they are the fixtures ``rpc_workers`` and ``rpc_processes``, of the plugin that is installed with aiorpc.

`Faults` drops, delays and refuses messages that one worker sends, by kind, receiver and function, and kills workers:

    async def test_a_lost_answer_is_a_timeout(workers):
        with aiorpc.testing.Faults(workers[1]) as faults:
            faults.drop("reply", times=1)
            with pytest.raises(aiorpc.RpcTimeout):
                await workers[0].peer("worker1", timeout=0.2).call(double, 21)
            assert await workers[0].call("worker1", double, 21) == 42

Only messages that this worker sends are affected. It also works for a worker of `init_rpc`
(``Faults(aiorpc.current())``), in programs whose workers are processes.
"""

from __future__ import annotations

from .clusters import blocking_cluster, cluster
from .faults import Fault, Faults
from .passing import MessageKind, SentMessage
from .processes import ProcessCluster, process_cluster

__all__ = [
    "Fault",
    "Faults",
    "MessageKind",
    "ProcessCluster",
    "SentMessage",
    "blocking_cluster",
    "cluster",
    "process_cluster",
]
