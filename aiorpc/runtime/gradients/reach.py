"""The targets of gradients: the leaves and received tensors in which a worker's part of a graph ends.

Each target has a bit, and each node the bits of all targets that it leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

from ...locks import Lock

Tensor = torch.Tensor


class SentName(NamedTuple):
    """The name of a sent tensor, for its sender and context: the number of its message and its place there."""

    message: int
    place: int


class ReceivedTensor(NamedTuple):
    """A tensor that was received: its sender, its name there, and the edge of the graph that stands for its past.

    behind: all sent tensors, on any worker, that its past came from, as (worker, message, place). None if they were too
    many for the message; ask the sender then.
    """

    sender: int
    name: SentName
    edge: GradientEdge
    behind: frozenset[tuple[int, int, int]] | None


class Foreign:
    """Stands for the past of a tensor that was received in another context."""


FOREIGN = Foreign()


Hooks = Mapping[int, Callable[..., object]]


class Leaf(NamedTuple):
    """A leaf of one graph: the tensor, the edge of its ``AccumulateGrad`` node, and the node's hooks.

    A pass uses the edge, because the tensor may have lost the node since (the program froze it) or have a new one (it
    changed type or device); the graphs of a context may contain both. Passes do not run the node, which would write to
    ``.grad``; they run its hooks. prehooks, posthooks: torch's own dictionaries, with hooks that are registered later,
    too.
    """

    tensor: Tensor
    edge: GradientEdge
    prehooks: Hooks
    posthooks: Hooks

    def before(self, gradient: Tensor) -> Tensor:
        """Run the prehooks. Returns the gradient to add; if there are prehooks, in memory of its own."""
        given = gradient
        for hook in list(self.prehooks.values()):
            changed = hook((given,))
            if changed is not None:
                (given,) = changed if isinstance(changed, tuple) else (changed,)
        if given.shape != gradient.shape:
            raise RuntimeError(
                f"a hook of an AccumulateGrad node changed the shape of a gradient from {tuple(gradient.shape)} to "
                f"{tuple(given.shape)}"
            )
        return given.clone() if self.prehooks else given

    def after(self, gradient: Tensor) -> None:
        """Run the posthooks."""
        for hook in list(self.posthooks.values()):
            hook((), (gradient,))


def _leaf_of(node: Any) -> Leaf:
    """The leaf of an ``AccumulateGrad`` node."""
    # Not by `get_gradient_edge`: this edge has the node itself.
    edge = GradientEdge(node, 0, None)
    return Leaf(node.variable, edge, _registered(node.register_prehook), _registered(node.register_hook))


def _registered(register: Callable[[Callable[..., None]], Any]) -> Hooks:
    """torch's own dictionary of a node's hooks, which only a hook's handle reveals."""
    handle = register(_nothing)
    hooks: dict[int, Callable[..., object]] = handle.hooks_dict_ref()
    hooks.pop(handle.id)
    return hooks


def _nothing(*_: object) -> None:
    """A hook that an engine running meanwhile may see."""


# The bits of some targets, or their numbers if these take less memory: in a context with many calls there are many
# targets, but most nodes lead to few of them.
Kept = int | tuple[int, ...]
_LONG = 1024  # with so many bits of a mask for each set one, numbers take less memory
_SHORT = 1 << 64  # masks below this are kept as they are, and looked through without a generator
# A leaf, or the past of a received tensor.
Target = Leaf | ReceivedTensor | Foreign
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # not in torch's stubs


class Reach:
    """The targets of each node of a graph, in one context at one worker. Any thread.

    Graphs only grow, so results stay true.
    """

    def __init__(self, received: Mapping[Node, ReceivedTensor], kind: type | tuple[()] = ()) -> None:
        """received: received tensors by the nodes that stand for their pasts; it may grow. kind: the type of such
        nodes.
        """
        self.targets: list[Target] = []  # by bit
        self._received = received
        self._kind = kind
        self._masks: dict[Node, Kept] = {}  # keeps the nodes: torch makes new objects for nodes without a reference
        self._came = 0  # the bits of received tensors
        self._lock = Lock()

    def of(self, node: Node) -> int:
        """The bits of the targets that a node leads to. Visits each node of the graph once, ever."""
        with self._lock:
            kept = self._masks[node] if node in self._masks else self._walk(node)
            return kept if isinstance(kept, int) else _spread(kept)

    def _walk(self, root: Node) -> Kept:
        masks, stack = self._masks, [root]  # no recursion: graphs are as deep as programs run long
        target: Target | None
        while stack:
            node = stack[-1]
            if node in masks:
                stack.pop()
                continue
            if isinstance(node, _AccumulateGrad):
                target = _leaf_of(node)
            else:
                target = self._received.get(node)
                if target is None and isinstance(node, self._kind):
                    target = FOREIGN
            if target is not None:
                bit = 1 << len(self.targets)
                masks[node] = bit if bit < _SHORT else _folded(bit)
                if isinstance(target, ReceivedTensor):
                    self._came |= bit
                self.targets.append(target)
                continue
            mask, waiting = 0, len(stack)
            for child, _ in node.next_functions:
                if child in masks:
                    kept = masks[child]
                    mask |= kept if isinstance(kept, int) else _spread(kept)
                elif child is not None:
                    stack.append(child)
            if len(stack) == waiting:
                masks[node] = mask if mask < _SHORT else _folded(mask)
        return masks[root]

    def targets_of(self, numbers: Iterable[int]) -> list[Target]:
        """The targets of the bits with these numbers."""
        return list(map(self.targets.__getitem__, numbers))

    def received_of(self, mask: int) -> Iterator[ReceivedTensor]:
        """The targets of a mask that came from another worker, lazily: callers may stop early."""
        found: Any = map(self.targets.__getitem__, bits_of(mask & self._came))
        return found  # type: ignore[no-any-return]  # by their bits

    def received_in(self, mask: int) -> int:
        """The bits of targets that came from another worker."""
        return mask & self._came


def _folded(mask: int) -> Kept:
    """A long mask in its smaller form."""
    return mask if mask.bit_length() < _LONG * mask.bit_count() else tuple(bits_of(mask))


def _spread(numbers: tuple[int, ...]) -> int:
    """The mask of the bits with these numbers."""
    mask = 0
    for bit in numbers:
        mask |= 1 << bit
    return mask


def bits_of(mask: int) -> Iterable[int]:
    """The numbers of the set bits, from the lowest on; lazily for a long mask."""
    if mask >= _SHORT:
        return _bits_of_long(mask)
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def _bits_of_long(mask: int) -> Iterator[int]:
    """Bits of a long mask in one pass over its digits: clearing each bit would copy the whole number every time."""
    if not mask & (mask - 1):
        yield mask.bit_length() - 1
        return
    digits = f"{mask:b}"[::-1]
    at = digits.find("1")
    while at >= 0:
        yield at
        at = digits.find("1", at + 1)
