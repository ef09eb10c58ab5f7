"""Unpickling is seen: a pickle that springs when it is read, and a look-out for what no input may make a process do."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never
from unittest import mock

# What the interpreter reports, and no input of any target may cause: what a pickle or a function called by name does.
FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "shutil.rmtree", "pty.spawn")


class Sprung(BaseException):
    """Something was unpickled, or done, that no input may cause. It is no Exception, so that nothing swallows it."""


def spring(*_: Any) -> Never:
    """What `PAYLOAD` calls when it is unpickled."""
    raise Sprung("an input was unpickled")


class Trap:
    """Calls `spring` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return spring, ()


PAYLOAD = pickle.dumps(Trap(), 5)


@contextmanager
def nothing_unpickled() -> Iterator[None]:
    """Inside, `pickle.loads` and `pickle.load` raise `Sprung`, whatever they are given."""
    with mock.patch.object(pickle, "loads", spring), mock.patch.object(pickle, "load", spring):
        yield


class LookOut:
    """Raises `Sprung` where the running code does what is forbidden, while it is `armed`. For a process of its own:
    Python has no way to take a hook for audits away again.

    seen: what was seen. pickles: whether it looks for names in pickles, too.
    """

    def __init__(self, pickles: bool) -> None:
        self.armed = False
        self.seen: list[str] = []
        self._forbidden = frozenset((*FORBIDDEN, *(("pickle.find_class",) if pickles else ())))
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.armed and event in self._forbidden:
            self.seen.append(f"{event}{arguments!r:.200}")
            raise Sprung(self.seen[-1])
