"""Stands as ``torch.distributed.autograd``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...autograd import backward as run_pass
from ...autograd import context as aiorpc_context
from ...autograd import get_gradients
from ...callbacks import current_autograd
from ...errors import RpcError, RpcUsageError
from ...runtime.gradients import contexts as gradients
from ...runtime.gradients.contexts import AutogradContext
from ...runtime.node import registry
from .replace import Replacements

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]

Tensor = torch.Tensor


def is_available() -> bool:
    """Always."""
    return True


def _init(worker_id: int) -> None:
    """Nothing to do: contexts belong to the worker."""


class context:
    """``with context() as context_id``: records the calls inside, on all workers. One at a time in a thread."""

    def __init__(self) -> None:
        self._inner = aiorpc_context()

    def __enter__(self) -> int:
        if current_autograd.get():
            raise RpcUsageError(
                f"Already have an autograd context id for this thread: {current_autograd.get()}; "
                "contexts cannot be nested"
            )
        return int(self._inner.__enter__())

    def __exit__(self, *exc_info: object) -> None:
        self._inner.__exit__(*exc_info)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Compute gradients of the sum of `roots` on all workers, into the context; blocks. See `aiorpc.autograd`."""
    if isinstance(context_id, bool) or not isinstance(context_id, int) or not isinstance(roots, (list, tuple)):
        raise TypeError("backward(): incompatible function arguments: it takes an int and a list of tensors")
    if any(not isinstance(root, Tensor) for root in roots):
        raise TypeError("backward(): incompatible function arguments: the roots are tensors")
    _run(context_id, roots, retain_graph)


def _run(context_id: int, roots: Sequence[Tensor], retain_graph: bool) -> None:
    """Run a pass. An error of a graph node becomes a RuntimeError with the worker's rank, as in torch."""
    try:
        run_pass(context_id, roots, retain_graph)
    except RpcError:
        raise
    except Exception as error:
        made = RuntimeError(f"Error on Node {_rank_of(error)}: {error}")
        raise made.with_traceback(error.__traceback__) from error


def _rank_of(error: Exception) -> int:
    """The rank of the worker where a pass failed, by the notes of the error; by default ours."""
    node = registry.get()
    named = [part for note in getattr(error, "__notes__", ()) for part in re.findall(r"on worker '([^']*)'", note)]
    for info in node.worker_infos():
        if named and info.name == named[0]:
            return info.id
    return node.engine.info.id


def backward_from_value(value: object, context_id: int, retain_graph: bool) -> None:
    """A pass from one tensor; without a context (-1) the gradients go to ``.grad``, as of a local ``backward()``."""
    if not isinstance(value, Tensor):
        raise RpcUsageError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        _run(context_id, [value], retain_graph)


# --- contexts as objects ----------------------------------------------------------------------------------------------


class SendFunction:
    """The graph's node of a message that left within a context: the edges of its tensors."""

    def __init__(self, edges: Sequence[Any]) -> None:
        self.next_functions: tuple[tuple[Any, Any], ...] = tuple((edge.node, edge.output_nr) for edge in edges)

    def name(self) -> str:
        """As torch names it."""
        return "torch::distributed::autograd::SendRpcBackward"


class DistAutogradContext:
    """A context of this worker, for torch's tests and tools."""

    def __init__(self, context: AutogradContext) -> None:
        self._context = context

    def _context_id(self) -> int:
        """Its id."""
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        """The workers that calls of this context went to from here."""
        return {peer.record.id for peer in self._context.known if peer.record is not None}

    def _send_functions(self) -> dict[int, SendFunction]:
        """The sent messages, by number."""
        by_message: dict[int, list[object]] = {}
        for name, edge in list(self._context.sent.items()):
            by_message.setdefault(name.message, []).append(edge)
        return {number: SendFunction(edges) for number, edges in by_message.items()}

    def _recv_functions(self) -> dict[int, object]:
        """A node of each received message, by a number of its own."""
        by_message: dict[tuple[int, int], object] = {}
        for node, received in list(self._context.received.items()):
            by_message.setdefault((received.sender, received.name.message), node)
        return dict(enumerate(by_message.values()))


def _message_of(node: Any) -> tuple[int, int, int] | None:
    """The message that a tensor came in: context, sender, number."""
    for context in list(registry.get().gradients._contexts.values()):
        received = context.received.get(node)
        if received is not None:
            return context.id, received.sender, received.name.message
    return None


def follow(replaced: Replacements) -> None:
    """Give nodes of received tensors torch's name, and make those of one message equal: torch has a single one."""

    def equal(node: Any, other: object) -> Any:
        if type(other) is not kind:
            return NotImplemented
        return node is other or (_message_of(node) is not None and _message_of(node) == _message_of(other))

    # aiorpc has a node for each tensor: torch's, for each message, would have as many outputs.
    kind: Any = gradients._Received._backward_cls
    replaced.attribute(kind, "__eq__", equal)
    replaced.attribute(kind, "__hash__", object.__hash__)  # still by identity: the runtime has them as keys
    replaced.attribute(kind, "__name__", "torch::distributed::autograd::RecvRpcBackward")


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """The context of that id. RuntimeError if there is none here."""
    return DistAutogradContext(registry.get().gradients.get(context_id))


def _current_context() -> DistAutogradContext:
    """The context that this thread is in. RuntimeError if it is in none."""
    current = current_autograd.get()
    if not current:
        raise RpcUsageError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: `with "
            "torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return _retrieve_context(current)


def _is_valid_context(context_id: int) -> None:
    """RuntimeError if there is no such context here."""
    registry.get().gradients.get(context_id)


_entered: WeakKeyDictionary[AutogradContext, aiorpc_context] = WeakKeyDictionary()


def _new_context() -> DistAutogradContext:
    """A context without ``with``; `_release_context` ends it."""
    if current_autograd.get():
        raise RpcUsageError(f"Already have an autograd context id for this thread: {current_autograd.get()}")
    entered = aiorpc_context()
    opened = registry.get().gradients.get(entered.__enter__())
    _entered[opened] = entered
    return DistAutogradContext(opened)


def _release_context(context_id: int) -> None:
    """End a context of `_new_context`. RuntimeError if there is none."""
    contexts = registry.get().gradients
    entered = _entered.pop(contexts.get(context_id), None)
    if entered is None:  # another worker's
        contexts.leave(context_id)
    else:
        entered.__exit__()
    if current_autograd.get() == context_id:
        current_autograd.set(None)


def _get_max_id() -> int:
    """The highest id that a context of this worker can have."""
    return gradients.id_range(registry.get().engine.id)[1]


def _get_debug_info() -> dict[str, int]:
    """The numbers of open contexts and of passes under way, as ints."""
    with contextlib.suppress(RpcUsageError):
        contexts = list(registry.get().gradients._contexts.values())
        passes = sum(len(each.parts) for each in contexts)
        return {"num_current_backward_passes": passes, "num_autograd_contexts": len(contexts)}
    return {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
