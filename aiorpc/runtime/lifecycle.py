"""How a worker joins its group, how it leaves, and what becomes of it when its loop ends.

Its states are the table `protocol.states.WORKER`. Everything that joining makes is entered into one exit stack. The
stack takes it down again, whether joining has failed halfway or the worker leaves after a long life: there is no other
place where a worker is taken down.

A joining member that loses the leader before it is a member begins anew, under another id: as whatever knows the first
one must take it for dead, all its parts are made anew, and so is its `Lifetime`.
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

# Seconds before the first try to find a store again that has gone.
_FIRST_PAUSE = 0.05
# Seconds for a step of joining that was given up; they look at that every few milliseconds, if the store answers.
_GIVING_UP = 1.0
# Seconds for joining once more, when the time for all of it is almost up; 0 would be no limit.
_LEAST = 0.1


class Lifecycle:
    """The life of one worker. On its loop, except where a method says otherwise.

    node: its parts, from when it has joined; None before. loop: where it joins and runs; None before it was started.
    """

    lifetime: Lifetime

    def __init__(self, plan: Plan) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._plan = plan
        self._without_loop = RLock()  # of whoever takes the worker down once its loop is closed
        self._left_over = True  # nobody has done so yet
        self._joining: asyncio.Task[Node] | None = None
        self._shutdown: asyncio.Task[ShutdownReport] | None = None
        self._at_once = False  # whether somebody wants it to leave without waiting for the work of others
        self._stays = False  # whether its shutdown waits for that
        self._reset()

    def _reset(self) -> None:
        """As it is before it begins to join."""
        self.lifetime = Lifetime(self._plan.name)
        self.lifetime.on_broken = self._break_down
        self.node: Node | None = None
        self._ending = _RendezvousEnd(self._plan)
        self._stack = AsyncExitStack()
        self._closing: asyncio.Future[None] | None = None
        self._goes_on = False  # it is taken down to begin anew

    # --- joining ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the worker is being started. RpcUsageError if it has been started before. Any thread."""
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
            with contextlib.suppress(asyncio.CancelledError):  # as it is cancelled once more
                if self.lifetime.state is WorkerState.RUNNING:  # it was cancelled in the turn in which it had joined
                    await self.shutdown(graceful=False, timeout=0.0)
                elif self.lifetime.state is WorkerState.STARTING:  # it was cancelled in the turn in which it had begun
                    await self._close(WorkerEvent.NOT_JOINED if self._shutdown is None else WorkerEvent.SHUTDOWN)
            if self._closing is not None:  # it was cancelled while it was taken down
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
                await self.drop()  # without a word: else others would think that its place is given up
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
        """Meet the others, within so many seconds; a joining member is no member yet."""
        steps = Steps(asyncio.get_running_loop(), self.lifetime.name)
        plan, waiting = self._plan, Patience(patience, steps.stop)
        bound = asyncio.timeout(patience + Bounds().overtime if patience else None)
        try:
            async with bound:
                node = await self._make(steps, waiting)
        except BaseException as error:
            steps.stop.set()
            await self._close(WorkerEvent.NOT_JOINED if self._shutdown is None else WorkerEvent.SHUTDOWN)
            if isinstance(error, TimeoutError) and bound.expired():
                # A step that hangs, as a look-up of a name may, says nothing itself.
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
        await steps.run(registry.take_down_closed)  # one of them may host the store that this one is to find
        for pattern in Rights(plan.options.allow).patterns():
            check_pattern(pattern)
        layout.warm_up()
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
                    secret_file=plan.options.secret_file,
                    certificates=tls is not None and (tls.verify_names or plan.options.require_secret is False),
                    safe=plan.options.serialization == "safe",
                    founding=Bounds().founding,
                    grace=plan.options.reconnect_grace,
                ),
            )
        )
        if unusable is not None and rendezvous.dynamic:
            raise unusable  # nobody waits for this worker
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
            raise unusable  # the others have read it, and need not wait for what will not be
        _check_tls(record, records)
        if not rendezvous.dynamic and all(_is_beside(record, other) for other in records):
            listeners.close_tcp()
        secret = await steps.run(lambda: rendezvous.agree_secret(record, directory))
        logger.debug("worker %s: has what its members know each other by", plan.name)
        meeting = Meeting(rendezvous, listeners, record, records, secret, credentials)
        node = Node(meeting, plan, self.lifetime, steps, stack)
        await node.start()
        if rendezvous.dynamic:
            node.engine.tasks.spawn(_serve_rendezvous(node))
        return node

    # --- leaving ------------------------------------------------------------------------------------------------------

    def report(self) -> ShutdownReport | None:
        """The report of a shutdown that is over or has nothing to do; None if there is still something to do.

        One whose loop is closed is taken down by this. Any thread.
        """
        if self.loop_is_closed:
            self.loop_closed()
        if self.lifetime.loop_ended or self.lifetime.broken:
            registry.forget(self.lifetime)  # whoever asks knows by now
        state = self.lifetime.state
        if state in (WorkerState.NEW, WorkerState.CLOSED) and self._shutdown is None and not self._goes_on:
            return ShutdownReport()
        if self._shutdown is not None and self._shutdown.done():
            if not self._shutdown.cancelled():
                return self._shutdown.result()
            if state is WorkerState.CLOSED:
                return ShutdownReport(timed_out=True)
        if self.loop_is_closed:  # no shutdown began, or it never comes to its end
            return ShutdownReport(timed_out=self._shutdown is not None)
        return None

    async def shutdown(self, graceful: bool, timeout: float) -> ShutdownReport:
        """Begin to shut down, or wait for a shutdown that has begun already. See `Worker.shutdown`."""
        limit = seconds(timeout, "timeout")
        self._at_once = self._at_once or not graceful
        if self._shutdown is None:
            self._shutdown = begin(self._leave(limit), asyncio.get_running_loop())
        elif self._at_once and self._stays:
            self._stays = False
            self._shutdown.cancel()
        try:
            return await asyncio.shield(self._shutdown)
        except asyncio.CancelledError:
            # Whoever waited is cancelled (Ctrl-C, a timeout): leave at once instead of gracefully.
            # Closing itself is bounded, and never cut short: half of it would be left for good.
            if self.lifetime.state is WorkerState.LEAVING:
                self._shutdown.cancel()
            await until_done(self._shutdown)
            raise

    async def _leave(self, timeout: float) -> ShutdownReport:
        node = self.node
        if node is None or self.lifetime.ended:
            await self._give_up_joining()
            return ShutdownReport()
        self.lifetime.enter(WorkerEvent.SHUTDOWN)
        complete = True
        leaked: tuple[LeakedReference, ...] = ()
        try:
            if not self._at_once:
                self._stays = True
                try:
                    complete = await node.group.leave(timeout)
                except asyncio.CancelledError:  # see `shutdown`; later calls of it are not cancelled, they get a report
                    complete = False
                finally:
                    self._stays = False
            node.publications.leave()
            node.references.flush()
            for link in node.links.all():
                link.flush()  # give back the memory that we have released: this process may live on, and they need it
            leaked = tuple(node.references.leaked())
            with contextlib.suppress(asyncio.CancelledError):  # as above: others that wait for this are not cancelled
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
        return ShutdownReport(lost, not complete, leaked)

    def _break_down(self) -> None:
        """Begin to leave at once, as the runtime was interrupted in the midst of a step. Any thread."""
        loop = self.loop
        assert loop is not None, "it has joined"
        logger.error("%s", self.lifetime.why_closed())
        with contextlib.suppress(RuntimeError):  # it is closed, and so is the worker
            loop.call_soon_threadsafe(lambda: begin(self.shutdown(graceful=False, timeout=0.0), loop))

    async def drop(self) -> None:
        """Let go of everything without leaving: the others see a death."""
        if self.node is None:
            await self._give_up_joining()
            return
        self._ending.silent = True
        await self._close(WorkerEvent.DROPPED)

    async def _give_up_joining(self) -> None:
        """End a join that is under way; then wait for whatever closes the worker."""
        if self._joining is not None and not self._joining.done():
            self._joining.cancel()
            await asyncio.wait((self._joining,))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, event: WorkerEvent) -> None:
        """Take down whatever has been made; if that is under way already, wait for it.

        The task is shielded: whoever waits here may be cancelled, but taking down halfway would leave things for good.
        Where the loop has ended by itself, whoever has ended it takes everything down, and nobody can wait for it.
        """
        if not self.lifetime.ended:
            self.lifetime.enter(event)
            if event is WorkerEvent.DROPPED and self.node is not None:
                # Closed before: else the end of one connection would be told to others over those that are there still.
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
        # It is CLOSED already if the interpreter exits or this is a forked child.
        if self.lifetime.state is WorkerState.CLOSING:
            self.lifetime.enter(WorkerEvent.ENDED)

    def loop_ended(self, cause: BaseException | None) -> Coro[None]:
        """The loop has ended while the worker was running: close it at once. Others see a loss, not a goodbye.

        The coroutine that is returned lets go of the rest, and needs one more run of the loop. On the loop's thread.
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
        """Whether the loop that it runs on was closed, so that nothing of the worker can go on."""
        return self.loop is not None and self.loop.is_closed()

    def loop_closed(self, *, wait: bool = True) -> None:
        """The loop was closed, as `asyncio.run` does, and the worker has not shut down: take it down without the loop.

        It is as a shutdown at once, as far as that needs no waiting: the others see a goodbye, as where a program ends
        without a shutdown. Idempotent, nothing if it has shut down. wait: whether to wait for another thread that does
        so already. Any thread.
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
                if state is not WorkerState.LEAVING:
                    self.lifetime.enter(WorkerEvent.SHUTDOWN)
                if not self.lifetime.ended:  # it had joined
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
    """How a worker leaves the rendezvous, as far as the store still answers.

    It is entered into the exit stack before there is a rendezvous, so that joining can be given up at any point.
    rendezvous, record: None until joining has got that far. silent: nobody is told, as if the process had died.

    Of a worker that leaves in good order the store is told at once, beside all else: whoever cannot reach it from then
    on, and has no connection on which a goodbye could come, looks there (`Group.look_for_farewell`).
    """

    def __init__(self, plan: Plan) -> None:
        self.rendezvous: Rendezvous | None = None
        self.record: WorkerRecord | None = None
        self.silent = False
        self._plan = plan
        self._leaves = self._told = False

    def say_so(self, engine: Engine) -> None:
        """Begin to tell the store that this worker leaves. `end` waits for it."""
        self._leaves = True
        engine.tasks.spawn(engine.steps.run(self._tell))

    async def end(self, steps: Steps, joined: Callable[[], Node | None]) -> None:
        """Wait for steps that are under way at the store, and leave it.

        joined: the node, if the worker has joined. Where that leaves in good order these steps are waited for as long
        as the store may take, else hardly at all.
        """
        node = joined()
        patience = Bounds().store if node is None else node.engine.bounds.store
        if node is None and self.rendezvous is not None and self.rendezvous.dynamic:
            self._leaves = True  # members may have found it in the list, and would take it for lost
        if steps.loop_closed:
            self._leaves = True
            self._leave_beside()
            return
        try:
            async with asyncio.timeout(patience) as limit:
                await steps.wait(patience if node is not None and node.patient else 0.1)
                if node is None and not await steps.wait(_GIVING_UP):
                    # It may answer this thread and not that one; but whoever gives up does not wait for long.
                    patience = 2 * _GIVING_UP
                    limit.reschedule(asyncio.get_running_loop().time() + _GIVING_UP)
                if self.rendezvous is not None:
                    await steps.run(self._leave)
        except TimeoutError:
            steps.stop.set()  # of who still tries to reach it
            logger.warning(
                "worker %s left without a word to the store of %s, which has not answered for %g s",
                self._plan.name,
                self._plan.init_method,
                patience,
            )
        except Overloaded as error:  # there is no thread to say it in
            logger.warning(
                "worker %s left without a word to the store of %s: %s", self._plan.name, self._plan.init_method, error
            )

    def _leave_beside(self) -> None:
        """Leave in a thread that goes on by itself if that takes long: whoever found the loop closed has other work.

        Nothing if there can be no thread, as when the interpreter exits.
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
    """Run a coroutine to its end where no loop can: what would have to wait is cancelled in place of that."""
    try:
        coroutine.send(None)
        while True:
            coroutine.throw(asyncio.CancelledError())
    except StopIteration:
        return
    except (Exception, asyncio.CancelledError) as error:  # all steps were taken, and one of them would have needed it
        foreign.log_error(logger, logging.DEBUG, error, "taking a worker down without its loop")


def _watch_loop(node: Node) -> asyncio.Task[None]:
    """A task on a loop of the program's that is cancelled with all others, as `asyncio.run` does at its end.

    Then that waits for its threads (`asyncio.to_thread`), and nobody would end what these wait for.
    """

    async def until_cancelled() -> None:
        try:
            await node.engine.loop.create_future()
        except asyncio.CancelledError:
            if not node.engine.closed:
                node.loop_ends()
            raise

    task = begin(until_cancelled(), node.engine.loop, contextvars.Context())
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # a loop may be closed without a word
    return task


async def _serve_rendezvous(node: Node) -> None:
    """In a free group: look after joining members, and find a store again that has gone, until the worker ends."""
    engine, rendezvous = node.engine, node.rendezvous
    bounds, name = engine.bounds, engine.name
    gone = occupied = False
    pause = bounds.serving_pause
    while True:
        await asyncio.sleep(pause)
        try:
            if not gone:
                look = partial(rendezvous.serve_joining, bounds.absence, parted=node.group.parted)
                await engine.steps.run(look)
                continue
            pause = min(2 * pause, bounds.foreign_pause if occupied else bounds.return_pause)
            if await engine.steps.run(lambda: rendezvous.meet_again(engine.record)):
                logger.info("worker %s has found a store again: joining members find it there", name)
                gone = occupied = False
                pause = bounds.serving_pause
        except asyncio.CancelledError:  # the worker ends, which waits for steps that are under way
            engine.steps.stop.set()
            raise
        except StoreGone as error:
            if not gone:
                said = "worker %s: %s. Members that know each other go on; joining members find nobody"
                logger.warning(said, name, error)
            if not rendezvous.may_return:
                return
            gone, pause = True, _FIRST_PAUSE
        except (RendezvousError, OSError) as error:  # also where the file of the secret cannot be written just now
            if gone and not occupied:
                occupied = True
                logger.warning("worker %s: %s", name, error)
            elif not gone:
                logger.debug("worker %s serves no secrets just now: %s", name, error)


def _check_tls(own: WorkerRecord, records: Sequence[WorkerRecord]) -> None:
    """RendezvousError if a member cannot use its files, or if some have TLS and others have not.

    It would do nothing for either.
    """
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

    Containers may share everything that makes a host but the files; then the path of its socket leads nowhere here.
    """
    return record.host == own.host and bool(record.unix_path) and os.path.exists(record.unix_path)
