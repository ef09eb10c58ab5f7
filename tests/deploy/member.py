"""What runs in the pods of test_pods.py: ``python -m tests.deploy.member PART``."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import aiorpc as rpc


def where() -> str:
    """Handler: the pod's name and address."""
    name = socket.gethostname()
    return f"{name} {socket.gethostbyname(name)}"


def say(text: str) -> None:
    """To the pod's log."""
    print(text, flush=True)


async def member() -> None:
    """A member of a group of fixed size, by env://; rank 0 looks at rank 1 before and after another takes its place."""
    rank = os.environ["JOB_COMPLETION_INDEX"]
    options = rpc.RpcBackendOptions(rpc_timeout=float(os.environ.get("BOUND", "60")))
    async with rpc.init(f"worker{rank}", options=options) as worker:
        say(f"joined: {where()}")
        if rank == "0" and "REPLACED" in os.environ:
            events = worker.events()
            say(f"first: {await rpc.call('worker1', where)}")
            async for event in events:
                if isinstance(event, rpc.events.WorkerReplaced):
                    break
            say(f"then: {await rpc.call('worker1', where)}")
            await events.aclose()


async def follower() -> None:
    """A member of such a group that cannot do without rank 0: it fails when that was lost. Rank 0 calls, and leaves."""
    rank = os.environ["JOB_COMPLETION_INDEX"]
    worker = await rpc.init(f"worker{rank}")
    say(f"joined: {where()}")
    if rank == "0":
        say(f"other: {await rpc.call('worker1', where)}")
        await asyncio.sleep(float(os.environ["STAYS"]))
    report = await worker.shutdown()  # serves until all are here
    sys.exit(1 if report.lost else 0)


async def slow() -> str:
    """Handler: takes a while."""
    await asyncio.sleep(3.0)
    return where()


async def asks() -> None:
    """A member of a free group with calls to the model under way, all of which are answered."""
    async with rpc.init("asks", init_method=os.environ["MEET"]):
        await rpc.wait_for("model", timeout=60)
        calls = [rpc.call("model", slow) for _ in range(20)]
        await rpc.call("model", where)  # it has accepted those before
        say("under way")
        say(f"answered: {len(await asyncio.gather(*calls))}")


async def model() -> None:
    """A member of a free group, which serves until it is killed."""
    async with rpc.init("model", init_method=os.environ["MEET"]):
        say("serves")
        await asyncio.Event().wait()


async def web() -> None:
    """A member of the same group, which calls the model, and stays."""
    async with rpc.init("web", init_method=os.environ["MEET"]):
        await rpc.wait_for("model", timeout=60)
        say(f"model: {await rpc.call('model', where)}")
        await asyncio.Event().wait()


if __name__ == "__main__":
    # By its real name, not __main__: that is the name by which handlers are called.
    from tests.deploy import member as this

    asyncio.run(getattr(this, sys.argv[1])())
