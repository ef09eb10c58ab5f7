"""Functions and modules of TorchScript as what calls carry: functions by name, modules as ``torch.jit.save`` has them.

Both sides have compiled a function, as torch wants it. It runs in a handler like any other.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import RpcUsageError
from ...functions import async_execution
from ...futures import is_future
from ...protocol import codec
from ...runtime.calls.current import permits
from ...runtime.gradients.contexts import keeps_past
from .replace import Replacements

ScriptFunction: Any = torch.jit.ScriptFunction
ScriptModule: Any = torch.jit.ScriptModule
_reduce_module: Callable[[Any, Any], Any] = ScriptModule.__reduce_ex__


def is_script(func: object) -> bool:
    """Whether it is a function of TorchScript, perhaps marked with ``async_execution``."""
    return isinstance(getattr(func, "_wrapped_async_rpc_function", func), ScriptFunction)


def by_name(
    func: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The handler to call in place of a script function, and its arguments."""
    wrapped = getattr(func, "_wrapped_async_rpc_function", None)
    function = func if wrapped is None else wrapped
    name = torch._jit_internal._qualified_name(function)
    given, taken = len(args or ()) + len(kwargs or {}), len(function.schema.arguments)
    if given > taken:
        raise RpcUsageError(f"{function.name}() expected at most {taken} argument(s) but received {given} argument(s)")
    return run if wrapped is None else run_async, (name, tuple(args or ()), kwargs or {})


@keeps_past
def run(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Handler: a script function of that name. RuntimeError if there is none here; NotAllowed if it may not be run."""
    rights = permits()
    if rights is not None:
        rights.check_script(name)
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        raise RpcUsageError(f"the script function {name} is not compiled here; define it on both workers")
    try:
        return function(*args, **kwargs)
    except torch.jit.Error as error:  # no RuntimeError by itself, but torch's calls raise one
        raise RuntimeError(str(error)) from error


@keeps_past
@async_execution
def run_async(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Handler: a script function that returns a Future, whose value is the answer."""
    result = run(name, args, kwargs)
    if not is_future(result):
        raise RpcUsageError(f"Async functions must return an IValue of Future type, but got {type(result).__name__}")
    return result


def follow(replaced: Replacements) -> None:
    """From now on script modules travel."""

    def reduce(module: object, protocol: object) -> Any:
        if codec.outgoing.get() is None:
            return _reduce_module(module, protocol)
        file = io.BytesIO()
        torch.jit.save(module, file)
        return load_module, (file.getvalue(),)

    replaced.attribute(ScriptModule, "__reduce_ex__", reduce)


def load_module(data: bytes) -> Any:
    """Used in pickles: a script module."""
    return torch.jit.load(io.BytesIO(data))
