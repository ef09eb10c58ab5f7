"""What code that builds on a worker may put into it before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .gradients.contexts import LeafSink
from .references.rref import RRef


def _as_it_is(function: str, error: BaseException) -> BaseException:
    return error


@dataclass(frozen=True)
class Hooks:
    """Places where the drop-in for ``torch.distributed.rpc`` changes a worker, to behave as torch does.

    handle_class: the class of handles that arrive, and of results of `remote`. on_handler_error: called with each error
    of a handler after that was sent as an answer, in any thread. read_error: is given the name of a function and the
    error that came back from it, and returns the error that the caller gets. sink, as_torch: see `Gradients`.
    """

    handle_class: type[RRef[object]] = RRef
    on_handler_error: Callable[[BaseException], None] | None = None
    read_error: Callable[[str, BaseException], BaseException] = _as_it_is
    sink: LeafSink | None = None
    as_torch: bool = False
