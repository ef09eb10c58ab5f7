"""Stands as ``torch.distributed.rpc.internal``: pickling outside of a message, and names of profiled calls."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ....protocol import codec
from ....runtime.calls.current import permits

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class PythonUDF(NamedTuple):
    """A call, as torch writes it."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An error of a call, as torch writes it."""

    msg: object
    exception_type: object


class RPCExecMode(enum.Enum):
    """How a call is made, in the names that profiles give to calls."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class _InternalRPCPickler:
    """An object as bytes, and the tensors that were in it. May be used while a message is pickled, for a part of it."""

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        """Bytes, and the tensors in the object; buffers of others, like numpy's arrays, stand behind these."""
        outer = codec.outgoing.get()
        out = codec.Outgoing(None if outer is None else outer.target, same_main=outer is not None and outer.same_main)
        data = codec.dumps(obj, out)
        buffers = [_tensor_of(buffer) for buffer in out.buffers]
        return pickle.dumps((len(out.tensors), data)), out.tensors + buffers

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """The object that `serialize` made these of."""
        count, data = pickle.loads(binary_data)
        outer = codec.incoming.get()
        message = codec.Incoming(tensor_table[:count], () if outer is None else outer.references)
        return codec.loads(data, message, [_bytes_of(tensor) for tensor in tensor_table[count:]])


def _tensor_of(buffer: Any) -> torch.Tensor:
    data = bytearray(buffer)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)  # it takes no empty


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Bytes, and the tensors in the object."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """The object that `serialize` made these of."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def run_serialized(load: Callable[[bytes, Sequence[torch.Tensor]], Any], data: bytes, tensors: list[Any]) -> Any:
    """Handler: a call that a pickler of the program's own has pickled, see `api._use_rpc_pickler`.

    NotAllowed for a caller that may not have everything run: both functions come with the arguments.
    """
    rights = permits()
    if rights is not None:
        rights.check_by_value("a call that another pickler has pickled")
    udf = load(data, tensors)
    return udf.func(*udf.args, **(udf.kwargs or {}))


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """What a profile calls the call of a function."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
