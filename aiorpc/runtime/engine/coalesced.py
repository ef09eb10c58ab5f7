"""Callbacks that run once in the loop for any number of requests."""

from __future__ import annotations

from collections.abc import Callable


class CoalescedCallback:
    """Runs a function in one of the loop's next turns, once for all requests until then. Any thread.

    post: runs a function on the loop, like `Engine.call_on_loop`. asked: whether the function is about to run.
    """

    __slots__ = ("_function", "_post", "asked")

    def __init__(self, post: Callable[[Callable[[], object]], object], function: Callable[[], object]) -> None:
        self._post = post
        self._function = function
        self.asked: bool = False

    def __call__(self) -> None:
        if self.asked:
            return
        self.asked = True
        self._post(self._run)

    def _run(self) -> None:
        if self.asked:
            self.asked = False
            self._function()
