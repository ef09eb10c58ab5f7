"""The life of one member of a round, in a process of its own: it joins, does what the round says, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvloop
from torch.distributed import TCPStore

import aiorpc as rpc
from bench.hosts import enter
from tests import leaks
from tests.cuts import cut
from tests.processes.bodies import hold_the_interpreter
from tests.processes.workers import Link, Place, until

from . import handlers
from .load import LIMIT, Load

AT_ONCE = 5  # operations of one member


@dataclass(frozen=True)
class Assignment:
    """What a member is told at first. life: a number of its own in this round. names: of all places of the group.

    load: kinds of operations. namespace, address: of the host that the member is on, if there are several.
    """

    seed: str
    life: int
    names: list[str]
    folder: str
    transports: tuple[str, ...]
    load: tuple[str, ...]
    namespace: str = ""
    address: str | None = None

    @property
    def log(self) -> Path:
        """Where the member writes what it does, and where it stands if asked by SIGUSR1."""
        return Path(self.folder) / f"{self.life}.log"


def live(place: Place, link: Link, assignment: Assignment) -> list[str]:
    """Body: a whole life; returns what is left of it in the process, one line each."""
    if assignment.namespace:
        enter(assignment.namespace)
    gc.freeze()  # the collector need not look at all of torch each time
    with assignment.log.open("w", buffering=1) as log:
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        logging.basicConfig(stream=log, level=logging.DEBUG, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%T")
        logging.getLogger("asyncio").setLevel(logging.INFO)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                # libuv opens a pipe for signals that lives as long as the process; uvloop and torch have one each.
                runner.run(asyncio.sleep(0))
                TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
                return runner.run(_live(place, link, assignment))
        finally:
            logging.getLogger().handlers.clear()
            faulthandler.unregister(signal.SIGUSR1)


async def _live(place: Place, link: Link, assignment: Assignment) -> list[str]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, tell_tasks)
    orders: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    threading.Thread(target=_hear, args=(link, loop, orders), daemon=True, name="orders").start()
    # In a thread, which stays and is counted: what is closed late needs the loop.
    before = await asyncio.to_thread(leaks.take_snapshot)
    address = assignment.address
    options = rpc.RpcBackendOptions(
        rpc_timeout=LIMIT, transports=assignment.transports, address=address, bind_address=address
    )
    began = time.monotonic()
    rank = None if place.world_size is None else place.rank
    joining = rpc.init(
        place.name, rank=rank, world_size=place.world_size, init_method=place.init_method, options=options
    )
    async with joining as worker:
        link.tell({"pid": os.getpid(), "seconds": time.monotonic() - began})
        with ThreadPoolExecutor(AT_ONCE) as threads:
            rng = random.Random(f"{assignment.seed}:{assignment.life}")
            load = Load(
                worker, assignment.names, assignment.life, f"{assignment.folder}/runs", rng, threads, assignment.load
            )
            graceful = await _obey(worker, link, orders, load)
        report = await worker.shutdown(graceful)
        link.tell({"lost": [info.name for info in report.lost], "timed_out": report.timed_out})
        del load, report
    del worker, joining
    left = await asyncio.to_thread(leaks.wait_until_clean, before, allowed=("files",))
    return [*left, *await leaks.tasks_left([])]


async def _obey(worker: rpc.Worker, link: Link, orders: asyncio.Queue[tuple[Any, ...]], load: Load) -> bool:
    """Do as the round says, until it says "leave"; whether that is to be graceful."""
    working: asyncio.Task[None] | None = None
    told: dict[str, Callable[..., Awaitable[object]]] = {"reach": reach, "settle": settle}
    while True:
        order, *arguments = await orders.get()
        if order == "load":
            working = asyncio.create_task(load.run(AT_ONCE))
        elif order == "end" and working is not None:
            load.ending = True
            await working
            link.tell(load.outcomes)
        elif order in told:
            link.tell(await told[order](worker, *arguments))
        elif order == "leave":
            return bool(arguments[0])


def _hear(link: Link, loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[tuple[Any, ...]]) -> None:
    """In a thread: take orders; faults are done here, the rest by the loop."""
    with contextlib.suppress(EOFError, RuntimeError):  # the end of the round, or of the loop
        while True:
            order: tuple[Any, ...] = link.hear(LIMIT * 10)
            if order[0] == "cut":
                cut(*order[1:])
            elif order[0] == "block":
                hold_the_interpreter(order[1])
            else:
                loop.call_soon_threadsafe(orders.put_nowait, order)


async def reach(worker: rpc.Worker, pids: dict[str, int]) -> dict[str, str]:
    """Call every living member by its name, which has to be that process: what does not hold, by name."""
    wrong: dict[str, str] = {}
    for name, pid in pids.items():
        try:
            found = await worker.call(name, handlers.pid)
        except rpc.RpcError as error:
            wrong[name] = f"{type(error).__name__}: {error}"
        else:
            if found != pid:
                wrong[name] = f"process {found} in place of {pid}"
    return wrong


async def settle(worker: rpc.Worker) -> dict[str, object]:
    """Wait until nothing of the load is left in the worker; what is left all the same."""

    def rest() -> dict[str, object]:
        statistics = worker.statistics()
        counted = ("calls_pending", "calls_running", "shared_lent", "shared_leases", "threads_blocked", "jobs_queued")
        found: dict[str, object] = {name: getattr(statistics, name) for name in counted}
        found |= {f"references.{name}": count for name, count in asdict(worker._node.references.counts()).items()}
        calls = [f"{call.direction} {call.function} {call.worker}" for call in worker.pending_calls()]
        return {name: value for name, value in (found | {"calls": calls}).items() if value}

    def is_settled() -> bool:
        gc.collect()
        return not rest()

    with contextlib.suppress(AssertionError):
        await until(is_settled, 20.0)
    return rest()


def tell_tasks() -> None:
    """To the log: where each task stands."""
    for task in asyncio.all_tasks():
        stack = "; ".join(f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in task.get_stack())
        logging.info("task %s: %r at %s", task.get_name(), task.get_coro(), stack)
