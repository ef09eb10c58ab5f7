"""One worker's part in a backward pass (see `passes`), and the calls between workers in a pass.

The worker that runs the pass has one question open at each other worker, or on its way there, until that worker's part
is over. PLAN is the first question; each later one brings new gradients, if there are any.

    from      event                                          to        the open question
    WAITING   gradients come before the plan                 WAITING   stays open
    WAITING   the plan                                       RUNNING
    RUNNING   gradients for the worker that asks came out    RUNNING   is answered with them: there will be more
    RUNNING   the next question                              RUNNING   is answered, and the next one is open
    RUNNING   all is evaluated and handed on                 READY
    READY     a question is open                             DONE      is answered with what came out last
              (what the plan wants done at the end is done before that: see `Closing`)
    any       an error, a lost worker, the end of a context  FAILED    is answered with the error

Another worker may give gradients only for tensors that this worker has sent to it. It may ask only for parts of passes
that it runs itself, whose ids contain its own, and only if it takes part in the context (`AutogradContext.takes_part`).
All this is checked before anything is kept.
"""

from __future__ import annotations

import contextlib
import operator
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import torch
from torch.autograd.graph import GradientEdge

from .. import foreign
from ..channels.landing import Arrival
from ..errors import RpcError, RpcUsageError
from ..futures import Future
from ..locks import Lock
from ..runtime.calls.current import permits
from ..runtime.calls.functions import async_execution, brief, carries, intrinsic
from ..runtime.calls.options import CallOptions
from ..runtime.gradients.contexts import AutogradContext, LeafSink, current_autograd, opener_of
from ..runtime.gradients.kept import PeerForContexts
from ..runtime.gradients.reach import Leaf, ReceivedTensor, SentName, bits_of
from ..runtime.node import Node, serving
from .awaited import Awaited
from .brought import BroughtGradients, Waiting, brought_by
from .engine import ALONE, IS_FOREIGN, evaluate, memory_of, references_to, say_where, unshared
from .resent import Entry, Resent
from .wire import (
    LAST,
    MORE,
    NOT_CLOSED,
    Gradients,
    Wire,
    pack_table,
    to_wire,
    unpack_names,
    unpack_reference,
)

Tensor = torch.Tensor
Given = dict[SentName, Tensor | None]
# How many ended passes of a context are remembered: a late message must not open one again.
_REMEMBERED = 1024
# The most characters of the reason of a failure elsewhere.
LONGEST_REASON = 10_000
_LEAF, _GRADIENT = operator.itemgetter(0), operator.itemgetter(1)


class Closing(ABC):
    """The last thing of a worker's part in a pass: the step of its own optimizer. Others name it by a reference."""

    @abstractmethod
    def close_part(self, node: Node, context_id: int, part: Part, seconds: float | None) -> bool:
        """Called when all gradients of the worker are in the context. Returns whether it did anything. In a thread,
        never on a loop. part: if it is over, do nothing. seconds: the longest wait. Its error fails the pass.
        """


class RunsPass(Protocol):
    """Runs the pass, on the worker that has the roots (`Pass`)."""

    def hand_on(self, worker_id: int, gradients: Gradients) -> None:
        """Send gradients to another worker. In a thread, never on a loop."""

    def part_over(self, part: Part) -> None:
        """This worker's part is over. Any thread."""


# --- a part -----------------------------------------------------------------------------------------------------------


class Part:
    """One worker's part in one pass.

    Any thread; `advance` not on a loop.

    over: whether it is DONE or FAILED. error: why it has failed. closed: the result of `Closing.close_part`. reached:
    `id` of each leaf of this worker that has got a gradient in this pass.
    """

    def __init__(
        self,
        node: Node,
        context: AutogradContext,
        number: int,
        runs: RunsPass | None,
        maker: PeerForContexts | None = None,
    ) -> None:
        """runs: the pass, at the worker that runs it. maker: elsewhere, the worker whose message made this part."""
        self.over: bool = False
        self.error: BaseException | None = None
        self.closed: bool = False
        self.reached: set[int] = set()
        self.held: dict[int, Given] | None = None  # gradients for others, while sending must wait
        self._maker = maker
        self._runs = runs
        self._node = node
        self._context = context
        self._number = number
        self._lock = Lock()
        self._entries: dict[SentName, Entry] = {}
        self._awaited: Awaited | None = None  # None: the plan has not come
        self._gradients: Given = {}  # have come
        self._waiting = Waiting(node.gradients.kept)
        self._arrivals: list[Arrival] = []
        self._left = 0  # bits of targets that are not evaluated yet
        self._resent = Resent()
        self._retain = False
        self._root = -1  # the worker that runs the pass
        self._until: float | None = None
        self._closing: Closing | None = None
        self._running = False
        self._ended = False  # a thread has found that nothing is left to do
        self._ready_to_end = False  # and it has done the last thing (`Closing`)
        self._sink: LeafSink | None = None  # has taken gradients of leaves
        self._delivering = 0  # unanswered calls that bring gradients to others
        self._for_root: Given = {}  # gradients for the worker that runs the pass, not sent yet
        self._question: Future[Wire] | None = None  # the open question of the worker that runs the pass

    def begin(
        self, entries: dict[SentName, Entry], *, retain: bool, until: float | None, closing: Closing | None = None
    ) -> None:
        """The plan has come. retain: keep the graph for another pass. until: as of `ask`. closing: the last thing to
        do.
        """
        with self._lock:
            self._retain, self._until, self._closing = retain, until, closing
            awaited = Awaited(list(entries), [entry.mask for entry in entries.values()])
            awaited.came(self._gradients)
            self._entries, self._left = entries, awaited.targets
            self._awaited = awaited
            if self._node.accelerators.accelerator is None:  # with devices, sums would have to wait for streams
                self._resent = Resent.of(entries, self._context.received)
                self._resent.came(self._gradients)

    def take_brought(self, brought: BroughtGradients) -> None:
        """Take gradients of another worker, which count for it until they are used. Raises Overloaded."""
        peer, gradients, tensors, sizes, _ = brought
        if not gradients:
            return
        self._waiting.add(peer, sizes)
        self.take(gradients, arrival_of(self._node, tensors, kept=True))
        if self.over:
            self._waiting.end()

    def take(self, gradients: Mapping[SentName, Tensor | None], arrival: Arrival | None = None) -> None:
        """Take gradients of some entries. arrival: of gradients on devices."""
        with self._lock:
            self._gradients.update(gradients)
            if self._awaited is not None:
                self._awaited.came(gradients)
                self._resent.came(gradients)
            if arrival is not None:
                self._arrivals.append(arrival)

    def question(self, worker_id: int) -> Future[Wire]:
        """Open a question of the worker that runs the pass: see the module. Raises RpcError if another runs it."""
        asked: Future[Wire] = Future()
        asked._loop, asked._executor = self._node.engine.loop, self._node.engine.pool
        with self._lock:
            if self._root not in (-1, worker_id):
                raise RpcError(f"worker {worker_id} does not run this backward pass of context {self._context.id}")
            self._root = worker_id
            before, self._question = self._question, asked
        if before is not None:
            before._settle(to_wire({}, MORE))
        if self.over:
            self._refuse()
        return asked

    def _refuse(self) -> None:
        """It is over: answer an open question with the error, or with nothing if another one had the last answer."""
        with self._lock:
            asked, self._question = self._question, None
        if asked is not None:
            asked._settle(to_wire({}, MORE), self.error)

    def fail(self, error: BaseException) -> None:
        """End it with an error; the first one counts."""
        self._end(error)
        self._refuse()
        self._kept(failed=True)

    def let_go(self) -> None:
        """The pass that this worker runs has ended: drop it.

        The cycle between the two would keep the graph and the gradients until the garbage collector runs.
        """
        self._runs = None

    def _end(self, error: BaseException | None) -> bool:
        """End it. False if it was over before."""
        with self._lock:
            if self.over:
                return False
            self.error = error
            self._context.passed[self._number] = error, self._maker
            self._context.parts.pop(self._number, None)
            self.over = True  # last: other threads read it without the lock, and then the rest
        if self._waiting.sizes:
            self._waiting.end()
        if len(self._context.passed) > _REMEMBERED:
            self._forget_oldest()
        if (runs := self._runs) is not None:
            runs.part_over(self)
        return True

    def _forget_oldest(self) -> None:
        passed = self._context.passed
        while len(passed) > _REMEMBERED:
            try:
                _, (_, maker) = passed.popitem(last=False)
            except KeyError:  # other threads do the same
                return
            if maker is not None:
                self._node.gradients.kept.keep(self._context, maker, -1)

    def advance(self) -> None:
        """Evaluate targets that are ready, and those that become ready, in this thread."""
        while not self.over:
            with self._lock:
                awaited = self._awaited
                if self._running or awaited is None:
                    return
                resent = self._resent
                ready = self._left & ~awaited.blocked
                begin = self._left & ~ready & resent.ready
                if not (ready or begin):
                    break
                self._running = True
                summed = list[SentName]()
                complete = resent.summed(done, self._gradients, summed) if (done := ready & resent.begun) else []
                resent.ready &= ~begin
                resent.begun |= begin
                targets = begin | (ready & ~resent.begun)
                left, used, spent = self._left & ~ready & ~resent.begun, [], []
                for name in awaited.leading_to(targets):
                    edge, mask = self._entries[name]
                    if mask & begin and name in resent.names:
                        continue
                    # Spent entries: all their targets are done then.
                    if not mask & left:
                        spent.append(name)
                    used.append((edge, self._gradients[name]))
                again = len(spent) < len(used)
                arrivals, self._arrivals = self._arrivals, []
            try:
                deliveries = self._run(used, targets, begin, self._retain or again, arrivals)
                for received, gradient in complete:
                    deliveries.setdefault(received.sender, {})[received.name] = gradient
            except BaseException as error:
                say_where(error, self._node.engine.name)
                if self._maker is not None:  # the pass remembers the error, whose frames would keep the gradients
                    used.clear()
                    complete.clear()
                    traceback.clear_frames(foreign.field(error, "__traceback__"))
                self._running = False
                self.fail(error)
                return
            used.clear()
            complete.clear()
            self._hand_on(ready, spent + summed, deliveries)
            deliveries.clear()
        self._finish()

    def _run(
        self,
        used: Sequence[tuple[GradientEdge, Tensor | None]],
        bits: int,
        begin: int,
        retain: bool,
        arrivals: Sequence[Arrival],
    ) -> dict[int, Given]:
        """Evaluate the targets of some bits.

        Returns the gradients for tensors of other workers, by worker.

        begin: the bits whose gradients `Resent` will complete.
        """
        for arrival in arrivals:
            arrival.join()
        numbers = list(bits_of(bits))
        targets = self._context.reach.targets_of(numbers)
        if any(map(IS_FOREIGN, targets)):  # `in` would compare each target with it
            raise RpcUsageError(
                "the graph goes on in a tensor that was received in another autograd context. Contexts do not mix: "
                "call again in this one; a @batched function must not gather calls of several contexts that go backward"
            )
        given: list[tuple[GradientEdge, Tensor]] = []
        taken: set[int] = set()
        for edge, gradient in used:
            if gradient is not None:
                given.append((edge, gradient))
                taken.add(memory_of(gradient))
        results = evaluate(given, targets, retain)
        holders = references_to(results)
        deliveries: dict[int, Given] = {}
        leaves: list[tuple[Leaf, Tensor]] = []
        for bit, target, gradient in zip(numbers, targets, results, strict=True):
            if isinstance(target, ReceivedTensor):
                taken.add(memory_of(gradient))
                if begin >> bit & 1:
                    self._resent.parts[bit] = gradient
                    continue
                deliveries.setdefault(target.sender, {})[target.name] = gradient
        for target, gradient, count in zip(targets, results, holders, strict=True):
            # A leaf that was frozen since gets none: its own node would not accumulate it, either.
            if gradient is not None and isinstance(target, Leaf) and target.tensor.requires_grad:
                leaves.append((target, gradient.clone() if count > ALONE else unshared(gradient, taken)))
        if self.over:  # it has failed or was cancelled meanwhile
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
            with torch.no_grad():  # as in torch's engine: results of hooks have no graph
                leaves = [(leaf, leaf.before(gradient)) for leaf, gradient in leaves]
            pairs = [(leaf.tensor, gradient) for leaf, gradient in leaves]
        self._context.accumulate(pairs, partial(arrival_of, self._node, gradients), self._node.gradients.kept)
        if hooked:
            with torch.no_grad():
                for leaf, gradient in leaves:
                    leaf.after(gradient)

    def _kept(self, failed: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """The gradients that the sink has kept, once no thread runs; nothing the second time."""
        with self._lock:
            if self._running:  # the thread that runs comes here afterwards
                return ()
            sink, self._sink = self._sink, None
        if sink is None:
            return ()
        self._context.accumulate(())  # this thread's streams wait for work of `take` on devices
        return sink.finish(self._context, failed)

    def _hand_on(self, ready: int, spent: Sequence[SentName], deliveries: dict[int, Given]) -> None:
        """Some targets are done: send their gradients. spent: entries that lead to no other targets."""
        with self._lock:
            assert self._awaited is not None, "it runs"
            own = deliveries.pop(self._node.engine.id, None)
            if own:
                self._gradients.update(own)
                self._awaited.came(own)
                self._resent.came(own)
            self._left &= ~ready
            self._gradients.update(dict.fromkeys(spent))  # free them now: the pass may last long
            self._running = False
            self._for_root.update(deliveries.pop(self._root, {}))
            if self.held is not None:
                for worker_id, gradients in deliveries.items():
                    self.held.setdefault(worker_id, {}).update(gradients)
                deliveries = {}
            if self._maker is not None:
                self._delivering += len(deliveries)
        if self._waiting.sizes:
            self._waiting.used(spent)
        for worker_id, gradients in deliveries.items():
            self._deliver(worker_id, gradients)

    def _deliver(self, worker_id: int, gradients: Gradients) -> None:
        try:
            if self._maker is None:
                if (runs := self._runs) is not None:  # None: the pass has ended
                    runs.hand_on(worker_id, gradients)
                return
            given = (self._context.id, self._number, *to_wire(gradients))
            call = ask(self._node, worker_id, take, *given, until=self._until)
        except BaseException as error:
            self.fail(error)
            return
        call._when_settled(self._delivered)

    def _delivered(self, call: Future[Any]) -> None:
        error = call.exception()
        if error is not None:
            self.fail(error)
            return
        with self._lock:
            self._delivering -= 1
        self._finish()

    def _finish(self) -> None:
        """Nothing is ready now: send the results, or the end of the part."""
        if self.over:  # it failed meanwhile
            self._kept(failed=True)
            return
        with self._lock:
            if self._awaited is None or self._running:
                return
            done = not (self._left or self._delivering or self._awaited.missing)
            first = done and not self._ended
            if first:
                self._ended = True
        if first:
            if kept := self._kept(failed=False):
                gradients = [gradient for _, gradient in kept]
                made = partial(arrival_of, self._node, gradients)
                self._context.accumulate(kept, made, self._node.gradients.kept)
            if self._closing is not None and self._node.engine.on_loop:  # on an answer
                self._node.engine.pool.submit(self._close, self._closing)
                return
            if self._closing is not None:
                self._close(self._closing)
                return
            self._ready_to_end = True
        self._tell()

    def _close(self, closing: Closing) -> None:
        """Do the last thing, in a thread."""
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
        """Answer the open question, if there is anything to send; the last answer ends the part."""
        with self._lock:
            asked, last = self._question, self._ready_to_end
            if self._maker is not None and (asked is None or not (last or self._for_root)):
                return
            if self._ended and not last:  # the thread that set it comes here later
                return
            self._question = None
            gradients, self._for_root = self._for_root, {}
        if last and not self._end(None) and asked is not None:
            asked._settle(None, self.error)
        elif asked is not None:
            nothing_done = self._closing is not None and not self.closed
            asked._settle(to_wire(gradients, MORE if not last else NOT_CLOSED if nothing_done else LAST))


def arrival_of(node: Node, gradients: Sequence[Tensor | None], *, kept: bool = False) -> Arrival | None:
    """The arrival of gradients, if any are on a device. kept: whether it keeps them for threads that join it."""
    if node.accelerators.accelerator is None:
        return None
    on_device = any(gradient is not None and not gradient.is_cpu for gradient in gradients)
    return node.accelerators.arrival(gradients if kept else None) if on_device else None


# --- calls between workers --------------------------------------------------------------------------------------------


def ask(
    node: Node, worker_id: int, function: Any, /, *args: Any, until: float | None, system: bool = False
) -> Future[Any]:
    """Call a handler of the runtime on a worker, outside of any context.

    args: the first is the id of the context. until: on ``time.monotonic``'s clock, or None. system: as of `Peer.call`.
    """
    timeout = 0.0 if until is None else max(1e-3, until - time.monotonic())
    token = current_autograd.set(0)
    try:
        options = CallOptions(part_of=("context", args[0]))
        return node.peers.by_id(worker_id).call(function, args, None, timeout, system=system, options=options)
    finally:
        current_autograd.reset(token)


def part_of(
    node: Node,
    context: AutogradContext,
    number: int,
    runs: RunsPass | None = None,
    maker: PeerForContexts | None = None,
) -> Part:
    """The part of a pass; its first message makes it. runs, maker: as of `Part`.

    Raises RpcError if the pass has ended; Overloaded.
    """
    with context.lock:
        part: Part | None = context.parts.get(number)
        if part is not None:
            return part
        if number in context.passed or (maker is not None and opener_of(number) == node.engine.id):
            raise RpcError(f"this backward pass of context {context.id} has ended on worker {node.engine.name!r}")
        if maker is not None:
            node.gradients.kept.keep(context, maker, 1)
        part = context.parts[number] = Part(node, context, number, runs, maker)
        return part


class _Asked(NamedTuple):
    """The context of a question. peer: the asking worker."""

    node: Node
    context: AutogradContext
    peer: Any


def _asked(context_id: int, number: int | None = None, name: SentName | None = None) -> _Asked:
    """In a handler: check and find the context.

    The same RpcUsageError if it is not open here, or the caller takes no part in it.

    number: of a pass that the caller claims to run; RpcError if another worker does. name: of a tensor of this worker,
    by which the caller shows that it takes part (`AutogradContext.takes_part`).
    """
    node, call = serving()
    context, caller = node.gradients.get(context_id), call.caller_id
    peer = node.peers.by_id(caller)
    if number is not None and opener_of(number) != caller:
        raise RpcError(f"worker {caller} does not run this backward pass: worker {opener_of(number)} does")
    if (
        peer not in context.known
        and (number is None or (number not in context.parts and number not in context.passed))
        and not context.takes_part(caller, name)
    ):
        raise node.gradients.not_here(context_id)
    return _Asked(node, context, peer)


def _first(packed: bytes) -> SentName | None:
    names = unpack_names(packed)
    return names[0] if names else None


# Ids of contexts and of passes in messages.
Id = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


@intrinsic
def gather(context_id: Id, name: bytes) -> bytes:
    """Handler: for each entry of this worker the tensors that it leads to, as a packed table. name: of an entry,
    packed.
    """
    _, context, _ = _asked(context_id, None, _first(name))
    reach, entries, every = context.reach, [], 0
    for each, edge in list(context.sent.items()):
        mask = reach.received_in(reach.of(edge.node))
        every |= mask
        entries.append((*each, mask.to_bytes(mask.bit_length() // 8 + 1, "little")))
    received = zip(bits_of(every), reach.received_of(every), strict=True)
    return pack_table([(bit, each.sender, *each.name) for bit, each in received], entries)


@intrinsic
@carries
@async_execution
def plan(
    context_id: Id,
    number: Id,
    names: bytes,
    retain: bool,
    seconds: Annotated[float, msgspec.Meta(ge=0)],
    last: bytes,
    given: bytes,
    *gradients: Tensor,
) -> Future[Wire]:
    """Handler: the first question: the entries that get gradients in a pass, with some gradients.

    last: a packed reference to a `Closing` of this worker, or empty.
    """
    wanted = unpack_names(names)
    node, context, peer = _asked(context_id, number, wanted[0] if wanted else None)
    edges = [context.sent[name] for name in wanted if name in context.sent]
    if len(edges) < len(wanted):
        raise RpcError(f"worker {node.engine.name!r} knows nothing of a tensor that it is said to have sent")
    brought = brought_by(node, context, peer, given, gradients)
    part = part_of(node, context, number, maker=peer)
    asked = part.question(peer.record.id)
    with _failing(part):
        entries = {name: Entry(edge, context.reach.of(edge.node)) for name, edge in zip(wanted, edges, strict=True)}
        until = time.monotonic() + seconds if seconds else None
        part.take_brought(brought)
        part.begin(
            entries,
            retain=retain,
            until=until,
            closing=_closing(node, last, until, opener_of(number)) if last else None,
        )
        part.advance()
    return asked


def _closing(node: Node, packed: bytes, until: float | None, asker: int) -> Closing:
    """The last thing to do. Raises NotAllowed if the asking worker may not run it."""
    seconds = None if until is None else max(0.0, until - time.monotonic())
    found = node.references.value(*unpack_reference(packed), asker).wait(seconds)
    if not isinstance(found, Closing):
        raise RpcError(f"a backward pass cannot end with a step of a {type(found).__qualname__}")
    rights = permits()
    if rights is not None:
        rights.check_method(found, "step")
    return found


@intrinsic
@carries
@async_execution
def go_on(context_id: Id, number: Id, given: bytes, *gradients: Tensor) -> Future[Wire]:
    """Handler: gradients of entries of this worker, from the worker that runs the pass, with its next question."""
    node, context, peer = _asked(context_id, number)
    brought = brought_by(node, context, peer, given, gradients)
    part = context.parts.get(number)
    if part is None and number in context.passed:  # overtaken by a later question, or failed without one
        over: Future[Wire] = Future()
        over._settle(to_wire({}, MORE), context.passed[number][0])
        return over
    part = part or part_of(node, context, number, maker=peer)
    asked = part.question(peer.record.id)
    with _failing(part):
        part.take_brought(brought)
        part.advance()
    return asked


@contextlib.contextmanager
def _failing(part: Part) -> Iterator[None]:
    """What the block raises is what the pass fails with."""
    try:
        yield
    except BaseException as error:
        part.fail(error)


@intrinsic
@carries
def take(context_id: Id, number: Id, given: bytes, *gradients: Tensor) -> None:
    """Handler: gradients of entries of this worker, from another worker with a part in the pass."""
    node, context, peer = _asked(context_id)
    brought = brought_by(node, context, peer, given, gradients)
    part = part_of(node, context, number, maker=peer)
    part.take_brought(brought)
    part.advance()


@brief
def abort(
    context_id: Id, number: Id, name: bytes, reason: Annotated[str, msgspec.Meta(max_length=LONGEST_REASON)]
) -> None:
    """Handler: a pass has failed elsewhere. name: of a tensor of this worker that it goes through, packed."""
    node, context, peer = _asked(context_id, number, _first(name))
    if number not in context.passed:
        part_of(node, context, number, maker=peer).fail(RpcError(f"the backward pass has failed: {reason}"))
