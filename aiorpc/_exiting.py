"""The last step of the interpreter's end, registered when the package is imported.

So it runs after the exit functions that a program registers later: until then its workers refuse calls in good order.
"""

from __future__ import annotations

import atexit
import sys


def end_at_exit() -> None:
    """End what is left of the workers of this process when the interpreter ends."""
    atexit.register(_end)


def _end() -> None:
    current = sys.modules.get("aiorpc.runtime.calls.current")
    if current is not None:  # otherwise there was no worker
        current.registry.at_end()
