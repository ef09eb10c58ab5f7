"""What a worker remembers of autograd contexts: tensors that require gradients and were sent or received within one.

Inside of a context each call carries the id of the context, and so does each call that its handlers make. A tensor that
requires gradients leaves an entry at its sender: the edge of the graph that it came out of. At the receiver the tensor
is the output of a graph node without a past, so that the graph there ends in it. Both ends know it by one name: the
sender, the number of the message, and the tensor's place in the message. A backward pass (`aiorpc.autograd.passes`)
goes along these names.

Entries are made when a message is encoded, and taken back if it is not sent. A context ends on all workers that took
part in it (`AutogradContext.known`) when the worker that opened it leaves it or is gone.

Who takes part in a context, as one worker sees it: the worker that opened it, those whose calls in it were allowed
here, and those that were called in it from here. A worker of which none of this is known can still run a backward
pass, over what came of tensors that others passed on to it: it shows that by the name of such a tensor, which is as
hard to guess as the id of the context and travels with what came of the tensor alone. What any other worker says of a
context is refused (`AutogradContext.takes_part`).

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
# Contexts that were left, and workers that are gone, are remembered, so that a call that comes late opens none. So are
# the passes of a context that have ended.
_REMEMBERED = 4096
# A message says of a tensor where its gradient goes on to, up to so many tensors; of more the others have to ask.
MOST_BEHIND = 512
# Names of tensors behind another one that take about as much memory as one recorded tensor does.
_NAMES_IN_ONE = 8
# Ids of contexts and of passes are integers of 63 bits, so that they fit wherever torch's do. As torch's they are the
# id of a worker and a number in 48 bits, here a random one. Where the worker's id takes more than 14 bits, as after
# many joins of a free group, 31 are left for the number, and a bit in front marks that.
_BITS, _BITS_OF_MARKED, _MARK = 48, 31, 1 << 62


def _form_of(worker_id: int) -> tuple[int, int]:
    """The lowest id that a context of that worker can have, and how many bits of it are the number's."""
    if worker_id << _BITS < _MARK:
        return worker_id << _BITS, _BITS
    return _MARK | worker_id << _BITS_OF_MARKED, _BITS_OF_MARKED


def id_range(worker_id: int) -> tuple[int, int]:
    """The lowest and the highest id that a context of that worker can have."""
    first, bits = _form_of(worker_id)
    return first, first | (1 << bits) - 1


def opener_of(id: int) -> int:
    """The worker that the context, or the pass, of that id belongs to: see `id_range`. Of any integer."""
    return id >> _BITS if id < _MARK else (id ^ _MARK) >> _BITS_OF_MARKED


class _Received(torch.autograd.Function):
    """The node that a received tensor comes out of."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, held: list[Tensor]) -> Tensor:
        # Not an argument of its own: the output would count as a view of it, and could not be written to.
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
    """Whether the program sees the gradient of that tensor, by a hook or as ``retain_grad()`` was called."""
    node: Any = received.edge.node
    tensor = node.tensor()
    return node.hooked or (tensor is not None and tensor.retains_grad)


# Function.apply without what it looks at first, for transforms, and bindings of arguments: half of its time.
_make_received: Any = super(torch.autograd.Function, _Received).apply


class AutogradContext:
    """One context, as this worker sees it.

    anchor: what makes nodes of `_Received` part of a graph. untracked: types of tensors that are sent without a past,
    if a message does not say otherwise (`Tape`).
    """

    def __init__(
        self, id: int, anchor: Tensor, untracked: type | tuple[()] = (), *, most_behind: int = MOST_BEHIND
    ) -> None:
        self.id = id
        self.most_behind = most_behind
        self.opener: int = opener_of(id)
        self.sent: dict[SentName, GradientEdge] = {}
        self.receivers: dict[int, PeerForContexts] = {}  # of the messages in which they were sent, by number
        self.received: dict[Node, ReceivedTensor] = {}  # by the node of its edge
        self.known: set[PeerForContexts] = set()  # workers that calls of this context went to or came from
        self.brought_by: PeerForContexts | None = None  # whose call was the first here
        self.lock: threading.Lock = Lock()
        self.reach: Reach = Reach(self.received, _Received._backward_cls)
        self.parts: dict[int, Any] = {}  # of backward passes that are under way, by number (aiorpc.autograd.passes)
        # The latest that have ended: why, if they failed, and for whom each is kept (`KeptForOthers`).
        self.passed: OrderedDict[int, tuple[BaseException | None, PeerForContexts | None]] = OrderedDict()
        self.untracked = untracked
        self._anchor = anchor
        self._arrivals: list[Arrival] = []  # of gradients on devices
        self._numbers = itertools.count(int.from_bytes(os.urandom(8)) >> 2)  # else who knows one would know all
        self.kept: dict[PeerForContexts, int] = {}  # what is kept here for whom, as `KeptForOthers` counts it
        self.leaf_bytes = 0  # of gradients of leaves, the same
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}  # of leaves, by `id`: a tensor's hash runs in Python

    # --- who may say something of it ----------------------------------------------------------------------------------

    def takes_part(self, worker_id: int, name: SentName | None = None) -> bool:
        """Whether that worker takes part, as far as this one knows. name: of a tensor that it says it knows of."""
        if worker_id == self.opener or (name is not None and name in self.sent):
            return True
        records = [peer.record for peer in self.known.copy()]  # calls may add to it meanwhile
        return any(record is not None and record.id == worker_id for record in records)

    def was_sent_to(self, peer: PeerForContexts, name: SentName) -> bool:
        """Whether the tensor of that name was sent from here to that worker, which so may say what its gradient is."""
        receiver = self.receivers.get(name.message) if name in self.sent else None
        there, record = None if receiver is None else receiver.record, peer.record
        return there is not None and record is not None and there.id == record.id

    # --- recording ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], untracked: type | tuple[()], to: PeerForContexts) -> Recorded | None:
        """Remember those that require gradients; None if there are none. What the message to that worker says of them.

        What is behind a tensor is said as [worker, message, place, ..], or None: ask. untracked: types of tensors that
        are not remembered.
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
        """All tensors that were sent and that a gradient of this edge leads to, on whichever worker; None: too many.

        As (worker, message, place).
        """
        found: set[tuple[int, int, int]] = set()
        for received in self.reach.received_of(self.reach.of(edge.node)):
            if received.behind is None:
                return None
            found.add((received.sender, *received.name))
            found |= received.behind
            if len(found) > self.most_behind:  # also where all of them are behind one: in a chain of calls
                return None
        return found

    def unsend(self, recorded: Recorded) -> None:
        """Take back the entries of a message that was not sent."""
        self.receivers.pop(recorded.number, None)
        for place in recorded.places:
            self.sent.pop(SentName(recorded.number, place), None)

    def receive(self, sender: int, name: SentName, behind: Sequence[int] | None, tensor: Tensor) -> Tensor:
        """A tensor of a message from that worker, as what comes out of a node that stands for its past."""
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # modes of the thread that reads
            with torch.inference_mode(False), torch.enable_grad():
                return self.receive(sender, name, behind, tensor)
        received: Tensor = _make_received(self._anchor, [tensor])
        # Without what `get_gradient_edge` adds to keep such a node alive: where nothing leads to it any more, no
        # gradient comes either.
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
        """Add to the gradients of leaves of this worker. arrival: gives that of what is made here on devices.

        kept: counts those of leaves that had none. Raises Overloaded, and nothing is added then.
        """
        with self.lock:
            if kept is not None and self.brought_by is not None:
                kept.make_room(self, sum(bytes_of(new) for leaf, new in gradients if id(leaf) not in self._gradients))
            self._join(self._gradients.get(id(leaf)) for leaf, _ in gradients)
            for leaf, gradient in gradients:
                pair = self._gradients.get(id(leaf))
                self._gradients[id(leaf)] = leaf, gradient if pair is None else sum_of(pair[1], gradient)
            made = arrival() if arrival is not None else None  # not before the sums are enqueued
            if made is not None:
                self._arrivals.append(made)

    def _join(self, pairs: Iterable[tuple[Tensor, Tensor] | None]) -> None:
        """The current streams of this thread wait for all gradients on devices, and are about to use those of these."""
        for each in self._arrivals:
            each.join()
        if self._arrivals:
            self._arrivals[-1].keep([pair[1] for pair in pairs if pair is not None])

    def gradients(self) -> dict[Tensor, Tensor]:
        """By leaf of this worker; a copy. The current streams of this thread wait for those on devices."""
        with self.lock:
            self._join(self._gradients.values())
            return dict(self._gradients.values())

    def gradients_of(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Of these leaves, in their order; None for one without a gradient. See `gradients`."""
        with self.lock:
            pairs = [self._gradients.get(id(leaf)) for leaf in leaves]
            self._join(pairs)
            return [None if pair is None else pair[1] for pair in pairs]

    def take_back(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a leaf of this worker, which the context then has no more. See `gradients`."""
        with self.lock:
            pair = self._gradients.get(id(tensor))
            self._join([pair])
            self._gradients.pop(id(tensor), None)
            return None if pair is None else pair[1]

    def end(self, error: Exception) -> None:
        """The context was left: passes in it that are under way end with the error."""
        for part in list(self.parts.values()):
            part.fail(error)


def sum_of(before: Tensor, gradient: Tensor) -> Tensor:
    """The sum of two gradients of one tensor."""
    # torch adds a sparse tensor to a dense one, in this order only.
    return gradient + before if before.is_sparse and not gradient.is_sparse else before + gradient


def _edge_of(tensor: Tensor) -> GradientEdge:
    """What `get_gradient_edge` gives; that takes a view of the tensor, which a sparse one does not have."""
    if torch.is_inference_mode_enabled():  # of the thread that sends: a view has no node then
        with torch.inference_mode(False):
            return _edge_of(tensor)
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        behind: Any = torch.neg(tensor).grad_fn
    node = tensor.grad_fn
    if node is None:
        return GradientEdge(behind.next_functions[0][0], 0)
    return GradientEdge(node, tensor.output_nr, behind)  # which keeps the node alive, as in torch's own


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
#: The arguments with which a drop-in fetches the value of ``RRef(value)``: see `Gradients.fetched`.
OF_VALUE = [True]


def keeps_past(function: F) -> F:
    """A decorator for a handler that stands for functions which torch calls without pickling their arguments."""
    setattr(function, _KEEPS_PAST, True)
    return function


class Tape:
    """Records what one message of a context sends. untracked: types of tensors that it sends without a past."""

    def __init__(
        self,
        context: AutogradContext,
        to: PeerForContexts,
        counts: KeptForOthers | None = None,
        on_untracked: Callable[[PeerForContexts], None] | None = None,
    ) -> None:
        """to: the worker that it goes to. counts: where what is recorded counts as kept for that one, if it does.
        on_untracked: hears that it sends tensors without a past that require gradients."""
        self.untracked: type | tuple[()] = context.untracked
        self._context = context
        self._to = to
        self._counts = counts
        self._on_untracked = on_untracked

    def record(self, tensors: Sequence[Tensor], on_unsent: list[Callable[[], None]]) -> Recorded | None:
        """What the message has to say about its tensors, None for nothing.

        on_unsent: a list that gets the function to undo it. Raises Overloaded.
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
    """Sees the gradients of a worker's leaves before their context does, while the worker has a part in a pass."""

    def take(
        self, context: AutogradContext, leaves: Sequence[tuple[Tensor, Tensor]]
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """Gradients of these leaves are there: those that the context gets now. In a thread, never on a loop."""

    def finish(self, context: AutogradContext, failed: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """The part has ended, and no `take` runs: what the context gets besides; nothing if the part failed.

        Any thread, the loop's too.
        """


class Gradients:
    """All contexts of one worker."""

    def __init__(self, engine: Engine, *, sink: LeafSink | None = None, as_torch: bool = False) -> None:
        """as_torch: calls under `no_grad` record nothing, and a Parameter that is sent arrives as one, without a past,
        so that optimizers take what has come in a module. Where torch itself does not pickle it, it has its past, and
        arrives as another tensor: as an argument of an operator of torch, and as a value of ``RRef(value)``."""
        self.sink = sink
        self.as_torch = as_torch
        self.most_behind = MOST_BEHIND
        # The last call by which a worker was told of a context's end, unanswered.
        self.farewells: dict[int, Future[bytes]] = {}
        self.doubted: set[int] = set()  # contexts whose openers are asked whether they have ended
        self.piggybacked: Piggybacked = Piggybacked(engine)
        self.kept: KeptForOthers = KeptForOthers(engine)
        self._on_untracked = self._say_untracked if as_torch else None
        self._engine = engine
        self._contexts: dict[int, AutogradContext] = {}
        self._left: set[int] = set()
        self._left_of: dict[int, deque[int]] = {}  # the same, by the workers that have opened them, the oldest first
        self._gone: OrderedDict[int, None] = OrderedDict()  # workers: as `_left`, for contexts that have not come here
        self._brought: dict[PeerForContexts, int] = {}  # how many of the contexts calls of that worker have brought
        self._first, self._bits = _form_of(engine.id)
        self._lock = Lock()
        with torch.inference_mode(False):
            self._anchor = torch.empty(0, device="cpu", requires_grad=True)

    def __len__(self) -> int:
        """How many contexts are open."""
        return len(self._contexts)

    def new_id(self) -> int:
        """An id for a context or a pass of this worker, which cannot be guessed, and which no context has or had."""
        while (number := self._first | int.from_bytes(os.urandom(8)) >> 64 - self._bits) in self._contexts or (
            number in self._left
        ):
            pass
        return number

    def has_ended(self, id: int) -> bool:
        """Whether a context of this worker was left: its id is in use from the moment at which it is made."""
        return opener_of(id) == self._engine.id and id not in self._contexts

    def open(self) -> AutogradContext:
        """A new context of this worker."""
        return self._enter(self.new_id())

    def _bring(self, id: int, peer: PeerForContexts) -> AutogradContext:
        """The context of a call from that peer. Raises Overloaded where too many of its are open."""
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
        """A context that is open here. RpcUsageError if there is none of that id."""
        context = self._contexts.get(id)
        if context is None:
            raise self.not_here(id)
        return context

    def not_here(self, id: int) -> RpcUsageError:
        """That there is no such context here."""
        return RpcUsageError(
            f"Could not find autograd context with id: {id} on worker {self._engine.name!r}. It was left, or has not "
            "come here; are you inside of `with autograd.context() as context_id`?"
        )

    def find(self, id: int) -> AutogradContext | None:
        """A context that is open here; None if there is none of that id."""
        return self._contexts.get(id)

    def calls(self, id: int | None, peer: PeerForContexts, function: object) -> Tape | None:
        """The tape of a call to that peer in context `id`; None outside of any context, or if it was left.

        From now on the peer takes part. function: that is called.
        """
        context = self._contexts.get(id) if id else None
        if context is None or (self.as_torch and not torch.is_grad_enabled()):
            return None
        context.known.add(peer)
        if id not in self._contexts:  # left meanwhile, by another thread, which may not tell that worker of it
            return None
        tape = Tape(context, peer, None, self._on_untracked)
        if self.as_torch and (_find_builtin(function) is not None or getattr(function, _KEEPS_PAST, False)):
            tape.untracked = ()
        return tape

    def answers(self, id: int | None, peer: PeerForContexts) -> Tape | None:
        """The tape of an answer to that peer, whose call in context `id` was let in (`called`), whatever autograd mode
        this thread is in; None if the context was left."""
        context = self._contexts.get(id) if id else None
        return (
            None if context is None or peer not in context.known else Tape(context, peer, self.kept, self._on_untracked)
        )

    def _say_untracked(self, to: PeerForContexts) -> None:
        """As torch does it, and torch says nothing: once for each worker."""
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
        """As `answers`, as torch does it for the value of an ``RRef(value)``."""
        tape = self.answers(id, peer)
        # One of TorchScript's types it does not pickle; and what has no Parameters itself need not be looked at.
        kinds = (torch.nn.Parameter, list, tuple, dict)
        if tape is not None and isinstance(value, kinds) and _infer_type(value).success():
            tape.untracked = ()
        return tape

    def called(self, id: int, peer: PeerForContexts, serves_all: Callable[[], bool] | None = None) -> int | None:
        """A call from that peer in context `id`, which it may have run, is about to: the peer takes part from now on.

        serves_all: whether every worker may call that function, so that a call of it makes none take part. Returns the
        id, or None if the context was left by now, or never was, or if the peer takes no part. Raises Overloaded.
        """
        if id in self._left or (self._gone and opener_of(id) in self._gone):
            return None
        context = self._contexts.get(id)
        if context is not None and peer in context.known:
            return id
        if serves_all is not None and serves_all():
            return None
        if context is None:
            if not 0 < id < 1 << 63 or opener_of(id) == self._engine.id:  # which would be open
                return None
            context = self._bring(id, peer)
        context.known.add(peer)
        if id in self._left or (self._gone and opener_of(id) in self._gone):  # meanwhile, by another thread
            self._drop(id)
            return None
        return id

    def _drop(self, id: int) -> AutogradContext | None:
        """It is open no longer; None if it was not."""
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
        """The tensors of a message from that peer, each as the output of a graph node that stands for its past.

        Also returns a function that does the same for tensors which are taken apart inside of the pickle, given their
        number among these; None if there are none. Both raise ProtocolError; Overloaded.
        """
        assert peer.record is not None, "a message came from it"
        try:
            number, places, behind = said.number, said.places, said.behind
            context = self._contexts.get(said.context)
            # Left meanwhile: they are tensors like others. So they are where the sender takes no part, as it would if
            # the message were of a call in this context.
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
        """A context has ended: drop what is kept for it. Returns the workers that may know it, too."""
        context = self._contexts.get(id)
        self._remember_left(id, opener_of(id) if context is None else context.opener)
        context = self._drop(id)
        if context is None:
            return set()
        context.end(RpcError(f"autograd context {id} was left"))
        return context.known.copy()  # while that is looked through, other threads may still add to what they have found

    def on_gone(self, worker_id: int) -> None:
        """A worker is gone, and leaves its contexts. On the loop."""
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
        """For each opener by itself: however many contexts one leaves, those of others stay remembered."""
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
