"""Backward passes over the graphs of several workers.

A worker's part of the graph begins at entries: tensors that it has sent, and roots of its own. It ends in targets:
leaves, and tensors that it has received. A pass, run by the worker that has the roots:

    1. GATHER   ask the workers that took part which of their entries lead to which received tensors
    2.          from the roots, follow sender and receiver: which entries get a gradient in this pass
    3. PLAN     tell each of these workers its entries; answered when its part is done
    4.          each part runs, target by target; TAKE brings gradients to the entries of other workers

States of a part, on the loop: WAITING for its plan (gradients that come early are kept), RUNNING, DONE, FAILED.

Invariants
1. A target is evaluated when all entries of the plan that lead to it have their gradients, and once in a pass. All
   targets that are ready share one run of torch's engine, from those entries. So a node only ever sees complete
   gradients, and hooks on targets and on tensors that were sent see them once.
2. Entries that no root leads to are in no plan: nobody waits for a gradient that does not come.
3. Whoever fails (an exception, a lost worker, the deadline) ends the pass on all workers. What was accumulated by then
   stays in the context.
4. The engine never runs on a loop.

A node that entries with different targets have in common may run once for each of these runs. Asking costs one round
trip for each hop of the graph of workers, however often a tensor went back and forth.

What torch describes as its "smart" mode, and has not built: torch.distributed.autograd counts all entries of a context,
and waits for those that the loss does not use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..errors import RpcError, RpcTimeout, RpcUsageError
from ..futures import Future
from ..runtime.current import current_call
from ..runtime.gradients import AutogradContext, ReceivedTensor, SentName
from ..runtime.worker import Worker
from .reach import Reach

Tensor = torch.Tensor
# An entry of a part: a tensor that was sent, or one of the roots, by their numbers below zero.
Name = SentName
# What the entries of a worker lead to: for each the tensors that came from others, as (worker, message, place).
Table = list[tuple[int, int, list[tuple[int, int, int]]]]

_REACH, _PARTS, _ENDED = "reach", "parts", "ended"


class Entry(NamedTuple):
    """Where a gradient comes in. mask: of the targets that it leads to."""

    edge: GradientEdge
    mask: int


def reach_of(context: AutogradContext) -> Reach:
    """What is known of the graph of a context at this worker."""
    with context.lock:
        reach = context.work.get(_REACH)
        if reach is None:
            reach = context.work[_REACH] = Reach(context.received)
    return reach


# --- a part -----------------------------------------------------------------------------------------------------------


class Part:
    """What one worker does in one pass. On the loop, except where it says otherwise."""

    def __init__(self, worker: Worker, context: AutogradContext, number: int) -> None:
        self._worker = worker
        self._context = context
        self._number = number
        self._entries: dict[Name, Entry] | None = None  # None: the plan has not come
        self._gradients: dict[Name, Tensor | None] = {}  # that have come, by entry; None: nothing flows there
        self._arrivals: list[Any] = []
        self._left = 0  # bits of targets that were not evaluated
        self._retain = False
        self._running = False
        self._delivering = 0
        self.done: asyncio.Future[None] = worker.loop.create_future()

    def begin(self, entries: Mapping[Name, Entry], *, retain: bool, deadline: float | None) -> None:
        """The plan. retain: keep the graph for another pass. deadline: on ``time.monotonic``'s clock."""
        self._entries = dict(entries)
        self._retain = retain
        self._deadline = deadline
        for entry in entries.values():
            self._left |= entry.mask
        self._advance()

    def take(self, gradients: Mapping[Name, Tensor | None], arrival: Any = None) -> None:
        """Gradients of some entries. arrival: of those on devices."""
        self._gradients.update(gradients)
        if arrival is not None:
            self._arrivals.append(arrival)
        if self._entries is not None:
            self._advance()

    def fail(self, error: BaseException) -> None:
        """It cannot be done; the first reason counts."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever waits is told; if nobody does, that is no news

    def _advance(self) -> None:
        if self._running or self.done.done() or self._entries is None:
            return
        blocked = 0
        waiting = False
        for name, entry in self._entries.items():
            if name not in self._gradients:
                blocked |= entry.mask
                waiting = True
        ready = self._left & ~blocked
        if ready:
            self._running = True
            last = ready == self._left and not waiting
            used = [(entry.edge, self._gradients[name]) for name, entry in self._entries.items() if entry.mask & ready]
            arrivals, self._arrivals = self._arrivals, []
            self._worker.pool.submit(self._run, used, ready, self._retain or not last, arrivals)
        elif not self._left and not waiting and not self._delivering:
            self.done.set_result(None)

    def _run(
        self, used: Sequence[tuple[GradientEdge, Tensor | None]], ready: int, retain: bool, arrivals: Sequence[Any]
    ) -> None:
        """In the pool: evaluate some targets."""
        try:
            for arrival in arrivals:
                arrival.join()
            targets = reach_of(self._context).targets_of(ready)
            results = _evaluate([each for each in used if each[1] is not None], targets, retain)
            deliveries: dict[int, list[tuple[Name, Tensor | None]]] = {}
            seen: set[int] = set()
            for target, gradient in zip(targets, results, strict=True):
                if isinstance(target, ReceivedTensor):
                    deliveries.setdefault(target.sender, []).append((target.name, gradient))
                elif gradient is not None:
                    self._context.accumulate(target, _own(gradient, seen))
        except BaseException as error:
            _say_where(error, self._worker.name)
            self._worker.call_on_loop(self.fail, error)
            return
        self._worker.call_on_loop(self._ran, ready, deliveries)

    def _ran(self, ready: int, deliveries: Mapping[int, Sequence[tuple[Name, Tensor | None]]]) -> None:
        self._left &= ~ready
        self._running = False
        for worker_id, gradients in deliveries.items():
            self._deliver(worker_id, gradients)
        self._advance()

    def _deliver(self, worker_id: int, gradients: Sequence[tuple[Name, Tensor | None]]) -> None:
        if self.done.done():
            return
        names = [tuple(name) for name, _ in gradients]
        values = [gradient for _, gradient in gradients]
        self._delivering += 1
        try:
            call = ask(
                self._worker, worker_id, take, self._context.id, self._number, names, values, until=self._deadline
            )
        except BaseException as error:
            self.fail(error)
            return
        call._add_callback(lambda future: self._worker.run_on_loop(self._delivered, future))

    def _delivered(self, call: Future[Any]) -> None:
        self._delivering -= 1
        error = call.exception()
        if error is not None:
            self.fail(error)
        else:
            self._advance()


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
    """Call a function of this module on a worker. until: on ``time.monotonic``'s clock; None: no limit."""
    timeout = 0.0 if until is None else max(1e-3, until - time.monotonic())
    return worker.peers.by_id(worker_id).call(function, args, None, timeout)


def _here(context_id: int) -> tuple[Worker, AutogradContext]:
    call = current_call.get()
    assert call is not None, "only called by workers"
    return call.worker, call.worker.gradients.get(context_id)


def _part(worker: Worker, context: AutogradContext, number: int) -> Part:
    """The part of a pass, made by whichever of its messages comes first. On the loop."""
    if number in context.work.setdefault(_ENDED, set()):
        raise RpcError(f"the backward pass {number} of context {context.id} has ended on worker {worker.name!r}")
    parts = context.work.setdefault(_PARTS, {})
    part: Part | None = parts.get(number)
    if part is None:
        part = parts[number] = Part(worker, context, number)
    return part


def _end_part(context: AutogradContext, number: int) -> None:
    context.work.get(_PARTS, {}).pop(number, None)
    context.work.setdefault(_ENDED, set()).add(number)


def gather(context_id: int) -> Table:
    """Handler: what the entries of this worker lead to. In the pool: it looks at the whole graph."""
    _, context = _here(context_id)
    reach = reach_of(context)
    table: Table = []
    for name, edge in list(context.sent.items()):
        received = reach.received_of(reach.of(edge.node))
        table.append((*name, [(each.sender, *each.name) for each in received]))
    return table


async def plan(context_id: int, number: int, names: Sequence[tuple[int, int]], retain: bool, seconds: float) -> None:
    """Handler: these entries get gradients in that pass. Answered when all is done that follows from them here."""
    worker, context = _here(context_id)
    part = _part(worker, context, number)
    reach = reach_of(context)
    try:
        edges = {SentName(*name): context.sent[SentName(*name)] for name in names}
        entries = {name: Entry(edge, reach.of(edge.node)) for name, edge in edges.items()}
        part.begin(entries, retain=retain, deadline=time.monotonic() + seconds if seconds else None)
        await part.done
    finally:
        _end_part(context, number)


async def take(
    context_id: int, number: int, names: Sequence[tuple[int, int]], gradients: Sequence[Tensor | None]
) -> None:
    """Handler: gradients of entries of this worker."""
    worker, context = _here(context_id)
    received = {SentName(*name): gradient for name, gradient in zip(names, gradients, strict=True)}
    on_device = any(gradient is not None and not gradient.is_cpu for gradient in gradients)
    _part(worker, context, number).take(received, worker.accelerators.arrival() if on_device else None)


async def abort(context_id: int, number: int, reason: str) -> None:
    """Handler: that pass has failed elsewhere."""
    worker, context = _here(context_id)
    if number not in context.work.get(_ENDED, ()):
        _part(worker, context, number).fail(RpcError(f"the backward pass has failed: {reason}"))
        _end_part(context, number)


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
    """A pass, at the worker that has the roots. On the loop."""

    def __init__(
        self, worker: Worker, context: AutogradContext, roots: Sequence[Tensor], retain: bool, until: float | None
    ) -> None:
        """Any thread. Raises RpcUsageError for roots that cannot be."""
        self._worker = worker
        self._context = context
        self._until = until
        self._retain = retain
        self._number = worker.gradients.next_number()
        self._roots = check_roots(roots)
        self._gradients = [torch.ones_like(root) for root in roots]
        self._arrival = worker.accelerators.arrival() if any(not root.is_cpu for root in roots) else None

    async def run(self) -> None:
        """Raises what the first failing part raised."""
        reach = reach_of(self._context)
        names = [SentName(-1, place) for place in range(len(self._roots))]
        edges = dict(zip(names, self._roots, strict=True))
        entries = await in_pool(self._worker, lambda: {n: Entry(e, reach.of(e.node)) for n, e in edges.items()})
        wanted = [(each.sender, each.name) for entry in entries.values() for each in reach.received_of(entry.mask)]
        plans = await self._close_over(wanted) if wanted else {}
        for name in plans.pop(self._worker.id, ()):
            edge = self._context.sent[name]
            entries[name] = Entry(edge, reach.of(edge.node))
        await self._carry_out(entries, dict(zip(names, self._gradients, strict=True)), plans)

    async def _close_over(self, wanted: Iterable[tuple[int, SentName]]) -> dict[int, list[SentName]]:
        """The entries of each worker that a gradient will come to."""
        tables: dict[int, dict[SentName, list[tuple[int, SentName]]]] = {}
        found: dict[int, list[SentName]] = {}
        seen: set[tuple[int, SentName]] = set()
        todo = list(wanted)
        while todo:
            unknown = {worker_id for worker_id, _ in todo} - tables.keys()
            answers = [
                ask(self._worker, worker_id, gather, self._context.id, until=self._until) for worker_id in unknown
            ]
            for worker_id, answer in zip(unknown, answers, strict=True):
                tables[worker_id] = {
                    SentName(message, place): [(sender, SentName(*name)) for sender, *name in received]
                    for message, place, received in await answer
                }
            current, todo = todo, []
            for worker_id, name in current:
                if (worker_id, name) in seen:
                    continue
                seen.add((worker_id, name))
                found.setdefault(worker_id, []).append(name)
                if name not in tables[worker_id]:
                    raise RpcError(
                        f"worker {self._worker.peers.describe(worker_id)!r} has forgotten that it sent a tensor in "
                        f"autograd context {self._context.id}"
                    )
                todo += tables[worker_id][name]
        return found

    async def _carry_out(
        self,
        entries: Mapping[Name, Entry],
        gradients: Mapping[Name, Tensor],
        plans: Mapping[int, Sequence[SentName]],
    ) -> None:
        part = _part(self._worker, self._context, self._number)
        seconds = 0.0 if self._until is None else max(1e-3, self._until - time.monotonic())
        waits: list[asyncio.Future[Any]] = []
        try:
            for worker_id, names in plans.items():
                told = [tuple(name) for name in names]
                call = ask(
                    self._worker,
                    worker_id,
                    plan,
                    self._context.id,
                    self._number,
                    told,
                    self._retain,
                    seconds,
                    until=self._until,
                )
                waits.append(asyncio.ensure_future(_result(call)))
            part.take(gradients, self._arrival)
            part.begin(entries, retain=self._retain, deadline=self._until)
            waits.append(part.done)
            await self._all(waits)
        except BaseException as error:
            part.fail(RpcError(f"the backward pass has failed: {error}"))
            self._tell_of(error, plans)
            raise
        finally:
            for wait in waits:
                wait.cancel()
            _end_part(self._context, self._number)

    async def _all(self, waits: Sequence[asyncio.Future[Any]]) -> None:
        limit = None if self._until is None else max(0.0, self._until - time.monotonic())
        done, pending = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        for each in done:
            each.result()
        if pending:
            raise RpcTimeout(f"the backward pass of context {self._context.id} was not done in time")

    def _tell_of(self, error: BaseException, plans: Mapping[int, Any]) -> None:
        """The others need not wait any longer."""
        for worker_id in plans:
            try:
                call = ask(
                    self._worker,
                    worker_id,
                    abort,
                    self._context.id,
                    self._number,
                    f"{type(error).__name__}: {error}",
                    until=time.monotonic() + 10.0,
                )
            except RpcError:  # it is the one that is gone
                continue
            call._add_callback(lambda future: future._look())


async def _result(call: Future[Any]) -> Any:
    return await call


async def in_pool(worker: Worker, function: Any) -> Any:
    """What a function gives that takes too long for the loop."""
    result: asyncio.Future[Any] = worker.loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not result.done():
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

    def run() -> None:
        try:
            value = function()
        except BaseException as error:
            worker.call_on_loop(settle, None, error)
        else:
            worker.call_on_loop(settle, value, None)

    worker.pool.submit(run)
    return await result
