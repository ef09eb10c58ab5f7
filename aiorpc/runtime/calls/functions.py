"""Functions on the wire: which name they have there, where they are found, and how they are run."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from enum import Enum
from types import FunctionType, MethodDescriptorType
from typing import Any, NamedTuple, TypeVar

import torch

from ...errors import RpcUsageError
from ...protocol.codec import MAIN_NAMES, find_main
from .batching import get_batcher

F = TypeVar("F", bound=Callable[..., Any])

_DEFERRED = "_aiorpc_async_execution"
_SYSTEM = "_aiorpc_system"
_INLINE = "_aiorpc_inline"


class Mode(Enum):
    """How a handler is run."""

    THREAD = "thread"
    COROUTINE = "coroutine"
    DEFERRED = "async_execution"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"
    BATCHED = "batched"
    INLINE = "inline"


class Handler(NamedTuple):
    """A function that serves calls. system: whether it belongs to the runtime and does not count as users' work."""

    function: Callable[..., Any]
    mode: Mode
    name: str
    system: bool = False


def async_execution(fn: F) -> F:
    """Mark a handler that returns a Future: its thread is free at once, the reply goes out when the Future completes.

    The function must return a ``torch.futures.Future`` of any kind. With ``@staticmethod`` and ``@classmethod`` it may
    be written on either side.
    """
    target: Any = fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn
    setattr(target, _DEFERRED, True)
    return fn


def system(fn: F) -> F:
    """Mark a handler that belongs to the runtime."""
    setattr(fn, _SYSTEM, True)
    return fn


def inline(fn: F) -> F:
    """Mark a plain function of the runtime's that never waits: it is run on the loop, between two frames."""
    setattr(fn, _INLINE, True)
    return fn


def classify(function: Callable[..., Any], name: str) -> Handler:
    """How a callable has to be run."""
    is_system = bool(getattr(function, _SYSTEM, False))
    inner = inspect.unwrap(function) if not isinstance(function, type) else function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if get_batcher(function) is not None:
        mode = Mode.BATCHED
    elif getattr(function, _INLINE, False):
        mode = Mode.INLINE
    elif getattr(function, _DEFERRED, False) or getattr(inner, _DEFERRED, False):
        mode = Mode.DEFERRED
    elif isinstance(function, type):
        mode = Mode.THREAD
    elif inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(_call_of(inner)):
        mode = Mode.COROUTINE
    elif inspect.isasyncgenfunction(inner) or inspect.isasyncgenfunction(_call_of(inner)):
        mode = Mode.ASYNC_GENERATOR
    elif inspect.isgeneratorfunction(inner) or inspect.isgeneratorfunction(_call_of(inner)):
        mode = Mode.GENERATOR
    else:
        mode = Mode.THREAD
    return Handler(function, mode, name, is_system)


def _call_of(function: object) -> object:
    return None if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004  # how, not whether


def describe(function: object) -> str:
    """A function's name for people."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(name) if name else repr(function)


def find_name(function: Any, same_main: bool) -> str | None:
    """The wire name, ``module:qualname``, under which the callee finds the same function; None if it travels by value.

    same_main: whether caller and callee run the same main module.
    """
    name = _find_name(function)
    return None if name is not None and not same_main and name.startswith("__main__:") else name


def _find_name(function: Any) -> str | None:
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if not isinstance(qualname, str):
        return None
    if module in MAIN_NAMES:
        return f"__main__:{qualname}" if find_main(qualname) == function else None
    if isinstance(module, str) and _lookup(module, qualname) == function:
        return f"{module}:{qualname}"
    # torch's operators name no module, or an internal class; they are found where users find them.
    name = getattr(function, "__name__", "")
    for owner in (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special):
        if getattr(owner, name, None) is function:
            return f"{owner.__name__}:{name}"
    return None


def _lookup(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def is_loaded(name: str) -> bool:
    """Whether `resolve` needs no import for that name; an import may take long and does not belong on the loop."""
    module = name.partition(":")[0]
    if module in MAIN_NAMES:
        return True
    # Another thread may be in the middle of importing it.
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module in sys.modules and not getattr(spec, "_initializing", False)


def resolve(name: str) -> Handler:
    """The function of a wire name, imported if need be. RpcUsageError if there is none here."""
    module, _, qualname = name.partition(":")
    try:
        if module in MAIN_NAMES:
            found = find_main(qualname)
        elif not module:
            found = None
        else:
            importlib.import_module(module)  # also waits for a thread that is importing it
            found = _lookup(module, qualname)
    except ImportError as error:
        raise RpcUsageError(f"RPC pickler does not serialize {name!r}: the callee cannot import it: {error}") from error
    if not callable(found):
        raise RpcUsageError(
            f"RPC pickler does not serialize {name!r}: the callee has no such function. "
            "Define it in a module that both sides can import."
        )
    return classify(found, name)


def find_method(kind: type, name: str) -> object | None:
    """The function or method of that name in a class; None if looking it up would run code of the user's."""
    for base in kind.__mro__:
        if name in base.__dict__:
            found: object = base.__dict__[name]
            return found if isinstance(found, (FunctionType, classmethod, staticmethod, MethodDescriptorType)) else None
    return None
