"""Errors for common mistakes of callers, raised before anything is sent, with advice."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from types import MethodType

import torch

from ...errors import RpcUsageError
from ...protocol.packing import PLAIN
from ..calls.annotations import signature
from ..calls.functions import describe

#: Keywords of other verbs than those that pass all keywords on.
OF_VERBS = frozenset(("timeout", "retries", "backoff", "idempotent", "args", "kwargs"))
OF_GROUPS = OF_VERBS | {"quorum"}


def check_keywords(function: object, kwargs: Mapping[str, object], worker: str, verb: str = "peer") -> None:
    """Raise RpcUsageError for a keyword meant for aiorpc that the function does not take.

    Functions without a signature and methods of references are not checked. verb: the verb that made the handle of the
    call.
    """
    if not callable(function):
        return
    try:
        parameters = signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    for name, value in kwargs.items():
        if name not in OF_GROUPS or name in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
            continue
        instead = (
            f"arguments simply follow the function, rpc.call({worker!r}, {describe(function)}, ...); "
            f"{name}= is of rpc_sync, rpc_async and remote"
            if name in ("args", "kwargs")
            else f"{name} is said to the worker's handle, rpc.{verb}({worker!r}, {name}={value!r:.40}).call(...)"
        )
        raise RpcUsageError(
            f"{describe(function)} takes no argument {name!r}, and nothing was sent: keywords are passed on to the "
            f"function; {instead}"
        )


def no_worker(value: object) -> str:
    """The text of the error for a call to something that names no worker."""
    advice = ""
    if callable(value):
        advice = "; the worker comes first, and then the function"
    elif isinstance(value, (list, tuple, set, frozenset)):
        advice = "; several workers are called together by rpc.group([...]), with a name for each"
    return f"a worker is named by a name, a rank or a WorkerInfo, not by {value!r:.80}{advice}"


def stays_here(handle: object, there: str) -> RpcUsageError:
    """The error for pickling a handle, which makes calls of this worker. there: the code that makes one on another
    worker."""
    return RpcUsageError(
        f"{handle!r} makes calls of the worker that made it, and cannot be pickled or sent; pass the names, and make "
        f"one there: {there}"
    )


def check_arguments(args: object, kwargs: object) -> tuple[tuple[object, ...], dict[str, object] | None]:
    """The arguments in ``args=`` and ``kwargs=`` of a verb. RpcUsageError for wrong types."""
    if args is None:
        args = ()
    # Most often a single argument whose comma was forgotten.
    if isinstance(args, str | bytes | torch.Tensor) or not isinstance(args, Iterable):
        raise RpcUsageError(
            f"args must be a tuple of arguments, not {args!r:.80}; for a single one write args=(value,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise RpcUsageError(f"kwargs must be a dict of arguments by name, or None, not {kwargs!r:.80}")
    return tuple(args), None if kwargs is None else dict(kwargs)


def no_function(value: object, worker: str, verb: str = "call") -> str:
    """The text of the error for a call of an object that is not callable. verb: of the call."""
    shape = f"rpc.call({worker!r}, " if verb == "call" else f"rpc.{verb}(...).call("
    kind = type(value).__qualname__
    if inspect.iscoroutine(value):
        value.close()  # keeps Python from warning that it was never awaited
        name = value.__qualname__
        return f"{name}(...) runs here and gives a {kind}: pass the function by itself, {shape}{name}, ...)"
    shown = repr(value)[:80] if type(value) in PLAIN else f"an object of {kind}"
    return (
        f"{shown} is not callable, and nothing was sent: a call takes the function by itself and then "
        f"its arguments, {shape}function, ...)"
    )


def warn_of_copy(method: MethodType, worker: str, depth: int) -> None:
    """Warn, once for each line of a program, that a bound method travels with a copy of its object.

    depth: how many stack frames up that line is.
    """
    holder = method.__self__
    if isinstance(holder, type):
        return
    kind, name = type(holder).__qualname__, method.__name__
    warnings.warn(
        f"{kind}.{name} goes to worker {worker!r} with a copy of its object: what it changes there is not seen here. "
        f"If the object is to live there, make it there: ref = rpc.remote({worker!r}, {kind}, ...), and then "
        f"await ref.rpc_async().{name}(...). If the one that is here is meant, pass rpc.RRef(object) as an argument. "
        "If a copy is meant, pass the object as an argument of a plain function",
        stacklevel=depth + 1,
    )
