"""A worker's autograd contexts: the tensors that were sent or received within a context and require gradients.

Each call inside of a context carries the context's id, and so do the calls of its handlers. For a tensor that requires
gradients, the sender records the edge of its graph. At the receiver the tensor is the output of a graph node without a
past: the receiver's graph ends there. Both ends use one name: the sender, the number of the message, and the tensor's
place in the message. A backward pass (`aiorpc.autograd.passes`) follows these names.

Encoding a message makes the entries; a message that is not sent takes them back. A context ends on all workers that
took part in it (`AutogradContext.known`) when the worker that opened it leaves it or is gone.

For one worker, these take part in a context: the worker that opened it, workers whose calls in it were allowed here,
and workers that were called in it from here. Another worker can still run a backward pass over tensors that others
passed on to it. It then gives the name of such a tensor, which is as hard to guess as the context's id and travels only
with results of the tensor. All other messages about a context are refused (`AutogradContext.takes_part`).

Everything here may be used from any thread where it does not say otherwise.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.jit._builtins import _find_builtin

from ...callbacks import current_autograd as current_autograd
from ...channels.landing import Arrival
from ...errors import Overloaded, ProtocolError, RpcError, RpcUsageError
from ...futures import Future
from ...locks import Lock
from ...logs import logger
from ...protocol.codec import Past
from ...protocol.messages import Recorded
from ..engine.engine import Engine
from .kept import KeptForOthers, PeerForContexts, bytes_of, name_of
from .piggybacked import Piggybacked
from .reach import Reach, ReceivedTensor, SentName

Tensor = torch.Tensor
_infer_type = torch._C._jit_try_infer_type
# How many left contexts and gone workers are remembered: a late call must not open their contexts again. As many ended
# passes of a context are remembered.
_REMEMBERED = 4096
# The most tensors behind a tensor that a message names; for more the receiver has to ask.
MOST_BEHIND = 512
# The number of names that take about as much memory as one recorded tensor.
_NAMES_IN_ONE = 8
# Ids of contexts and of passes are integers of 63 bits, like torch's: the id of a worker, and a number in 48 bits, here
# a random one. If the worker's id takes more than 14 bits (after many joins of a free group), 31 bits are left for the
# number, and the top bit marks that.
_BITS, _BITS_OF_MARKED, _MARK = 48, 31, 1 << 62


def _form_of(worker_id: int) -> tuple[int, int]:
    """The lowest id of a context of a worker, and how many bits of it are the number's."""
    if worker_id << _BITS < _MARK:
        return worker_id << _BITS, _BITS
    return _MARK | worker_id << _BITS_OF_MARKED, _BITS_OF_MARKED


def id_range(worker_id: int) -> tuple[int, int]:
    """The lowest and the highest id of contexts of a worker."""
    first, bits = _form_of(worker_id)
    return first, first | (1 << bits) - 1


def opener_of(id: int) -> int:
    """The id of the worker that a context or a pass belongs to, by its id. Accepts any integer."""
    return id >> _BITS if id < _MARK else (id ^ _MARK) >> _BITS_OF_MARKED


class _Received(torch.autograd.Function):
    """The graph node that a received tensor is the output of."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, held: list[Tensor]) -> Tensor:
        # Not as an argument: the output would count as a view of it, and could not be written to.
        return held.pop()

    @staticmethod
    def backward(ctx: object, *grads: object) -> NoReturn:
        raise RpcUsageError(
            "this tensor came from another worker, where its graph goes on: in place of loss.backward() use "
            "aiorpc.autograd.backward(context_id, [loss])"
        )


def _note_hook(node: Any, tensor: Tensor) -> None:
    node.hooked = True
    torch.autograd.function.BackwardCFunction._register_hook_dict(node, tensor)


_node_class: Any = _Received._backward_cls
_node_class._register_hook_dict = _note_hook  # which `Tensor.register_hook` calls
_node_class.hooked = False


def is_watched(received: ReceivedTensor) -> bool:
    """Whether the program sees the gradient of a tensor, by a hook or ``retain_grad()``."""
    node: Any = received.edge.node
    tensor = node.tensor()
    return node.hooked or (tensor is not None and tensor.retains_grad)


# Function.apply without its checks for transforms and its binding of arguments: half of the time.
_make_received: Any = super(torch.autograd.Function, _Received).apply


class AutogradContext:
    """One context, as this worker sees it.

    anchor: a tensor that makes nodes of `_Received` part of a graph. untracked: types of tensors that are sent without
    a past, unless a message sets others (`Tape`).
    """

    def __init__(
        self, id: int, anchor: Tensor, untracked: type | tuple[()] = (), *, most_behind: int = MOST_BEHIND
    ) -> None:
        self.id = id
        self.most_behind = most_behind
        self.opener: int = opener_of(id)
        self.sent: dict[SentName, GradientEdge] = {}
        self.receivers: dict[int, PeerForContexts] = {}  # receivers of messages, by the number of the message
        self.received: dict[Node, ReceivedTensor] = {}  # by the node of its edge
        self.known: set[PeerForContexts] = set()  # peers of calls in this context
        self.brought_by: PeerForContexts | None = None  # the caller of the first call here
        self.lock: threading.Lock = Lock()
        self.reach: Reach = Reach(self.received, _Received._backward_cls)
        self.parts: dict[int, Any] = {}  # of backward passes under way, by number (autograd.passes)
        # The last passes that have ended: the error, if it failed, and the peer that it counts for (`KeptForOthers`).
        self.passed: OrderedDict[int, tuple[BaseException | None, PeerForContexts | None]] = OrderedDict()
        self.untracked = untracked
        self._anchor = anchor
        self._arrivals: list[Arrival] = []  # of gradients on devices
        self._numbers = itertools.count(
            int.from_bytes(os.urandom(8)) >> 2
        )  # unguessable: one name must not reveal others
        self.kept: dict[PeerForContexts, int] = {}  # pieces kept for each peer (`KeptForOthers`)
        self.leaf_bytes = 0  # of gradients of leaves (`KeptForOthers`)
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}  # of leaves, by `id`: a tensor's hash runs in Python

    # --- who takes part
    # -------------------------------------------------------------------------------------------------

    def takes_part(self, worker_id: int, name: SentName | None = None) -> bool:
        """Whether a worker takes part in the context. name: of a tensor that it claims to know."""
        if worker_id == self.opener or (name is not None and name in self.sent):
            return True
        records = [peer.record for peer in self.known.copy()]  # calls may add to it meanwhile
        return any(record is not None and record.id == worker_id for record in records)

    def was_sent_to(self, peer: PeerForContexts, name: SentName) -> bool:
        """Whether this worker sent a tensor to that peer, which may then send its gradient."""
        receiver = self.receivers.get(name.message) if name in self.sent else None
        there, record = None if receiver is None else receiver.record, peer.record
        return there is not None and record is not None and there.id == record.id

    # --- recording ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], untracked: type | tuple[()], to: PeerForContexts) -> Recorded | None:
        """Record the tensors that require gradients.

        Returns their record for the message to a peer, or None without any. untracked: types of tensors that are not
        recorded.
        """
        places = [at for at, each in enumerate(tensors) if each.requires_grad and not isinstance(each, untracked)]
        if not places:
            return None
        number = next(self._numbers)
        behind: list[list[int] | None] = []
        for place in places:
            edge = self.sent[SentName(number, place)] = _edge_of(tensors[place])
            found = self.behind(edge)
            behind.append(None if found is None else list(itertools.chain.from_iterable(found)))
        self.receivers[number] = to
        return Recorded(self.id, number, places, behind)

    def behind(self, edge: GradientEdge) -> set[tuple[int, int, int]] | None:
        """All sent tensors, on any worker, that a gradient of an edge leads to; None if they are too many.

        As (worker, message, place).
        """
        found: set[tuple[int, int, int]] = set()
        for received in self.reach.received_of(self.reach.of(edge.node)):
            if received.behind is None:
                return None
            found.add((received.sender, *received.name))
            found |= received.behind
            if len(found) > self.most_behind:  # even through a single one, in a chain of calls
                return None
        return found

    def unsend(self, recorded: Recorded) -> None:
        """Remove the entries of a message that was not sent."""
        self.receivers.pop(recorded.number, None)
        for place in recorded.places:
            self.sent.pop(SentName(recorded.number, place), None)

    def receive(self, sender: int, name: SentName, behind: Sequence[int] | None, tensor: Tensor) -> Tensor:
        """Make a received tensor the output of a node that stands for its past."""
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # modes of the thread that reads
            with torch.inference_mode(False), torch.enable_grad():
                return self.receive(sender, name, behind, tensor)
        received: Tensor = _make_received(self._anchor, [tensor])
        # `get_gradient_edge` would keep the node alive. A node that nothing leads to gets no gradient.
        node: Any = received.grad_fn
        node.tensor = weakref.ref(received)  # see `is_watched`
        edge = GradientEdge(node, 0, None)
        others = None if behind is None else frozenset(_named(behind) if behind else ())
        self.received[node] = ReceivedTensor(sender, name, edge, others)
        return received

    # --- gradients ----------------------------------------------------------------------------------------------------

    def accumulate(
        self,
        gradients: Sequence[tuple[Tensor, Tensor]],
        arrival: Callable[[], Arrival | None] | None = None,
        kept: KeptForOthers | None = None,
    ) -> None:
        """Add to the gradients of leaves of this worker. arrival: returns the arrival of sums on devices. kept: counts
        the gradients of leaves that had none.

        Raises Overloaded; nothing is added then.
        """
        with self.lock:
            if kept is not None and self.brought_by is not None:
                kept.make_room(self, sum(bytes_of(new) for leaf, new in gradients if id(leaf) not in self._gradients))
            self._join(self._gradients.get(id(leaf)) for leaf, _ in gradients)
            for leaf, gradient in gradients:
                pair = self._gradients.get(id(leaf))
                self._gradients[id(leaf)] = leaf, gradient if pair is None else sum_of(pair[1], gradient)
            made = arrival() if arrival is not None else None  # after the sums are enqueued
            if made is not None:
                self._arrivals.append(made)

    def _join(self, pairs: Iterable[tuple[Tensor, Tensor] | None]) -> None:
        """Make the current streams of this thread wait for all gradients on devices, and keep those of `pairs` for
        them.
        """
        for each in self._arrivals:
            each.join()
        if self._arrivals:
            self._arrivals[-1].keep([pair[1] for pair in pairs if pair is not None])

    def gradients(self) -> dict[Tensor, Tensor]:
        """A copy of the gradients, by leaf. The current streams of this thread wait for gradients on devices."""
        with self.lock:
            self._join(self._gradients.values())
            return dict(self._gradients.values())

    def gradients_of(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of `leaves`, in their order; None for a leaf without one. See `gradients`."""
        with self.lock:
            pairs = [self._gradients.get(id(leaf)) for leaf in leaves]
            self._join(pairs)
            return [None if pair is None else pair[1] for pair in pairs]

    def take_back(self, tensor: Tensor) -> Tensor | None:
        """Remove and return the gradient of a leaf. See `gradients`."""
        with self.lock:
            pair = self._gradients.get(id(tensor))
            self._join([pair])
            self._gradients.pop(id(tensor), None)
            return None if pair is None else pair[1]

    def end(self, error: Exception) -> None:
        """The context was left: end its passes under way with an error."""
        for part in list(self.parts.values()):
            part.fail(error)


def sum_of(before: Tensor, gradient: Tensor) -> Tensor:
    """The sum of two gradients of one tensor."""
    # torch adds a sparse tensor to a dense one, in this order only.
    return gradient + before if before.is_sparse and not gradient.is_sparse else before + gradient


def _edge_of(tensor: Tensor) -> GradientEdge:
    """As `get_gradient_edge`, which takes a view of the tensor, and so fails for sparse tensors."""
    if torch.is_inference_mode_enabled():  # a view has no node in this mode
        with torch.inference_mode(False):
            return _edge_of(tensor)
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        behind: Any = torch.neg(tensor).grad_fn
    node = tensor.grad_fn
    if node is None:
        return GradientEdge(behind.next_functions[0][0], 0)
    return GradientEdge(node, tensor.output_nr, behind)  # `behind` keeps the node alive, as in torch's edges


def _receive_apart(
    context: AutogradContext,
    sender: int,
    apart: dict[int, tuple[SentName, Sequence[int] | None]],
    number: int,
    tensor: Tensor,
) -> Tensor:
    try:
        return context.receive(sender, *apart[number], tensor)
    except (KeyError, TypeError, ValueError):
        raise _impossible() from None


def _impossible() -> ProtocolError:
    return ProtocolError("a message that says of the gradients of its tensors what cannot be")


_INT = frozenset((int,))


def _named(said: object) -> Iterator[tuple[int, int, int]]:
    if type(said) is not list or len(said) % 3 or len(said) > 3 * MOST_BEHIND or not _INT.issuperset(map(type, said)):
        raise ValueError
    numbers = iter(said)
    return zip(numbers, numbers, numbers, strict=True)


F = TypeVar("F", bound=Callable[..., object])
_KEEPS_PAST = "__aiorpc_keeps_past__"
#: The arguments by which the drop-in fetches the value of ``RRef(value)``: see `Gradients.fetched`.
OF_VALUE = [True]


def keeps_past(function: F) -> F:
    """A decorator for a handler that stands for functions which torch calls without pickling their arguments."""
    setattr(function, _KEEPS_PAST, True)
    return function


class Tape:
    """Records the tensors of one message of a context. untracked: types of tensors that it sends without a past."""

    def __init__(
        self,
        context: AutogradContext,
        to: PeerForContexts,
        counts: KeptForOthers | None = None,
        on_untracked: Callable[[PeerForContexts], None] | None = None,
    ) -> None:
        """to: the receiver. counts: counts the recorded tensors for the receiver.
        on_untracked: called if a tensor that requires gradients is sent without a past.
        """
        self.untracked: type | tuple[()] = context.untracked
        self._context = context
        self._to = to
        self._counts = counts
        self._on_untracked = on_untracked

    def record(self, tensors: Sequence[Tensor], on_unsent: list[Callable[[], None]]) -> Recorded | None:
        """Record the tensors of the message; None if none require gradients. on_unsent: gets a function that undoes it.

        Raises Overloaded.
        """
        untracked = self.untracked
        if self._on_untracked is not None and any(
            each.requires_grad and isinstance(each, untracked) for each in tensors
        ):
            self._on_untracked(self._to)
        recorded = self._context.send(tensors, self.untracked, self._to)
        if recorded is not None:
            on_unsent.append(partial(self._context.unsend, recorded))
            if self._counts is not None:
                self._counts.keep(self._context, self._to, len(recorded.places))
        return recorded


class LeafSink(Protocol):
    """Gets the gradients of a worker's leaves before their context does, while the worker has a part in a pass."""

    def take(
        self, context: AutogradContext, leaves: Sequence[tuple[Tensor, Tensor]]
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """Take gradients of leaves; returns the gradients for the context. In a thread, never on a loop."""

    def finish(self, context: AutogradContext, failed: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """The part has ended, and no `take` runs. Returns the remaining gradients for the context; none if it failed.

        Any thread, the loop's too.
        """


class Gradients:
    """All contexts of one worker."""

    def __init__(self, engine: Engine, *, sink: LeafSink | None = None, as_torch: bool = False) -> None:
        """as_torch: calls under `no_grad` record nothing, and a sent Parameter arrives as a Parameter without a past,
        because optimizers must accept the parameters of a received module. It keeps its past, and arrives as a plain
        tensor, where torch does not pickle it: as an argument of an operator of torch, and as the value of
        ``RRef(value)``.
        """
        self.sink = sink
        self.as_torch = as_torch
        self.most_behind = MOST_BEHIND
        # By worker: its unanswered call about the end of a context.
        self.farewells: dict[int, Future[bytes]] = {}
        self.doubted: set[int] = set()  # contexts whose openers are being asked
        self.piggybacked: Piggybacked = Piggybacked(engine)
        self.kept: KeptForOthers = KeptForOthers(engine)
        self._on_untracked = self._say_untracked if as_torch else None
        self._engine = engine
        self._contexts: dict[int, AutogradContext] = {}
        self._left: set[int] = set()
        self._left_of: dict[int, deque[int]] = {}  # the same by opener, the oldest first
        self._gone: OrderedDict[int, None] = OrderedDict()  # gone workers, whose contexts may still come
        self._brought: dict[PeerForContexts, int] = {}  # by worker: number of contexts that its calls opened here
        self._first, self._bits = _form_of(engine.id)
        self._lock = Lock()
        with torch.inference_mode(False):
            self._anchor = torch.empty(0, device="cpu", requires_grad=True)

    def __len__(self) -> int:
        """How many contexts are open."""
        return len(self._contexts)

    def new_id(self) -> int:
        """An unguessable id for a context or a pass of this worker, which no context has or had."""
        while (number := self._first | int.from_bytes(os.urandom(8)) >> 64 - self._bits) in self._contexts or (
            number in self._left
        ):
            pass
        return number

    def has_ended(self, id: int) -> bool:
        """Whether an id is of a context of this worker that was left."""
        return opener_of(id) == self._engine.id and id not in self._contexts

    def open(self) -> AutogradContext:
        """A new context of this worker."""
        return self._enter(self.new_id())

    def _bring(self, id: int, peer: PeerForContexts) -> AutogradContext:
        """The context of a call from a peer. Raises Overloaded if the peer has too many open."""
        context = self._contexts.get(id)
        if context is not None:
            return context
        most = self._engine.options.max_contexts
        with self._lock:
            count = self._brought.get(peer, 0)
            if count >= most and id not in self._contexts:
                raise Overloaded(
                    f"worker {self._engine.name!r} has {count} autograd contexts open that calls of the same caller "
                    "have brought (max_contexts); this call in a further one was not run"
                )
            context = self._enter(id)
            if context.brought_by is None and context.opener != self._engine.id:
                context.brought_by = peer
                self._brought[peer] = count + 1
            return context

    def _enter(self, id: int) -> AutogradContext:
        context = self._contexts.get(id)
        if context is None:
            untracked = torch.nn.Parameter if self.as_torch else ()
            made = AutogradContext(id, self._anchor, untracked, most_behind=self.most_behind)
            context = self._contexts.setdefault(id, made)
        return context

    def get(self, id: int) -> AutogradContext:
        """An open context. Raises RpcUsageError if there is none of that id."""
        context = self._contexts.get(id)
        if context is None:
            raise self.not_here(id)
        return context

    def not_here(self, id: int) -> RpcUsageError:
        """The error for an id of which there is no context here."""
        return RpcUsageError(
            f"Could not find autograd context with id: {id} on worker {self._engine.name!r}. It was left, or has not "
            "come here; are you inside of `with autograd.context() as context_id`?"
        )

    def find(self, id: int) -> AutogradContext | None:
        """An open context; None if there is none of that id."""
        return self._contexts.get(id)

    def calls(self, id: int | None, peer: PeerForContexts, function: object) -> Tape | None:
        """The tape of a call to a peer in context `id`; None outside of any context, or if it was left.

        From now on the peer takes part. function: the called one.
        """
        context = self._contexts.get(id) if id else None
        if context is None or (self.as_torch and not torch.is_grad_enabled()):
            return None
        context.known.add(peer)
        if id not in self._contexts:  # left meanwhile by another thread, which may not have seen this peer
            return None
        tape = Tape(context, peer, None, self._on_untracked)
        if self.as_torch and (_find_builtin(function) is not None or getattr(function, _KEEPS_PAST, False)):
            tape.untracked = ()
        return tape

    def answers(self, id: int | None, peer: PeerForContexts) -> Tape | None:
        """The tape of an answer to a peer whose call in context `id` was admitted (`called`); None if the context was
        left. This thread's autograd mode does not matter.
        """
        context = self._contexts.get(id) if id else None
        return (
            None if context is None or peer not in context.known else Tape(context, peer, self.kept, self._on_untracked)
        )

    def _say_untracked(self, to: PeerForContexts) -> None:
        """Warn, once for each worker, of torch's silent behaviour."""
        self._on_untracked = None
        logger.warning(
            "worker %r sends a Parameter to %s in an autograd context: as with torch.distributed.rpc it arrives there "
            "without its past, and gets no gradient of what is computed there. To have one, send a tensor that was "
            "computed from it (parameter * 1), or keep the module where its parameters are and call it there; to send "
            "values alone, send parameter.detach(). This is said once",
            self._engine.name,
            name_of(to),
        )

    def fetched(self, id: int, peer: PeerForContexts, value: object) -> Tape | None:
        """As `answers`, for the value of an ``RRef(value)``, with torch's rules."""
        tape = self.answers(id, peer)
        # torch does not pickle values of TorchScript's types. Only these kinds may be or have Parameters.
        kinds = (torch.nn.Parameter, list, tuple, dict)
        if tape is not None and isinstance(value, kinds) and _infer_type(value).success():
            tape.untracked = ()
        return tape

    def called(self, id: int, peer: PeerForContexts, serves_all: Callable[[], bool] | None = None) -> int | None:
        """A permitted call from a peer in context `id` is about to run: the peer takes part from now on.

        serves_all: returns whether every worker may call the function; such a call makes no peer take part. Returns the
        id, or None if the context was left, never existed, or the peer takes no part. Raises Overloaded.
        """
        if id in self._left or (self._gone and opener_of(id) in self._gone):
            return None
        context = self._contexts.get(id)
        if context is not None and peer in context.known:
            return id
        if serves_all is not None and serves_all():
            return None
        if context is None:
            if not 0 < id < 1 << 63 or opener_of(id) == self._engine.id:  # ours would be open
                return None
            context = self._bring(id, peer)
        context.known.add(peer)
        if id in self._left or (self._gone and opener_of(id) in self._gone):  # meanwhile, by another thread
            self._drop(id)
            return None
        return id

    def _drop(self, id: int) -> AutogradContext | None:
        """Close and return a context; None if it was not open."""
        with self._lock:
            context = self._contexts.pop(id, None)
            if context is not None:
                if context.kept or context.leaf_bytes:
                    self.kept.drop(context)
                if context.brought_by is not None:
                    left = self._brought[context.brought_by] - 1
                    if left:
                        self._brought[context.brought_by] = left
                    else:
                        del self._brought[context.brought_by]
            return context

    def receive(
        self, peer: PeerForContexts, said: Recorded, tensors: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Past | None]:
        """The tensors of a message from a peer, each as the output of a graph node that stands for its past.

        Also returns a function that does the same for a tensor inside of the pickle, given its number there; None if
        there are none. Both raise ProtocolError and Overloaded.
        """
        assert peer.record is not None, "a message came from it"
        try:
            number, places, behind = said.number, said.places, said.behind
            context = self._contexts.get(said.context)
            # If the context was left, or the sender takes no part in it, these are plain tensors.
            if context is None or peer not in context.known:
                return tensors, None
            count = len(behind)
            for names in behind:
                if names:
                    count += len(names) // (3 * _NAMES_IN_ONE)
            self.kept.keep(context, peer, count)
            sender, tracked = peer.record.id, list(tensors)
            apart: dict[int, tuple[SentName, Sequence[int] | None]] = {}
            for place, past in zip(places, behind, strict=True):
                if place < len(tracked):
                    name = SentName(number, place)
                    tracked[place] = context.receive(sender, name, past, tracked[place])
                else:
                    apart[place - len(tracked)] = SentName(number, place), past
            return tracked, partial(_receive_apart, context, sender, apart) if apart else None
        except (TypeError, ValueError):
            raise _impossible() from None

    def leave(self, id: int) -> set[PeerForContexts]:
        """A context has ended: drop it. Returns the peers that may know it, too."""
        context = self._contexts.get(id)
        self._remember_left(id, opener_of(id) if context is None else context.opener)
        context = self._drop(id)
        if context is None:
            return set()
        context.end(RpcError(f"autograd context {id} was left"))
        return context.known.copy()  # other threads may still add to the set

    def on_gone(self, worker_id: int) -> None:
        """A worker is gone: leave its contexts. On the loop."""
        with self._lock:
            self._gone[worker_id] = None
            if len(self._gone) > _REMEMBERED:  # one was added
                self._gone.popitem(last=False)
        first, last = id_range(worker_id)
        for id in [id for id in list(self._contexts) if first <= id <= last]:
            self.leave(id)
        with self._lock:
            self._left.difference_update(self._left_of.pop(worker_id, ()))

    def _remember_left(self, id: int, opener: int) -> None:
        """Remember a left context, with a limit for each opener, so one worker does not push out the contexts of
        others.
        """
        with self._lock:
            if id in self._left:
                return
            left = self._left_of.setdefault(opener, deque())
            left.append(id)
            self._left.add(id)
            if len(left) > _REMEMBERED:
                self._left.discard(left.popleft())

    def close(self) -> None:
        """The worker closes: drop all contexts. On the loop."""
        self.piggybacked.close()
        self._contexts.clear()
