"""The contact with a store over TCP: a client of torch, and another one in its place when its connection has broken.

A connection may break or die silently (a NAT has forgotten it, the network is down) while the store lives. The kernel
watches for that (`watch.ServerWatch`), and every wait for an answer has a limit. Then a new client is made. It goes on
if it reaches the same store, which it knows by the store's mark; a store that has ended has lost its content, and its
successor has another mark. Blocking; any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store

from ... import foreign
from ...errors import RendezvousError, StoreGone
from ...locks import Lock
from .watch import ServerWatch

_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.5
_TRY = 5.0  # seconds for one try: torch's server looks up the client's name, which may take long


@dataclass(frozen=True)
class Reached:
    """A client of torch, what looks after its connection, and the mark of the store that it has reached."""

    store: Store
    watch: ServerWatch
    mark: str


#: Makes a client within so many seconds, by one try. OSError or RuntimeError without an answer, RendezvousError if what
#: answers is no store.
Reach = Callable[[float], Reached]


class Contact:
    """See the module. place: for errors. grace: seconds for which an unreachable store is tried, from the beginning of
    the operation that failed; after them each use is one try. stop: ends the trying.
    """

    def __init__(self, place: str, client: Reached, reach: Reach, grace: float, stop: threading.Event) -> None:
        self._place = place
        self._client: Reached | None = client
        self._mark = client.mark
        self._reach = reach
        self._grace = grace
        self._stop = stop
        self._lock = Lock()
        self._closed = ""
        self._over = threading.Event()  # set by `close`, which does not wait for a try
        self._away = 0.0  # since when, ``time.monotonic()``; 0 while the store is reached
        self._broken = ""  # why the connection broke
        self._failed = ""  # why the last try failed
        self._tries = 0

    def store(self) -> Store:
        """The client, made anew if its connection has broken. StoreGone if the store is not reached, or has ended."""
        tries, client = self._tries, self._client
        if client is not None:
            reason = client.watch.gone()
            if not reason:
                return client.store
            self.failed(client.store, reason, time.monotonic())
        del client  # a kept error keeps this frame
        with self._lock:
            if self._closed:
                raise StoreGone(self._closed)
            if self._client is None and self._tries != tries and self._failed:
                raise StoreGone(self._failed)  # another thread has just tried it
            if self._client is None:
                self._client = self._return()
            return self._client.store

    def failed(self, store: Store, reason: str, began: float) -> None:
        """An operation of this client, begun at that time, has failed: the client is not used again."""
        with self._lock:
            if self._client is not None and self._client.store is store:
                self._client.watch.close()
                self._client = None
                self._broken = reason
                self._away = self._away or began

    def has_time(self) -> bool:
        """Whether the grace has not run out."""
        return not self._away or time.monotonic() < self._away + self._grace

    def worked(self) -> None:
        """The store has answered."""
        self._away = 0.0

    def close(self, reason: str) -> None:
        """Let go of the store. Later operations fail for that reason."""
        self._closed = self._closed or reason
        self._over.set()
        with self._lock:
            if self._client is not None:
                self._client.watch.close()
                self._client = None

    def _return(self) -> Reached:
        self._tries += 1
        self._failed = ""
        try:
            return self._try()
        except StoreGone as error:
            self._failed = str(error)
            raise

    def _try(self) -> Reached:
        pause = _FIRST_PAUSE
        while True:
            try:
                client = self._reach(_TRY)
            except ConnectionRefusedError:
                break
            except RendezvousError as error:
                raise StoreGone(f"the store at {self._place} has gone: {self._broken}. {error}") from None
            except (OSError, RuntimeError) as error:
                trouble = foreign.text_of(error).partition("\n")[0] or "no answer"
            else:
                if client.mark == self._mark:
                    return client
                client.watch.close()
                del client
                break  # another store: no use to wait for the old one
            left = self._away + self._grace - time.monotonic()
            if left <= 0 or self._stop.is_set() or self._over.wait(min(pause, left)):
                away = time.monotonic() - self._away
                raise StoreGone(
                    f"the store at {self._place} has not been reached for {away:.0f} s: {self._broken}; then {trouble}"
                )
            pause = min(2 * pause, _LAST_PAUSE)
        raise StoreGone(f"the store at {self._place} has gone: {self._broken}")
