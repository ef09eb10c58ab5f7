"""Stands as ``torch.distributed.rpc.functions``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ....functions import async_execution as mark_async

__all__ = ["async_execution"]


def async_execution(fn: Any) -> Any:
    """Mark a handler that returns a Future: the reply goes out when that completes. See `aiorpc.async_execution`.

    A function that takes no attributes, like one of TorchScript, is wrapped first.
    """
    marked: Any = mark_async(fn if _takes_attributes(fn) else _wrapped(fn))
    target: Any = marked.__func__ if isinstance(marked, (staticmethod, classmethod)) else marked
    target._wrapped_async_rpc_function = fn
    return marked


def _takes_attributes(fn: object) -> bool:
    return hasattr(fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn, "__dict__")


def _wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return call
