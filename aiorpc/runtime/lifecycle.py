"""How a worker joins its group, how it leaves, and how it is closed when its loop ends.

Its states are the table `protocol.states.WORKER`. Joining enters everything that it makes into one exit stack. Only
this stack takes a worker down, after a failed join as after a long life.

A joining member that loses the leader before it is a member begins anew under another id, with new parts and a new
`Lifetime`, because members that know the first id take it for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from .. import foreign
from .._typing import Coro
from ..channels import layout
from ..errors import Overloaded, RendezvousError, RpcUsageError, StoreGone, WorkerClosed
from ..locks import RLock
from ..logs import logger
from ..options import Tls, seconds
from ..protocol.identity import UNUSABLE, WorkerRecord, legible
from ..protocol.states import WorkerEvent, WorkerState
from ..rights import Rights
from ..threads import daemon
from ..transport import sockets
from ..transport.certificates import Credentials
from .calls.functions import check_pattern
from .engine.bounds import Bounds
from .engine.engine import Engine
from .engine.host import host_identity, main_identity, versions
from .engine.lifetime import Lifetime
from .engine.loops import occupy_standard_streams
from .engine.steps import Steps
from .engine.tasks import begin, until_done
from .group.group import ShutdownReport
from .group.listening import Listeners
from .meeting.patience import Patience
from .meeting.rendezvous import MeetingOptions, Rendezvous
from .node import Meeting, Node, Plan, registry
from .references.references import LeakedReference

# Seconds before the first try to find a lost store again.
_FIRST_PAUSE = 0.05
# Members of a free group, from which on they look at its store more rarely.
_MANY = 64
# Seconds for the end of an abandoned step of joining.
_GIVING_UP = 1.0
# The least seconds for joining once more; 0 would be no limit.
_LEAST = 0.1


class Lifecycle:
    """The life of one worker. On its loop, except where a method says otherwise.

    node: its parts; None before it has joined. loop: where it joins and runs; None before it was started. tell: as of
    `Patience`.
    """

    lifetime: Lifetime

    def __init__(self, plan: Plan) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._plan = plan
        self._without_loop = RLock()  # held while a thread takes the worker down without its loop
        self._left_over = True  # whether no thread has done so yet
        self._joining: asyncio.Task[Node] | None = None
        self._shutdown: asyncio.Task[ShutdownReport] | None = None
        self._at_once = False  # whether a shutdown without a wait for the others was asked for
        self._begun = asyncio.Event()  # whether it begins to leave
        self._stays = False  # whether its shutdown waits for the others
        self.tell: Callable[[int, int], None] | None = None
        self._reset()

    def _reset(self) -> None:
        """Set the state from before joining."""
        self._begun.clear()
        self.lifetime = Lifetime(self._plan.name)
        self.lifetime.on_broken = self._break_down
        self.node: Node | None = None
        self._ending = _RendezvousEnd(self._plan)
        self._stack = AsyncExitStack()
        self._closing: asyncio.Future[None] | None = None
        self._goes_on = False  # whether it is taken down to begin anew

    # --- joining ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note the start of the worker. RpcUsageError if it was started before. Any thread."""
        if self.lifetime.state is not WorkerState.NEW:
            raise RpcUsageError(f"worker {self.lifetime.name!r} was started before; make a new one")
        self.lifetime.enter(WorkerEvent.START)

    async def join(self) -> None:
        """Make the worker a running member of its group, on the running loop. After any error it is CLOSED.

        Raises RendezvousError if it cannot join, and WorkerClosed if `shutdown` is called meanwhile.
        """
        occupy_standard_streams()
        self.loop = asyncio.get_running_loop()
        self._joining = begin(self._join(), self.loop)
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in one"
        cancelled = task.cancelling()
        try:
            await self._joining
        except BaseException as error:
            was_shut_down = self._shutdown is not None and task.cancelling() == cancelled
            with contextlib.suppress(asyncio.CancelledError):  # in case it is cancelled once more
                if self.lifetime.state is WorkerState.RUNNING:  # cancelled in the turn in which it joined
                    await self.shutdown(graceful=False, timeout=0.0)
                elif self.lifetime.state is WorkerState.STARTING:  # cancelled in the turn in which it began
                    await self._close(WorkerEvent.NOT_JOINED if self._shutdown is None else WorkerEvent.SHUTDOWN)
            if self._closing is not None:  # cancelled while it was taken down
                await until_done(self._closing)
            self._plan.events.end()
            self._plan.objects.close()
            if isinstance(error, asyncio.CancelledError) and was_shut_down:
                raise WorkerClosed(f"worker {self.lifetime.name!r} was shut down before it had joined") from None
            raise

    async def _join(self) -> Node:
        limit = self._plan.options.rpc_timeout
        deadline = time.monotonic() + limit if limit else float("inf")
        seconds = limit
        while True:
            node = await self._meet(seconds)
            if node.rendezvous.returned is None:
                node.group.start()
                break
            try:
                await node.group.joining.come(seconds)
                break
            except BaseException as error:
                leader = node.rendezvous.returned.admission.by
                lost = isinstance(error, RendezvousError) and node.group.is_gone(leader)
                self._goes_on = lost and time.monotonic() < deadline and self._shutdown is None
                await self.drop()  # without a goodbye, which would give its place up
                if not self._goes_on or self._shutdown is not None:
                    raise
                why = error.__cause__
            name = self.lifetime.name
            logger.info("worker %s lost the leader before it was a member, and begins anew: %s", name, why)
            self._reset()
            self.lifetime.enter(WorkerEvent.START)
            seconds = max(_LEAST, deadline - time.monotonic()) if limit else limit
        logger.debug("worker %s has joined as %s", self.lifetime.name, node.engine.record.describe())
        return node

    async def _meet(self, patience: float) -> Node:
        """Meet the others, within so many seconds. A joining member is no member yet afterwards."""
        steps = Steps(asyncio.get_running_loop(), self.lifetime.name)
        plan, waiting = self._plan, Patience(patience, steps.stop)
        waiting.tell = self.tell
        bound = asyncio.timeout(patience + Bounds().overtime if patience else None)
        try:
            async with bound:
                node = await self._make(steps, waiting)
        except BaseException as error:
            steps.stop.set()
            await self._close(WorkerEvent.NOT_JOINED if self._shutdown is None else WorkerEvent.SHUTDOWN)
            if isinstance(error, TimeoutError) and bound.expired():
                # A hanging step, such as a look-up of a name, gives no reason itself.
                where = f"at {waiting.place or plan.init_method}" if plan.store is None else "that was given"
                raise RendezvousError(
                    f"worker {plan.name!r} could not join within {plan.options.rpc_timeout:g} s (rpc_timeout): the "
                    f"store {where} does not answer{waiting.trouble and ': '}{waiting.trouble}"
                ) from error
            if isinstance(error, Overloaded):
                raise RendezvousError(f"worker {plan.name!r} could not join: {error}") from error
            raise
        self.node = node
        self.lifetime.enter(WorkerEvent.JOINED)
        registry.add(node)
        self._stack.callback(registry.remove, node)
        if plan.worker._thread is None and registry.hosted is not plan.worker:
            self._stack.callback(_watch_loop(node).cancel)
        return node

    async def _make(self, steps: Steps, patience: Patience) -> Node:
        plan, stack = self._plan, self._stack
        await steps.run(registry.take_down_closed)  # a closed one may host the store that this worker looks for
        for pattern in Rights(plan.options.allow).patterns():
            check_pattern(pattern)
        layout.warm_up()
        for attachment in plan.attachments:
            stack.callback(attachment.close)
            await steps.run(partial(attachment.open, steps.stop))
        try:
            directory = sockets.private_directory()
            sockets.remove_stale(directory)
        except OSError as error:
            raise RendezvousError(f"worker {plan.name!r} has no directory for its sockets: {error}") from error
        tls = plan.options.tls or Tls._from_environment(os.environ)
        credentials: Credentials | None = None
        unusable: RpcUsageError | None = None
        try:
            credentials = None if tls is None else Credentials(tls, plan.name, plan.role)
        except RpcUsageError as error:
            unusable = error
        ending = self._ending
        stack.push_async_callback(ending.end, steps, lambda: self.node)
        rendezvous = ending.rendezvous = await steps.run(
            lambda: Rendezvous.open(
                plan.init_method,
                rank=plan.rank,
                world_size=plan.world_size,
                timeout=patience,
                store=plan.store,
                options=MeetingOptions(
                    require_secret=plan.options.require_secret,
                    secret=plan.secret,
                    secret_file=plan.options.secret_file,
                    certificates=tls is not None and (tls.verify_names or plan.options.require_secret is False),
                    safe=plan.options.serialization == "safe",
                    founding=Bounds().founding,
                    grace=plan.options.reconnect_grace,
                ),
            )
        )
        if unusable is not None and rendezvous.dynamic:
            raise unusable  # no member waits for this worker
        what = "a group without a size" if rendezvous.dynamic else f"{rendezvous.world_size} members"
        logger.debug("worker %s: reached the store of %s, to meet %s there", plan.name, plan.init_method, what)
        confined = rendezvous.dynamic and rendezvous.confined
        listeners = Listeners(plan.name, plan.options, directory, rendezvous.local_address(), confined=confined)
        stack.callback(listeners.close)
        incarnation = secrets.token_hex(16)

        def make_record(number: int) -> WorkerRecord:
            return WorkerRecord(
                name=plan.name,
                id=number,
                incarnation=incarnation,
                host=host_identity(),
                hostname=legible(socket.gethostname()),
                pid=os.getpid(),
                main=main_identity(),
                unix_path=listeners.unix_path,
                tcp_host=plan.options.address or listeners.host,
                tcp_port=listeners.port,
                role=plan.role,
                tls=f"{UNUSABLE}{unusable}"[:1000] if unusable else "" if credentials is None else "1.3",
                **versions(),
            )

        records = await steps.run(lambda: rendezvous.join(make_record, plan.claims))
        record = ending.record = rendezvous.record
        logger.debug("worker %s: met %s", plan.name, ", ".join(each.describe() for each in records))
        if unusable is not None:
            raise unusable  # the others have read it in the record, and do not wait
        _check_tls(record, records)
        if not rendezvous.dynamic and all(_is_beside(record, other) for other in records):
            listeners.close_tcp()
        secret = await steps.run(lambda: rendezvous.agree_secret(record, directory))
        logger.debug("worker %s: has what its members know each other by", plan.name)
        meeting = Meeting(rendezvous, listeners, record, records, secret, credentials)
        node = Node(meeting, plan, self.lifetime, steps, stack)
        for attachment in plan.attachments:
            attachment.attach(node)
            stack.callback(attachment.close)  # before the parts that it looks at
        await node.start()
        if rendezvous.dynamic:
            node.engine.tasks.spawn(_serve_rendezvous(node))
        return node

    # --- leaving ------------------------------------------------------------------------------------------------------

    def report(self) -> ShutdownReport | None:
        """The report of a shutdown that is over or needless; None if a shutdown is still to be done.

        Takes a worker with a closed loop down. Any thread.
        """
        if self.loop_is_closed:
            self.loop_closed()
        if self.lifetime.loop_ended or self.lifetime.broken:
            registry.forget(self.lifetime)  # the program knows it now
        state = self.lifetime.state
        if state in (WorkerState.NEW, WorkerState.CLOSED) and self._shutdown is None and not self._goes_on:
            return ShutdownReport()
        if self._shutdown is not None and self._shutdown.done():
            if not self._shutdown.cancelled():
                return self._shutdown.result()
            if state is WorkerState.CLOSED:
                return ShutdownReport(timed_out=True)
        if self.loop_is_closed:  # no shutdown began, or it cannot end
            return ShutdownReport(timed_out=self._shutdown is not None)
        return None

    async def shutdown(self, graceful: bool, timeout: float) -> ShutdownReport:
        """Begin to shut down, or wait for a running shutdown. See `Worker.shutdown`."""
        limit = seconds(timeout, "timeout")
        self._at_once = self._at_once or not graceful
        if self._shutdown is None:
            self._shutdown = self._begin_to_leave(limit)
        elif self._at_once and self._stays:
            self._stays = False
            self._shutdown.cancel()
        return await self._until_left(self._shutdown)

    async def drain(self, timeout: float) -> ShutdownReport:
        """Leave without the others, or wait for it. See `Worker.drain`."""
        return await self._until_left(self.begin_to_drain(timeout))

    def begin_to_drain(self, timeout: float, asked_by: str = "its program") -> asyncio.Task[ShutdownReport]:
        """As `drain`, without waiting. A shutdown that waits for the others becomes a drain. asked_by: for errors."""
        limit = seconds(timeout, "timeout")
        if self.lifetime.state is WorkerState.RUNNING:
            self.lifetime.enter(WorkerEvent.DRAIN)
        elif self._stays and self.node is not None and self.lifetime.state is WorkerState.LEAVING:
            self.lifetime.enter(WorkerEvent.DRAIN)
            self.node.group.departure.drain(limit)
        if self._shutdown is None:
            self.lifetime.asked_by = asked_by
            self._shutdown = self._begin_to_leave(limit)
        return self._shutdown

    def _begin_to_leave(self, timeout: float) -> asyncio.Task[ShutdownReport]:
        self._begun.set()
        return begin(self._leave(timeout), asyncio.get_running_loop())

    async def _until_left(self, leaving: asyncio.Task[ShutdownReport]) -> ShutdownReport:
        try:
            return await asyncio.shield(leaving)
        except asyncio.CancelledError:
            # The waiting task is cancelled (Ctrl-C, a timeout): leave at once instead of gracefully. Closing itself is
            # bounded and never cut short, because the rest of it would never be done.
            if self.lifetime.leaving:
                leaving.cancel()
            await until_done(leaving)
            raise

    async def left(self) -> ShutdownReport:
        """Wait until the worker has left, by whatever begins that. A cancelled wait changes nothing."""
        while (report := self.report()) is None:
            await self._begun.wait()
            for each in (self._shutdown, self._closing):
                if each is not None:
                    await asyncio.wait((each,))
        return report

    async def _leave(self, timeout: float) -> ShutdownReport:
        node = self.node
        if node is None or self.lifetime.ended:
            await self._give_up_joining()
            return ShutdownReport()
        if not self.lifetime.drains:
            self.lifetime.enter(WorkerEvent.SHUTDOWN)
        complete = True
        leaked: tuple[LeakedReference, ...] = ()
        try:
            if not self._at_once:
                self._stays = True
                try:
                    complete = await node.group.leave(timeout)
                    if node.rendezvous.dynamic and node.rendezvous.hosts_store and len(node.group.live()) > 1:
                        self._ending.heard_within = min(2 * _until_next_look(node), node.engine.bounds.store / 2)
                except asyncio.CancelledError:  # by `shutdown`; later calls of that get a report
                    complete = False
                finally:
                    self._stays = False
            node.publications.leave()
            node.references.flush()
            for link in node.links.all():
                link.flush()  # returns released memory, which the others need: this process may live on
            leaked = tuple(node.references.leaked())
            with contextlib.suppress(asyncio.CancelledError):  # as above
                await node.connector.settle()
        finally:
            lost = tuple(node.group.lost.values())
            node.patient = True
            if not self.lifetime.ended:
                self._ending.say_so(node.engine)
            await self._close(WorkerEvent.LEFT)
        for reference in leaked:
            logger.info("still referred to at shutdown of %s: %s", self.lifetime.name, reference)
        if lost:
            own = f"{self.lifetime.name} (the process that had this name before)"
            times = Counter(own if info.name == self.lifetime.name else info.name for info in lost)
            names = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in times.items())
            logger.warning("worker %s shut down; lost on the way: %s", self.lifetime.name, names)
        return ShutdownReport(lost, not complete, leaked, node.group.departure.unfinished)

    def _break_down(self) -> None:
        """Begin to leave at once after an interruption of the runtime. Any thread."""
        loop = self.loop
        assert loop is not None, "it has joined"
        logger.error("%s", self.lifetime.why_closed())
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the worker
            loop.call_soon_threadsafe(lambda: begin(self.shutdown(graceful=False, timeout=0.0), loop))

    async def drop(self) -> None:
        """Close everything without leaving: the others see a death."""
        if self.node is None:
            await self._give_up_joining()
            return
        self._ending.silent = True
        await self._close(WorkerEvent.DROPPED)

    async def _give_up_joining(self) -> None:
        """End a running join; then wait until the worker is closed."""
        if self._joining is not None and not self._joining.done():
            self._joining.cancel()
            await asyncio.wait((self._joining,))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, event: WorkerEvent) -> None:
        """Take the worker down; if that is under way already, wait for it.

        The task is shielded from a cancelled caller: a half-done end would leave resources behind. If the loop has
        ended by itself, `loop_ended` takes everything down, and no task can wait for it.
        """
        self._begun.set()
        if not self.lifetime.ended:
            self.lifetime.enter(event)
            if event is WorkerEvent.DROPPED and self.node is not None:
                # Closed first: the others shall not hear of the end of one connection over another one.
                for connection in list(self.node.engine.connections):
                    connection.abort()
            self._closing = begin(self._take_down(), asyncio.get_running_loop())
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _take_down(self) -> None:
        if not self._goes_on:
            self._plan.events.end()
            self._plan.objects.close()
        await self._stack.aclose()
        # CLOSED already when the interpreter exits, and in a forked child.
        if self.lifetime.state is WorkerState.CLOSING:
            self.lifetime.enter(WorkerEvent.ENDED)

    def loop_ended(self, cause: BaseException | None) -> Coro[None]:
        """The loop has ended while the worker was running: close it at once. Others see a loss, not a goodbye.

        The returned coroutine takes down the rest, and needs one more run of the loop. On the loop's thread.
        """
        if self.lifetime.ended or self.lifetime.state is WorkerState.NEW:
            return asyncio.sleep(0)
        node = self.node
        self.lifetime.enter(WorkerEvent.LOOP_ENDED)
        reason = "it was stopped" if cause is None else foreign.said(cause)
        logger.error("worker %s is closed, as its event loop has ended: %s", self.lifetime.name, reason)
        error = WorkerClosed(f"worker {self.lifetime.name!r} is closed, as its event loop has ended: {reason}")
        if node is not None:
            node.engine.steps.stop.set()
            for peer in node.peers.all():
                peer.fail(error)
            for connection in list(node.engine.connections):
                connection.abort()
        if self._shutdown is not None:
            self._shutdown.cancel()
        return self._take_down()

    @property
    def loop_is_closed(self) -> bool:
        """Whether the worker's loop was closed."""
        return self.loop is not None and self.loop.is_closed()

    def loop_closed(self, *, wait: bool = True) -> None:
        """The loop was closed before a shutdown, as `asyncio.run` does: take the worker down without the loop.

        It is a shutdown at once without its waits: the others see a goodbye. Idempotent; does nothing after a shutdown.
        wait: whether to wait for another thread that does this already. Any thread.
        """
        if not self._without_loop.acquire(wait):
            return
        try:
            state, node = self.lifetime.state, self.node
            if not self._left_over or state is WorkerState.NEW or state is WorkerState.CLOSED:
                return
            self._left_over = False
            if not self.lifetime.ended:
                self.lifetime.loop_ended = True
                if not self.lifetime.leaving:
                    self.lifetime.enter(WorkerEvent.SHUTDOWN)
                if not self.lifetime.ended:  # it was a member
                    self.lifetime.enter(WorkerEvent.LEFT)
                logger.warning("%s", self.lifetime.why_closed())
            self._goes_on = False
            self._plan.events.end()
            self._plan.objects.close()
            if node is not None:
                node.leave_without_loop(self.lifetime.why_closed())
            _finish_without_loop(self._stack.aclose())
            if self.lifetime.state is WorkerState.CLOSING:
                self.lifetime.enter(WorkerEvent.ENDED)
        finally:
            self._without_loop.release()


class _RendezvousEnd:
    """Leaving the rendezvous, if the store still answers.

    The exit stack has it before there is a rendezvous, so joining can be given up at any point. rendezvous, record:
    None until joining has got that far. silent: leave without a goodbye, as if the process had died.

    A worker that leaves in good order first writes so into the store: a member that cannot reach it, and has no
    connection for a goodbye, looks there (`Group.look_for_farewell`). heard_within: seconds in which the others look
    there, if the store ends with this worker and they stay; else they would take it for lost.
    """

    def __init__(self, plan: Plan) -> None:
        self.rendezvous: Rendezvous | None = None
        self.record: WorkerRecord | None = None
        self.silent = False
        self.heard_within = 0.0
        self._plan = plan
        self._leaves = self._told = False

    def say_so(self, engine: Engine) -> None:
        """Begin to write into the store that this worker leaves. `end` waits for it."""
        self._leaves = True
        engine.tasks.spawn(engine.steps.run(self._tell))

    async def end(self, steps: Steps, joined: Callable[[], Node | None]) -> None:
        """Wait for running steps at the store, and leave it.

        joined: returns the node, if the worker has joined. A worker that leaves in good order waits for the steps for
        `Bounds.store`, another one hardly at all.
        """
        node = joined()
        patience = Bounds().store if node is None else node.engine.bounds.store
        if node is None and self.rendezvous is not None and self.rendezvous.dynamic:
            self._leaves = True  # members may have found it in the list, and must not take it for lost
        if steps.loop_closed:
            self._leaves = True
            self._leave_beside()
            return
        try:
            async with asyncio.timeout(patience) as limit:
                await steps.wait(patience if node is not None and node.patient else 0.1)
                if node is None and not await steps.wait(_GIVING_UP):
                    # The store may still answer another thread, but an abandoned join does not wait for long.
                    patience = 2 * _GIVING_UP
                    limit.reschedule(asyncio.get_running_loop().time() + _GIVING_UP)
                if self.heard_within and self._told:
                    await asyncio.sleep(self.heard_within)
                if self.rendezvous is not None:
                    await steps.run(self._leave)
        except TimeoutError:
            steps.stop.set()  # ends other steps at the store
            logger.warning(
                "worker %s left without a word to the store of %s, which has not answered for %g s",
                self._plan.name,
                self._plan.init_method,
                patience,
            )
        except Overloaded as error:  # there is no thread for it
            logger.warning(
                "worker %s left without a word to the store of %s: %s", self._plan.name, self._plan.init_method, error
            )

    def _leave_beside(self) -> None:
        """Leave in a thread, and wait for it for a short time.

        Does nothing if there can be no thread, as when the interpreter exits.
        """
        if self.rendezvous is None:
            return
        name = f"aiorpc-{self._plan.name}-rendezvous"
        leaving = daemon(self._leave, name=name)
        with contextlib.suppress(RuntimeError):
            leaving.start()
            leaving.join(_GIVING_UP)

    def _tell(self) -> None:
        """In a thread."""
        assert self.rendezvous is not None and self.record is not None, "it has joined"
        try:
            self.rendezvous.say_farewell(self.record)
            self._told = True
        except (RuntimeError, OSError) as error:
            logger.debug("saying farewell at the rendezvous: %s", error)

    def _leave(self) -> None:
        """In a thread."""
        assert self.rendezvous is not None, "else there is nothing to leave"
        try:
            if self.record is None:
                self.rendezvous.abandon()
            elif not self.silent:
                if self._leaves and not self._told:
                    self._tell()
                self.rendezvous.leave(self.record)
        except (RuntimeError, OSError) as error:
            logger.debug("leaving the rendezvous: %s", error)
        try:
            self.rendezvous.close()
        except (RuntimeError, OSError) as error:
            logger.debug("closing the rendezvous: %s", error)


def _finish_without_loop(coroutine: Coro[None]) -> None:
    """Run a coroutine to its end without a loop: each of its waits is cancelled."""
    try:
        coroutine.send(None)
        while True:
            coroutine.throw(asyncio.CancelledError())
    except StopIteration:
        return
    except (Exception, asyncio.CancelledError) as error:  # all steps were taken, and one needed the loop
        foreign.log_error(logger, logging.DEBUG, error, "taking a worker down without its loop")


def _watch_loop(node: Node) -> asyncio.Task[None]:
    """A task on the program's loop that notices when `asyncio.run` cancels all tasks at its end.

    Then `asyncio.run` waits for its threads (`asyncio.to_thread`), and their waits for this worker have to end.
    """

    async def until_cancelled() -> None:
        try:
            await node.engine.loop.create_future()
        except asyncio.CancelledError:
            if not node.engine.closed:
                node.loop_ends()
            raise

    task = begin(until_cancelled(), node.engine.loop, contextvars.Context())
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # no warning if the loop is closed without cancelling
    return task


def _until_next_look(node: Node) -> float:
    """Seconds between two looks at the list. Many members look more rarely: the store has one thread."""
    return node.engine.bounds.serving_pause * max(1.0, len(node.group.members) / _MANY)


async def _serve_rendezvous(node: Node) -> None:
    """In a free group: serve joining members, and find a lost store again, until the worker ends."""
    engine, rendezvous = node.engine, node.rendezvous
    bounds, name = engine.bounds, engine.name
    gone = occupied = False
    pause = bounds.serving_pause
    while True:
        await asyncio.sleep(pause if gone else _until_next_look(node))
        try:
            if not gone:
                look = partial(rendezvous.serve_joining, bounds.absence, parted=node.group.parted)
                node.group.on_listed(await engine.steps.run(look))
                node.resumption.let_rest(node.group.may_rest)
                continue
            node.group.on_unlisted()  # some at a time: there may be a store again soon
            pause = min(2 * pause, bounds.foreign_pause if occupied else bounds.return_pause)
            if await engine.steps.run(lambda: rendezvous.meet_again(engine.record)):
                logger.info("worker %s has found a store again: joining members find it there", name)
                gone = occupied = False
                pause = bounds.serving_pause
        except asyncio.CancelledError:  # the worker ends, and waits for running steps
            engine.steps.stop.set()
            raise
        except StoreGone as error:
            if not gone:
                said = "worker %s: %s. Members that know each other go on; joining members find none of them"
                logger.warning(said, name, error)
                node.resumption.wake()
            if not rendezvous.may_return:
                node.group.on_unlisted(len(node.group.members))
                return
            gone, pause = True, _FIRST_PAUSE
        except (RendezvousError, OSError) as error:  # OSError if the file of the user's key cannot be written
            if gone and not occupied:
                occupied = True
                logger.warning("worker %s: %s", name, error)
            elif not gone:
                logger.debug("worker %s serves no secrets just now: %s", name, error)


def _check_tls(own: WorkerRecord, records: Sequence[WorkerRecord]) -> None:
    """RendezvousError if a member cannot use its TLS files, or if some members have TLS and others have not."""
    for record in records:
        if record.tls.startswith(UNUSABLE):
            raise RendezvousError(f"{record.describe()} cannot join: {record.tls.removeprefix(UNUSABLE)}")
    others = [record.describe() for record in records if record.tls != own.tls]
    if others:
        mine, theirs = ("has", "have none") if own.tls else ("has no", "have")
        raise RendezvousError(
            f"worker {own.name!r} {mine} TLS (tls= or AIORPC_TLS_*), and {', '.join(others)} {theirs}: it has to be "
            "set for all workers or for none"
        )


def _is_beside(own: WorkerRecord, record: WorkerRecord) -> bool:
    """Whether a worker is on this host and can be reached by its unix socket.

    Containers may share a host's namespaces but not its files; then the socket's path does not exist here.
    """
    return record.host == own.host and bool(record.unix_path) and os.path.exists(record.unix_path)
