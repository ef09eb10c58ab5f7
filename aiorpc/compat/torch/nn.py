"""Stands as ``torch.distributed.nn.api.remote_module``."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from ...errors import RpcUsageError
from ...nn import RemoteModule as BaseModule
from ...nn import refused
from ...protocol import codec
from ...runtime.references.rref import RRef

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
# torch refuses these, and programs may rely on it; aiorpc's own class has the useful ones.
_REFUSED = ("children", "extra_repr", "load_state_dict", "modules", "named_children", "named_modules", "state_dict")
_INSTEAD = {"parameters": ". Please use ``remote_parameters`` instead."}


class _RemoteModule(BaseModule):
    """A module on another worker; see `aiorpc.nn.RemoteModule`. It travels without attributes of a subclass."""

    is_scriptable = False
    generated_methods: tuple[Callable[..., object], ...] = (BaseModule.forward_async, BaseModule.forward)

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: object = None,
    ) -> None:
        if _module_interface_cls is not None:
            raise RpcUsageError("a RemoteModule of aiorpc is no part of TorchScript: leave _module_interface_cls out")
        super().__init__(remote_device, module_cls, args, kwargs)

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[torch.nn.Module], _module_interface_cls: object = None
    ) -> Any:
        """A RemoteModule of a module that exists. As with torch, `remote_device` need not name its owner."""
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._adopt(remote_device)
        made.module_rref = module_rref
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if codec.outgoing.get() is None:
            raise RpcUsageError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
            )
        return _load, (type(self), self.on, self.device, self.module_rref)


def _load(kind: type[_RemoteModule], on: object, device: str, module_rref: RRef[torch.nn.Module]) -> _RemoteModule:
    """Set torch's attributes in torch's order, and none of a local module."""
    made = kind.__new__(kind)
    made.__dict__.update(on=on, device=device)
    made.__dict__["is_device_map_set"] = False  # for code that looks at the dictionary; the property hides it
    made.__dict__.update(is_scriptable=False, generated_methods=kind.generated_methods, module_rref=module_rref)
    made.__dict__.update((each.__name__, MethodType(each, made)) for each in kind.generated_methods)
    return made


for _name in (*_REFUSED, *_INSTEAD):
    setattr(_RemoteModule, _name, refused(_name, _INSTEAD.get(_name, "")))


class RemoteModule(_RemoteModule):
    """A module on another worker; see `aiorpc.nn.RemoteModule`. torch has two classes for it."""
