"""One worker's part in a backward pass (see `passes`), and what workers ask of each other in one.

The worker that runs the pass asks each of the others how far its part is, and has one such question open there or on
its way until the part is over. PLAN is the first; each later one brings the gradients that are there by then, if any.

    from      event                                          to        the open question
    WAITING   gradients come before the plan                 WAITING   stays open
    WAITING   the plan                                       RUNNING
    RUNNING   gradients for the worker that asks came out    RUNNING   is answered with them: there will be more
    RUNNING   the next question                              RUNNING   is answered, and the next one is open
    RUNNING   all is evaluated and handed on                 READY
    READY     a question is open                             DONE      is answered with what came out last
              (what the plan wants done at the end is done before that: see `Closing`)
    any       an error, a lost worker, the end of a context  FAILED    is answered with the error
"""

from __future__ import annotations

import itertools
import operator
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

from .. import foreign
from ..channels.landing import Arrival
from ..channels.layout import EMBEDDED_SIZE
from ..errors import RpcError, RpcUsageError
from ..futures import Future
from ..protocol.reference_messages import ReferenceId
from ..runtime.calls.current import current_call, permits
from ..runtime.calls.functions import async_execution, brief, intrinsic
from ..runtime.calls.values import Results
from ..runtime.gradients.contexts import AutogradContext, LeafSink, current_autograd
from ..runtime.gradients.reach import FOREIGN, Leaf, ReceivedTensor, SentName, Target
from ..runtime.node import Node, serving

Tensor = torch.Tensor
# On the wire: the names of entries, packed, and then the gradient of each; None: nothing flows there.
Wire = Results
Gradients = dict[SentName, Tensor | None]
_new: Any = tuple.__new__  # what SentName(...) and Entry(...) do, without their calls into Python
_LEAF, _GRADIENT, _EDGE = operator.itemgetter(0), operator.itemgetter(1), operator.attrgetter("edge")


class Entry(NamedTuple):
    """Where a gradient comes in. mask: of the targets that it leads to."""

    edge: GradientEdge
    mask: int


class Closing(ABC):
    """What a worker may be asked to do last in its part of a pass: the step of an optimizer of its own.

    Others name it by a reference to it.
    """

    @abstractmethod
    def close_part(self, node: Node, context_id: int, part: Part, seconds: float | None) -> bool:
        """All gradients of that worker are in the context; whether there was anything to do. In a thread, never on a
        loop. part: if it is over, nothing is to be done any more. seconds: for which it may wait. What it raises is the
        error of the pass."""


class RunsPass(Protocol):
    """Runs the pass, on the worker that has the roots (`Pass`)."""

    def hand_on(self, worker_id: int, gradients: Gradients) -> None:
        """These gradients came out here for another worker. In a thread, never on a loop."""

    def part_over(self, part: Part) -> None:
        """The part of this worker is over. Any thread."""


class _RanPass:
    """Stands for a pass that has ended, which nobody has to tell anything."""

    def hand_on(self, worker_id: int, gradients: Gradients) -> None:
        """See `RunsPass`."""

    def part_over(self, part: Part) -> None:
        """See `RunsPass`."""


_RAN_PASS = _RanPass()


# --- a part -----------------------------------------------------------------------------------------------------------


class Part:
    """What one worker does in one pass. Any thread; `advance` not on a loop.

    over: whether it is DONE or FAILED. error: why it has failed. closed: what `Closing.close_part` has said. reached:
    `id` of each leaf of this worker that has got a gradient in this pass.
    """

    def __init__(self, node: Node, context: AutogradContext, number: int, runs: RunsPass | None) -> None:
        """runs: what runs the pass, if that is this worker."""
        self.over = False
        self.error: BaseException | None = None
        self.closed = False
        self.reached: set[int] = set()
        self.held: dict[int, Gradients] | None = None  # gradients for others, while they are not to be sent
        self._runs = runs
        self._node = node
        self._context = context
        self._number = number
        self._lock = threading.Lock()
        self._entries: dict[SentName, Entry] | None = None  # None: the plan has not come
        self._gradients: Gradients = {}  # that have come
        self._arrivals: list[Arrival] = []
        self._left = 0  # bits of targets that were not evaluated
        self._retain = False
        self._root = -1  # who runs the pass
        self._until: float | None = None
        self._closing: Closing | None = None
        self._running = False
        self._ended = False  # somebody has found that nothing is left to do
        self._ready_to_end = False  # and has done what comes last
        self._sink: LeafSink | None = None  # that has taken gradients of leaves
        self._delivering = 0
        self._home: Gradients = {}  # that came out for who runs the pass, and were not told yet
        self._question: Future[Wire] | None = None  # of who runs the pass, which is open

    def begin(
        self, entries: dict[SentName, Entry], *, retain: bool, until: float | None, closing: Closing | None = None
    ) -> None:
        """The plan. retain: keep the graph for another one. until: as of `ask`. closing: what is to be done last."""
        with self._lock:
            self._retain, self._until, self._closing = retain, until, closing
            for entry in entries.values():
                self._left |= entry.mask
            self._entries = entries

    def take(self, gradients: Mapping[SentName, Tensor | None], arrival: Arrival | None = None) -> None:
        """Gradients of some entries. arrival: of those on devices."""
        with self._lock:
            self._gradients.update(gradients)
            if arrival is not None:
                self._arrivals.append(arrival)

    def question(self, worker_id: int) -> Future[Wire]:
        """That worker runs the pass and asks: see the module. RpcError if it is another one that does."""
        asked: Future[Wire] = Future()
        asked.loop, asked.executor = self._node.engine.loop, self._node.engine.pool
        with self._lock:
            if self._root not in (-1, worker_id):
                raise RpcError(f"worker {worker_id} does not run this backward pass of context {self._context.id}")
            self._root = worker_id
            before, self._question = self._question, asked
        if before is not None:
            before.settle(to_wire({}, MORE))
        if self.over:
            self._refuse()
        return asked

    def _refuse(self) -> None:
        """It is over: an open question learns why it has failed, or nothing, if another one has had the last answer."""
        with self._lock:
            asked, self._question = self._question, None
        if asked is not None:
            asked.settle(to_wire({}, MORE), self.error)

    def fail(self, error: BaseException) -> None:
        """It cannot be done; the first reason counts."""
        self._end(error)
        self._refuse()
        self._kept(failed=True)

    def let_go(self) -> None:
        """The pass that this worker runs has ended: it is kept no longer.

        The two refer to each other, and would keep the graph and the gradients until the garbage collector comes.
        """
        self._runs = _RAN_PASS

    def _end(self, error: BaseException | None) -> bool:
        """It is over; False if it was before."""
        with self._lock:
            if self.over:
                return False
            self.error = error
            self._context.passed[self._number] = error
            self._context.parts.pop(self._number, None)
            self.over = True  # the last of these: who is interrupted before it does them again
        if self._runs is not None:
            self._runs.part_over(self)
        return True

    def advance(self) -> None:
        """Run what is ready, here and now; whatever then is ready, too."""
        while not self.over:
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
                    if not entry.mask & ready:
                        continue
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
        if any(map(_IS_FOREIGN, targets)):  # `in` would compare each target with it
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
        try:
            results = _evaluate(given, targets, retain)
        except BaseException as error:
            _say_what_changed(error, targets)
            raise
        holders = _references(results)
        deliveries: dict[int, Gradients] = {}
        leaves: list[tuple[Leaf, Tensor]] = []
        for target, gradient in zip(targets, results, strict=True):
            if isinstance(target, ReceivedTensor):
                deliveries.setdefault(target.sender, {})[target.name] = gradient
                taken.add(_memory_of(gradient))
        for target, gradient, count in zip(targets, results, holders, strict=True):
            # A leaf that was frozen since the graph was made gets none: its own node would not accumulate any either.
            if gradient is not None and isinstance(target, Leaf) and target.tensor.requires_grad:
                leaves.append((target, gradient.clone() if count > _ALONE else _own(gradient, taken)))
        if self.over:  # it has failed or was given up meanwhile
            return {}
        if leaves:
            self._accumulate(leaves)
        return deliveries

    def _accumulate(self, leaves: list[tuple[Leaf, Tensor]]) -> None:
        sink, gradients = self._node.gradients.sink, list(map(_GRADIENT, leaves))
        pairs: Sequence[tuple[Tensor, Tensor]] = [(leaf.tensor, gradient) for leaf, gradient in leaves]
        self.reached.update(map(id, map(_LEAF, pairs)))
        if sink is not None:
            self._sink = sink
            pairs = sink.take(self._context, pairs)
            left = set(map(id, map(_LEAF, pairs)))
            leaves = [each for each in leaves if id(each[0].tensor) in left]
        hooked = [leaf for leaf, _ in leaves if leaf.prehooks or leaf.posthooks]
        if hooked:
            with torch.no_grad():  # as in torch's engine: what hooks make of gradients has no graph of its own
                leaves = [(leaf, leaf.before(gradient)) for leaf, gradient in leaves]
            pairs = [(leaf.tensor, gradient) for leaf, gradient in leaves]
        self._context.accumulate(pairs, partial(arrival_of, self._node, gradients))
        if hooked:
            with torch.no_grad():
                for leaf, gradient in leaves:
                    leaf.after(gradient)

    def _kept(self, failed: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """What the sink has kept, once it is at rest; nothing the second time."""
        with self._lock:
            if self._running:  # whoever runs comes here afterwards
                return ()
            sink, self._sink = self._sink, None
        if sink is None:
            return ()
        self._context.accumulate(())  # this thread's streams wait for what `take` has begun on devices
        return sink.finish(self._context, failed)

    def _hand_on(self, ready: int, deliveries: dict[int, Gradients]) -> None:
        """Some targets are done: their gradients go to whoever has sent them."""
        with self._lock:
            assert self._entries is not None, "it runs"
            self._gradients.update(deliveries.pop(self._node.engine.id, {}))
            self._left &= ~ready
            self._running = False
            self._home.update(deliveries.pop(self._root, {}))
            if self.held is not None:
                for worker_id, gradients in deliveries.items():
                    self.held.setdefault(worker_id, {}).update(gradients)
                return
            if self._runs is None:
                self._delivering += len(deliveries)
        for worker_id, gradients in deliveries.items():
            self._deliver(worker_id, gradients)

    def _deliver(self, worker_id: int, gradients: Gradients) -> None:
        try:
            if self._runs is not None:
                self._runs.hand_on(worker_id, gradients)
                return
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
        """Nothing more can be run now: say what has come out, or that all is done."""
        if self.over:  # it failed meanwhile
            self._kept(failed=True)
            return
        with self._lock:
            if self._entries is None or self._running:
                return
            done = not (self._left or self._delivering) and self._entries.keys() <= self._gradients.keys()
            first = done and not self._ended
            if first:
                self._ended = True
        if first:
            if kept := self._kept(failed=False):
                gradients = [gradient for _, gradient in kept]
                self._context.accumulate(kept, partial(arrival_of, self._node, gradients))
            if self._closing is not None and self._node.engine.on_loop:  # an answer has come there
                self._node.engine.pool.submit(self._close, self._closing)
                return
            if self._closing is not None:
                self._close(self._closing)
                return
            self._ready_to_end = True
        self._tell()

    def _close(self, closing: Closing) -> None:
        """Do what comes last, in a thread."""
        if self.over:  # meanwhile
            return
        try:
            seconds = None if self._until is None else max(0.0, self._until - time.monotonic())
            self.closed = closing.close_part(self._node, self._context.id, self, seconds)
        except BaseException as error:
            self.fail(error)
            return
        self._ready_to_end = True
        self._tell()

    def _tell(self) -> None:
        """Answer the open question, if there is anything to say; with the last answer the part is over."""
        with self._lock:
            asked, last = self._question, self._ready_to_end
            if self._runs is None and (asked is None or not (last or self._home)):
                return
            if self._ended and not last:  # whoever has found that comes here
                return
            self._question = None
            home, self._home = self._home, {}
        if last and not self._end(None) and asked is not None:
            asked.settle(None, self.error)
        elif asked is not None:
            nothing_done = self._closing is not None and not self.closed
            asked.settle(to_wire(home, MORE if not last else NOT_CLOSED if nothing_done else b""))


# What an answer says of the part, behind the names of its gradients. Nothing: that was the last one.
MORE = b"+"  # others will follow it
NOT_CLOSED = b"-"  # that was the last one, and what the plan wants done last had nothing to do


def to_wire(gradients: Gradients, said: bytes = b"") -> Wire:
    """Values side by side: in a list they would be pickled. said: of an answer, see `MORE`."""
    return Results((pack_names(gradients) + said, *map(_short, gradients.values())))


def _short(gradient: Tensor | None) -> Tensor | None:
    """A dense copy of a short gradient that was expanded, as that of a sum is: strides cost more than its elements."""
    if gradient is None or not gradient.is_cpu or gradient.layout is not torch.strided or gradient.is_contiguous():
        return gradient
    return gradient.contiguous() if gradient.nbytes <= EMBEDDED_SIZE and 0 in gradient.stride() else gradient


def said_of_part(names: bytes) -> bytes:
    """What an answer with these packed names says of the part: MORE, NOT_CLOSED or nothing."""
    return names[len(names) // 8 * 8 :]


def from_wire(names: bytes, *gradients: Tensor | None) -> Gradients:
    """What `to_wire` was given."""
    return dict(zip(unpack_names(names), gradients, strict=True))


def pack_names(names: Collection[SentName]) -> bytes:
    """Names of entries, in their order."""
    return struct.pack(f"<{2 * len(names)}q", *itertools.chain.from_iterable(names))


def unpack_names(packed: bytes) -> list[SentName]:
    """What `pack_names` was given."""
    numbers = iter(struct.unpack_from(f"<{len(packed) // 8}q", packed))
    return list(map(_new, itertools.repeat(SentName), zip(numbers, numbers, strict=True)))


def arrival_of(node: Node, gradients: Sequence[Tensor | None], *, kept: bool = False) -> Arrival | None:
    """What users of these wait for, if any are on a device. kept: it has them, and keeps them for who joins it."""
    if node.accelerators.accelerator is None:
        return None
    on_device = any(gradient is not None and not gradient.is_cpu for gradient in gradients)
    return node.accelerators.arrival(gradients if kept else None) if on_device else None


def _evaluate(
    entries: Sequence[tuple[GradientEdge, Tensor]], targets: Sequence[Target], retain: bool
) -> Sequence[Tensor | None]:
    if not entries:
        return [None] * len(targets)
    outputs, gradients = zip(*entries, strict=True)
    inputs = tuple(map(_EDGE, targets))
    # What `torch.autograd.grad` comes to for edges, with a quarter of its functions: the engine compares shapes and
    # types of the gradients by itself.
    results: Sequence[Tensor | None] = _engine_run_backward(
        outputs, gradients, retain, False, inputs, allow_unreachable=True, accumulate_grad=False
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


_IS_FOREIGN = partial(operator.is_, FOREIGN)
# What it counts for a tensor that nobody else has: a custom Function may have kept what it returned.
_ALONE = _references((torch.empty(0),))[0]


def _say_what_changed(error: BaseException, targets: Sequence[Target]) -> None:
    """Note each leaf that has changed since the forward pass: what a node has saved of it does not fit then."""
    for target in targets:
        change = target.change() if isinstance(target, Leaf) else None
        if change is not None:
            foreign.add_note(error, change)


def _say_where(error: BaseException, worker: str) -> None:
    """Note worker and node, which the error itself says nothing of."""
    node = None
    traceback = foreign.field(error, "__traceback__")
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        first = names.get(code.co_varnames[0]) if code.co_argcount and code.co_varnames else None
        if isinstance(first, torch.autograd.graph.Node):
            node = first.name()
        traceback = traceback.tb_next
    foreign.add_note(error, f"in the backward pass on worker {worker!r}" + (f", at node {node}" if node else ""))


# --- calls between workers --------------------------------------------------------------------------------------------


def ask(
    node: Node, worker_id: int, function: Any, /, *args: Any, until: float | None, system: bool = False
) -> Future[Any]:
    """Call a function of the runtime's on a worker, in no context.

    until: on ``time.monotonic``'s clock, or None. system: as of `Peer.call`.
    """
    timeout = 0.0 if until is None else max(1e-3, until - time.monotonic())
    token = current_autograd.set(0)
    try:
        return node.peers.by_id(worker_id).call(function, args, None, timeout, system=system)
    finally:
        current_autograd.reset(token)


def _here(context_id: int) -> tuple[Node, AutogradContext]:
    node, _ = serving()
    return node, node.gradients.get(context_id)


def part_of(node: Node, context: AutogradContext, number: int, runs: RunsPass | None = None) -> Part:
    """The part of a pass, made by whichever of its messages comes first. runs: as of `Part`."""
    with context.lock:
        if number in context.passed:
            raise RpcError(f"this backward pass of context {context.id} has ended on worker {node.engine.name!r}")
        part: Part | None = context.parts.get(number)
        if part is None:
            part = context.parts[number] = Part(node, context, number, runs)
        return part


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
    last: bytes,
    given: bytes,
    *gradients: Tensor | None,
) -> Future[Wire]:
    """Handler: these entries get gradients in that pass, of which some are given. It is the first question.

    last: the reference to a `Closing` of this worker, packed; empty: nothing is to be done at the end.
    """
    node, context = _here(context_id)
    call = current_call.get()
    assert call is not None, "it is served"
    part = part_of(node, context, number)
    asked = part.question(call.caller_id)
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
        part.take(from_wire(given, *gradients), arrival_of(node, gradients, kept=True))
        part.begin(entries, retain=retain, until=until, closing=_closing(node, last, until) if last else None)
        part.advance()
    except BaseException as error:
        part.fail(error)
    return asked


_REFERENCE = struct.Struct("<qqQ")


def pack_reference(rref: ReferenceId) -> bytes:
    """The reference to a `Closing`, for a plan."""
    return _REFERENCE.pack(*rref)


def _closing(node: Node, packed: bytes, until: float | None) -> Closing:
    """What is to be done at the end. NotAllowed if the worker that asks may not have it done."""
    seconds = None if until is None else max(0.0, until - time.monotonic())
    found = node.references.value(*_REFERENCE.unpack(packed)).wait(seconds)
    if not isinstance(found, Closing):
        raise RpcError(f"a backward pass cannot end with a step of a {type(found).__qualname__}")
    rights = permits()
    if rights is not None:
        rights.check_method(found, "step")
    return found


@intrinsic
@async_execution
def go_on(context_id: int, number: int, names: bytes, *gradients: Tensor | None) -> Future[Wire]:
    """Handler: gradients of entries of this worker, from the one that runs the pass, with its next question."""
    node, context = _here(context_id)
    call = current_call.get()
    assert call is not None, "it is served"
    given = from_wire(names, *gradients)
    part = context.parts.get(number)
    if part is None and number in context.passed:  # a later question has overtaken it, or none was open at a failure
        over: Future[Wire] = Future()
        over.settle(to_wire({}, MORE), context.passed[number])
        return over
    part = part or part_of(node, context, number)
    asked = part.question(call.caller_id)
    part.take(given, arrival_of(node, gradients, kept=True))
    part.advance()
    return asked


@intrinsic
def take(context_id: int, number: int, names: bytes, *gradients: Tensor | None) -> None:
    """Handler: gradients of entries of this worker, from another one that has a part in the pass."""
    node, context = _here(context_id)
    part = part_of(node, context, number)
    part.take(from_wire(names, *gradients), arrival_of(node, gradients, kept=True))
    part.advance()


@brief
def abort(context_id: int, number: int, reason: str) -> None:
    """Handler: that pass has failed elsewhere."""
    node, context = _here(context_id)
    if number not in context.passed:
        part_of(node, context, number).fail(RpcError(f"the backward pass has failed: {reason}"))
