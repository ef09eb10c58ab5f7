"""What a worker remembers of autograd contexts: tensors that require gradients and were sent or received within one.

Inside a context each call carries its id, and so does each call that its handlers make. A tensor that requires
gradients leaves an entry at its sender, the edge of the graph that it came out of; at the receiver it is the output of
a node without a past, so that the graph there ends in it. The two have one name: the sender, the number of the message,
and the tensor's place in it. A backward pass (`aiorpc.autograd.passes`) goes along these names.

Entries are made when a message is encoded, and taken back if it is not sent. Contexts end on all workers that took part
(`AutogradContext.known`) when whoever opened one leaves it, or is gone.

Any thread, except where it says otherwise.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ..errors import ProtocolError, RpcUsageError

if TYPE_CHECKING:
    from .peer import Peer
    from .worker import Worker

Tensor = torch.Tensor
# The context that code runs in, by its id; 0: none, whatever the call that is being served says.
current_autograd: ContextVar[int | None] = ContextVar("aiorpc_autograd", default=None)

# Contexts that were left are remembered, so that a call that comes late does not open them again.
_REMEMBERED = 4096
_WORKER_BITS = 48


class SentName(NamedTuple):
    """A tensor sent: number of its message, and its place among the tensors of that. Of one worker and context."""

    message: int
    place: int


class ReceivedTensor(NamedTuple):
    """A tensor received: who sent it, its name there, and the edge that stands for its past."""

    sender: int
    name: SentName
    edge: GradientEdge


class _Received(torch.autograd.Function):
    """The node that a received tensor comes out of."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, held: list[Tensor]) -> Tensor:
        # Not an argument of its own: the output would count as a view of it, and could not be written to.
        return held.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RpcUsageError(
            "this tensor came from another worker, where its graph goes on: in place of loss.backward() use "
            "aiorpc.autograd.backward(context_id, [loss])"
        )


class AutogradContext:
    """One context, as this worker sees it."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.sent: dict[SentName, GradientEdge] = {}
        self.received: dict[Node, ReceivedTensor] = {}  # by the node of its edge
        self.known: set[Peer] = set()  # workers that calls of this context went to or came from
        self.lock = threading.Lock()
        self.work: dict[Any, Any] = {}  # of backward passes, while the context is open (aiorpc.autograd)
        self._numbers = itertools.count(1)
        self._gradients: dict[Tensor, Tensor] = {}  # a tensor's hash is its identity

    # --- recording ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor]) -> tuple[int, list[int]] | None:
        """Remember those that require gradients: number of the message, and their places; None if there are none."""
        places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        if not places:
            return None
        number = next(self._numbers)
        edges = {SentName(number, place): get_gradient_edge(tensors[place]) for place in places}
        self.sent.update(edges)
        return number, places

    def unsend(self, number: int, places: Sequence[int]) -> None:
        """That message was not sent."""
        for place in places:
            self.sent.pop(SentName(number, place), None)

    def receive(self, sender: int, number: int, places: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a message from that worker; those at `places` get a node that stands for their past."""
        tracked = list(tensors)
        with torch.inference_mode(False), torch.enable_grad():
            for place in places:
                anchor = torch.empty(0, requires_grad=True)
                tracked[place] = _Received.apply(anchor, [tensors[place]])  # type: ignore[no-untyped-call]
                edge = get_gradient_edge(tracked[place])
                self.received[edge.node] = ReceivedTensor(sender, SentName(number, place), edge)
        return tracked

    # --- gradients ----------------------------------------------------------------------------------------------------

    def accumulate(self, tensor: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a leaf of this worker."""
        with self.lock:
            before = self._gradients.get(tensor)
            if before is None:
                self._gradients[tensor] = gradient
            elif before.is_sparse and not gradient.is_sparse:
                self._gradients[tensor] = gradient + before  # torch adds them in this order only
            else:
                self._gradients[tensor] = before + gradient

    def gradients(self) -> dict[Tensor, Tensor]:
        """By leaf of this worker; a copy."""
        with self.lock:
            return dict(self._gradients)


class Tape:
    """Records what one message of a context sends."""

    def __init__(self, context: AutogradContext) -> None:
        self._context = context

    def record(self, tensors: Sequence[Tensor], on_unsent: list[Any]) -> list[Any] | None:
        """What the message has to say of its tensors; None: nothing. on_unsent: gets what undoes it."""
        sent = self._context.send(tensors)
        if sent is None:
            return None
        on_unsent.append(partial(self._context.unsend, *sent))
        return [self._context.id, *sent]


class Gradients:
    """All contexts of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._contexts: dict[int, AutogradContext] = {}
        self._left: OrderedDict[int, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many contexts are open."""
        return len(self._contexts)

    def next_number(self) -> int:
        """A number for a context or a pass that no other worker gives to one."""
        return self._worker.id << _WORKER_BITS | next(self._numbers)

    def open(self) -> AutogradContext:
        """A new context of this worker."""
        return self._enter(self.next_number())

    def _enter(self, id: int) -> AutogradContext:
        context = self._contexts.get(id)
        if context is None:
            context = self._contexts.setdefault(id, AutogradContext(id))
        return context

    def get(self, id: int) -> AutogradContext:
        """A context that is open here. RpcUsageError if there is none of that id."""
        context = self._contexts.get(id)
        if context is None:
            raise RpcUsageError(
                f"Could not find autograd context with id: {id} on worker {self._worker.name!r}. It was left, or has "
                "not come here; are you inside of `with autograd.context() as context_id`?"
            )
        return context

    def find(self, id: int) -> AutogradContext | None:
        """A context that is open here; None if there is none of that id."""
        return self._contexts.get(id)

    def calls(self, id: int | None, peer: Peer) -> Tape | None:
        """A message to that peer is made in context `id`; None outside of any, or of one that was left."""
        context = self._contexts.get(id) if id else None
        if context is None:
            return None
        context.known.add(peer)
        return Tape(context)

    def called(self, id: Any, peer: Peer) -> int | None:
        """A call came from that peer in context `id`: the id, or None if the context was left by now."""
        if type(id) is not int:
            raise ProtocolError(f"{id!r:.40} is no autograd context")
        if id in self._left:
            return None
        self._enter(id).known.add(peer)
        return id

    def receive(self, peer: Peer, said: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of a message from that peer that says so of them. Raises ProtocolError."""
        assert peer.record is not None, "a message came from it"
        try:
            id, number, places = said
            if type(number) is not int or any(not 0 <= place < len(tensors) for place in places):
                raise ValueError(f"{number!r:.40}, {places!r:.40}")
            context = self._contexts.get(id)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a message that says of gradients what cannot be: {error}") from None
        if context is None:  # left meanwhile: they are tensors like others
            return tensors
        context.known.add(peer)
        return context.receive(peer.record.id, number, places, tensors)

    def leave(self, id: int) -> set[Peer]:
        """That context has ended: what is kept for it is dropped. Who else may know of it."""
        with self._lock:
            self._left[id] = None
            while len(self._left) > _REMEMBERED:
                self._left.popitem(last=False)
        context = self._contexts.pop(id, None)
        return set() if context is None else context.known

    def on_gone(self, worker_id: int) -> None:
        """A worker is gone, and leaves its contexts. On the loop."""
        for id in [id for id in list(self._contexts) if id >> _WORKER_BITS == worker_id]:
            self.leave(id)

    def close(self) -> None:
        """The worker shuts down."""
        self._contexts.clear()
