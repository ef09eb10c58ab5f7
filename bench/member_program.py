"""``python -m bench.member_program``: a process with several members of a free group, which does what it is told.

It reads commands from its standard input, one JSON list on each line, and answers each with one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiorpc import RpcBackendOptions, worker

from . import functions
from .stats import percentile

JOIN_SECONDS = 120.0
LOOK = 0.01  # seconds between two looks whether all are known
CALLS_AT_LEAST = 5


class Members:
    """The members of this process. On its loop."""

    def __init__(self) -> None:
        self._all: list[worker.Worker] = []

    async def join(self, init_method: str, names: Sequence[str], size: int, begin: float) -> dict[str, float]:
        """Join, and wait until each knows the whole group. begin: of all processes, on `time.monotonic`.

        joined: seconds until all of this process have joined; known: until they know all others; spent: the seconds of
        the processor until then.
        """
        spent = time.process_time()
        options = RpcBackendOptions(init_method=init_method, rpc_timeout=JOIN_SECONDS)
        self._all = [worker.Worker(name, options=options) for name in names]
        await asyncio.gather(*(each.start() for each in self._all))
        joined = time.monotonic() - begin
        while not all(len(each.worker_infos()) == size for each in self._all):  # noqa: ASYNC110  # many events
            await asyncio.sleep(LOOK)
        return {"joined": joined, "known": time.monotonic() - begin, "spent": time.process_time() - spent}

    async def call_all(self, seconds: float) -> dict[str, float]:
        """Milliseconds of a no-op to all others: the first time, and afterwards (median and worst)."""
        caller = self._all[0]
        group = caller.group([info.name for info in caller.worker_infos() if info.name != caller.name])
        samples: list[float] = []
        end = time.perf_counter() + seconds
        while len(samples) <= CALLS_AT_LEAST or time.perf_counter() < end:
            before = time.perf_counter()
            (await group.call(functions.noop)).values()
            samples.append(1e3 * (time.perf_counter() - before))
        return {"first": samples[0], "p50": percentile(samples[1:], 50), "worst": max(samples[1:])}

    async def idle(self, seconds: float) -> dict[str, float]:
        """What this process takes while nothing is called: its processor, descriptors, memory, and the loop's lag."""
        gc.collect()
        before, begin, lag = time.process_time(), time.monotonic(), 0.0
        while (now := time.monotonic()) < begin + seconds:
            await asyncio.sleep(LOOK)
            lag = max(lag, time.monotonic() - now - LOOK)
        return {
            "processor": (time.process_time() - before) / (time.monotonic() - begin),
            "lag": lag,
            "descriptors": float(len(os.listdir("/proc/self/fd"))),
            "connections": float(sum(each.statistics().connections for each in self._all)),
            "memory": float(_private_bytes()),
        }

    async def leave(self) -> dict[str, float]:
        """Leave; how long that took."""
        before = time.monotonic()
        await asyncio.gather(*(each.shutdown() for each in self._all))
        return {"left": time.monotonic() - before}


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


async def _main() -> None:
    members, loop = Members(), asyncio.get_running_loop()
    print(json.dumps("ready"), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, *arguments = json.loads(line)
        command: Any = getattr(members, name)
        print(json.dumps(await command(*arguments)), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
