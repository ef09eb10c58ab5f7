"""A module that lives on another worker, with the name of ``torch.distributed.nn``.

    embedding = RemoteModule("ps/cuda:0", torch.nn.Embedding, args=(1000, 64))   # await RemoteModule.create(...)
    y = embedding(x)                                                             # y = await embedding(x)
    optimizer = DistributedOptimizer(torch.optim.SGD, embedding.remote_parameters(), lr=0.1)

Verbs block, and each has a twin ``..._async`` that returns a Future, for coroutines. Calling the module itself returns
a Future on the worker's loop, and blocks elsewhere. A forward is one call, so it takes part in autograd contexts as any
other; the module's ``__call__`` runs, with the hooks that it has there.

Devices. The owner moves tensors among the arguments to the module's device, also inside lists, tuples and dicts.
Results stay on that device if a device map of the caller leads there; otherwise they are moved to the host's memory.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch.nn.parameter import is_lazy

from .errors import RpcError, RpcUsageError
from .futures import Future
from .protocol import codec
from .protocol.messages import Method
from .protocol.registered import register_safe
from .protocol.trees import fill
from .runtime.caller.misuse import check_arguments
from .runtime.caller.peers import To
from .runtime.calls.current import permits
from .runtime.calls.options import CallOptions
from .runtime.gradients.contexts import current_autograd
from .runtime.node import Node, node_of, registry
from .runtime.references.rref import RRef

__all__ = ["RemoteModule", "RemoteModuleError"]

Tensor = torch.Tensor
Module = torch.nn.Module
_HERE = globals()
_RANK = re.compile(r"rank:(\d+)")
_ASSIGN = "assign_to_params_buffers"  # torch's own entry among the versions of a state


class RemoteModuleError(RpcUsageError, ValueError):
    """An invalid RemoteModule, or a method that it does not support; a ``ValueError``, as in torch."""


def _depth_of_user() -> int:
    """The `depth` of `Peer.call` that leads to the user's code, for a call from where this is called."""
    depth, frame = 2, sys._getframe(2)
    while frame.f_globals is _HERE and frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def refused(name: str, hint: str) -> Callable[..., NoReturn]:
    """A method of torch.nn.Module that a RemoteModule does not have. hint: the end of the error text."""

    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise RemoteModuleError(f"Method ``{name}`` not supported for RemoteModule{hint}")

    return refuse


@register_safe
class RemoteModule(Module):
    """A ``torch.nn.Module`` that is made, and runs, on another worker.

    The constructor blocks until it exists. The object may be used from any thread, passed to other workers, which use
    the same module then, and be a part of a local module: ``parameters()`` of that are the local ones, its ``train``,
    ``eval``, ``state_dict`` and ``load_state_dict`` reach the remote part, and its ``to`` does not. Subclasses travel
    with their attributes. It is no part of TorchScript.

    remote_device: ``"worker"``, ``"worker/device"``, ``"rank:0"`` or ``"rank:0/device"``; the device is the owner's,
        ``cpu`` if not given. A device alone means this worker.
    module_cls: a class or function that is called there with `args` and `kwargs`; its module is moved to the device.
    on: name or rank of the owner, as given.
    device: where the module is, there.

    Raised here: WouldBlockLoop on the worker's loop: ``await RemoteModule.create(...)`` there. RemoteModuleError (a
    ValueError) for an invalid remote_device, for a module_cls that does not return a module, and for a module in place
    of its class; RpcUsageError if args is not a tuple; UnknownWorker; the error of module_cls; PeerLost, RpcTimeout.
    After an error nothing is left on the owner.
    """

    training: bool

    on: To
    device: str
    module_rref: RRef[Module]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., Module],
        args: tuple[object, ...] | None = None,
        kwargs: dict[str, object] | None = None,
    ) -> None:
        registry.get().engine.refuse_on_loop("RemoteModule(...)", "await RemoteModule.create(...)")
        super().__init__()
        self._adopt(remote_device)
        self.module_rref = self._make(module_cls, args, kwargs).wait()

    @classmethod
    async def create(
        cls,
        remote_device: str,
        module_cls: Callable[..., Module],
        args: tuple[object, ...] | None = None,
        kwargs: dict[str, object] | None = None,
    ) -> Self:
        """The same as the constructor, without blocking; a subclass' ``__init__`` is not run.

        If cancelled, what the owner has made is dropped.
        """
        made = cls.__new__(cls)
        Module.__init__(made)
        made._adopt(remote_device)
        made.module_rref = await made._make(module_cls, args, kwargs)
        return made

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[Module]) -> Self:
        """A RemoteModule of an existing module, from `get_module_rref` or any RRef of a module. No call is made.

        remote_device: its owner, and the device that it is on. RemoteModuleError if the RRef has another owner.
        """
        made = cls.__new__(cls)
        Module.__init__(made)
        node = made._adopt(remote_device)
        if node.peers.info_of(node.peers.find(made.on)) != module_rref.owner():
            raise RemoteModuleError(f"{remote_device!r} is not where the module is: its owner is {module_rref.owner()}")
        made.module_rref = module_rref
        return made

    def _adopt(self, remote_device: str) -> Node:
        node = registry.get()
        node.engine.lifetime.check_open()
        self.on, device = parse_remote_device(remote_device, node.engine.name)
        self.device = str(device)
        node.peers.find(self.on)
        return node

    def _make(
        self, module_cls: Callable[..., Module], args: tuple[object, ...] | None, kwargs: dict[str, object] | None
    ) -> Future[RRef[Module]]:
        if isinstance(module_cls, Module) or not callable(module_cls):
            kind = type(module_cls).__qualname__
            raise RemoteModuleError(
                f"module_cls is a class or a function, which makes the module on {self.on!r}, and not an object of "
                f"{kind}: pass the class and its arguments by themselves, RemoteModule(..., Class, args=(...))"
            )
        node = registry.get()
        args, kwargs = check_arguments(args, kwargs)
        values = (module_cls, args, kwargs or {}, self.device)
        peer = node.peers.find(self.on)
        return peer.call(new_module, values, None, node.engine.default_timeout, depth=_depth_of_user())

    # --- running it ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """`forward`; on the worker's loop `forward_async`: ``y = await module(x)``."""
        node = self._node()
        if node.engine.on_loop:
            return self.forward_async(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the module on these arguments; blocks. Raises the module's errors, PeerLost, RpcTimeout."""
        self._node().engine.refuse_on_loop("module.forward()", "await module(...)")
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: object, **kwargs: object) -> Future[Any]:
        """The same as a Future, at once. Any thread. Cancelling it may leave the module having run."""
        rref, node = self.module_rref, self._node()
        rref._check()
        peer, timeout = node.peers.by_id(rref._owner), node.engine.default_timeout
        depth = _depth_of_user()
        if self.device == "cpu" and node.accelerators.accelerator is None:  # nothing to move: no reference travels
            method = Method(*rref._name(), "__call__")
            return peer.call(method, args, kwargs, timeout, depth=depth, options=CallOptions(keeps=rref))
        values = (rref, self.device, self._is_led_to(), args, kwargs)
        return peer.call(forward, values, None, timeout, depth=depth)

    @property
    def is_device_map_set(self) -> bool:
        """Whether this worker has a device map to the owner."""
        node = self._node()
        return bool(node.engine.options.device_maps.get(self.module_rref.owner_name()))

    def _is_led_to(self) -> bool:
        """Whether tensors on the module's device can come back to a device here."""
        node = self._node()
        name = self.device
        device = torch.device(name if name == "cpu" or ":" in name else f"{name}:0")
        return node.accelerators.comes_back(self.module_rref.owner_name(), device)

    # --- the module ---------------------------------------------------------------------------------------------------

    def get_module_rref(self) -> RRef[Module]:
        """The RRef of the module itself."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """RRefs of the module's parameters, in its order, for a DistributedOptimizer. Blocks.

        recurse: with those of its submodules.
        """
        self._node().engine.refuse_on_loop("module.remote_parameters()", "await module.remote_parameters_async()")
        return self.remote_parameters_async(recurse).wait()

    def remote_parameters_async(self, recurse: bool = True) -> Future[list[RRef[torch.nn.Parameter]]]:
        """The same as a Future."""
        return self._ask(parameters_of, recurse)

    def train(self, mode: bool = True) -> Self:
        """Put the module into training mode, or out of it. Blocks."""
        self._node().engine.refuse_on_loop("module.train()", "await module.train_async()")
        self.train_async(mode).wait()
        return self

    def eval(self) -> Self:
        """Put the module out of training mode. Blocks."""
        self._node().engine.refuse_on_loop("module.eval()", "await module.eval_async()")
        return self.train(False)

    def train_async(self, mode: bool = True) -> Future[None]:
        """`train` as a Future."""
        asked: Future[None] = self._ask(set_training, bool(mode))
        self.training = bool(mode)
        return asked

    def eval_async(self) -> Future[None]:
        """`eval` as a Future."""
        return self.train_async(False)

    def state_dict(  # type: ignore[override]  # torch types it to give back its `destination`
        self, *, destination: dict[str, object] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The module's state, tensors copied to this worker, into the host's memory. Blocks.

        destination: where to add it, and `prefix`: before the names. keep_vars: without effect, they are copies.
        """
        self._node().engine.refuse_on_loop("module.state_dict()", "await module.state_dict_async()")
        state = self.state_dict_async().wait()
        if destination is None and not prefix:
            return state
        destination = OrderedDict() if destination is None else destination
        destination.update((prefix + name, value) for name, value in state.items())
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata.update((f"{prefix}{name}".strip("."), each) for name, each in _metadata_of(state).items())
        return destination

    def state_dict_async(self) -> Future[dict[str, object]]:
        """`state_dict` as a Future."""
        return self._ask(state_of)

    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False) -> Any:
        """Load a state that `state_dict` made. Blocks; returns the missing and the unexpected keys, as torch does.

        assign: put the tensors in place of the parameters; RRefs of the old ones then refer to unused tensors. Raises
        torch's RuntimeError if the state does not fit.
        """
        self._node().engine.refuse_on_loop("module.load_state_dict()", "await module.load_state_dict_async(...)")
        return self.load_state_dict_async(state_dict, strict, assign).wait()

    def load_state_dict_async(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> Future[object]:
        """`load_state_dict` as a Future."""
        return self._ask(load_state, _each_tensor(state_dict, Tensor.detach), strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: Mapping[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """An enclosing local module loads its state: send our part to the owner."""
        state: dict[str, object] = OrderedDict(
            (name.removeprefix(prefix), value) for name, value in state_dict.items() if name.startswith(prefix)
        )
        versions = {name: value for name, value in local_metadata.items() if name != _ASSIGN}
        if versions:  # of the module itself; torch gives none of its submodules here
            setattr(state, "_metadata", OrderedDict({"": versions}))  # noqa: B010  # as in `_each_tensor`
        assign = bool(local_metadata.get(_ASSIGN, False))
        try:
            result = self.load_state_dict(state, False, assign)
        except RpcError:
            raise
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys += [prefix + name for name in result.missing_keys]
        if strict:
            unexpected_keys += [prefix + name for name in result.unexpected_keys]

    def extra_repr(self) -> str:
        """Where it is."""
        return f"{self.on!r}, device={self.device!r}"

    # --- travelling ---------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        if codec.outgoing.get() is None:
            raise RpcUsageError(
                "a RemoteModule cannot be pickled by itself: it refers to a module on another worker, and can only "
                "travel in a call, as an argument or result; for its values use state_dict()"
            )
        return super().__reduce_ex__(protocol)

    def _take_apart(self) -> dict[str, object]:
        """Its parts for safe encoding (`protocol.trees`)."""
        plain = Module().__dict__
        own = {name: value for name, value in self.__dict__.items() if name not in plain}
        return {**own, "training": self.training}

    @classmethod
    def _put_together(cls, parts: dict[str, object]) -> Self:
        """Make it from the parts of `_take_apart`. Raises for parts of other types, and for names of methods."""
        sorts: dict[str, Any] = {"on": (str, int), "device": str, "module_rref": RRef, "training": bool}
        for name, sort in sorts.items():
            if not isinstance(parts.get(name), sort):
                raise RpcUsageError(f"a RemoteModule whose {name} is {parts.get(name)!r:.80}")
        made = cls.__new__(cls)
        Module.__init__(made)
        fill(made, parts)
        return made

    def _node(self) -> Node:
        node: Node = node_of(self.module_rref)
        node.engine.lifetime.check_open()
        return node

    def _ask(self, function: Callable[..., object], *args: object) -> Future[Any]:
        """Call a handler of this module on the owner, outside of any autograd context."""
        node, rref = self._node(), self.module_rref
        rref._check()
        token = current_autograd.set(0)
        try:
            peer = node.peers.by_id(rref._owner)
            timeout = node.engine.default_timeout
            return peer.call(function, (rref, *args), None, timeout, depth=_depth_of_user())
        finally:
            current_autograd.reset(token)


def parse_remote_device(remote_device: str, here: str) -> tuple[To, torch.device]:
    """The worker, by name or rank, and the device there. here: the worker meant by a device alone.

    Raises RemoteModuleError.
    """
    if not isinstance(remote_device, str):
        raise RemoteModuleError(f"remote_device is a string like 'worker1/cuda:0', not {type(remote_device).__name__}")
    worker, slash, device = remote_device.partition("/")
    if not slash:
        local = _device(worker)
        if isinstance(local, torch.device):
            return here, local
        device = "cpu"
    place = _device(device)
    rank = _RANK.fullmatch(worker)
    if isinstance(place, str) or not worker or (worker.startswith("rank:") and rank is None):
        reason = f"; {place}" if isinstance(place, str) else ""
        raise RemoteModuleError(
            # torch's text, with more forms, and torch's error for the device.
            f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>', "
            f"'rank:<rank>/<device>', '<workername>' or '<device>'{reason}"
        )
    return int(rank[1]) if rank else worker, place


def _device(text: str) -> torch.device | str:
    """The device of a text, or the reason why it is invalid."""
    try:
        return torch.device(text)
    except RuntimeError as error:
        return str(error)


def _metadata_of(state: object) -> Mapping[str, Any]:
    return getattr(state, "_metadata", {})


def _each_tensor(state: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The state with changed tensors, in torch's type and with the versions of its modules.

    A tensor of a lazy module that has not run has no shape: it cannot be changed or copied, and is made anew in the
    host's memory.
    """
    made: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        if is_lazy(value):
            lazy: Any = type(value)
            made[name] = lazy(value.requires_grad, "cpu", value.data.dtype)
        else:
            made[name] = change(value) if isinstance(value, Tensor) else value
    setattr(made, "_metadata", OrderedDict(_metadata_of(state)))  # noqa: B010  # an attribute without a type
    return made


#: Methods that a RemoteModule does not have, by the hint of the error.
_REFUSED = {
    "they live on its owner; use remote_parameters()": "parameters",
    "they live on its owner; use remote_parameters(), or state_dict() for copies by name": "named_parameters",
    "they live on its owner; use state_dict() for copies": "buffers named_buffers",
    "its device is settled when it is made": "to to_empty cpu cuda ipu xpu mtia",
    "run a function that does it on the module's owner, with get_module_rref()": (
        "get_parameter get_buffer get_submodule register_buffer register_parameter register_module add_module apply "
        "requires_grad_ zero_grad share_memory compile type float double half bfloat16 register_forward_pre_hook "
        "register_forward_hook register_backward_hook register_full_backward_hook register_full_backward_pre_hook"
    ),
}
for _hint, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(RemoteModule, _name, refused(_name, f": {_hint}"))

# What `load_state_dict` returns.
register_safe(torch.nn.modules.module._IncompatibleKeys)


# --- on the owner -----------------------------------------------------------------------------------------------------


def new_module(
    module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> RRef[Module]:
    """Handler: a new module. NotAllowed if the caller may not make one of that class."""
    rights = permits()
    if rights is not None:
        rights.check_callable(module_cls)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, Module):
        name = getattr(module_cls, "__qualname__", module_cls)
        raise RemoteModuleError(
            f"Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but {name} returned a "
            f"{type(module).__qualname__}"
        )
    return RRef(module.to(device))


def forward(module_rref: RRef[Module], device: str, keep: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handler: run the module. keep: leave results on the device."""
    place = torch.device(device)
    result = _value_of(module_rref, "__call__")(*moved(args, place), **moved(kwargs, place))
    return result if keep else moved(result, torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """The value with its tensors on a device, also inside lists, tuples and dicts of exact types."""
    if isinstance(value, Tensor):
        return value.to(device)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(moved(each, device) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(moved(each, device) for each in value))
    if kind is dict:
        return {key: moved(each, device) for key, each in value.items()}
    return value


def parameters_of(module_rref: RRef[Module], recurse: bool) -> list[RRef[torch.nn.Parameter]]:
    """Handler: a new RRef of each parameter."""
    return [RRef(parameter) for parameter in _value_of(module_rref, "parameters").parameters(recurse)]


def set_training(module_rref: RRef[Module], mode: bool) -> None:
    """Handler: training mode, or not."""
    _value_of(module_rref, "train").train(mode)


def state_of(module_rref: RRef[Module]) -> dict[str, Any]:
    """Handler: a copy of the state in the host's memory, because parameters may change while it is sent."""
    state = _value_of(module_rref, "state_dict").state_dict()
    return _each_tensor(state, lambda tensor: tensor.to("cpu", copy=True))


def load_state(module_rref: RRef[Module], state: dict[str, Any], strict: bool, assign: bool) -> object:
    """Handler: take that state."""
    if assign:  # received tensors may lie in shared memory
        state = _each_tensor(state, torch.clone)
    return _value_of(module_rref, "load_state_dict").load_state_dict(state, strict, assign)


def _value_of(module_rref: RRef[Module], method: str) -> Module:
    """The module. Raises NotAllowed if the caller may not call `method`."""
    module = module_rref.local_value()
    rights = permits()
    if rights is not None:
        rights.check_method(module, method)
    return module
