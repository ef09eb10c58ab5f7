"""What tests reach for inside of a worker: whose verbs are meant, how long it waits, and its connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token
from typing import Any

from aiorpc import Worker
from aiorpc.runtime.calls.current import current_node
from aiorpc.runtime.engine.bounds import Bounds
from aiorpc.transport.connection import Connection


def act_as(worker: Worker) -> Token[Any]:
    """The module's verbs are this worker's from now on, in this context. What it returns is for `act_no_more`."""
    return current_node.set(worker._node)


def act_no_more(token: Token[Any]) -> None:
    """The module's verbs are those of before `act_as`."""
    current_node.reset(token)


@contextmanager
def acting_as(worker: Worker) -> Iterator[None]:
    """The module's verbs are this worker's in the block."""
    token = act_as(worker)
    try:
        yield
    finally:
        act_no_more(token)


def set_bounds(worker: Worker, **seconds: Any) -> None:
    """How long the runtime of a worker waits, and for how many; what is not named is as usual."""
    worker._node.engine.bounds = Bounds(**seconds)


def breakable(worker: Worker) -> list[Connection]:
    """Its connections that may be broken now, and are mended."""
    lines = [each for each in worker._node.engine.connections if isinstance(each, Connection)]
    return [each for each in lines if each.lasting is not None and not each.suspended and each.on_suspended]
