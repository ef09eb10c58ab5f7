"""A store for tests: torch's own, whose every operation passes a look of the test's first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore, Store

ROSTER = "aiorpc/1/roster"  # the list of the members of a free group


class WatchedStore(Store):
    """A store that hands on to another one. `look` is called first in each operation, with its name and its keys.

    What `look` raises (a RuntimeError, as torch's stores do) is the outcome of the operation. inner: a new HashStore if
    None.
    """

    def __init__(self, inner: Store | None = None) -> None:
        super().__init__()
        self.inner = HashStore() if inner is None else inner
        self.look: Callable[[str, tuple[str, ...]], object] = lambda operation, keys: None

    def set(self, key: str, value: Any) -> None:
        self.look("set", (key,))
        self.inner.set(key, _text(value))

    def get(self, key: str) -> bytes:
        self.look("get", (key,))
        value: bytes = self.inner.get(key)
        return value

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.look("compare_set", (key,))
        value: bytes = self.inner.compare_set(key, _text(expected), _text(desired))
        return value

    def add(self, key: str, amount: int) -> int:
        self.look("add", (key,))
        return int(self.inner.add(key, amount))

    def delete_key(self, key: str) -> bool:
        self.look("delete_key", (key,))
        return bool(self.inner.delete_key(key))

    def check(self, keys: list[str]) -> bool:
        self.look("check", tuple(keys))
        return bool(self.inner.check(keys))

    def has_extended_api(self) -> bool:
        return False


class Stuck:
    """For `WatchedStore.look`: no operation returns until `open`; `entered` says that one is in.

    first: only those of the thread that comes first.
    """

    def __init__(self, *, first: bool = False) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self._first = first

    def __call__(self, operation: str, keys: tuple[str, ...]) -> None:
        if self._first and self.entered.is_set():
            return
        self.entered.set()
        assert self.open.wait(30)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value
