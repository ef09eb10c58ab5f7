"""One worker's part in a backward pass (see `passes`), and what workers ask of each other in one.

States of a part: WAITING for its plan (gradients that come early are kept), RUNNING, DONE, FAILED.
"""

from __future__ import annotations

import itertools
import operator
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from ..channels.landing import Arrival
from ..errors import RpcError, RpcUsageError
from ..futures import Future
from ..runtime.calls.current import current_call
from ..runtime.calls.functions import async_execution, inline, intrinsic
from ..runtime.calls.values import Results
from ..runtime.gradients.contexts import AutogradContext, LeafSink, current_autograd
from ..runtime.gradients.reach import FOREIGN, ReceivedTensor, SentName, Target
from ..runtime.node import Node, serving

Tensor = torch.Tensor
# On the wire: the names of entries, packed, and then the gradient of each; None: nothing flows there.
Wire = Results
Gradients = dict[SentName, Tensor | None]
_new: Any = tuple.__new__  # what SentName(...) and Entry(...) do, without their calls into Python
_LEAF, _GRADIENT = operator.itemgetter(0), operator.itemgetter(1)


class Entry(NamedTuple):
    """Where a gradient comes in. mask: of the targets that it leads to."""

    edge: GradientEdge
    mask: int


# --- a part -----------------------------------------------------------------------------------------------------------


class Part:
    """What one worker does in one pass. Any thread; `advance` not on a loop.

    done: a Future of the gradients for entries of the worker that runs the pass that were not sent before.
    """

    def __init__(self, node: Node, context: AutogradContext, number: int) -> None:
        self.done: Future[Wire] = Future()
        self.done.subject = f"the part of worker {node.engine.name!r} in a backward pass"
        self.done.loop, self.done.executor = node.engine.loop, node.engine.pool
        self.held: dict[int, Gradients] | None = None  # gradients for others, while they are not to be sent
        self._node = node
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
        self._ended = False
        self._sink: LeafSink | None = None  # that has taken gradients of leaves
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
        if self.done.settle(None, error):
            self.done.mark_seen()  # whoever waits is told; if nobody does, that is no news
        self._kept(failed=True)

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
                used = []
                for name, entry in self._entries.items():
                    if entry.mask & ready:
                        used.append((entry.edge, self._gradients[name]))
                arrivals, self._arrivals = self._arrivals, []
            try:
                deliveries = self._run(used, ready, self._retain or not last, arrivals)
            except BaseException as error:
                _say_where(error, self._node.engine.name)
                self._running = False
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
        if FOREIGN in targets:
            raise RpcUsageError(
                "the graph goes on in a tensor that was received in another autograd context. Contexts do not mix: "
                "call again in this one; a @batched function must not gather calls of several contexts that go backward"
            )
        given: list[tuple[GradientEdge, Tensor]] = []
        taken: set[int] = set()
        for edge, gradient in used:
            if gradient is not None:
                given.append((edge, gradient))
                taken.add(_memory_of(gradient))
        results = _evaluate(given, targets, retain)
        holders = _references(results)
        deliveries: dict[int, Gradients] = {}
        leaves: list[tuple[Tensor, Tensor]] = []
        for target, gradient in zip(targets, results, strict=True):
            if isinstance(target, ReceivedTensor):
                deliveries.setdefault(target.sender, {})[target.name] = gradient
                taken.add(_memory_of(gradient))
        for target, gradient, count in zip(targets, results, holders, strict=True):
            if gradient is not None and isinstance(target, Tensor):
                leaves.append((target, gradient.clone() if count > _ALONE else _own(gradient, taken)))
        self._accumulate(leaves)
        return deliveries

    def _accumulate(self, leaves: Sequence[tuple[Tensor, Tensor]]) -> None:
        sink, gradients = self._node.gradients.sink, list(map(_GRADIENT, leaves))
        hooks = self._context.reach.hooks
        if sink is not None and leaves:
            self._sink = sink
            leaves = sink.take(self._context, leaves)
        hooked = any(map(hooks.__getitem__, map(id, map(_LEAF, leaves))))
        if hooked:
            leaves = [(leaf, hooks[id(leaf)].before(gradient)) for leaf, gradient in leaves]
        self._context.accumulate(leaves, arrival_of(self._node, gradients))
        if hooked:
            for leaf, gradient in leaves:
                hooks[id(leaf)].after(gradient)

    def _kept(self, failed: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """What the sink has kept, once it is at rest; nothing the second time."""
        with self._lock:
            if self._running:  # whoever runs comes here afterwards
                return ()
            sink, self._sink = self._sink, None
        if sink is None:
            return ()
        self._context.accumulate((), None)  # this thread's streams wait for what `take` has begun on devices
        return sink.finish(self._context, failed)

    def _hand_on(self, ready: int, deliveries: dict[int, Gradients]) -> None:
        """Some targets are done: their gradients go to whoever has sent them."""
        with self._lock:
            assert self._entries is not None, "it runs"
            self._gradients.update(deliveries.pop(self._node.engine.id, {}))
            self._left &= ~ready
            self._running = False
            if not self._left and self._entries.keys() <= self._gradients.keys():  # the plan's answer takes them along
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
            call = ask(self._node, worker_id, take, *said, until=self._until)
        except BaseException as error:
            self.fail(error)
            return
        call.when_settled(self._delivered)

    def _delivered(self, call: Future[Any]) -> None:
        error = call.exception()
        if error is not None:
            self.fail(error)
            return
        with self._lock:
            self._delivering -= 1
        self._finish()

    def _finish(self) -> None:
        if self.done.done():  # it failed meanwhile
            self._kept(failed=True)
            return
        with self._lock:
            if self._ended or self._entries is None or self._running or self._left or self._delivering:
                return
            if not self._entries.keys() <= self._gradients.keys():
                return
            self._ended = True
        if kept := self._kept(failed=False):
            self._context.accumulate(kept, arrival_of(self._node, [gradient for _, gradient in kept]))
        self.done.settle(to_wire(self._home))


def to_wire(gradients: Gradients) -> Wire:
    """Values side by side: in a list they would be pickled."""
    return Results((pack_names(gradients), *gradients.values()))


def from_wire(names: bytes, *gradients: Tensor | None) -> Gradients:
    """What `to_wire` was given."""
    return dict(zip(unpack_names(names), gradients, strict=True))


def pack_names(names: Collection[SentName]) -> bytes:
    """Names of entries, in their order."""
    return struct.pack(f"<{2 * len(names)}q", *itertools.chain.from_iterable(names))


def unpack_names(packed: bytes) -> list[SentName]:
    """What `pack_names` was given."""
    numbers = iter(struct.unpack(f"<{len(packed) // 8}q", packed))
    return list(map(_new, itertools.repeat(SentName), zip(numbers, numbers, strict=True)))


def arrival_of(node: Node, gradients: Iterable[Tensor | None]) -> Arrival | None:
    """What users of these wait for, if any are on a device."""
    if node.accelerators.accelerator is None:
        return None
    on_device = any(gradient is not None and not gradient.is_cpu for gradient in gradients)
    return node.accelerators.arrival() if on_device else None


def _evaluate(
    entries: Sequence[tuple[GradientEdge, Tensor]], targets: Sequence[Target], retain: bool
) -> Sequence[Tensor | None]:
    if not entries:
        return [None] * len(targets)
    outputs, gradients = zip(*entries, strict=True)
    inputs: Any = [target.edge if isinstance(target, ReceivedTensor) else target for target in targets]
    results: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, inputs, gradients, retain_graph=retain, allow_unused=True
    )
    return results


def _own(gradient: Tensor, taken: set[int]) -> Tensor:
    """A gradient that shares memory with no other one: the engine gives one tensor, or views of one, to several inputs,
    and may hand through what it was given."""
    memory = _memory_of(gradient)
    if memory in taken or (gradient.layout is torch.strided and 0 in gradient.stride()):
        return gradient.clone(memory_format=torch.contiguous_format)
    taken.add(memory)
    return gradient


def _memory_of(tensor: Tensor | None) -> int:
    """Equal for tensors that share it; of what has no storage of its own, the object's."""
    if tensor is None or tensor.layout is not torch.strided:
        return id(tensor)
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _references(tensors: Sequence[Tensor | None]) -> list[int]:
    return list(map(sys.getrefcount, tensors))


# What it counts for a tensor that nobody else has: a custom Function may have kept what it returned.
_ALONE = _references((torch.empty(0),))[0]


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


def ask(node: Node, worker_id: int, function: Any, /, *args: Any, until: float | None) -> Future[Any]:
    """Call a function of the runtime's on a worker, in no context. until: on ``time.monotonic``'s clock, or None."""
    timeout = 0.0 if until is None else max(1e-3, until - time.monotonic())
    token = current_autograd.set(0)
    try:
        return node.peers.by_id(worker_id).call(function, args, None, timeout)
    finally:
        current_autograd.reset(token)


def _here(context_id: int) -> tuple[Node, AutogradContext]:
    node, _ = serving()
    return node, node.gradients.get(context_id)


def part_of(node: Node, context: AutogradContext, number: int) -> Part:
    """The part of a pass, made by whichever of its messages comes first."""
    with context.lock:
        if number in context.passed:
            raise RpcError(f"this backward pass of context {context.id} has ended on worker {node.engine.name!r}")
        part: Part | None = context.parts.get(number)
        if part is None:
            part = context.parts[number] = Part(node, context, number)
            part.done.when_settled(lambda _: _end_part(context, number))
        return part


def _end_part(context: AutogradContext, number: int) -> None:
    context.passed.add(number)
    context.parts.pop(number, None)


@intrinsic
def gather(context_id: int) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """Handler: for each entry of this worker, as (message, place), the tensors it leads to, as (worker, ..)."""
    _, context = _here(context_id)
    table = []
    for name, edge in list(context.sent.items()):
        received = context.reach.received_of(context.reach.of(edge.node))
        table.append((*name, [(each.sender, *each.name) for each in received]))
    return table


@intrinsic
@async_execution
def plan(
    context_id: int,
    number: int,
    names: bytes,
    retain: bool,
    seconds: float,
    given: bytes,
    *gradients: Tensor | None,
) -> Future[Wire]:
    """Handler: these entries get gradients in that pass, of which some are given. Completes with the part."""
    node, context = _here(context_id)
    call = current_call.get()
    assert call is not None, "it is served"
    part = part_of(node, context, number)
    try:
        entries = {}
        for name in unpack_names(names):
            edge = context.sent.get(name)
            if edge is None:
                raise RpcError(
                    f"worker {node.engine.name!r} knows nothing of tensor {tuple(name)} that it is said to have sent"
                )
            entries[name] = _new(Entry, (edge, context.reach.of(edge.node)))
        until = time.monotonic() + seconds if seconds else None
        part.take(from_wire(given, *gradients), arrival_of(node, gradients))
        part.begin(entries, root=call.caller_id, retain=retain, until=until)
        part.advance()
    except BaseException as error:
        part.fail(error)
    return part.done


@intrinsic
def take(context_id: int, number: int, names: bytes, *gradients: Tensor | None) -> None:
    """Handler: gradients of entries of this worker."""
    node, context = _here(context_id)
    part = part_of(node, context, number)
    part.take(from_wire(names, *gradients), arrival_of(node, gradients))
    part.advance()


@inline
def abort(context_id: int, number: int, reason: str) -> None:
    """Handler: that pass has failed elsewhere."""
    node, context = _here(context_id)
    if number not in context.passed:
        part_of(node, context, number).fail(RpcError(f"the backward pass has failed: {reason}"))
