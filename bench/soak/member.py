"""One member of a soak: a process that works, answers samples, and leaves when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import socket
import traceback
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import uvloop

import aiorpc as rpc

from ..rank import receive
from . import gauges
from .load import Done, Load

SAMPLE, LEAVE = "sample", "leave"


@dataclass(frozen=True)
class MemberSpec:
    """Who a member is.

    secret: of the group; without one, a group that meets at a loopback address uses no TCP beside unix sockets. tcp: it
    uses TCP alone, so that all its traffic goes as between hosts. cuts: seconds between two times that it breaks some
    of its connections; 0: it never does. away: it leaves the group every so many seconds, and joins again, in the same
    process; 0: it stays.
    """

    name: str
    address: str
    secret: str = field(repr=False)
    steady: list[str]
    guests: list[str]
    tcp: bool = False
    cuts: float = 0.0
    away: float = 0.0


@dataclass(frozen=True)
class Sample:
    """What a member says of itself. counts: what it has done so far, by name."""

    gauges: dict[str, float]
    done: Done
    counts: dict[str, int]


def start(spec: MemberSpec, pipe: Connection) -> None:
    """Entry of the process. Ends it with status 1 on any error, after having told the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends its children
    torch.set_num_threads(1)
    logging.getLogger("aiorpc").setLevel(logging.ERROR)  # guests are killed all the time
    os.environ["AIORPC_SECRET"] = spec.secret
    try:
        uvloop.run(Membership(spec, pipe).run())
    except EOFError:
        os._exit(1)  # the parent is gone: nobody is left to work for
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())
        os._exit(1)


class Membership:
    """The life of one member."""

    def __init__(self, spec: MemberSpec, pipe: Connection) -> None:
        self.spec = spec
        self.pipe = pipe
        self.done = Done()
        self.joined = self.cut = 0
        self.resumed = 0  # connections, of the workers that have left

    async def run(self) -> None:
        """Until the parent says that it shall leave."""
        gc.collect()
        gc.freeze()
        while not await self._once():
            pass

    async def _once(self) -> bool:
        """Join, work and leave; whether that was the last time."""
        spec = self.spec
        options = rpc.RpcBackendOptions(
            transports=("tcp",) if spec.tcp else ("unix", "tcp"),
            max_remembered_answers=32,  # so that these are as many as they get within the warm-up
        )
        async with rpc.init(spec.name, init_method=spec.address, options=options) as worker:
            self.joined += 1
            if self.joined == 1:
                self.pipe.send("joined")
            # Of those who come last nobody may be there when the first ones begin.
            for each in spec.steady:
                if each != spec.name:
                    await worker.wait_for(each)
            load = Load(spec.name, spec.steady, spec.guests, self.done)
            async with load.running(), self._cutting():
                last = await self._answer(worker, load)
            self.resumed += worker.statistics().connections_resumed
        return last

    async def _answer(self, worker: rpc.Worker, load: Load) -> bool:
        """Answer samples until it is time to leave; whether that is for good."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.spec.away if self.spec.away else None
        while True:
            try:
                async with asyncio.timeout_at(until):
                    asked = await receive(self.pipe)
            except TimeoutError:
                return False
            if asked == LEAVE:
                return True
            latencies, load.latencies = load.latencies, []
            found = await asyncio.to_thread(gauges.of_process, os.getpid()) | gauges.from_inside(latencies)
            counts = {
                "joined": self.joined,
                "connections cut": self.cut,
                "connections resumed": self.resumed + worker.statistics().connections_resumed,
            }
            self.pipe.send(Sample(found, self.done, counts))

    @contextlib.asynccontextmanager
    async def _cutting(self) -> AsyncIterator[None]:
        """Break connections now and then as long as the block lasts."""
        task = asyncio.create_task(self._keep_cutting()) if self.spec.cuts else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _keep_cutting(self) -> None:
        store = int(self.spec.address.rpartition(":")[2])
        while True:
            await asyncio.sleep(self.spec.cuts * random.uniform(0.5, 1.5))
            for end in _connections():
                with contextlib.suppress(OSError), end:
                    if end.getpeername()[1] != store and random.random() < 0.5:
                        end.shutdown(socket.SHUT_RDWR)
                        self.cut += 1


def _connections() -> Iterator[socket.socket]:
    """Another descriptor of each TCP connection of this process."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not entry.is_socket():
                continue
            end = socket.socket(fileno=os.dup(int(entry.name)))
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                yield end
            else:
                end.close()
