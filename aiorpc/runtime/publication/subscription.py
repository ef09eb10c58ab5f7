"""The results of `aiorpc.publish` and `aiorpc.subscribe`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NoReturn

import torch

from ..._typing import T_co
from ...callbacks import block_observer, served
from ...errors import NotAllowed, RpcCancelled, RpcError, RpcTimeout, RpcUsageError
from ...futures import Future
from ...interrupts import acquire
from ...protocol.identity import WorkerInfo
from ...protocol.states import CallOutcome
from ...protocol.trace_context import valid
from ..calls.current import within_call
from ..calls.failures import without_frames
from ..engine.call_tracing import Raised
from .content import choose, put_together, unreadable
from .prefetcher import ArrivedVersion, Prefetcher
from .readers import Delivery


@dataclass(frozen=True)
class PublishedVersion(Generic[T_co]):
    """One version of a published value.

    value: the reader's own: the program may write to its tensors, and no other reader sees that. Their memory is not
    reused while one of them lives. version: its number, from 1 on. publisher: the worker that published it.
    """

    value: T_co
    version: int
    publisher: WorkerInfo


class Publication:
    """A published version, at its publisher. From any thread.

    name: under which it was published. version: its number, from 1 on.
    """

    def __init__(
        self, name: str, version: int, delivered: Callable[[float | None, float | None], Future[Delivery]]
    ) -> None:
        """delivered: what `delivered` does."""
        self.name = name
        self.version = version
        self._delivered = delivered

    def delivered(self, quorum: float | None = None, timeout: float | None = None) -> Future[Delivery]:
        """A Future of the delivery of this version, which settles once enough readers have it; ``await`` it.

        When the time is up the Future settles as well: its `Delivery` names the readers that have the version and those
        that lack it, and ``reached`` tells whether they are enough. A lost reader is not waited for. If the name is
        unpublished meanwhile, the Future settles with the state at that time.

        quorum: how many readers are enough: a number, a share of the readers (a float up to 1.0), or None for all.
        timeout: seconds, 0 for no limit; None for this worker's ``rpc_timeout``.

        Raised here: RpcUsageError for an invalid quorum, or a quorum larger than a group of fixed size; WorkerClosed if
        this worker has shut down.

        Raised by the Future: RpcUsageError for a name that was unpublished before.
        """
        return self._delivered(quorum, timeout)

    def __reduce__(self) -> NoReturn:
        """Not supported: only the publisher knows the readers of a version."""
        raise RpcUsageError(
            f"a publication of {self.name!r} stays with the worker that publishes it, and cannot be copied, pickled or "
            "sent; send its name and its version, or what delivered() gives"
        )

    def __repr__(self) -> str:
        return f"<aiorpc.types.Publication {self.name!r}, version {self.version}>"


class Subscription(AsyncIterator[PublishedVersion[T_co]], Iterator[PublishedVersion[T_co]], Generic[T_co]):
    """The newest versions of a published value: ``async for``, or ``for`` in a thread that may block.

    Each turn gives the newest version, and waits until there is a newer one than in the turn before; versions in
    between are skipped. The next version is fetched meanwhile. One task or thread at a time takes versions. A cancelled
    turn loses no version. `newest` does not wait.

    It ends when it is closed (``async with``, ``with`` or `close`), when it is dropped, and when the publisher
    unpublishes the name: then the loop ends after the last version that came. When the publisher has left or was lost,
    nothing is raised: the subscription follows the worker that publishes the name next. Versions go up, also from one
    publisher to the next.

    Raised by a turn: RpcTimeout when nothing new came within the timeout; the turn may be tried again. In a handler a
    turn waits no longer than the handler's caller. WorkerClosed once this worker has shut down. NotAllowed if the
    publisher's option ``allow`` keeps this worker's role from reading the name, and for a pickle of a publisher whose
    role may not run everything here. RpcError for a value that cannot be read here, or that exceeds this worker's
    ``max_incoming_bytes``.
    """

    def __init__(self, prefetcher: Prefetcher, timeout: float, device: torch.device | None = None) -> None:
        """timeout: seconds, 0 for no limit. device: where tensors are moved to; None leaves them in shared memory."""
        self.name: str = prefetcher.name
        self._prefetcher = prefetcher
        self._timeout = timeout
        self._device = device

    def __aiter__(self) -> Subscription[T_co]:
        return self

    async def __anext__(self) -> PublishedVersion[T_co]:
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits there
                loop.call_soon_threadsafe(arrived.set)

        engine = self._prefetcher.engine
        seconds = within_call(engine, self._timeout)
        limit = asyncio.timeout(seconds or None)
        try:
            async with limit:
                while (arrival := self._prefetcher.take(wake)) is None:
                    engine.refuse_idle_loop(f"to await a version of {self.name!r}", "async for")
                    await arrived.wait()
                    arrived.clear()
                return self._open(arrival)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._too_late(seconds) from None
        except StopAsyncIteration:
            _look_at_the_end()
            raise
        finally:
            self._prefetcher.forget(wake)

    def newest(self) -> PublishedVersion[T_co] | None:
        """The newest version, without waiting; None if nothing newer has come. Any thread, also a loop's.

        For a program that goes on with the version that it has. None once the subscription has ended, too.

        Raised here: the errors of a turn, apart from RpcTimeout.
        """
        try:
            arrival = self._prefetcher.take(None)
        except StopAsyncIteration:
            return None
        return None if arrival is None else self._open(arrival)

    def __iter__(self) -> Subscription[T_co]:
        self._prefetcher.engine.refuse_on_loop("iterating over a subscription", "async for")
        return self

    def __next__(self) -> PublishedVersion[T_co]:
        self._prefetcher.engine.refuse_on_loop("iterating over a subscription", "async for")
        arrived = threading.Lock()
        arrived.acquire()
        seconds = within_call(self._prefetcher.engine, self._timeout)
        limit = time.monotonic() + seconds if seconds else None

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # it is awake
                arrived.release()

        try:
            while (arrival := self._prefetcher.take(wake)) is None:
                if not _wait(arrived, wake, -1 if limit is None else max(0.0, limit - time.monotonic())):
                    raise self._too_late(seconds)
            return self._open(arrival)
        except StopAsyncIteration:
            raise StopIteration from None
        finally:
            self._prefetcher.forget(wake)

    def _open(self, arrival: ArrivedVersion) -> PublishedVersion[T_co]:
        tracer = self._prefetcher.engine.tracer
        span = None if tracer is None else tracer.exchanged("receive", self.name)
        if span is None:
            return self._opened(arrival)
        trace = arrival.edition.trace
        span.linked(None if trace is None else valid(trace))
        try:
            version = self._opened(arrival)
        except Exception as error:
            span.ended(CallOutcome.ERROR, Raised(error))
            raise
        span.ended(CallOutcome.VALUE, Raised(None))
        return version

    def _opened(self, arrival: ArrivedVersion) -> PublishedVersion[T_co]:
        engine = self._prefetcher.engine
        try:
            body = choose(arrival.bodies, arrival.edition.main, engine)
            data, spans = arrival.data.data, arrival.edition.spans
            value = put_together(body, data, spans, engine, plain=arrival.plain, device=self._device)
        except NotAllowed:
            raise
        except Exception as error:
            failure = RpcError(unreadable(self.name, arrival.edition.version, error))
            failure.__cause__ = without_frames(error)
            raise failure from failure.__cause__
        return PublishedVersion(value, arrival.edition.version, arrival.publisher)

    def _too_late(self, seconds: float) -> RpcTimeout:
        text = f"{self._prefetcher.describe()}, for {seconds:g} s"
        return RpcTimeout(text, worker=self._prefetcher.engine.name, function="subscribe", seconds=seconds)

    def close(self) -> None:
        """Take no more versions; what was taken stays valid. Any thread. Idempotent."""
        self._prefetcher.close_later()

    def __del__(self) -> None:
        prefetcher = self.__dict__.get("_prefetcher")  # None if `__init__` has failed
        if prefetcher is not None:
            prefetcher.close_later()

    async def aclose(self) -> None:
        """The same, for ``contextlib.aclosing`` and the like."""
        self.close()

    async def __aenter__(self) -> Subscription[T_co]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def __enter__(self) -> Subscription[T_co]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Not supported, also for copies: dropping one copy would end the others."""
        raise RpcUsageError(
            f"a subscription to {self.name!r} cannot be copied, pickled or sent; subscribe once more, which any worker "
            "of the group can"
        )

    def __repr__(self) -> str:
        return f"<aiorpc.types.Subscription to {self.name!r}>"


def _look_at_the_end() -> None:
    """If a turn is a task of its own (``asyncio.ensure_future(anext(versions))``), keep asyncio from logging its end as
    a failure that was never retrieved.
    """
    task = asyncio.current_task()
    coroutine: object = None if task is None else task.get_coro()
    if task is not None and getattr(coroutine, "cr_code", None) is Subscription.__anext__.__code__:
        task.add_done_callback(_seen)


def _seen(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()


def _wait(arrived: threading.Lock, wake: Callable[[], object], seconds: float) -> bool:
    """Wait for the lock's release, up to `seconds` (-1: no limit); whether it came. The pool makes up for the thread.

    wake: releases the lock. Raises RpcCancelled in a handler whose caller gives up.
    """
    observer, call = block_observer.get(), served.get()
    given_up = ""
    if observer is not None:
        observer.enter_blocked()
    try:
        if call is not None:
            call.enter_wait(wake)
        came = acquire(arrived, seconds)
    finally:
        if observer is not None:
            observer.exit_blocked()
        if call is not None:
            given_up = call.exit_wait()
    if given_up:
        raise RpcCancelled(given_up)
    return came
