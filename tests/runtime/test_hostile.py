"""Exceptions and values whose own code raises: each call has its answer, and the connection and the loops go on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

import aiorpc
from aiorpc import Future, RpcBackendOptions, RpcError, Worker, async_execution, batched
from aiorpc.errors import SerializationError
from aiorpc.testing import cluster
from tests.runtime import hostile
from tests.runtime.waiting import LIMIT

Make = Callable[..., Any]
WAYS = ("def", "async def", "generator", "async generator", "async_execution", "batched", "batched async", "remote")
NO_ANSWER = (aiorpc.RpcTimeout, ConnectionError, aiorpc.WorkerClosed, asyncio.CancelledError)
EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)


def fail(make: Make, *args: Any) -> None:
    raise make(*args)


async def fail_async(make: Make, *args: Any) -> None:
    await asyncio.sleep(0)
    raise make(*args)


def fail_generator(make: Make, *args: Any) -> Iterator[int]:
    yield 1
    raise make(*args)


async def fail_async_generator(make: Make, *args: Any) -> AsyncIterator[int]:
    yield 1
    raise make(*args)


@async_execution
def fail_deferred(make: Make, *args: Any) -> Future[int]:
    def fail_then(settled: Future[None]) -> int:
        raise make(*args)  # it need be no Exception

    source: Future[None] = Future()
    source.set_result(None)
    return source.then(fail_then)


@batched(max_size=1)
def fail_batched(make: list[Make], *args: list[Any]) -> list[int]:
    raise make[0](*(arg[0] for arg in args))


@batched(max_size=1)
async def fail_batched_async(make: list[Make], *args: list[Any]) -> list[int]:
    await asyncio.sleep(0)
    raise make[0](*(arg[0] for arg in args))


def give(make: Make, *args: Any) -> Any:
    return make(*args)


async def give_async(make: Make, *args: Any) -> Any:
    await asyncio.sleep(0)
    return make(*args)


def give_generator(make: Make, *args: Any) -> Iterator[Any]:
    yield 1
    yield make(*args)


async def give_async_generator(make: Make, *args: Any) -> AsyncIterator[Any]:
    yield 1
    yield make(*args)


@async_execution
def give_deferred(make: Make, *args: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(make(*args))
    return future


@batched(max_size=1)
def give_batched(make: list[Make], *args: list[Any]) -> list[Any]:
    return [make[0](*(arg[0] for arg in args))]


@batched(max_size=1)
async def give_batched_async(make: list[Make], *args: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return [make[0](*(arg[0] for arg in args))]


FAILING = dict(
    zip(
        WAYS,
        (
            fail,
            fail_async,
            fail_generator,
            fail_async_generator,
            fail_deferred,
            fail_batched,
            fail_batched_async,
            fail,
        ),
        strict=True,
    )
)
GIVING = dict(
    zip(
        WAYS,
        (
            give,
            give_async,
            give_generator,
            give_async_generator,
            give_deferred,
            give_batched,
            give_batched_async,
            give,
        ),
        strict=True,
    )
)


async def drain(stream: aiorpc.types.Stream[Any]) -> None:
    async for _ in stream:
        pass


def start(worker: Worker, way: str, function: Any, *args: Any) -> Awaitable[Any]:
    """The call in that way, to be awaited."""
    if "generator" in way:
        return drain(worker.stream("worker1", function, *args))
    if way == "remote":
        return worker.remote("worker1", function, *args)
    return worker.call("worker1", function, *args)


async def error_of(awaitable: Awaitable[Any]) -> BaseException:
    """What it ends with, which must not be a time-out."""

    async def ended() -> BaseException:
        try:
            await awaitable
        except BaseException as error:
            return error
        raise AssertionError("it has not failed")

    # By hand: pytest and asyncio look at errors in ways that these do not survive.
    error = await asyncio.wait_for(ended(), LIMIT)
    assert not issubclass(type(error), NO_ANSWER)
    return error


async def works_on(workers: list[Worker]) -> None:
    """Over the same connections, both ways."""
    assert await workers[0].call("worker1", len, "abc") == 3
    assert await workers[1].call("worker0", len, "abc") == 3


def error_of_blocking(worker: Worker, function: Any, *args: Any) -> BaseException:
    try:
        worker.call("worker1", function, *args).wait(LIMIT)
    except BaseException as error:
        assert not issubclass(type(error), NO_ANSWER)
        return error
    raise AssertionError("it has not failed")


async def own_loops() -> AsyncIterator[list[Worker]]:
    """Two workers, each on a loop in a thread of its own."""
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True, rpc_timeout=LIMIT)) as workers:
        yield workers


own = pytest.fixture(own_loops, name="own")


@pytest.mark.parametrize("raised", [ValueError, *EXITS])
@pytest.mark.parametrize("way", WAYS)
async def test_errors_that_raise_when_touched(
    own: list[Worker], way: str, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Awaited calls end with some error, whatever the handler's exception does; nobody loses anybody."""
    caplog.set_level(logging.DEBUG, "aiorpc")
    bases = (hostile.Hostile, hostile.HostileExit, hostile.HostileInterrupt)
    for place, base in itertools.product(hostile.PLACES, bases):
        error = await error_of(start(own[0], way, FAILING[way], hostile.make, place, raised, base))
        assert issubclass(type(error), (RpcError, hostile.Hostile)), (place, base)
        del error
        await works_on(own)
    assert "was lost" not in caplog.text and "could not be handled" not in caplog.text


@pytest.mark.parametrize("raised", [ValueError, *EXITS])
async def test_errors_that_raise_when_touched_in_blocking_calls(own: list[Worker], raised: type[BaseException]) -> None:
    """The thread that waits reads the answer itself, and gets the error; the next call works."""

    def body() -> None:
        worker = own[0]
        for place in hostile.PLACES:
            for function in (fail, fail_async, fail_deferred, fail_batched):
                for _ in range(2):
                    error = error_of_blocking(worker, function, hostile.make, place, raised)
                    assert issubclass(type(error), (RpcError, hostile.Hostile)), (place, function)
                    assert worker.call("worker1", len, "abc").wait(LIMIT) == 3

    await asyncio.to_thread(body)


@pytest.mark.parametrize("raised", EXITS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["__reduce_ex__", "__getstate__"])
async def test_results_whose_pickling_exits(
    own: list[Worker], way: str, place: str, raised: type[BaseException]
) -> None:
    """The call is answered with an error that names the function and what was raised; the worker serves on."""
    function = GIVING[way]
    error = await error_of(start(own[0], way, function, hostile.Bomb, raised, place))
    assert isinstance(error, SerializationError)
    assert raised.__name__ in str(error) and "from pickling" in str(error)
    assert ("to_here" if way == "remote" else function.__name__) in str(error)  # type: ignore[attr-defined]
    await works_on(own)


@pytest.mark.parametrize("raised", EXITS)
@pytest.mark.parametrize("way", WAYS)
async def test_handlers_that_exit(own: list[Worker], way: str, raised: type[BaseException]) -> None:
    """A handler that raises what ends programs is answered; the loop of its worker goes on."""
    error = await error_of(start(own[0], way, FAILING[way], raised, "why"))
    assert isinstance(error, aiorpc.RemoteError) and error.type_name == raised.__name__
    assert FAILING[way].__name__ in str(error)  # type: ignore[attr-defined]
    await works_on(own)


@pytest.mark.parametrize("raised", EXITS)
async def test_arguments_whose_pickling_exits(own: list[Worker], raised: type[BaseException]) -> None:
    """That is the caller's own, in its own thread: it is raised there, and nothing was sent."""

    def body() -> None:
        for _ in range(2):
            with pytest.raises(raised):
                own[0].call("worker1", len, hostile.Bomb(raised))  # type: ignore[call-overload]
            with pytest.raises(raised):
                own[0].remote("worker1", len, hostile.Bomb(raised))  # type: ignore[call-overload]
            assert own[0].call("worker1", len, "abc").wait(LIMIT) == 3

    await asyncio.to_thread(body)


@pytest.mark.parametrize("raised", EXITS)
@pytest.mark.parametrize("way", WAYS)
async def test_arguments_whose_unpickling_exits(own: list[Worker], way: str, raised: type[BaseException]) -> None:
    """The callee answers with an error; its worker serves on."""
    error = await error_of(start(own[0], way, GIVING[way], int, hostile.Late(raised)))
    assert isinstance(error, SerializationError) and f"{raised.__name__}: from unpickling" in str(error)
    await works_on(own)


@pytest.mark.parametrize("raised", EXITS)
async def test_results_whose_unpickling_exits(own: list[Worker], raised: type[BaseException]) -> None:
    """The caller's loop goes on."""
    for way in WAYS:
        error = await error_of(start(own[0], way, GIVING[way], hostile.Late, raised))
        assert isinstance(error, RpcError) and raised.__name__ in str(error)
    await works_on(own)
