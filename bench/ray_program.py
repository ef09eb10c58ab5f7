"""Ray's side of a measurement, as its users would write it: a program of its own, which prints its figures as JSON.

Run by `ray_side`, which also ends what it leaves. Ray is imported here and nowhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from typing import Any

import ray
import ray.util.queue

from .publishing_clients import MB, WARM_UP, look, median, weights
from .queue_clients import ITEM

LIMIT = 60.0  # seconds of one wait
STORE = 100 * MB  # bytes of Ray's object store beside what is measured
END = "end"
WARM_UP_SECONDS = 0.2


class Reader:
    """An actor that reads weights."""

    def look(self, state: Any) -> float:
        """Read one element of each tensor."""
        return look(state)


class Blocking:
    """An actor that puts, or gets, one item at a time."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, seconds: float) -> None:
        """Items for so many seconds, and the mark of the end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._queue.put(ITEM)
        self._queue.put(END)

    def get(self) -> float:
        """Items a second, until the mark of the end."""
        count = 0
        begin = 0.0
        while self._queue.get() != END:
            begin = begin or time.monotonic()
            count += 1
        return count / (time.monotonic() - begin)


class Awaiting:
    """An actor that puts, or gets, many items at a time."""

    def __init__(self, queue: Any, under_way: int) -> None:
        self._queue = queue
        self._under_way = under_way

    async def put(self, seconds: float) -> None:
        """Items for so many seconds, and the marks of the end."""
        until = time.monotonic() + seconds
        puts: deque[asyncio.Future[None]] = deque()
        while time.monotonic() < until:
            puts.append(asyncio.ensure_future(self._queue.put_async(ITEM)))
            if len(puts) >= self._under_way:
                await puts.popleft()
        await asyncio.gather(*puts)
        for _ in range(self._under_way):  # one for each that gets: of waiting ones not always the first is served first
            await self._queue.put_async(END)

    async def get(self) -> float:
        """Items a second, until the marks of the end."""
        times: list[float] = []
        await asyncio.gather(*(self._get_all(times) for _ in range(self._under_way)))
        return (len(times) - 1) / (times[-1] - times[0])

    async def _get_all(self, times: list[float]) -> None:
        while await self._queue.get_async() != END:
            times.append(time.monotonic())


def publish(size: int, readers: int, times: int) -> dict[str, float]:
    """Milliseconds until the last reader has looked at what was put: the median of so many."""
    state = weights(size)
    actors = [ray.remote(Reader).options(num_cpus=0).remote() for _ in range(readers)]

    def once() -> float:
        begun = time.perf_counter()
        reference = ray.put(state)
        ray.get([actor.look.remote(reference) for actor in actors], timeout=LIMIT)
        return 1e3 * (time.perf_counter() - begun)

    return {"ms": median([once() for _ in range(WARM_UP + times)])}


def queue(seconds: float, under_way: int) -> dict[str, float]:
    """Small items a second, one at a time and so many under way."""
    limit = 4 * under_way  # items, as in our queue
    one = ray.util.queue.Queue(limit, actor_options={"num_cpus": 0})
    blocking = [ray.remote(Blocking).options(num_cpus=0).remote(one) for _ in range(2)]
    many = ray.util.queue.Queue(limit, actor_options={"num_cpus": 0})
    awaiting = [ray.remote(Awaiting).options(num_cpus=0).remote(many, under_way) for _ in range(2)]
    return {"one": _rate(blocking, seconds), "many": _rate(awaiting, seconds)}


def _rate(actors: list[Any], seconds: float) -> float:
    """Of the second time: the first starts processes and imports modules."""
    producer, consumer = actors
    rate = 0.0
    for each in (WARM_UP_SECONDS, seconds):
        _, rate = ray.get([producer.put.remote(each), consumer.get.remote()], timeout=LIMIT + each)
    return rate


def main() -> None:
    """Start Ray in as few processes as it can, measure, and end it."""
    parser = argparse.ArgumentParser(prog="python -m bench.ray_program")
    parser.add_argument("measurement", choices=["publish", "queue"])
    parser.add_argument("folder", help="where Ray keeps its files")
    parser.add_argument("arguments", type=json.loads, help="of the measurement, as JSON")
    given = parser.parse_args()
    ray.init(
        num_cpus=1,
        object_store_memory=STORE + 4 * given.arguments.get("size", 0),
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=given.folder,
    )
    try:
        found = publish(**given.arguments) if given.measurement == "publish" else queue(**given.arguments)
    finally:
        ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
