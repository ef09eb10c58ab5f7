"""Something that the loop has to do soon, whoever asks for it and however often."""

from __future__ import annotations

from collections.abc import Callable

from ...undoing import on_error


class CoalescedCallback:
    """Has a function run in one of the loop's next turns: once for all who ask until then. Any thread.

    post: has a function run on the loop, like `Engine.call_on_loop`. asked: whether it is going to run.
    Not lost even if a signal handler raises between any two instructions of who asks.
    """

    __slots__ = ("_function", "_post", "asked")

    def __init__(self, post: Callable[[Callable[[], object]], object], function: Callable[[], object]) -> None:
        self._post = post
        self._function = function
        self.asked: bool = False

    def __call__(self) -> None:
        if self.asked:
            return
        with on_error(self._post, self._run):  # an interruption; who is asked twice finds nothing to do then
            self.asked = True
            self._post(self._run)

    def _run(self) -> None:
        if self.asked:
            self.asked = False
            self._function()
