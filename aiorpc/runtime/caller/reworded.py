"""The Future of a verb made of a call of the runtime: its errors name the verb, and not the runtime's function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ...callbacks import Executor
from ...futures import ArrivalForFuture, Future
from ...sites import CallSite
from .future import CallFuture
from .unawaited import Unawaited

#: Maps the error of a call, None for a value, to the error of the verb.
Words = Callable[[BaseException | None], BaseException | None]


class RewordedFuture(Unawaited, Future[Any]):
    """Settles as a call does, with another error text; cancelling it cancels the call."""

    _home_thread: int | None
    _loop: asyncio.AbstractEventLoop | None
    _site: CallSite | None
    _arrival: ArrivalForFuture | None

    _apart = True

    def __init__(self, call: CallFuture, words: Words) -> None:
        super().__init__()
        self._site, self._loop, self._home_thread = call._site, call._loop, call._home_thread
        self._executor: Executor | None = call._executor
        self._sources: Sequence[Future[object]] = (call,)
        self._call = call
        self._words = words
        call._when_settled(self._on_settled)

    @property
    def _subject(self) -> str:  # type: ignore[override]  # an attribute there; here it is made of the call's
        return self._call._subject

    def _on_settled(self, call: Future[object]) -> None:
        call._mark_seen()
        self._arrival = call._arrival
        self._settle(self._value_of(call), self._words(call._error))

    def _value_of(self, call: Future[object]) -> object:
        """The value for that of the settled call."""
        return call._value

    def _on_cancel(self) -> None:
        self._call.cancel()
