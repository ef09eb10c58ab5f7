"""Hooks that code on top of a worker sets before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .gradients.contexts import LeafSink
from .references.rref import RRef


def _as_it_is(function: str, error: BaseException) -> BaseException:
    return error


@dataclass(frozen=True)
class Hooks:
    """The places where the drop-in for ``torch.distributed.rpc`` makes a worker behave as torch does.

    handle_class: the class of handles that arrive, and of results of `remote`. on_handler_error: called with each error
    of a handler after it was sent as an answer, in any thread. read_error: called with the name of a function and its
    error, and returns the error for the caller. sink, as_torch: see `Gradients`.
    """

    handle_class: type[RRef[object]] = RRef
    on_handler_error: Callable[[BaseException], None] | None = None
    read_error: Callable[[str, BaseException], BaseException] = _as_it_is
    sink: LeafSink | None = None
    as_torch: bool = False
