"""Where the gradients of a node go to: the leaves and the received tensors that a worker's part of a graph ends in.

These are the targets of a backward pass. Each has a bit, and each node the bits of all targets that it leads to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

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


class LeafHooks:
    """What a program registered on a leaf's ``AccumulateGrad`` node, now or later.

    Passes do not run that node, which would write to ``.grad``; they run its hooks, as it would.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, node: Node) -> None:
        self._before = _registered(node.register_prehook)
        self._after = _registered(node.register_hook)

    def __bool__(self) -> bool:
        return bool(self._before or self._after)

    def before(self, gradient: Tensor) -> Tensor:
        """Run those that come before the gradient is added: what is to be added, in memory of its own."""
        given = gradient
        for hook in list(self._before.values()):
            changed = hook((given,))
            if changed is not None:
                (given,) = changed if isinstance(changed, tuple) else (changed,)
        if given.shape != gradient.shape:
            raise RuntimeError(
                f"a hook of an AccumulateGrad node changed the shape of a gradient from {tuple(gradient.shape)} to "
                f"{tuple(given.shape)}"
            )
        return given.clone() if self._before else given

    def after(self, gradient: Tensor) -> None:
        """Run those that come when it was added."""
        for hook in list(self._after.values()):
            hook((), (gradient,))


def _registered(register: Callable[[Callable[..., None]], Any]) -> Mapping[int, Callable[..., Any]]:
    """torch's own dictionary of a node's hooks, which only the handle of a hook tells of."""
    handle = register(_nothing)
    hooks: dict[int, Callable[..., Any]] = handle.hooks_dict_ref()
    hooks.pop(handle.id)
    return hooks


def _nothing(*_: Any) -> None:
    """A hook that an engine running meanwhile may see."""


# A leaf, or what stands for the past of a tensor that was received.
Target = Tensor | ReceivedTensor | Foreign
_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # not in torch's stubs


class Reach:
    """Which targets the nodes of a graph lead to, in one context at one worker. Any thread.

    Graphs only grow, so what was found once stays true.
    """

    def __init__(self, received: Mapping[Node, ReceivedTensor], kind: type | tuple[()] = ()) -> None:
        """received: the nodes that stand for the past of received tensors; it may grow. kind: of such nodes."""
        self.targets: list[Target] = []  # by bit
        self.hooks: dict[int, LeafHooks] = {}  # of the leaves among them, by `id`: a tensor's hash runs in Python
        self._received = received
        self._kind = kind
        self._masks: dict[Node, int] = {}  # keeps the nodes: torch makes new objects for those that nobody holds
        self._lock = threading.Lock()

    def of(self, node: Node) -> int:
        """The bits of the targets that a node leads to. Looks at each node of the graph once, ever."""
        with self._lock:
            return self._masks[node] if node in self._masks else self._walk(node)

    def _walk(self, root: Node) -> int:
        masks, stack = self._masks, [root]  # no recursion: graphs are as deep as programs run long
        target: Target | None
        while stack:
            node = stack[-1]
            if node in masks:
                stack.pop()
                continue
            if isinstance(node, _Leaf):
                target = node.variable
                self.hooks[id(target)] = LeafHooks(node)
            else:
                target = self._received.get(node)
                if target is None and isinstance(node, self._kind):
                    target = FOREIGN
            if target is not None:
                masks[node] = 1 << len(self.targets)
                self.targets.append(target)
                continue
            mask, waiting = 0, len(stack)
            for child, _ in node.next_functions:
                if child in masks:
                    mask |= masks[child]
                elif child is not None:
                    stack.append(child)
            if len(stack) == waiting:
                masks[node] = mask
        return masks[root]

    def targets_of(self, mask: int) -> list[Target]:
        """The targets of some bits."""
        found = []
        while mask:
            bit = mask & -mask
            found.append(self.targets[bit.bit_length() - 1])
            mask ^= bit
        return found

    def received_of(self, mask: int) -> list[ReceivedTensor]:
        """Those of the targets that came from another worker."""
        return [target for target in self.targets_of(mask) if isinstance(target, ReceivedTensor)]
