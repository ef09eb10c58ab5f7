"""torch's RRef: what programs ask of one beyond what aiorpc's own has."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import torch

from ....autograd.wire import pack_reference, unpack_reference
from ....callbacks import current_autograd
from ....errors import NotAllowed, NotInitialized, RpcTimeout, RpcUsageError, SerializationError
from ....futures import Future
from ....protocol.codec import Outgoing
from ....protocol.messages import Fetch
from ....runtime.calls.current import deadline
from ....runtime.calls.functions import carries, intrinsic
from ....runtime.gradients.contexts import OF_VALUE
from ....runtime.node import serving
from ....runtime.references.rref import RRef as BaseRRef
from ..autograd import backward_from_value

T = TypeVar("T")
_NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"

_LOOK = 0.001  # seconds between two looks

__all__ = ["PyRRef", "RRef"]


class PyRRef(BaseRRef[T]):
    """A reference to a value on one worker; see `aiorpc.RRef`. torch has two classes for it, here they are one."""

    _deleted = False  # by a shutdown, while the program still has it
    _asked_type: Future[type] | None = None

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is None and isinstance(value, torch.jit.ScriptModule):
            raise RpcUsageError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
            )
        try:
            super().__init__(value, type_hint)
        except NotInitialized as error:
            raise NotInitialized(f"{_NO_AGENT} {error}") from None

    def _check(self) -> None:
        if self._deleted and self._references.engine.closed:
            raise RpcUsageError(
                f"{self}: it was deleted when RPC shut down. Cannot call to_here() on it after deletion."
            )
        creation = self._creation
        if creation is not None and creation.done() and isinstance(creation.exception(), RpcTimeout):
            raise RpcTimeout(f"RRef creation via rpc.remote() timed out: {creation.exception()}")
        super()._check()

    def local_value(self) -> T:
        """The value itself, on its owner; blocks until it exists, raises what its creation raised."""
        if self.is_owner():
            return super().local_value()
        me, there = self._references.engine.info, self.owner()
        raise RpcUsageError(
            f"For UserRRef(rref_id={_id(self._rref)}, fork_id={_id(self._fork)}), can't call localValue() on user "
            f"{me}. Call it on owner {there}"
        )

    def _fetch(self, timeout: float, depth: int) -> Future[T]:
        # The owner has named it: by `RRef(value)`, if not by a call to itself. torch keeps the past of such a value.
        if not current_autograd.get() or self._rref.worker != self._owner or self.is_owner():
            return super()._fetch(timeout, depth + 1)
        self._check()
        references = self._references
        peer = references.peers.by_id(self._owner)
        return peer.call(Fetch(*self._rref), OF_VALUE, None, references.engine.timeout(timeout), depth=depth)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner counts this reference. If it came in a message, waits for a moment until it does.

        torch hands references to a handler only when their owners count them; here the handler has run meanwhile.
        """
        engine = self._references.engine
        if self._creation is None and not engine.on_loop:
            limit = time.monotonic() + (engine.default_timeout or 60.0)
            while not self._confirmed and self._broken is None and not engine.closed and time.monotonic() < limit:
                time.sleep(_LOOK)
        return self._confirmed

    def remote(self, timeout: float = -1.0) -> Any:
        """A proxy whose methods run on the owner and return an RRef. AttributeError here for an unknown one."""
        return _Checked(self, super().remote(timeout), timeout)

    # --- about the value ----------------------------------------------------------------------------------------------

    def _get_type(self, timeout: float = -1.0, blocking: bool = True) -> Any:
        """The type of the value; not blocking: one Future of it, the same each time, until one has failed."""
        asked = self._asked_type
        if asked is None or (asked.done() and asked.exception() is not None):
            asked = self._asked_type = self._ask_type(timeout)
        return asked.wait() if blocking else asked

    def _ask_type(self, timeout: float) -> Future[type]:
        if self.is_owner():
            return self._value_future().then(_type_of)
        self._check()
        references = self._references
        peer = references.peers.by_id(self._owner)
        return peer.call(type_on_owner, (self,), None, references.engine.timeout(timeout), depth=4)

    def _get_future(self) -> Future[Any]:
        """A Future of the creation on the owner."""
        if self._creation is None:
            raise RpcUsageError(f"{self} was not made by remote() here, so nothing is known of its creation")
        return self._creation

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, which is a scalar tensor, on its owner; blocks.

        dist_autograd_ctx_id: the autograd context that gets the gradients; without one they go to ``.grad``, which only
        the owner can ask for.
        """
        if self.is_owner():
            backward_from_value(self.local_value(), dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RpcUsageError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        references = self._references
        peer = references.peers.by_id(self._owner)
        timeout = references.engine.default_timeout
        said = pack_reference(self._rref), int(dist_autograd_ctx_id), bool(retain_graph)
        peer.call(backward_on_owner, said, None, timeout).wait()

    def __str__(self) -> str:
        if self.is_owner():
            return f"OwnerRRef({_id(self._rref)})"
        return f"UserRRef(RRefId = {_id(self._rref)}, ForkId = {_id(self._fork)})"

    # --- travelling ---------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._check_there()
        return super().__reduce_ex__(protocol)

    def _serialize(self) -> Any:
        """Raises the error of the creation, or RpcUsageError: a reference travels only in calls."""
        self._check_there()
        self._check()
        return super().__reduce_ex__(2)

    def _travel(self, out: Outgoing, position: int | None) -> None:
        self._check_there()
        super()._travel(out, position)

    def _check_there(self) -> None:
        if self._deleted:
            raise RpcUsageError("Cannot call fork an UserRRef after deletion.")


class _Checked:
    """A proxy that asks for the type of the value, once, before it makes a call.

    Where the owner does not tell the type, as its option ``allow`` or safe serialization keeps it, the call is made.
    """

    def __init__(self, rref: PyRRef[Any], proxy: Any, timeout: float) -> None:
        self._rref, self._proxy, self._timeout = rref, proxy, timeout

    def __getattr__(self, name: str) -> Any:
        if name == "_proxy":  # not set yet: a copy is being made
            raise AttributeError(name)
        method = getattr(self._proxy, name)
        if self._rref._references.engine.on_loop:
            return method  # no waiting there: the error is that of the call
        try:
            kind = self._rref._get_type(self._timeout)
        except (NotAllowed, SerializationError):
            return method
        if not hasattr(kind, name) and not hasattr(kind, "__getattr__"):
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}")
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._proxy(*args, **kwargs)


def _id(reference: Any) -> str:
    return f"GloballyUniqueId(created_on={reference.worker}, local_id={reference.number})"


def _type_of(value: Future[Any]) -> type:
    return type(value.value())


def type_on_owner(rref: PyRRef[Any]) -> type:
    """Handler: the type of a value of this worker."""
    return type(rref.local_value())


@intrinsic
@carries
def backward_on_owner(packed: bytes, context_id: int, retain_graph: bool) -> None:
    """Handler: a backward pass from a value of this worker, in a context in which the caller takes part.

    packed: the reference to the value.
    """
    if context_id == -1:
        raise RpcUsageError("without a context gradients go to `.grad`, which only the owner can ask for")
    node, call = serving()
    if not node.gradients.get(context_id).takes_part(call.caller_id):
        raise node.gradients.not_here(context_id)
    value = node.references.value(*unpack_reference(packed), call.caller_id).wait(deadline())
    backward_from_value(value, context_id, retain_graph)


RRef = PyRRef
