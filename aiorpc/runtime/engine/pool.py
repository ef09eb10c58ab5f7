"""A bounded pool of threads for ``def`` handlers. Threads that wait for a nested call do not count.

Jobs are taken first in, first out. Idle threads are woken last in, first out, which keeps few of them warm. ``submit``
takes no lock: it appends the job, then looks for an idle thread. A thread that goes idle announces itself, then looks
for a job. The second of the two sees the first, so no job can lie beside a sleeping thread. Every step that frees a
place under the limit (going idle, waiting for a nested call, ending) is followed by the same second look.

A thread without a job may stand by at a source of jobs (`Lookout.stand_by`): it waits for the descriptor, reads the
next job and runs it, and no other thread has to wake it. These are the leader/followers of Schmidt, Stal, Rohnert and
Buschmann (Pattern-Oriented Software Architecture 2), beside a loop that reads all other sources. Such a thread counts
as idle; other threads are woken or started before it.

After an exception of a signal handler in ``submit`` all threads wake up and look again (`_mend`), so each job that was
appended runs. A wake-up says no more than "look again": a thread that wakes up removes itself from the idle ones if it
is still there. A thread being started has an object in `_starting`, which the thread itself or the interrupted starter
removes: it counts once, whether or not the thread comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from ... import foreign
from ...callbacks import block_observer
from ...errors import WorkerClosed
from ...locks import RLock, is_owned
from ...logs import logger
from ...threads import daemon
from .busy_poll import MOMENT
from .forked import end_child
from .lookout import JobSource, Lookout, Stance
from .wakeup import WakeUp

_Job = tuple[Callable[..., None], tuple[object, ...]]


# The weight of a new wait in the moving average of its thread.
_WEIGHT = 0.25
# Threads that stand by, at most.
_MOST_STANDING = 8
# Seconds for idle threads to end when the process exits.
_IDLE_LEAVE = 0.1
# Seconds without a job after which another thread may stand by.
_STANDING = 1.0


class NoThread(WorkerClosed):
    """The system gives no thread for a job, and no thread of the pool could take it later: it was not run.

    It is no Overloaded, which promises that the call has not run: the caller's end may lack a thread to read the
    answer.
    """


class ProcessExits(SystemExit):
    """Raised in threads that run jobs when their process exits. It is not logged."""


class _NotStarted(RuntimeError):
    """The system, or an ending interpreter, gives no more threads."""


class ShareForPool(Protocol):
    """A caller's share of the threads (`Share`)."""

    def claim(self) -> None: ...

    def let_go(self) -> None: ...


class _Local(threading.local):
    """A thread's own state.

    depth: how many nested waits it is in; -1 in threads outside of the pool. typical_wait: seconds of its waits on
    average. share: of the caller whose job it runs, see `shares`.
    """

    depth = -1
    typical_wait: float = 0.0
    share: ShareForPool | None = None


class ThreadPool:
    """Daemon threads ``aiorpc-<name>-<n>``, started when needed, at most ``limit`` of them running a job at a time.

    name: shown in thread names. limit: jobs that may run at once; those that wait for a nested call do not count.
    linger: seconds a thread above the limit stays idle before it ends (starting one costs more than keeping one).
    prepare: called first in each thread, to set its context variables. busy: seconds that a waiting thread polls at
    most (`stay_awake`); a thread that stands by polls for at most `busy_poll.MOMENT` of them. may_stay_awake: whether
    waiting threads may poll. All methods may be called from any thread. The pool lives until ``close``; it belongs to
    the process that made it. local: the calling thread's own state.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        *,
        linger: float = 1.0,
        prepare: Callable[[], object] | None = None,
        busy: float = 0.0,
    ) -> None:
        if limit < 1:
            raise ValueError(f"a thread pool needs a limit >= 1, not {limit}")
        self._name = name
        self._limit = limit
        self._linger = linger
        self._prepare = prepare
        self._most_busy = busy
        self.may_stay_awake: bool = bool(busy)
        self._pid = os.getpid()
        self._jobs: deque[_Job] = deque()
        self.lookout: Lookout = Lookout(min(busy, MOMENT), self._jobs)
        self._idle: list[threading.Lock | WakeUp] = []  # woken from the end; threads that stand by are in front
        self._standing: list[WakeUp] = []
        self._most_standing = _MOST_STANDING
        self.local: _Local = _Local()
        self._wakes: set[threading.Lock | WakeUp] = set()  # of all threads
        self._running: dict[threading.Lock, threading.Thread] = {}  # the threads, by their wake-up
        self._ending: list[threading.Thread] = []  # threads that no longer count, and may still live
        # Reentrant: a signal handler may submit a job. Taken directly and not by way of the condition, whose Python
        # code a signal handler could interrupt while the lock is held.
        self._lock = RLock()
        self._ended = threading.Condition(self._lock)
        self._threads = 0  # that have begun
        self._starting: set[object] = set()  # one object for each thread that has not begun
        self._blocked = 0
        self._excused = 0  # threads that wait for the thread that closes the pool
        self._numbered = 0
        self._waking = False
        self._closed = False
        self._in_child = False
        self._awake = RLock()  # of the polling thread; reentrant, because unpickled code may wait, too
        self._is_awake = False  # whether a thread polls

    # Looking in.

    @property
    def threads(self) -> int:
        """Threads alive or being started."""
        return self._threads + len(self._starting)

    @property
    def idle(self) -> int:
        """Threads that wait for a job."""
        return len(self._idle)

    @property
    def blocked(self) -> int:
        """Threads inside a job that wait for a nested call."""
        return self._blocked

    @property
    def queued(self) -> int:
        """Jobs not started yet."""
        return len(self._jobs)

    def is_active(self) -> bool:
        """Whether a thread runs a job or polls."""
        return self._busy() > 0 or self._is_awake or self.lookout.looks()

    def is_pool_thread(self) -> bool:
        """Whether the calling thread is one of this pool's."""
        return self.local.depth >= 0

    # Work.

    def submit(self, fn: Callable[..., None], *args: object) -> None:
        """Run ``fn(*args)`` once, in a thread of the pool, after all jobs submitted before.

        ``fn`` should not raise; what it raises is logged. WorkerClosed after ``close``, in a forked child, and as the
        interpreter ends; NoThread if there is no thread and the system gives none. If a signal handler raises
        meanwhile, ``fn`` runs or does not.
        """
        if self._closed or os.getpid() != self._pid:
            raise WorkerClosed(self._why_unusable())
        job = (fn, args)
        try:
            self._jobs.append(job)
            # One thread at a time is being woken; when it arrives it wakes the next if jobs are left. A burst of jobs
            # then costs the submitter one system call, and no crowd of threads contends for the interpreter lock.
            if not self._waking:
                self._kick()
        except _NotStarted as error:
            self._take_back(job, error)
        except BaseException:  # of a signal handler
            self._mend()
            raise

    def enter_blocked(self) -> None:
        """The calling pool thread is about to wait: another may run meanwhile. Nothing in other threads. May nest."""
        local = self.local
        if local.depth < 0:
            return
        local.depth += 1
        if local.depth > 1:
            return
        with self._lock:
            self._blocked += 1
        if local.share is not None:
            local.share.let_go()
        self._look_again()

    def exit_blocked(self) -> None:
        """The wait announced by ``enter_blocked`` is over. More than ``limit`` may run until one finishes its job."""
        local = self.local
        if local.depth <= 0:
            return
        local.depth -= 1
        if local.depth == 0:
            with self._lock:
                self._blocked -= 1
            if local.share is not None:
                local.share.claim()

    def stay_awake(
        self, look: Callable[[Callable[[], bool]], None], done: Callable[[], bool], timeout: float | None
    ) -> None:
        """Poll in a waiting thread, if that pays: call `look(enough)`; `enough()` returns whether to stop. Any thread.

        A sleeping thread needs tens of microseconds to wake up, and its idle core as long again. So a thread whose
        waits are short polls, and lets others run between two looks: for at most `busy` seconds, one thread at a time,
        and only while no job needs the interpreter. A thread with longer waits on average sleeps at once.
        """
        most, local = self._most_busy, self.local
        if not most or local.typical_wait > most or self._busy() > (local.depth >= 0) or not self._awake.acquire(False):
            return
        try:
            until = time.monotonic() + (most if timeout is None else min(most, timeout))
            self._is_awake = True
            look(lambda: done() or bool(self._jobs) or time.monotonic() > until)
        finally:
            self._is_awake = False
            self._awake.release()

    def waited(self, seconds: float) -> None:
        """The calling thread waited so many seconds: `stay_awake` uses the mean.

        Long waits count as twice `busy` only, and are soon forgotten among short ones.
        """
        local = self.local
        local.typical_wait += _WEIGHT * (min(seconds, 2 * self._most_busy) - local.typical_wait)

    def close(self, timeout: float) -> int:
        """Take no more jobs; end idle threads at once; wait up to ``timeout`` seconds for the jobs taken so far, and
        for their threads.

        Returns how many jobs are unfinished (running, or queued behind them); these go on in daemon threads. The
        calling job and those in `excused` are neither waited for nor counted. Idempotent; does nothing in a forked
        child.
        """
        if os.getpid() != self._pid:
            return 0
        self._closed = True
        self._wake_all()
        own = int(self.is_pool_thread())
        until = time.monotonic() + timeout
        with self._lock:
            self._ended.wait_for(lambda: self.threads <= own + self._excused, timeout)
            left = max(0, self.threads - own - self._excused - len(self._idle)) + len(self._jobs)
        for thread in self._ending:  # afterwards no thread of the pool is alive
            thread.join(max(0.0, until - time.monotonic()))
        return left

    def end_jobs(self, timeout: float) -> None:
        """Before the interpreter exits: raise ProcessExits in running jobs, and wait so many seconds for their threads.

        The exiting interpreter ends a daemon thread that wants its lock. Below a C++ frame, as of torch, this aborts
        the process and loses its exit status. Jobs that wait for a nested call have no such frame as a rule, and are
        not waited for. Does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return
        self._jobs.clear()
        if not self.close(min(timeout, _IDLE_LEAVE)):
            return
        for thread in list(self._running.values()):
            if thread is not threading.current_thread():
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(ProcessExits))
        own = int(self.is_pool_thread())
        with self._lock:
            self._ended.wait_for(lambda: self._threads <= own + self._blocked, timeout)

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """In this context the calling thread waits for the closing thread, which must not wait for it. Any thread."""
        own = int(self.is_pool_thread())
        self._excuse(own)
        try:
            yield
        finally:
            self._excuse(-own)

    def _excuse(self, count: int) -> None:
        with self._lock:
            self._excused += count
            self._ended.notify_all()

    def in_forked_child(self) -> None:
        """In a forked child: if its thread is one of the pool, the child ends with the thread's job."""
        self._in_child = True

    # Waking and starting threads.

    def _busy(self) -> int:
        """How many threads count against the limit now, including those that were woken or are starting."""
        return self._threads + len(self._starting) - len(self._idle) - self._blocked

    def _kick(self) -> None:
        """Wake an idle thread, or start one, where the limit allows."""
        if self._threads + len(self._starting) - len(self._idle) - self._blocked >= self._limit:  # as `_busy`
            return
        idle = self._idle
        try:
            if type(idle[-1]) is WakeUp and self._grow_beside():
                return
            wake = idle.pop()
        except IndexError:
            self._grow()
            return
        self._waking = True
        try:
            wake.release()
        except RuntimeError as error:  # woken by `_wake_all` already
            if type(error) is not RuntimeError:
                raise

    def _grow_beside(self) -> bool:
        """Start a thread, because all idle ones stand by; False if the system gives none."""
        try:
            return self._grow()
        except _NotStarted:
            return False

    def _look_again(self) -> None:
        """After a place under the limit came free: start a job that waits for one."""
        if self._jobs and not self._waking:
            try:
                self._kick()
            except _NotStarted as error:
                logger.warning("pool %s cannot start a thread, %d go on: %s", self._name, self._threads, error)

    def _mend(self) -> None:
        """Restore the pool after an interruption: see the module."""
        if is_owned(self._lock):
            self._lock.release()
        self._waking = False
        self._wake_all()
        self._look_again()

    def _grow(self) -> bool:
        announced = object()
        try:
            with self._lock:
                if self._threads + len(self._starting) - self._blocked >= self._limit:
                    return False
                self._starting.add(announced)
                self._numbered += 1
                name = f"aiorpc-{self._name}-{self._numbered}"
            self._waking = True
            thread = daemon(self._work, announced, name=name)
            thread.start()
        except BaseException as error:  # no thread, or an interruption, after which the thread may exist
            with self._lock:
                self._starting.discard(announced)
                self._ended.notify_all()
            self._waking = False
            if isinstance(error, RuntimeError):
                raise _NotStarted(*error.args) from error
            raise
        return True

    def _take_back(self, job: _Job, reason: _NotStarted) -> None:
        """No thread could be started: withdraw the job, unless other threads live to run it.

        When the interpreter exits only an idle thread counts: the others may end in their jobs.
        """
        ending = sys.is_finalizing() or "interpreter shutdown" in str(reason)  # since Python 3.12, and before
        if self._idle if ending else self.threads > 0:
            return
        for index in range(len(self._jobs)):
            # By identity: comparing arguments could mean comparing tensors.
            if self._jobs[index] is job:
                del self._jobs[index]
                if self._closed:
                    raise WorkerClosed(self._why_unusable()) from None
                if ending:
                    raise WorkerClosed(
                        f"pool {self._name} has no idle thread, as the interpreter ends: {reason}"
                    ) from None
                raise NoThread(f"worker {self._name!r} cannot start a thread: {reason}; nothing was run") from None

    def _why_unusable(self) -> str:
        if os.getpid() != self._pid:
            return f"pool {self._name} belongs to process {self._pid}; a forked child cannot use it"
        return f"pool {self._name} is closed"

    # A thread's life.

    def _work(self, announced: object) -> None:
        wake = threading.Lock()
        wake.acquire()
        with self._lock:
            self._threads += 1
            self._starting.discard(announced)
            self._wakes.add(wake)
            self._running[wake] = threading.current_thread()
        self.local.depth = 0
        block_observer.set(self)
        if self._prepare is not None:
            self._prepare()
        stance = self.lookout.stance
        fresh = True
        self._waking = False
        while True:
            # Inlined: every call of a `def` handler pays for it.
            if (
                self._jobs
                and self._threads + len(self._starting) - len(self._idle) - self._blocked <= self._limit  # as `_busy`
            ):
                try:
                    fn, args = self._jobs.popleft()
                except IndexError:  # another thread has come first
                    pass
                else:
                    if fresh and self._jobs and not self._waking:
                        self._look_again()  # a thread that was just woken first wakes the next one
                    fresh = False
                    if stance.kept is not None:
                        self.lookout.let_go()
                    stance.ready = False
                    try:
                        fn(*args)
                    except BaseException as error:
                        said = "a job of pool %s raised; the pool goes on"
                        foreign.log_error(logger, logging.ERROR, error, said, self._name)
                    del fn, args  # a sleeping thread keeps no job alive
                    if self._in_child:
                        end_child(f"a thread of {self._name}")
                    continue
            if self._closed and not self._jobs:
                self.lookout.let_go()
                self._leave(wake)
                return
            if stance.source is not None:
                self._stand_by()
            elif not self._park(wake):
                return
            fresh = True
            self._waking = False

    def _park(self, wake: threading.Lock) -> bool:
        """Sleep until woken; False if this thread is surplus and has left instead."""
        self._idle.append(wake)
        if self._closed if not self._jobs else self._busy() < self._limit:
            if not self._unpark(wake):
                wake.acquire()
            return True
        while True:
            surplus = self._threads + len(self._starting) - self._blocked > self._limit
            if wake.acquire(timeout=self._linger if surplus else -1):
                if wake in self._idle:  # woken by `_wake_all`
                    self._unpark(wake)
                return True
            if self._retire(wake):
                return False

    def _stand_by(self) -> None:
        """Sleep until woken, or until there is something for the thread itself; or not at all."""
        stance = self.lookout.stance
        try:
            wakeup = self._begin_standing(stance)
            found = [] if wakeup is None else self._sleep_standing(wakeup, stance)
            if wakeup is not None and found and (len(found) > 1 or found[0][0] != wakeup.event):
                watched: JobSource | None = wakeup.watched()
                if watched is not None:
                    self._waking = True  # this thread runs the jobs that it brings
                    watched.bring()
        except BaseException as error:  # the thread goes on: jobs may have been left to it
            said = "a thread of pool %s could not stand by; the pool goes on"
            foreign.log_error(logger, logging.ERROR, error, said, self._name)
        finally:
            if stance.kept is not None:
                self.lookout.let_go()

    def _begin_standing(self, stance: Stance) -> WakeUp | None:
        """Enter the threads that stand by; None if this one cannot, or the pool does not need it."""
        standing = self._standing
        source, stance.source = stance.source, None
        assert source is not None, "a job has asked for it"
        surplus = self._threads + len(self._starting) - self._blocked > self._limit
        if surplus or len(standing) >= self._most_standing:
            return None
        wakeup = stance.wakeup
        if wakeup is None or wakeup.watched() is not source:
            if self.lookout.crowded():
                return None
            if wakeup is None:
                wakeup = stance.wakeup = WakeUp.make()
            if wakeup is None:
                self._most_standing = 0
                return None
            self._wakes.add(wakeup)
            if not wakeup.watch(source):
                return None
        standing.append(wakeup)
        for each in standing.copy():
            if each is wakeup:
                break
            if each.watched() is source:  # one is enough for each, and the first one of two that come at once stays
                standing.remove(wakeup)
                return None
        return wakeup

    def _sleep_standing(self, wakeup: WakeUp, stance: Stance) -> list[tuple[int, int]]:
        """What the epoll of this thread has found; nothing if there are jobs already."""
        found: list[tuple[int, int]] = []
        self._idle.insert(0, wakeup)
        try:
            if not (self._closed if not self._jobs else self._busy() < self._limit):  # as in `_park`
                if stance.kept is not None:
                    found = self.lookout.look(wakeup, stance.kept)
                if not found:
                    found = wakeup.epoll.poll(_STANDING, 2)
        finally:
            self._standing.remove(wakeup)
            if not self._unpark(wakeup):
                wakeup.take()  # another thread has taken us from the list, and says so
            elif found and wakeup.event in (found[0][0], found[-1][0]):
                wakeup.take()  # we have been woken with everybody
        return found

    def _unpark(self, wake: threading.Lock | WakeUp) -> bool:
        """Stop being idle; False if somebody has already taken us from the list to wake us."""
        try:
            self._idle.remove(wake)
        except ValueError:
            return False
        return True

    def _retire(self, wake: threading.Lock) -> bool:
        with self._lock:
            if self._threads + len(self._starting) - self._blocked <= self._limit or not self._unpark(wake):
                return False
            self._end(wake)
        self._close_wakeup()
        # Between list and count this thread looked busy: a job may have been left waiting.
        self._look_again()
        return True

    def _end(self, wake: threading.Lock) -> None:
        """This thread no longer counts. With the lock held."""
        self._wakes.discard(wake)
        self._ending = [*(each for each in self._ending if each.is_alive()), self._running.pop(wake)]
        self._threads -= 1
        self._ended.notify_all()

    def _close_wakeup(self) -> None:
        wakeup = self.lookout.stance.wakeup
        if wakeup is not None:
            self._wakes.discard(wakeup)
            wakeup.close()

    def _leave(self, wake: threading.Lock) -> None:
        self._close_wakeup()
        with self._lock:
            self._end(wake)
        self._look_again()
        # Threads that went idle above the limit while jobs were queued have not seen that the pool is closed.
        self._wake_all()

    def _wake_all(self) -> None:
        """Make all threads look again, whether or not they sleep."""
        for wake in list(self._wakes):
            with contextlib.suppress(RuntimeError):  # woken already
                wake.release()
