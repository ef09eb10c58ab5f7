"""Counts and limits what autograd contexts keep for each other worker."""

from __future__ import annotations

from typing import Protocol

import torch

from ...errors import Overloaded
from ...locks import Lock
from ...protocol.identity import WorkerRecord
from ..engine.engine import Engine


class PeerForContexts(Protocol):
    """Another worker (`Peer`)."""

    @property
    def record(self) -> WorkerRecord | None: ...


class CountedContext(Protocol):
    """A context (`AutogradContext`)."""

    kept: dict[PeerForContexts, int]
    leaf_bytes: int

    @property
    def brought_by(self) -> PeerForContexts | None: ...


class KeptForOthers:
    """The counts of one worker, over all its contexts. Any thread.

    A gradient waits from its arrival from another worker until a pass has used it, or has ended.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = Lock()
        self._pieces: dict[PeerForContexts, int] = {}
        self._waiting: dict[PeerForContexts, int] = {}  # bytes
        self._leaf_bytes: dict[PeerForContexts, int] = {}

    def keep(self, context: CountedContext, peer: PeerForContexts, count: int) -> None:
        """Count `count` more pieces (fewer, if negative) of a context for a peer.

        A piece takes about 1 KiB: a tensor from the peer or in an answer to it, `_NAMES_IN_ONE` names, or a pass.
        Raises Overloaded.
        """
        most = self._engine.options.max_references
        with self._lock:
            pieces = self._pieces.get(peer, 0) + count
            if count > 0 and pieces > most:
                raise Overloaded(
                    f"worker {self._engine.name!r} has recorded {pieces - count} tensors and backward passes for "
                    f"{name_of(peer)} in autograd contexts that are open; {count} more are too many (max_references)"
                )
            self._pieces[peer] = pieces
            context.kept[peer] = context.kept.get(peer, 0) + count

    def hold(self, peer: PeerForContexts, size: int) -> None:
        """Count bytes of gradients that have come from a peer and wait.

        Raises Overloaded if others of the peer wait, and all together are too many.
        """
        most = self._engine.options.max_queued_bytes
        with self._lock:
            waiting = self._waiting.get(peer, 0)
            if waiting and waiting + size > most:
                raise Overloaded(
                    f"worker {self._engine.name!r} has {waiting} bytes of gradients of {name_of(peer)} that wait for "
                    f"the rest of their backward passes; {size} more are too many (max_queued_bytes)"
                )
            self._waiting[peer] = waiting + size

    def let_go(self, peer: PeerForContexts, size: int) -> None:
        """Count bytes of gradients no more that waited."""
        with self._lock:
            left = self._waiting.get(peer, 0) - size
            if left > 0:
                self._waiting[peer] = left
            else:
                self._waiting.pop(peer, None)

    def make_room(self, context: CountedContext, size: int) -> None:
        """Count bytes of gradients of leaves in a context.

        Raises Overloaded if the worker that brought the context has brought others with gradients, and all together are
        too many.
        """
        peer = context.brought_by
        if peer is None or not size:
            return
        most = self._engine.options.max_incoming_bytes
        with self._lock:
            there = self._leaf_bytes.get(peer, 0)
            if there > context.leaf_bytes and there + size > most:
                raise Overloaded(
                    f"worker {self._engine.name!r} has {there} bytes of gradients in autograd contexts that "
                    f"{name_of(peer)} has brought; {size} more in one of several are too many (max_incoming_bytes)"
                )
            self._leaf_bytes[peer] = there + size
            context.leaf_bytes += size

    def drop(self, context: CountedContext) -> None:
        """Count a context no more that has ended."""
        with self._lock:
            for peer, count in context.kept.items():
                _subtract(self._pieces, peer, count)
            context.kept.clear()
            if context.brought_by is not None:
                _subtract(self._leaf_bytes, context.brought_by, context.leaf_bytes)
                context.leaf_bytes = 0


def bytes_of(gradient: torch.Tensor) -> int:
    """The memory of a gradient in bytes; an expanded gradient counts its storage."""
    if gradient.layout is torch.strided:
        return min(gradient.nbytes, gradient.untyped_storage().nbytes())
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().nbytes + gradient._values().nbytes
    return gradient.values().nbytes * 3  # with the indices


def _subtract(counts: dict[PeerForContexts, int], peer: PeerForContexts, count: int) -> None:
    left = counts.get(peer, 0) - count
    if left > 0:
        counts[peer] = left
    else:
        counts.pop(peer, None)


def name_of(peer: PeerForContexts) -> str:
    """A peer, for texts."""
    return "another worker" if peer.record is None else f"worker {peer.record.name!r}"
