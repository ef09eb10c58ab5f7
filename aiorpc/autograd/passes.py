"""Backward passes over the graphs of several workers.

A worker's part of the graph begins at entries: tensors that it has sent, and roots of its own. It ends in targets:
leaves, and tensors that it has received. A pass, run by the worker that has the roots:

    1.          from the roots, follow received tensors to their senders: which entries get a gradient in this pass.
                The names behind a tensor came with it; if they were too many, GATHER asks for them
    2.          run what can be run here
    3. PLAN     tell each of these workers its entries, with the gradients that there are by now; answered as soon as
                gradients for entries of ours came out there, with these, or when its part is done
    4. GO_ON    as long as its part is not done: brings the gradients that there are for it by then, if any, and is
                answered in the same manner. So what goes to and fro between two workers takes two messages
    5. TAKE     brings gradients from one of these workers to another, as each part goes on

Invariants
1. A target is evaluated when all entries of the plan that lead to it have their gradients, and once in a pass. All
   targets that are ready share one run of torch's engine, from those entries. So a node only ever sees complete
   gradients, and hooks on targets see them once. So do hooks on tensors that were sent, but for one case, below.
   A received tensor that was sent on unchanged needs no engine for its gradient: that is added to the gradient of the
   graph, which need not wait for it (`resent.py`).
2. Entries that no root leads to are in no plan: no worker waits for a gradient that does not come.
3. A failure (an exception, a lost worker, the deadline) ends the pass on all workers, and so does cancelling it.
   What was accumulated by then stays in the context.
4. The engine never runs on a loop: it runs in the thread that waits for the pass, and in those of the pool.

If a handler keeps a graph that a later call goes on with, entries with different targets may share a node. It may then
run once for each of these runs, always with its whole gradient, and so does a hook on it.

This is what torch describes as its "smart" mode, and has not built: torch.distributed.autograd counts all entries of a
context, and waits for entries that the loss does not use.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .. import foreign
from ..errors import RpcError, RpcTimeout, RpcUsageError
from ..futures import Future
from ..locks import Lock
from ..runtime.calls.failures import without_frames
from ..runtime.gradients.contexts import AutogradContext
from ..runtime.gradients.reach import SentName, bits_of
from ..runtime.node import Node
from .brought import brought_by
from .parts import LONGEST_REASON, Closing, Part, abort, arrival_of, ask, gather, go_on, part_of, plan
from .resent import Entry
from .wire import MORE, NOT_CLOSED, Gradients, Wire, pack_names, to_wire, unpack_table

Tensor = torch.Tensor
# Seconds to tell other workers that a pass has failed.
_ABORT_PATIENCE = 10.0


def check_roots(roots: Sequence[Tensor]) -> list[GradientEdge]:
    """The edges of the roots. Raises RpcUsageError, with torch's text, for an invalid root."""
    if not isinstance(roots, list | tuple) or not roots:
        raise RpcUsageError("No tensors provided for gradient computation: roots must be a list of tensors")
    for root in roots:
        if not isinstance(root, Tensor):
            raise RpcUsageError(f"roots must be tensors, not {type(root).__name__}")
        if not root.requires_grad:
            raise RpcUsageError("requires_grad not set on root")
        if root.numel() != 1:
            raise RpcUsageError(f"a root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RpcUsageError("root does not have a valid gradient function: it is a leaf, nothing was computed")
    return list(map(get_gradient_edge, roots))


class Last(NamedTuple):
    """What workers do at the end of their parts: the steps of optimizers.

    here: at the worker that runs the pass. there: packed references to those of others, by worker. idle: makes the
    error of the pass if no worker had anything to do.
    """

    here: Closing | None
    there: Mapping[int, bytes]
    idle: Callable[[], RpcError]


class _Table:
    """A worker's answer to `gather`."""

    def __init__(self, packed: object) -> None:
        """Raises ProtocolError."""
        table = unpack_table(packed)
        self._received = {bit: (sender, SentName(message, place)) for bit, sender, message, place in table.received}
        self._masks = {
            SentName(message, place): int.from_bytes(mask, "little") for message, place, mask in table.entries
        }
        self._told = 0  # bits

    def behind(self, names: Iterable[SentName]) -> list[tuple[int, SentName]]:
        """The tensors that some entries lead to, with their senders, without those that were returned before."""
        mask = 0
        for name in names:
            mask |= self._masks.get(name, 0)
        new, self._told = mask & ~self._told, self._told | mask
        return [self._received[bit] for bit in bits_of(new) if bit in self._received]


class Done(Future[None]):
    """The outcome of a pass. Cancelling it ends the pass. of: a weak reference to the pass."""

    of: weakref.ref[Pass]

    def _on_cancel(self) -> None:
        one = self.of()
        if one is not None:
            one.give_up()


class Pass:
    """A pass, at the worker that has the roots. Any thread; `start` and `drive` not on a loop."""

    def __init__(
        self,
        node: Node,
        context: AutogradContext,
        roots: Sequence[Tensor],
        retain: bool,
        until: float | None,
        last: Last | None = None,
    ) -> None:
        """last: what workers do at the end, if anything. Raises RpcUsageError for invalid roots."""
        self.done: Done = Done()
        self.done.of = weakref.ref(self)
        self.done._subject = f"the backward pass of autograd context {context.id}"
        engine = node.engine
        self.done._loop, self.done._home_thread, self.done._executor = engine.loop, engine.thread, engine.pool
        self._node = node
        self._context = context
        self._until = until
        self._seconds = 0.0 if until is None else round(until - time.monotonic(), 3)
        self._retain = retain
        self._last = last
        self._closed = False  # whether a worker had anything to do at the end
        self._number = node.gradients.new_id()
        self._roots = check_roots(roots)
        self._gradients = list(map(torch.ones_like, roots))
        self._arrival = arrival_of(node, self._gradients, kept=True)
        self._plans: dict[int, list[SentName]] = {}
        self._open: dict[int, int] = {}  # by worker: unanswered questions
        self._answers = 0  # unanswered questions of all workers
        self._over: set[int] = set()  # workers whose parts are done
        self._calls: set[Future[Wire | bytes]] = set()  # questions whose answers were not used
        self._lock = Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._gate: Future[None] | None = None  # of the thread that drives it
        self._driven = False
        self._part = part_of(node, context, self._number, self)

    def start(self) -> None:
        """Do what can be done at once, and tell the others their plans; the rest follows from the answers."""
        self._guarded(self._start)

    def _start(self) -> None:
        context, part = self._context, self._part
        names = [SentName(-1, place) for place in range(len(self._roots))]
        edges = dict(zip(names, self._roots, strict=True))
        plans = self._close_over(edges.values())
        for name in plans.pop(self._node.engine.id, ()):
            edges[name] = context.sent[name]
        self._plans = plans
        entries = {name: Entry(edge, context.reach.of(edge.node)) for name, edge in edges.items()}
        part.take(dict(zip(names, self._gradients, strict=True)), self._arrival)
        part.held = {}
        last = self._last
        part.begin(entries, retain=self._retain, until=self._until, closing=None if last is None else last.here)
        self._answers = len(plans)
        self._open = dict.fromkeys(plans, 1)
        part.advance()
        held, part.held = part.held, None
        if part.error is not None:  # failed or cancelled; `_end` finds the plans and tells the others
            return
        seconds = 0.0 if self._until is None else max(1e-3, self._until - time.monotonic())
        for worker_id, wanted in plans.items():
            given = to_wire(held.pop(worker_id, {}))
            at_end = b"" if last is None else last.there.get(worker_id, b"")
            self._ask(worker_id, plan, pack_names(wanted), self._retain, seconds, at_end, *given)

    def _ask(self, worker_id: int, function: Any, *args: Any) -> None:
        """Send a question that is counted already."""
        args = (self._context.id, self._number, *args)
        call = ask(self._node, worker_id, function, *args, until=self._until)
        self._calls.add(call)
        call._when_settled(partial(self._answered, worker_id))

    def _close_over(self, roots: Iterable[GradientEdge]) -> dict[int, list[SentName]]:
        """The entries of each worker that will get a gradient."""
        found: set[tuple[int, int, int]] = set()
        for edge in roots:
            behind = self._context.behind(edge)
            if behind is None:
                return self._gather_over(roots)
            found |= behind
        plans: dict[int, list[SentName]] = {}
        for worker_id, message, place in found:
            plans.setdefault(worker_id, []).append(SentName(message, place))
        return plans

    def _gather_over(self, roots: Iterable[GradientEdge]) -> dict[int, list[SentName]]:
        """The same, by asking: one round trip for each hop of the graph of workers."""
        reach = self._context.reach
        tables: dict[int, _Table] = {}
        plans: dict[int, dict[SentName, None]] = {}
        todo: dict[int, set[SentName]] = {}
        for edge in roots:
            for each in reach.received_of(reach.of(edge.node)):
                todo.setdefault(each.sender, set()).add(each.name)
        while todo:
            unknown = todo.keys() - tables.keys()
            calls = {}
            for worker_id in unknown:
                one = pack_names([next(iter(todo[worker_id]))])
                calls[worker_id] = ask(self._node, worker_id, gather, self._context.id, one, until=self._until)
            for worker_id, call in calls.items():
                tables[worker_id] = _Table(call.wait())
            current, todo = todo, {}
            for worker_id, names in current.items():
                known = plans.setdefault(worker_id, {})
                new = [name for name in names if name not in known]
                known.update(dict.fromkeys(new))
                for sender, name in tables[worker_id].behind(new):
                    todo.setdefault(sender, set()).add(name)
        return {worker_id: list(names) for worker_id, names in plans.items()}

    # --- what follows from the answers --------------------------------------------------------------------------------

    def _answered(self, worker_id: int, call: Future[Wire | bytes]) -> None:
        error = call.exception()
        if error is not None:
            self._fail(self._worded(worker_id, error))
        else:
            self._do(partial(self._use, worker_id, call))

    def _worded(self, worker_id: int, error: BaseException) -> BaseException:
        """The error of a question; a timeout names the time of the whole pass."""
        if not isinstance(error, RpcTimeout) or self._until is None or time.monotonic() < self._until:
            return error
        name = self._node.peers.by_id(worker_id).name
        text = (
            f"{self.done._subject} was not done after {self._seconds:g} s (rpc_timeout, or what a handler had left): "
            f"worker {name!r} was asked for its part, and has not answered"
        )
        late = RpcTimeout(text, worker=name, function="autograd.backward", seconds=self._seconds)
        late.late = error.late
        late.__cause__ = without_frames(error)
        return late

    def _use(self, worker_id: int, call: Future[Wire | bytes]) -> None:
        """Use an answer of a worker, which has results of its part. Not on a loop. A lone value comes by itself."""
        self._calls.remove(call)
        answer = call.value()
        packed, *gradients = answer if type(answer) is Wire else (answer,)
        brought = brought_by(self._node, self._context, self._node.peers.by_id(worker_id), packed, gradients)
        state = brought.state
        if gradients or brought.gradients:
            self._part.take_brought(brought)
            self._part.advance()
        with self._lock:
            self._open[worker_id] -= 1
            if state != MORE:
                self._over.add(worker_id)
                self._closed |= self._last is not None and worker_id in self._last.there and state != NOT_CLOSED
            again = not self._open[worker_id] and worker_id not in self._over
            if again:
                self._open[worker_id] = 1
            else:
                self._answers -= 1
        if again:
            self._ask(worker_id, go_on, *to_wire({}))
        else:
            self._finish()

    def hand_on(self, worker_id: int, gradients: Gradients) -> None:
        """See `RunsPass`: the gradients go with the next question."""
        with self._lock:
            self._open[worker_id] += 1
            self._answers += 1
        self._ask(worker_id, go_on, *to_wire(gradients))

    def part_over(self, part: Part) -> None:
        """See `RunsPass`."""
        if part.error is not None:
            self._end(part.error)
        else:
            self._finish()

    def _finish(self) -> None:
        if self._answers or not self._part.over or self._part.error is not None:
            return
        idle = self._last is not None and not (self._closed or self._part.closed)
        if self.done._settle(None, self._last.idle() if self._last is not None and idle else None):
            self._open_gate()
        self._part.let_go()

    def _fail(self, error: BaseException) -> None:
        if self._end(error):
            self._part.fail(RpcError(f"the backward pass has failed: {foreign.text_of(error)}"))

    def _end(self, error: BaseException) -> bool:
        """It has failed: tell the others. False if it had another outcome before."""
        if not self.done._settle(None, error) and self.done._error is not error:
            return False
        self._open_gate()
        self._part.let_go()
        self._abort(error)
        return True

    def give_up(self) -> None:
        """It was cancelled: end it here, and tell the others. Any thread, also the loop's."""
        error = self.done.exception()
        assert error is not None, "it was cancelled"
        # The part first: a thread that makes plans checks the part before it sends them.
        self._part.fail(RpcError(f"the backward pass has failed: {foreign.text_of(error)}"))
        self._part.let_go()
        self._abort(error)

    def _abort(self, error: BaseException) -> None:
        reason = foreign.said(error)[:LONGEST_REASON]
        for worker_id, names in self._plans.items():
            try:
                args = (self._context.id, self._number, pack_names(names[:1]), reason)
                until = time.monotonic() + _ABORT_PATIENCE
                call = ask(self._node, worker_id, abort, *args, until=until, system=True)
            except RpcError:  # we leave
                continue
            call._when_settled(lambda future: future._mark_seen())

    # --- threads ------------------------------------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        """Run a job in the thread that drives the pass, or in a thread of the pool."""
        if not self._driven:
            self._node.engine.pool.submit(self._guarded, job)
            return
        self._jobs.append(job)
        self._open_gate()

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._fail(error)

    def _open_gate(self) -> None:
        gate = self._gate
        if gate is not None:
            gate._settle(None)

    def drive(self) -> None:
        """Start the pass, and run its jobs in this thread until it has ended. Raises its error."""
        self._driven = True
        try:
            self.start()
            while True:
                if not self._jobs and self.done.done():
                    break
                gate: Future[None] = Future()
                gate._loop, gate._executor, gate._subject = self.done._loop, self.done._executor, self.done._subject
                gate._sources = [*self._calls]
                self._gate = gate
                if self._jobs:
                    self._guarded(self._jobs.popleft())
                    continue
                if self.done.done():
                    break
                gate.wait()
        finally:
            self._driven = False
            for job in self._jobs:  # the wait was interrupted
                self._node.engine.pool.submit(self._guarded, job)
        self.done.wait()
