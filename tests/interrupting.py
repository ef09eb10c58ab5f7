"""Signal handlers that raise, at any place where Python would run one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


class Interrupting:
    """Raises KeyboardInterrupt once: at the n-th such place within these packages, in the thread that calls `run`.

    Python looks for signals as one of its functions begins, and when one of C has returned. (It does so as a loop jumps
    back, too, of which nobody is told.)
    """

    def __init__(self, number: int, *packages: str) -> None:
        """packages: parts of the paths of their files."""
        self._left = number
        self._packages = packages

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """As of `sys.setprofile`."""
        if event in ("call", "c_return") and any(part in frame.f_code.co_filename for part in self._packages):
            self._left -= 1
            if not self._left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def run(self, function: Callable[[], object]) -> bool:
        """Call that; whether it was interrupted."""
        sys.setprofile(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False
