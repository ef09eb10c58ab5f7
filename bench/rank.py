"""One worker process: joins its world, then runs what its parent sends over a pipe, until told to leave."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from .counter import counter
from .hosts import enter
from .sides import RpcModule, SideName, Style, module


@dataclass(frozen=True)
class RankSpec:
    """Who a worker process is. options: what differs from the side's defaults. counted: count Python functions.

    namespace: the network namespace that it lives in, "" for the one of its parent.
    """

    side: SideName
    style: Style
    name: str
    rank: int
    world_size: int
    init_method: str
    options: dict[str, Any] = field(default_factory=dict)
    counted: bool = False
    namespace: str = ""


@dataclass(frozen=True)
class Ready:
    """Sent once the worker has joined. at: ``time.monotonic()`` then; warm: torch came with the fork."""

    at: float
    warm: bool


@dataclass(frozen=True)
class Command:
    """Run ``function(rpc, **kwargs)`` and send its result back. None instead of a command means: leave."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """Something raised; the text is the traceback."""

    traceback: str


def start(spec: RankSpec, pipe: Connection) -> None:
    """Entry of the process. Ends it with status 1 on any error, after having told the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends its children
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks a worker that hangs where it is
    torch.set_num_threads(1)
    if spec.counted:
        counter().install()  # before there are other threads
    try:
        if spec.namespace:
            enter(spec.namespace)
        if spec.style == "blocking":
            _blocking(spec, pipe)
        else:
            _run_awaited(spec, pipe)
    except EOFError:
        os._exit(1)  # the parent is gone: nobody is left to leave for
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(Failed(traceback.format_exc()))
        os._exit(1)


def _fork_server_has_torch() -> bool:
    with open(f"/proc/{os.getppid()}/maps", encoding="utf-8") as maps:
        return any("libtorch" in line for line in maps)


def _announce(pipe: Connection) -> None:
    """Tell the parent when this worker had joined."""
    pipe.send(Ready(time.monotonic(), _fork_server_has_torch()))


def settle(rpc: object) -> None:
    """Put what start-up made out of the collector's sight, on both sides alike. Slow: not part of start-up."""
    gc.collect()
    gc.freeze()


def _blocking(spec: RankSpec, pipe: Connection) -> None:
    rpc = module(spec.side)
    options = rpc.TensorPipeRpcBackendOptions(init_method=spec.init_method, **spec.options)
    rpc.init_rpc(spec.name, rank=spec.rank, world_size=spec.world_size, rpc_backend_options=options)
    _announce(pipe)
    while (command := pipe.recv()) is not None:
        pipe.send(_attempt(rpc, command))
    rpc.shutdown()


def _attempt(rpc: RpcModule, command: Command) -> Any:
    try:
        return command.function(rpc, **command.kwargs)
    except Exception:
        return Failed(traceback.format_exc())


def _run_awaited(spec: RankSpec, pipe: Connection) -> None:
    import uvloop

    uvloop.run(_awaited(spec, pipe))


async def _awaited(spec: RankSpec, pipe: Connection) -> None:
    import aiorpc

    options = aiorpc.RpcBackendOptions(**spec.options)
    joining = aiorpc.init(
        spec.name, rank=spec.rank, world_size=spec.world_size, init_method=spec.init_method, options=options
    )
    async with joining:
        _announce(pipe)
        while (command := await receive(pipe)) is not None:
            pipe.send(await _attempt_awaited(aiorpc, command))


async def receive(pipe: Connection) -> Any:
    """What the parent says next, without a thread that would wait for it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()


async def _attempt_awaited(rpc: Any, command: Command) -> Any:
    try:
        result = command.function(rpc, **command.kwargs)
        return await result if isinstance(result, Awaitable) else result
    except Exception:
        return Failed(traceback.format_exc())
