"""Gradients that other workers bring to a part of a backward pass: checking them, and counting their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import NotAllowed
from ..locks import Lock
from ..runtime.gradients.contexts import AutogradContext
from ..runtime.gradients.kept import KeptForOthers, PeerForContexts, bytes_of, name_of
from ..runtime.gradients.reach import SentName
from ..runtime.node import Node
from .wire import from_wire

Tensor = torch.Tensor


class BroughtGradients(NamedTuple):
    """Checked gradients of another worker. sizes: in bytes. state: see `wire.MORE`."""

    peer: PeerForContexts
    gradients: Mapping[SentName, Tensor | None]
    tensors: Sequence[Tensor]
    sizes: Mapping[SentName, int]
    state: int


def brought_by(
    node: Node, context: AutogradContext, peer: PeerForContexts, packed: object, tensors: Sequence[Any]
) -> BroughtGradients:
    """Read and check the gradients of a peer, from `to_wire`.

    Raises NotAllowed for a tensor that was not sent to it from here, or has another shape; ProtocolError.
    """
    gradients, state = from_wire(packed, tensors)
    sent, receivers, sizes = context.sent, context.receivers, dict[SentName, int]()
    for name, gradient in gradients.items():
        edge = sent.get(name)
        if edge is None or (receivers.get(name.message) is not peer and not context.was_sent_to(peer, name)):
            raise _not_its_own(node, context, peer, "for a tensor that it was not sent from here")
        if gradient is not None:
            # torch's engine checks, too, but does not run for resent entries (`Resent`).
            if gradient.shape != tuple(edge.node._input_metadata[edge.output_nr].shape):
                raise _not_its_own(node, context, peer, "of another shape than the tensor has that it was sent")
            sizes[name] = bytes_of(gradient)
    return BroughtGradients(peer, gradients, tensors, sizes, state)


def _not_its_own(node: Node, context: AutogradContext, peer: PeerForContexts, which: str) -> NotAllowed:
    return NotAllowed(
        f"{name_of(peer)} has given worker {node.engine.name!r} a gradient {which}, in a backward pass of autograd "
        f"context {context.id}; nothing of it was used"
    )


class Waiting:
    """Waiting gradients of other workers in one part of a pass, counted by `KeptForOthers.hold`.

    Any thread.

    sizes: the peer and the bytes of each.
    """

    def __init__(self, kept: KeptForOthers) -> None:
        self.sizes: dict[SentName, tuple[PeerForContexts, int]] = {}
        self._kept = kept
        self._lock = Lock()

    def add(self, peer: PeerForContexts, sizes: Mapping[SentName, int]) -> None:
        """Count gradients of a peer. Raises Overloaded; nothing is counted then."""
        self._kept.hold(peer, sum(sizes.values()))
        if not self.sizes.keys().isdisjoint(sizes):
            self.used(sizes)
        with self._lock:
            for name, size in sizes.items():
                self.sizes[name] = peer, size

    def used(self, names: Iterable[SentName]) -> None:
        """Count gradients no more that were used."""
        used: dict[PeerForContexts, int] = {}
        with self._lock:
            for name in names:
                if name in self.sizes:
                    peer, size = self.sizes.pop(name)
                    used[peer] = used.get(peer, 0) + size
        for peer, size in used.items():
            self._kept.let_go(peer, size)

    def end(self) -> None:
        """The part is over."""
        self.used(list(self.sizes))
