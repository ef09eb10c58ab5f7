"""Backward passes over the graphs of several workers.

A worker's part of the graph begins at entries: tensors that it has sent, and roots of its own. It ends in targets:
leaves, and tensors that it has received. A pass, run by the worker that has the roots:

    1.          from the roots, follow received tensors to their senders: which entries get a gradient in this pass.
                What is behind a tensor came with it; where that was too much, GATHER asks for it
    2.          run what can be run here
    3. PLAN     tell each of these workers its entries, with the gradients that there are by now; answered when its part
                is done, with the gradients for entries of ours that came out last
    4. TAKE     brings gradients to entries of other workers, as each part goes on

States of a part: WAITING for its plan (gradients that come early are kept), RUNNING, DONE, FAILED.

Invariants
1. A target is evaluated when all entries of the plan that lead to it have their gradients, and once in a pass. All
   targets that are ready share one run of torch's engine, from those entries. So a node only ever sees complete
   gradients, and hooks on targets and on tensors that were sent see them once.
2. Entries that no root leads to are in no plan: nobody waits for a gradient that does not come.
3. Whoever fails (an exception, a lost worker, the deadline) ends the pass on all workers. What was accumulated by then
   stays in the context.
4. The engine never runs on a loop: it runs in the thread that waits for the pass, and in those of the pool.

A node that entries with different targets have in common may run once for each of these runs.

What torch describes as its "smart" mode, and has not built: torch.distributed.autograd counts all entries of a context,
and waits for those that the loss does not use.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..channels.landing import Arrival
from ..errors import RpcError, RpcUsageError
from ..futures import Future
from ..runtime.current import current_call
from ..runtime.functions import async_execution
from ..runtime.gradients import AutogradContext, current_autograd
from ..runtime.reach import ReceivedTensor, SentName
from ..runtime.worker import Worker

Tensor = torch.Tensor
# Gradients of entries, on the wire: their names and, at the same places, the gradients; None: nothing flows there.
Wire = tuple[list[tuple[int, int]], list[Tensor | None]]
Gradients = dict[SentName, Tensor | None]
# Seconds to tell other workers that a pass has failed.
_ABORT_PATIENCE = 10.0


class Entry(NamedTuple):
    """Where a gradient comes in. mask: of the targets that it leads to."""

    edge: GradientEdge
    mask: int


# --- a part -----------------------------------------------------------------------------------------------------------


class Part:
    """What one worker does in one pass. Any thread; `advance` not on a loop.

    done: a Future of the gradients for entries of the worker that runs the pass that were not sent before.
    """

    def __init__(self, worker: Worker, context: AutogradContext, number: int) -> None:
        self.done: Future[Wire] = Future()
        self.done._what = f"the part of worker {worker.name!r} in a backward pass"
        self.done._loop, self.done._executor = worker.loop, worker.pool
        self.held: dict[int, Gradients] | None = None  # gradients for others, while they are not to be sent
        self._worker = worker
        self._context = context
        self._number = number
        self._lock = threading.Lock()
        self._entries: dict[SentName, Entry] | None = None  # None: the plan has not come
        self._gradients: Gradients = {}  # that have come
        self._arrivals: list[Arrival] = []
        self._left = 0  # bits of targets that were not evaluated
        self._retain = False
        self._root = -1
        self._until: float | None = None
        self._running = False
        self._delivering = 0
        self._home: Gradients = {}

    def begin(self, entries: dict[SentName, Entry], *, root: int, retain: bool, until: float | None) -> None:
        """The plan. root: who runs the pass. retain: keep the graph for another one. until: as of `ask`."""
        with self._lock:
            self._root, self._retain, self._until = root, retain, until
            for entry in entries.values():
                self._left |= entry.mask
            self._entries = entries

    def take(self, gradients: Mapping[SentName, Tensor | None], arrival: Arrival | None = None) -> None:
        """Gradients of some entries. arrival: of those on devices."""
        with self._lock:
            self._gradients.update(gradients)
            if arrival is not None:
                self._arrivals.append(arrival)

    def fail(self, error: BaseException) -> None:
        """It cannot be done; the first reason counts."""
        if self.done._settle(None, error):
            self.done._look()  # whoever waits is told; if nobody does, that is no news

    def advance(self) -> None:
        """Run what is ready, here and now; whatever then is ready, too."""
        while not self.done.done():
            with self._lock:
                if self._running or self._entries is None:
                    return
                ready, waiting = self._ready(self._entries)
                if not ready:
                    break
                self._running = True
                last = ready == self._left and not waiting
                used = [(e.edge, self._gradients[name]) for name, e in self._entries.items() if e.mask & ready]
                arrivals, self._arrivals = self._arrivals, []
            try:
                deliveries = self._run(used, ready, self._retain or not last, arrivals)
            except BaseException as error:
                _say_where(error, self._worker.name)
                self.fail(error)
                return
            self._hand_on(ready, deliveries)
        self._finish()

    def _ready(self, entries: Mapping[SentName, Entry]) -> tuple[int, bool]:
        """Targets for which no gradient is missing, and whether any is missing."""
        blocked, waiting = 0, False
        for name, entry in entries.items():
            if name not in self._gradients:
                blocked |= entry.mask
                waiting = True
        return self._left & ~blocked, waiting

    def _run(
        self, used: Sequence[tuple[GradientEdge, Tensor | None]], ready: int, retain: bool, arrivals: Sequence[Arrival]
    ) -> dict[int, Gradients]:
        """Evaluate some targets: gradients for tensors that other workers have sent, by worker."""
        for arrival in arrivals:
            arrival.join()
        targets = self._context.reach.targets_of(ready)
        results = _evaluate([each for each in used if each[1] is not None], targets, retain)
        deliveries: dict[int, Gradients] = {}
        leaves: list[tuple[Tensor, Tensor]] = []
        seen: set[int] = set()
        for target, gradient in zip(targets, results, strict=True):
            if isinstance(target, ReceivedTensor):
                deliveries.setdefault(target.sender, {})[target.name] = gradient
            elif gradient is not None:
                leaves.append((target, _own(gradient, seen)))
        self._context.accumulate(leaves, _arrival(self._worker, [gradient for _, gradient in leaves]))
        return deliveries

    def _hand_on(self, ready: int, deliveries: dict[int, Gradients]) -> None:
        """Some targets are done: their gradients go to whoever has sent them."""
        with self._lock:
            assert self._entries is not None, "it runs"
            self._gradients.update(deliveries.pop(self._worker.id, {}))
            self._left &= ~ready
            self._running = False
            if not self._left and not self._ready(self._entries)[1]:  # the answer to the plan takes them along
                self._home = deliveries.pop(self._root, {})
            if self.held is not None:
                for worker_id, gradients in deliveries.items():
                    self.held.setdefault(worker_id, {}).update(gradients)
                return
            self._delivering += len(deliveries)
        for worker_id, gradients in deliveries.items():
            self._deliver(worker_id, gradients)

    def _deliver(self, worker_id: int, gradients: Gradients) -> None:
        try:
            said = (self._context.id, self._number, *to_wire(gradients))
            call = ask(self._worker, worker_id, take, *said, until=self._until)
        except BaseException as error:
            self.fail(error)
            return
        call._add_callback(self._delivered)

    def _delivered(self, call: Future[Any]) -> None:
        error = call.exception()
        if error is not None:
            self.fail(error)
            return
        with self._lock:
            self._delivering -= 1
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self._entries is None or self._running or self._left or self._delivering:
                return
            if self._ready(self._entries)[1]:
                return
            home, self._home = self._home, {}
        self.done._settle(to_wire(home))


def to_wire(gradients: Gradients) -> Wire:
    """Plain tuples for names; the tensors leave the pickle anyway."""
    return [(name.message, name.place) for name in gradients], list(gradients.values())


def from_wire(names: Sequence[tuple[int, int]], values: Sequence[Tensor | None]) -> Gradients:
    """What `to_wire` was given."""
    return {SentName(*name): value for name, value in zip(names, values, strict=True)}


def _arrival(worker: Worker, gradients: Iterable[Tensor | None]) -> Arrival | None:
    """What users of these wait for, if any are on a device."""
    on_device = any(gradient is not None and not gradient.is_cpu for gradient in gradients)
    return worker.accelerators.arrival() if on_device else None


def _evaluate(
    entries: Sequence[tuple[GradientEdge, Tensor | None]], targets: Sequence[Tensor | ReceivedTensor], retain: bool
) -> Sequence[Tensor | None]:
    if not entries:
        return [None] * len(targets)
    outputs, gradients = zip(*entries, strict=True)
    inputs: Any = [target.edge if isinstance(target, ReceivedTensor) else target for target in targets]
    results: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, inputs, gradients, retain_graph=retain, allow_unused=True
    )
    return results


def _own(gradient: Tensor, seen: set[int]) -> Tensor:
    """A gradient that shares memory with no other one: the engine may give one tensor to several inputs."""
    shared = id(gradient) in seen
    seen.add(id(gradient))
    if gradient.layout is torch.strided and (shared or 0 in gradient.stride()):
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient


def _say_where(error: BaseException, worker: str) -> None:
    """Note worker and node, which the error itself says nothing of."""
    node = None
    traceback = error.__traceback__
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        first = names.get(code.co_varnames[0]) if code.co_argcount and code.co_varnames else None
        if isinstance(first, torch.autograd.graph.Node):
            node = first.name()
        traceback = traceback.tb_next
    error.add_note(f"in the backward pass on worker {worker!r}" + (f", at node {node}" if node else ""))


# --- calls between workers --------------------------------------------------------------------------------------------


def ask(worker: Worker, worker_id: int, function: Any, /, *args: Any, until: float | None) -> Future[Any]:
    """Call a function of the runtime's on a worker, in no context. until: on ``time.monotonic``'s clock, or None."""
    timeout = 0.0 if until is None else max(1e-3, until - time.monotonic())
    token = current_autograd.set(0)
    try:
        return worker.peers.by_id(worker_id).call(function, args, None, timeout)
    finally:
        current_autograd.reset(token)


def _here(context_id: int) -> tuple[Worker, AutogradContext]:
    call = current_call.get()
    assert call is not None, "only called by workers"
    return call.worker, call.worker.gradients.get(context_id)


def _part(worker: Worker, context: AutogradContext, number: int) -> Part:
    """The part of a pass, made by whichever of its messages comes first."""
    with context.lock:
        if number in context.passed:
            raise RpcError(f"this backward pass of context {context.id} has ended on worker {worker.name!r}")
        part: Part | None = context.parts.get(number)
        if part is None:
            part = context.parts[number] = Part(worker, context, number)
            part.done._add_callback(lambda _: _end_part(context, number))
        return part


def _end_part(context: AutogradContext, number: int) -> None:
    context.passed.add(number)
    context.parts.pop(number, None)


def gather(context_id: int) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """Handler: for each entry of this worker, as (message, place), the tensors it leads to, as (worker, ..)."""
    _, context = _here(context_id)
    table = []
    for name, edge in list(context.sent.items()):
        received = context.reach.received_of(context.reach.of(edge.node))
        table.append((*name, [(each.sender, *each.name) for each in received]))
    return table


@async_execution
def plan(
    context_id: int,
    number: int,
    names: Sequence[tuple[int, int]],
    retain: bool,
    seconds: float,
    given: Sequence[tuple[int, int]],
    gradients: Sequence[Tensor | None],
) -> Future[Wire]:
    """Handler: these entries get gradients in that pass, of which some are given. Completes with the part."""
    worker, context = _here(context_id)
    call = current_call.get()
    assert call is not None, "it is served"
    part = _part(worker, context, number)
    try:
        entries = {}
        for name in names:
            edge = context.sent[SentName(*name)]
            entries[SentName(*name)] = Entry(edge, context.reach.of(edge.node))
        until = time.monotonic() + seconds if seconds else None
        part.take(from_wire(given, gradients), _arrival(worker, gradients))
        part.begin(entries, root=call.caller.id, retain=retain, until=until)
        part.advance()
    except BaseException as error:
        part.fail(error)
    return part.done


def take(context_id: int, number: int, names: Sequence[tuple[int, int]], gradients: Sequence[Tensor | None]) -> None:
    """Handler: gradients of entries of this worker."""
    worker, context = _here(context_id)
    part = _part(worker, context, number)
    part.take(from_wire(names, gradients), _arrival(worker, gradients))
    part.advance()


async def abort(context_id: int, number: int, reason: str) -> None:
    """Handler: that pass has failed elsewhere."""
    worker, context = _here(context_id)
    if number not in context.passed:
        _part(worker, context, number).fail(RpcError(f"the backward pass has failed: {reason}"))


# --- the whole pass ---------------------------------------------------------------------------------------------------


def check_roots(roots: Sequence[Tensor]) -> list[GradientEdge]:
    """The edges of the roots. RpcUsageError if one of them cannot be one, as torch says it."""
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
    return [get_gradient_edge(root) for root in roots]


class Pass:
    """A pass, at the worker that has the roots. Any thread; `start` and `drive` not on a loop."""

    def __init__(
        self, worker: Worker, context: AutogradContext, roots: Sequence[Tensor], retain: bool, until: float | None
    ) -> None:
        """Raises RpcUsageError for roots that cannot be."""
        self.done: Future[None] = Future()
        self.done._what = f"the backward pass of autograd context {context.id}"
        self.done._loop, self.done._executor = worker.loop, worker.pool
        self._worker = worker
        self._context = context
        self._until = until
        self._retain = retain
        self._number = worker.gradients.next_number()
        self._roots = check_roots(roots)
        self._gradients = [torch.ones_like(root) for root in roots]
        self._arrival = _arrival(worker, roots)
        self._part = _part(worker, context, self._number)
        self._plans: dict[int, list[SentName]] = {}
        self._answers = 0  # that are missing
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._gate: Future[None] | None = None  # of the thread that drives it
        self._driven = False

    def start(self) -> None:
        """Do what can be done at once, and tell the others their plans; the rest follows from the answers."""
        try:
            self._start()
        except BaseException as error:
            self._fail(error)

    def _start(self) -> None:
        context, part = self._context, self._part
        names = [SentName(-1, place) for place in range(len(self._roots))]
        edges = dict(zip(names, self._roots, strict=True))
        self._plans = self._close_over(edges.values())
        edges |= {name: context.sent[name] for name in self._plans.pop(self._worker.id, ())}
        entries = {name: Entry(edge, context.reach.of(edge.node)) for name, edge in edges.items()}
        part.take(dict(zip(names, self._gradients, strict=True)), self._arrival)
        part.held = {}
        part.begin(entries, root=self._worker.id, retain=self._retain, until=self._until)
        part.advance()
        held, part.held = part.held, None
        self._answers = len(self._plans)
        seconds = 0.0 if self._until is None else max(1e-3, self._until - time.monotonic())
        part.done._add_callback(self._part_done)
        for worker_id, wanted in self._plans.items():
            told = [tuple(name) for name in wanted]
            said = (context.id, self._number, told, self._retain, seconds, *to_wire(held.pop(worker_id, {})))
            ask(self._worker, worker_id, plan, *said, until=self._until)._add_callback(self._answered)

    def _close_over(self, roots: Iterable[GradientEdge]) -> dict[int, list[SentName]]:
        """The entries of each worker that a gradient will come to."""
        found: set[tuple[int, SentName]] = set()
        for edge in roots:
            behind = self._context.behind(edge)
            if behind is None:
                return self._gather_over(roots)
            found |= behind
        plans: dict[int, list[SentName]] = {}
        for worker_id, name in found:
            plans.setdefault(worker_id, []).append(name)
        return plans

    def _gather_over(self, roots: Iterable[GradientEdge]) -> dict[int, list[SentName]]:
        """The same, by asking: a round trip for each hop of the graph of workers, however often tensors crossed it."""
        reach = self._context.reach
        tables: dict[int, dict[SentName, list[tuple[int, SentName]]]] = {}
        plans: dict[int, list[SentName]] = {}
        seen: set[tuple[int, SentName]] = set()
        todo = [(each.sender, each.name) for edge in roots for each in reach.received_of(reach.of(edge.node))]
        while todo:
            unknown = {worker_id for worker_id, _ in todo} - tables.keys()
            calls = {each: ask(self._worker, each, gather, self._context.id, until=self._until) for each in unknown}
            for worker_id, call in calls.items():
                tables[worker_id] = {
                    SentName(message, place): [(sender, SentName(*name)) for sender, *name in received]
                    for message, place, received in call.wait()
                }
            current, todo = todo, []
            for worker_id, name in current:
                if (worker_id, name) not in seen:
                    seen.add((worker_id, name))
                    plans.setdefault(worker_id, []).append(name)
                    todo += tables[worker_id][name]
        return plans

    # --- what follows from the answers --------------------------------------------------------------------------------

    def _answered(self, call: Future[Wire]) -> None:
        error = call.exception()
        if error is not None:
            self._fail(error)
        else:
            self._do(partial(self._use, call.value()))

    def _use(self, gradients: Wire) -> None:
        """Not on a loop: a part is done, and has sent what came out of it last."""
        self._part.take(from_wire(*gradients), _arrival(self._worker, gradients[1]))
        self._part.advance()
        with self._lock:
            self._answers -= 1
        self._finish()

    def _part_done(self, part: Future[Wire]) -> None:
        error = part.exception()
        if error is not None:
            self._fail(error)
        else:
            self._finish()

    def _finish(self) -> None:
        if not self._answers and self._part.done.done() and self.done._settle(None):
            self._open_gate()

    def _fail(self, error: BaseException) -> None:
        if not self.done._settle(None, error):
            return
        self._part.fail(RpcError(f"the backward pass has failed: {error}"))
        self._open_gate()
        reason = f"{type(error).__name__}: {error}"
        for worker_id in self._plans:
            try:
                said = (self._context.id, self._number, reason)
                call = ask(self._worker, worker_id, abort, *said, until=time.monotonic() + _ABORT_PATIENCE)
            except RpcError:  # we leave
                continue
            call._add_callback(lambda future: future._look())

    # --- threads ------------------------------------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        """Off the loop: in the thread that drives the pass, or in one of the pool."""
        if not self._driven:
            self._worker.pool.submit(self._guarded, job)
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
        """Start it, and do in this thread what there is to do until it has ended. Raises what it ended with."""
        self._driven = True
        try:
            self.start()
            while not self.done.done() or self._jobs:
                gate: Future[None] = Future()
                gate._loop, gate._what = self._worker.loop, self.done._what
                self._gate = gate
                if self._jobs:
                    self._guarded(self._jobs.popleft())
                elif not self.done.done():
                    gate.wait()
        finally:
            self._driven = False
            for job in self._jobs:  # interrupted: somebody else has to
                self._worker.pool.submit(self._guarded, job)
        self.done.wait()
