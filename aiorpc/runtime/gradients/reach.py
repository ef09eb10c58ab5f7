"""Where the gradients of a node go to: the leaves and the received tensors that a worker's part of a graph ends in.

These are the targets of a backward pass. Each has a bit, and each node the bits of all targets that it leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

from ...locks import Lock

Tensor = torch.Tensor


class SentName(NamedTuple):
    """The name of a sent tensor, within its sender and context: the number of its message and its place in that."""

    message: int
    place: int


class ReceivedTensor(NamedTuple):
    """A tensor that was received: its sender, its name there, and the edge of the graph that stands for its past.

    behind: all sent tensors that its past in turn came from, on whichever worker, as (worker, message, place). None if
    they were too many for the message; then the sender has to be asked.
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
    """A leaf as one graph has it: the tensor, the edge of its ``AccumulateGrad`` node, and the hooks of that.

    A pass goes by the edge. The tensor has lost that node where a program has frozen it since the graph was made; given
    another type, or moved to another device, it has a new one, and both may be in the graphs of a context.

    Passes do not run the node, which would write to ``.grad``; they run its hooks, as it would. prehooks, posthooks:
    what a program registered on it, now or later.
    """

    tensor: Tensor
    edge: GradientEdge
    prehooks: Hooks
    posthooks: Hooks

    def before(self, gradient: Tensor) -> Tensor:
        """Run those that come before the gradient is added: what is to be added, in memory of its own."""
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
        """Run those that come when it was added."""
        for hook in list(self.posthooks.values()):
            hook((), (gradient,))


def _leaf_of(node: Any) -> Leaf:
    """What an ``AccumulateGrad`` node stands for."""
    # An edge without what `get_gradient_edge` adds to keep such a node alive: it has the node itself.
    edge = GradientEdge(node, 0, None)
    return Leaf(node.variable, edge, _registered(node.register_prehook), _registered(node.register_hook))


def _registered(register: Callable[[Callable[..., None]], Any]) -> Hooks:
    """torch's own dictionary of a node's hooks, which only the handle of a hook tells of."""
    handle = register(_nothing)
    hooks: dict[int, Callable[..., object]] = handle.hooks_dict_ref()
    hooks.pop(handle.id)
    return hooks


def _nothing(*_: object) -> None:
    """A hook that an engine running meanwhile may see."""


# The bits of some targets, or where that takes less memory, their numbers: in a context with many calls the targets
# become many, while most nodes lead to few, of which some are among the latest.
Kept = int | tuple[int, ...]
_LONG = 1024  # from so many bits of a mask for each that is set, numbers take less memory
_SHORT = 1 << 64  # masks below this are kept as they are, and looked through without a generator
# A leaf, or what stands for the past of a tensor that was received.
Target = Leaf | ReceivedTensor | Foreign
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # not in torch's stubs


class Reach:
    """Which targets the nodes of a graph lead to, in one context at one worker. Any thread.

    Graphs only grow, so what was found once stays true.
    """

    def __init__(self, received: Mapping[Node, ReceivedTensor], kind: type | tuple[()] = ()) -> None:
        """received: the nodes that stand for the past of received tensors; it may grow. kind: of such nodes."""
        self.targets: list[Target] = []  # by bit
        self._received = received
        self._kind = kind
        self._masks: dict[Node, Kept] = {}  # keeps the nodes: torch makes new objects for nodes without a reference
        self._came = 0  # the bits of received tensors
        self._lock = Lock()

    def of(self, node: Node) -> int:
        """The bits of the targets that a node leads to. Looks at each node of the graph once, ever."""
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
        """Those of the targets that came from another worker. In turn: who asks may have enough of them."""
        found: Any = map(self.targets.__getitem__, bits_of(mask & self._came))
        return found  # type: ignore[no-any-return]  # these are, say their bits

    def received_in(self, mask: int) -> int:
        """The bits of these."""
        return mask & self._came


def _folded(mask: int) -> Kept:
    """What is kept of a long mask: where it has few bits, their numbers."""
    return mask if mask.bit_length() < _LONG * mask.bit_count() else tuple(bits_of(mask))


def _spread(numbers: tuple[int, ...]) -> int:
    """The mask of the bits with these numbers."""
    mask = 0
    for bit in numbers:
        mask |= 1 << bit
    return mask


def bits_of(mask: int) -> Iterable[int]:
    """The numbers of the bits that are set, from the lowest on. Of a long mask in turn: see `Reach.received_of`."""
    if mask >= _SHORT:
        return _bits_of_long(mask)
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def _bits_of_long(mask: int) -> Iterator[int]:
    """As each number of such a length costs time it is looked through once: to clear bit after bit would write all of
    it for each."""
    if not mask & (mask - 1):
        yield mask.bit_length() - 1
        return
    digits = f"{mask:b}"[::-1]
    at = digits.find("1")
    while at >= 0:
        yield at
        at = digits.find("1", at + 1)
