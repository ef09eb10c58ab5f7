"""Entries of a part of a backward pass that are received tensors, sent on unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from ..runtime.gradients.contexts import is_watched, sum_of
from ..runtime.gradients.reach import ReceivedTensor, SentName, bits_of
from .awaited import Awaited

Tensor = torch.Tensor
# The fewest that are handled here: three times as fast in a chain of 300 calls, ten times in one of 1,000.
_MANY = 4


class Entry(NamedTuple):
    """An entry of a gradient. mask: of the targets that it leads to."""

    edge: GradientEdge
    mask: int


class Resent:
    """Entries that are tensors which this worker has received: their gradients are added to those of its graph.

    So the graph need not wait for them. In a chain of calls whose results all go into the loss, each call waits for the
    next: the engine would go through the whole graph once for each. Not thread-safe.

    names: of these entries. ready: the bits of targets of the other entries for which all gradients are there. begun:
    the bits of targets whose `parts` the engine has made, or is about to make.
    """

    def __init__(self) -> None:
        self.names: dict[SentName, None] = {}
        self.ready: int = 0
        self.begun = 0
        self.parts: dict[int, Tensor | None] = {}
        self._by_bit: dict[int, tuple[ReceivedTensor, list[SentName]]] = {}
        self._bits = 0
        self._others: Awaited | None = None

    @classmethod
    def of(cls, entries: Mapping[SentName, Entry], received: Mapping[Any, ReceivedTensor]) -> Resent:
        """The resent entries among `entries`, except tensors whose whole gradients the program sees (hooks)."""
        made = cls()
        if len(entries) <= _MANY or not received:
            return made
        for name, (edge, mask) in entries.items():
            tensor = received.get(edge.node)
            if tensor is not None and not is_watched(tensor):
                made.names[name] = None
                made._by_bit.setdefault(mask.bit_length() - 1, (tensor, []))[1].append(name)
        if len(made.names) < _MANY:
            return cls()
        others = {name: entry for name, entry in entries.items() if name not in made.names}
        made._others = Awaited(list(others), [entry.mask for entry in others.values()])
        for bit in made._by_bit:
            made._bits |= 1 << bit
        made._bits &= made._others.targets
        if not made._bits:  # no other entry leads to any of them
            return cls()
        made.came(())
        return made

    def came(self, names: Iterable[SentName]) -> None:
        """The gradients of some entries have come."""
        if self._others is not None:
            self._others.came(names)
            self.ready = self._bits & ~self._others.blocked & ~self.begun

    def summed(
        self, done: int, gradients: dict[SentName, Tensor | None], used: list[SentName]
    ) -> list[tuple[ReceivedTensor, Tensor | None]]:
        """Remove and return the gradients of targets that have begun and are complete.

        used: gets the names of the entries that they contain.
        """
        found: list[tuple[ReceivedTensor, Tensor | None]] = []
        for bit in bits_of(done):
            tensor, names = self._by_bit[bit]
            total = self.parts.pop(bit, None)
            used += names
            for name in names:
                gradient, gradients[name] = gradients[name], None
                if gradient is not None:
                    total = gradient if total is None else sum_of(total, gradient)
            found.append((tensor, total))
        return found
