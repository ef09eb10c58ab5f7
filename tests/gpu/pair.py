"""Two spawned processes with a GPU: w0, which runs what a test asks it to, and w1, which serves.

The test's own process takes no part, so that a device that hangs or a process that is killed takes no other test along.
Spawned, not forked from a server: some settings of torch are read while it is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import aiorpc as rpc

from ..processes.workers import Child, Children, Link, Place, _run, meeting_file, places
from . import bodies

START = 120.0  # seconds: an import of torch with CUDA from a cold disk, and a context
GRACE = 30.0  # seconds beyond its limit that a body has to say how it failed
MIB = 1 << 20
DEVICE_BUFFER = 8 * MIB  # so that no long tensor is needed to be longer than that
Maps = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True)
class Variant:
    """How a pair is started, and what its tensors should then go by; None: by the best that there is here."""

    way: str | None
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
VARIANTS = {
    "auto": Variant(None),
    "ipc": Variant("ipc", {"device_channel": "ipc"}),
    "staging": Variant("staging", {"device_channel": "staging"}),
    "expandable": Variant(None, env={ALLOCATOR: "expandable_segments:True"}),
    "cudaMallocAsync": Variant(None, env={ALLOCATOR: "backend:cudaMallocAsync"}),
}


@dataclass(frozen=True)
class Exchange:
    """What became of two processes that shared memory by the driver alone, without anything of the channel.

    refusal: why they could not. read: the sums of what was read. done: for each copy whether it was over when it had
    just been enqueued.
    """

    refusal: str
    read: list[int] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)


class Spawned(Children):
    """Processes with an interpreter of their own, started with an environment of their own."""

    def start(self, place: Place, body: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> Child:
        """Start a process that runs ``body(place, link, *args)``."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(body, place, theirs, args, {}), name=place.name)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            process.start()
        theirs.close()
        child = Child(place, process, ours)
        self.started.append(child)
        return child


@contextlib.contextmanager
def spawned() -> Iterator[Spawned]:
    """A place for processes; those that still run at the end of the block are killed."""
    children = Spawned()
    try:
        yield children
    finally:
        for child in children:
            if child.process.is_alive():
                child.process.kill()
            child.process.join(10.0)
            child.pipe.close()
            with contextlib.suppress(ValueError):  # it does not even end when it is killed: the driver holds it
                child.process.close()


class Pair:
    """Both processes, ready. way: "ipc" or "staging", what tensors are expected to go by."""

    def __init__(self, children: Spawned, way: str) -> None:
        self.children = children
        self.way = way
        self._broken = ""

    def run(self, body: Callable[..., Awaitable[Any]], *args: Any, limit: float = 60.0) -> Any:
        """What ``body(*args)`` returns in w0; fails the test with its traceback, or after `limit` seconds."""
        if self._broken:
            pytest.fail(f"these two processes are of no use any more: {self._broken}")
        driver = self.children["w0"]
        try:
            driver.tell((body, args, limit))
            failure, value = driver.hear(limit + GRACE)
        except (AssertionError, OSError) as error:
            self._broken = f"{body.__name__}: {error}"
            raise
        if failure is not None:
            pytest.fail(f"in w0:\n{failure}", pytrace=False)
        return value

    def end(self, *, killed: bool = False) -> None:
        """Let both leave in good order. killed: w1 is gone already."""
        if self._broken:
            return
        self.children["w0"].tell(None)
        self.children.check_ended(but=("w1",) if killed else ())


@contextlib.contextmanager
def start_pair(
    *,
    way: str,
    options: Mapping[str, Any] | None = None,
    maps: Maps | None = None,
    env: dict[str, str] | None = None,
    peer_env: dict[str, str] | None = None,
    killed: bool = False,
) -> Iterator[Pair]:
    """Start both, wait until a tensor has gone there and back, and end them afterwards.

    maps: device maps of each to the other, by the name of the one that has it. env: of both; peer_env: of w1 alone.
    """
    chosen = {"w0": {0: 0}} if maps is None else maps
    with spawned() as children, meeting_file() as init_method:
        first, second = places(2, init_method)
        settings = dict(options or {})
        children.start(second, serve, settings, chosen.get("w1"), env={**(env or {}), **(peer_env or {})})
        driver = children.start(first, drive, settings, chosen.get("w0"), env=env)
        assert driver.hear(START) == "ready"
        both = Pair(children, way)
        yield both
        both.end(killed=killed)


def serve(place: Place, link: Link, options: dict[str, Any], device_map: dict[int, int] | None) -> list[str]:
    """w1: join, and serve from inside `shutdown`."""
    bodies.count_calls()
    rpc.init_rpc(
        place.name,
        rank=place.rank,
        world_size=place.world_size,
        rpc_backend_options=_options(place, "w0", options, device_map),
    )
    return [info.name for info in rpc.shutdown().lost]


def drive(place: Place, link: Link, options: dict[str, Any], device_map: dict[int, int] | None) -> None:
    """w0: join, and run what the test sends until that is None."""
    bodies.count_calls()
    asyncio.run(_drive(place, link, _options(place, "w1", options, device_map)))


async def _drive(place: Place, link: Link, options: rpc.RpcBackendOptions) -> None:
    async with rpc.init(place.name, rank=place.rank, world_size=place.world_size, options=options):
        await bodies.warm_up()
        link.tell("ready")
        while (order := await asyncio.to_thread(link.hear, 3600.0)) is not None:
            body, args, limit = order
            try:
                link.tell((None, await asyncio.wait_for(body(*args), limit)))
            except TimeoutError:
                link.tell((f"{body.__name__} did not end within {limit:g} s\n{traceback.format_exc()}", None))
            except Exception:
                link.tell((traceback.format_exc(), None))


def _options(
    place: Place, other: str, options: dict[str, Any], device_map: dict[int, int] | None
) -> rpc.RpcBackendOptions:
    made = rpc.RpcBackendOptions(init_method=place.init_method, **options)
    if device_map is not None:
        made.set_device_map(other, device_map)
    return made
