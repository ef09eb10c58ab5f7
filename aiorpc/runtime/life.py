"""A worker's life: its states, how it joins the group, how it leaves, and what a fork or an exit leaves of it.

state      entered by                        what is possible
NEW        `Worker(...)`                     nothing yet
STARTING   `start`                           rendezvous, listening; others may connect, nobody is answered
RUNNING    the rendezvous and the secret     calls in both directions
LEAVING    `shutdown`                        graceful: everything, until the group is done
CLOSED     the end of `shutdown`, a failed   every verb raises WorkerClosed; Futures that were pending have failed
           start, a fork (in the child), the
           end of the loop's own thread
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch.distributed import Store  # type: ignore[attr-defined]  # not in torch's stubs

from .. import foreign
from ..channels import layout
from ..errors import RendezvousError, WorkerClosed
from ..options import seconds
from ..protocol.identity import WorkerRecord
from ..transport import sockets
from .engine.current import current_worker, registry
from .engine.deadlines import Deadlines
from .engine.host import host_identity, main_identity
from .engine.lag import LoopMonitor
from .engine.pool import ThreadPool
from .group.connecting import Acceptor
from .group.group import Group, ShutdownReport
from .links.memory import Memory
from .meeting.rendezvous import Rendezvous
from .meeting.stores import StoreGone
from .references.rref import References

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger("aiorpc")

# What is still running after these many seconds is left to itself.
_POOL_GRACE = 1.0
_TASKS_GRACE = 1.0
_CONNECTION_GRACE = 1.0
_DEVICES_GRACE = 1.0
_SERVING_PAUSE = 0.25
_STORE_GRACE = 5.0  # longer than `Rendezvous.close` waits for others


class State(Enum):
    """See the module."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    CLOSED = "closed"


class Life:
    """Makes the parts of a worker and lets go of them. On its loop, except where it says otherwise."""

    def __init__(
        self, worker: Worker, acceptor: Acceptor, *, rank: int | None, world_size: int | None, store: Store | None
    ) -> None:
        self.stop_waiting = threading.Event()  # what waits for others in a thread ends
        self.forked = False  # this is a child of the worker's process
        self._worker = worker
        self._acceptor = acceptor
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._shutdown: asyncio.Task[ShutdownReport] | None = None
        self._old_switch_interval: float | None = None

    # --- joining ------------------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Make the worker a running member of its group. On any error it is closed."""
        worker = self._worker
        worker.state = State.STARTING
        try:
            await self._join()
        except BaseException:
            self.stop_waiting.set()
            await self.close()
            raise
        worker.state = State.RUNNING
        if worker.options.switch_interval is not None:
            self._old_switch_interval = sys.getswitchinterval()
            sys.setswitchinterval(worker.options.switch_interval)
        registry.add(worker)
        worker.group.start()

    async def _join(self) -> None:
        worker = self._worker
        layout.warm_up()
        try:
            directory = sockets.private_directory()
        except OSError as error:
            raise RendezvousError(f"worker {worker.name!r} has no directory for its sockets: {error}") from error
        sockets.remove_stale(directory)
        rendezvous = worker.rendezvous = await worker.in_thread(self._open_rendezvous)
        confined = rendezvous.dynamic and rendezvous.confined
        unix_path, host, port = self._acceptor.listen(directory, rendezvous.local_address(), confined=confined)
        worker.pool = ThreadPool(
            worker.name,
            worker.options.num_worker_threads,
            prepare=lambda: current_worker.set(worker),
            # A lone core is left to whoever has to answer.
            busy=worker.options.busy_wait if len(os.sched_getaffinity(0)) > 1 else 0.0,
        )
        worker.background = ThreadPool(f"{worker.name}-background", 2, prepare=lambda: current_worker.set(worker))
        worker.deadlines = Deadlines(worker.loop, worker.scan_deadlines)
        incarnation = secrets.token_hex(16)

        made: list[WorkerRecord] = []

        def make_record(number: int) -> WorkerRecord:
            record = WorkerRecord(
                name=worker.name,
                id=number,
                incarnation=incarnation,
                host=host_identity(),
                hostname=socket.gethostname(),
                pid=os.getpid(),
                main=main_identity(),
                unix_path=unix_path,
                tcp_host=worker.options.address or host,
                tcp_port=port,
            )
            made.append(record)
            return record

        claims = worker.accelerators.claims
        records = await worker.in_thread(lambda: rendezvous.join(make_record, claims))
        worker.record = made[-1]  # what the store says of us is for others
        if not rendezvous.dynamic and all(_is_beside(worker.record, record) for record in records):
            self._acceptor.close_tcp()
        worker.secret = await worker.in_thread(lambda: rendezvous.agree_secret(worker.record, records, directory))
        worker.references = References(worker)
        worker.memory = Memory(worker)
        await worker.accelerators.start({worker.name: claims, **rendezvous.claims})
        worker.group = Group(worker, records)
        for record in records:
            worker.peers.add(record)
        # Handlers run in a copy of the context in which the reader was registered: not in that of whoever started us.
        contextvars.Context().run(self._acceptor.start)
        worker.monitor = LoopMonitor(
            worker.loop, warn_after=worker.options.lag_warning, describe=worker.describe_running, name=worker.name
        )
        worker.monitor.start()
        if rendezvous.dynamic:
            worker.tasks.spawn(self._serve_rendezvous(rendezvous))

    def _open_rendezvous(self) -> Rendezvous:
        worker = self._worker
        return Rendezvous.open(
            worker.init_method,
            rank=self._rank,
            world_size=self._world_size,
            timeout=worker.options.rpc_timeout,
            stop=self.stop_waiting,
            store=self._store,
        )

    async def _serve_rendezvous(self, rendezvous: Rendezvous) -> None:
        """In a group that is joined freely: hand newcomers from other hosts what they need."""
        worker = self._worker
        while True:
            await asyncio.sleep(_SERVING_PAUSE)
            try:
                await worker.in_thread(rendezvous.serve_secret_requests)
            except StoreGone:  # for good, and torch logs every look at it
                return
            except RendezvousError as error:
                logger.debug("%s serves no secrets just now: %s", worker.name, error)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def report(self) -> ShutdownReport | None:
        """Of a shutdown that is over, or that has nothing to do; None if there is something. Any thread."""
        if self._worker.state in (State.NEW, State.CLOSED) and self._shutdown is None:
            return ShutdownReport()
        if self._shutdown is not None and self._shutdown.done():
            if not self._shutdown.cancelled():
                return self._shutdown.result()
            if self._worker.state is State.CLOSED:
                return ShutdownReport(timed_out=True)
        return None

    async def shutdown(self, graceful: bool, timeout: float) -> ShutdownReport:
        """Begin it, or wait for the one that was begun. See `Worker.shutdown`."""
        if self._shutdown is None:
            self._shutdown = asyncio.ensure_future(self._leave(graceful, seconds(timeout, "timeout")))
        try:
            return await asyncio.shield(self._shutdown)
        except asyncio.CancelledError:
            # Whoever waited is cancelled (Ctrl-C, a timeout): leave at once instead of gracefully.
            # Closing itself is bounded, and never cut short: half of it would be left for good.
            if self._worker.state is State.LEAVING:
                self._shutdown.cancel()
            await asyncio.wait((self._shutdown,))
            raise

    async def _leave(self, graceful: bool, timeout: float) -> ShutdownReport:
        worker = self._worker
        worker.state = State.LEAVING
        complete = True
        leaked: tuple[Any, ...] = ()
        try:
            if graceful:
                try:
                    complete = await worker.group.leave(timeout)
                except asyncio.CancelledError:  # see `shutdown`; later calls of it are not cancelled, they get a report
                    complete = False
            worker.references.flush()
            for link in worker.links():
                link.flush()  # what was released here is theirs again, though this process lives on
            leaked = tuple(worker.references.leaked())
        finally:
            lost = tuple(worker.group.lost.values())
            await self.close()
        for reference in leaked:
            logger.info("still referred to at shutdown of %s: %s", worker.name, reference)
        if lost:
            names = ", ".join(info.name for info in lost)
            logger.warning("worker %s shut down; lost on the way: %s", worker.name, names)
        return ShutdownReport(lost, not complete, leaked)

    async def close(self) -> None:
        """Let go of everything, whatever the state; on the loop."""
        worker = self._worker
        if worker.state is State.CLOSED:
            return
        running = worker.state is State.LEAVING
        worker.state = State.CLOSED
        await self._let_go(running)

    def loop_ended(self, cause: BaseException | None) -> Coroutine[Any, Any, None]:
        """The loop has ended in the midst of it all. Closed at once; others see a loss, not a goodbye.

        What is returned lets go of the rest, in one more run of the loop. On the thread of the loop.
        """
        worker = self._worker
        if worker.state in (State.NEW, State.CLOSED):
            return asyncio.sleep(0)
        worker.state = State.CLOSED
        reason = "it was stopped" if cause is None else foreign.said(cause)
        logger.error("worker %s is closed, as its event loop has ended: %s", worker.name, reason)
        error = WorkerClosed(f"worker {worker.name!r} is closed, as its event loop has ended: {reason}")
        self.stop_waiting.set()
        for peer in worker.peers.all():
            peer.fail(error)
        for connection in list(worker.connections):
            connection.abort()
        if self._shutdown is not None:
            self._shutdown.cancel()
        return self._let_go(False)

    async def _let_go(self, running: bool) -> None:
        """Of everything that there is. running: it has left in good order, and others may still be busy with it."""
        worker = self._worker
        registry.remove(worker)
        if self._old_switch_interval is not None:
            sys.setswitchinterval(self._old_switch_interval)
        worker.news.end()
        self._acceptor.close()
        await worker.accelerators.let_go(_DEVICES_GRACE)
        for service in list(worker.services):
            service.say_goodbye()
        for peer in worker.peers.all():
            peer.close()
        if hasattr(worker, "group"):
            worker.group.close()
        if hasattr(worker, "deadlines"):
            worker.deadlines.close()
        if hasattr(worker, "references"):
            worker.references.close()
            worker.gradients.close()
            worker.memory.close()
        if worker.monitor is not None:
            worker.monitor.stop()
        if hasattr(worker, "tasks"):
            await worker.tasks.end(_TASKS_GRACE)
        if hasattr(worker, "pool"):
            worker.background.close(0.0)
            left = await worker.in_thread(lambda: worker.pool.close(_POOL_GRACE if running else 0.1))
            if left:
                logger.warning("worker %s shut down while %d handler threads were still running", worker.name, left)
        await self._end_connections()
        await worker.accelerators.close(_DEVICES_GRACE)
        await self._end_rendezvous(_STORE_GRACE if running else 0.1)

    async def _end_connections(self) -> None:
        """Wait until what is queued has been written; a peer that does not read must not keep us."""
        worker = self._worker
        limit = time.monotonic() + _CONNECTION_GRACE
        while any(not each.ended for each in worker.connections) and time.monotonic() < limit:  # noqa: ASYNC110  # their ends signal nobody
            await asyncio.sleep(0.005)
        for connection in list(worker.connections):
            connection.abort()

    async def _end_rendezvous(self, patience: float) -> None:
        """Leave it, as far as the store answers. patience: seconds for what is under way there."""
        worker = self._worker
        try:
            async with asyncio.timeout(_STORE_GRACE):
                if worker.steps:
                    await asyncio.wait(worker.steps, timeout=patience)
                if worker.rendezvous is not None:
                    await worker.in_thread(self._close_rendezvous)
        except TimeoutError:
            logger.warning(
                "worker %s left without a word to the store of %s, which has not answered for %g s",
                worker.name,
                worker.init_method,
                _STORE_GRACE,
            )
            with contextlib.suppress(OSError):
                if worker.rendezvous is not None:
                    worker.rendezvous.remove_secret()

    def _close_rendezvous(self) -> None:
        worker = self._worker
        assert worker.rendezvous is not None
        try:
            if hasattr(worker, "record"):
                worker.rendezvous.leave(worker.record)
            else:
                worker.rendezvous.abandon()
            worker.rendezvous.close()
        except (RuntimeError, OSError) as error:
            logger.debug("leaving the rendezvous: %s", error)

    # --- the end without leaving --------------------------------------------------------------------------------------

    def in_forked_child(self) -> None:
        """In a forked child: let go of the parent's descriptors; every verb raises. No lock is taken."""
        worker = self._worker
        self.forked = True
        worker.state = State.CLOSED
        for connection in list(worker.connections):
            connection.close_in_child()
        self._acceptor.close_in_child()
        if hasattr(worker, "group"):
            worker.group.close_in_child()
            worker.memory.close_in_child()
            worker.accelerators.close_in_child()

    def at_exit(self) -> None:
        """The interpreter exits with this worker alive: say goodbye if that is quickly done. No thread is started."""
        worker = self._worker
        # The loop may go on a little in its thread: what it sees of the others' reaction is no news any more.
        worker.state = State.CLOSED
        self._acceptor.unlink()
        if worker.rendezvous is not None:
            with contextlib.suppress(OSError):
                worker.rendezvous.remove_secret()
        for peer in worker.peers.all():
            peer.goodbye()
        for service in list(worker.services):
            service.goodbye()


def _is_beside(own: WorkerRecord, record: WorkerRecord) -> bool:
    """Whether it is on this host and reached by its unix socket: not where containers share all but their files."""
    return record.host == own.host and bool(record.unix_path) and os.path.exists(record.unix_path)
