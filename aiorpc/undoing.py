"""`on_error`: undo a half-done step if a block raises."""

from __future__ import annotations

from collections.abc import Callable


class on_error:  # as `contextlib.suppress`
    """``with on_error(step, *arguments):`` calls the step if the block raises anything; the exception goes on."""

    __slots__ = ("_arguments", "_step")

    def __init__(self, step: Callable[..., object], *arguments: object) -> None:
        self._step = step
        self._arguments = arguments

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._step(*self._arguments)
