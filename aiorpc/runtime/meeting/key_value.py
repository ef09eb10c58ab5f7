"""A key-value store of torch, with errors of our own and without unbounded waits.

Everything here blocks: call it in a helper thread, never on a loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from ...errors import PeerRefused, RendezvousError, StoreGone
from ...protocol.identity import WorkerRecord, legible
from .contact import Contact
from .watch import Watch

_CLOSING = "closing"  # holds the maker of the mark: the host that is about to end the store
_SHOWN = 200  # characters of a value in an error
_TRIES = 3  # of an operation that breaks its connection each time: the server may choke on it
_ABSENT = "\0"  # a value that no worker writes
_DIGITS = 18
_CAN_WRITE = (
    "Everyone who reaches that store can write there, and so keep a group from forming, but not join it: another "
    "program that uses the store, or a stranger. Meet at another port or in a file where only you can write"
)
T = TypeVar("T")


class KeyValueClient:
    """A torch store, its keys under one prefix, whose every failure is a RendezvousError.

    Safe to use from several threads. Nothing here waits for a key: `get` of a missing key is None. watch: asked before
    each operation; without the store, torch would block or fill the log. contact: in place of store and watch, for a
    store that is reconnected to. An operation whose connection breaks is then repeated, so every operation is
    idempotent but for `count`.
    """

    def __init__(
        self, store: Store | None, place: str, watch: Watch | None = None, contact: Contact | None = None
    ) -> None:
        self._store: Store | None = None if store is None else PrefixStore("aiorpc", store)
        self._place = place
        self._watch = watch
        self._contact = contact
        self._end = f"the rendezvous at {place} was closed by this worker"

    def _call(self, function: Callable[[Store], T], again: Callable[[Store], T] | None = None) -> T:
        """again: repeated in place of `function` after the connection broke in the midst of it."""
        tries = 0
        while True:
            store, began = self._take(), time.monotonic()
            try:
                result = function(store)
            except RuntimeError as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                # A kept error keeps its traceback's frames; these must not keep the connection.
                cause = error.with_traceback(None)
                tries += 1
                if self._contact is not None:
                    self._contact.failed(store, reason, began)
                elif self._looked_at() is None:  # it went during the operation
                    raise StoreGone(self._end) from cause
                if self._contact is None or tries == _TRIES or (tries > 1 and not self._contact.has_time()):
                    raise StoreGone(f"the store at {self._place} no longer answers: {reason}") from cause
                function = again or function
            else:
                if self._contact is not None:
                    self._contact.worked()
                return result
            finally:
                del store

    def _take(self) -> Store:
        if self._contact is not None:
            return self._contact.store()
        store = self._looked_at()
        if store is None:
            raise StoreGone(self._end)
        return store

    def _looked_at(self) -> Store | None:
        """The store, if it is still there and this worker has not closed it."""
        store, watch = self._store, self._watch
        if store is not None and watch is not None and (reason := watch.gone()):
            self.close(f"the store at {self._place} has gone: {reason}")
            return None
        return store

    def rubbish(self, key: str, what: str) -> RendezvousError:
        """The error for a value that no worker has written; it says who may have written it."""
        return RendezvousError(
            f"the rendezvous store at {self._place} holds {what} under aiorpc/{key}, which no worker has written "
            f"there. {_CAN_WRITE}"
        )

    def has(self, *keys: str) -> bool:
        """True if all these keys exist."""
        return self._call(lambda store: bool(store.check(list(keys))))

    def get(self, key: str) -> str | None:
        """The value of a key, None if there is none."""
        if self._contact is not None:
            # TCP stores return the expected value for a missing key. Check and get would be three round trips, because
            # torch waits before it gets.
            value = self._call(lambda store: store.compare_set(key, _ABSENT, _ABSENT))
            return None if value == _ABSENT.encode() else self._text(key, value)
        # A bare get would wait for the key, and block every other operation of this client meanwhile.
        return self._text(key, self._call(lambda store: store.get(key))) if self.has(key) else None

    def number(self, key: str) -> int:
        """The value of a key that counts something, 0 if there is none."""
        return self.read_number(key, self.get(key) or "0")

    def read_number(self, key: str, text: str) -> int:
        """The number in the text of such a key."""
        if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
            raise self.rubbish(key, "no number")
        return int(text)

    def load(self, key: str, text: str, shape: Callable[[Any], T], parse: Callable[[str], object] = json.loads) -> T:
        """What `shape` makes of the JSON under a key. For other content it may raise what reading a wrong shape raises.

        parse: reads the JSON.
        """
        try:
            return shape(parse(text))
        except PeerRefused as error:
            raise RendezvousError(f"cannot meet at {self._place}: {error}") from None
        except RendezvousError as error:
            raise self.rubbish(key, str(error)) from None
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise self.rubbish(key, f"something else ({type(error).__name__}: {error!s:.200})") from None

    def _text(self, key: str, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise self.rubbish(key, "no text") from None

    def get_all(self, keys: list[str]) -> list[str]:
        """The values of keys that have to exist."""
        values = self.find_all(keys)
        if values is None:
            raise RendezvousError(f"the rendezvous store at {self._place} lacks what it has to have: {_CAN_WRITE}")
        return values

    def find_all(self, keys: list[str]) -> list[str] | None:
        """The values of all these keys, None if one does not exist."""
        if not self.has(*keys):  # reading a missing key would wait for it
            return None

        def read(store: Store) -> list[bytes]:
            extended = store.has_extended_api()  # type: ignore[attr-defined]  # not in torch's stubs
            return store.multi_get(keys) if extended else [store.get(key) for key in keys]

        return [self._text(key, value) for key, value in zip(keys, self._call(read), strict=True)]

    def put(self, key: str, value: str) -> None:
        """Set a key."""

        def write(store: Store) -> None:
            store.set(key, value)
            if self._contact is not None:
                store.check([key])  # waits for the server: `set` has no answer

        self._call(write)

    def swap(self, key: str, expected: str, desired: str) -> str:
        """Set a key to `desired` if it is `expected` ("" for missing); return what it holds afterwards."""
        return self._text(key, self._call(lambda store: store.compare_set(key, expected, desired)))

    def count(self, key: str, *, at_most: bool = False) -> int:
        """Add one to a counter and return its new value.

        If the connection breaks in the midst, it may add two, so no number is given twice; with `at_most`, none.
        """

        def add(store: Store, more: int) -> int:
            return int(store.add(key, more))

        try:
            return self._call(partial(add, more=1), partial(add, more=0) if at_most else None)
        except (ValueError, IndexError):
            raise self.rubbish(key, "no number") from None

    def check_open(self) -> None:
        """StoreGone if the process that hosts the store has announced its end."""
        by = self.closing()
        if by:
            raise StoreGone(f"the store at {self._place} is being closed by {by}")

    def closing(self) -> str:
        """The worker that has announced the end of the store, for people; "" without an announcement."""
        _, _, who = (self.get(_CLOSING) or "").partition(" ")
        return legible(who[:_SHOWN])

    def announce_end(self, maker: WorkerRecord) -> None:
        """Announce that this worker is about to end the store. If the store lives on, call `take_back_end`."""
        self.put(_CLOSING, _mark_of(maker))

    def take_back_end(self, maker: WorkerRecord) -> None:
        """Take back the announcement of that worker only."""
        self.swap(_CLOSING, _mark_of(maker), "")

    def reopen(self) -> None:
        """Take back any announcement: this worker hosts the store now."""
        if self.has(_CLOSING):
            self.put(_CLOSING, "")

    def close(self, reason: str = "") -> None:
        """Let go of the store; a server without other users ends. Idempotent.

        reason: for the errors of later operations; empty if this worker has closed the store.
        """
        self._store = None
        self._end = reason or self._end
        if self._contact is not None:
            self._contact.close(self._end)
        if self._watch is not None:
            self._watch.close()


def from_hex(text: str) -> bytes:
    """The bytes of a hexadecimal text; empty if it is none."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _mark_of(maker: WorkerRecord) -> str:
    return f"{maker.incarnation} {maker.describe()}"
