"""The secret that people give to a group in AIORPC_SECRET, and the key that its members make of it.

What people choose can be guessed, and whoever has heard a handshake or read a record in the store can try guesses by
himself (`protocol/handshake.py`). So the key is made by scrypt (RFC 7914), which takes memory as well as time, with its
parameters N = 2^15, r = 8, p = 1: 32 MiB, and about a tenth of a second, for each guess as for each worker that joins.
The salt is random. The first worker leaves it in the store, so that it is one for the group: guesses for one group are
worth nothing for another, and records that somebody has kept from another store are not believed in this one. Whoever
writes another salt there makes keys that do not fit, and so keeps workers from joining. That is all that he gets: also
with a salt of his own he still has to guess.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, NoReturn

from ...errors import RendezvousError, SerializationError

#: Bytes. A random text of that length cannot be guessed: 128 bits, as RFC 9257 (section 6) asks for.
MIN_SIZE = 16
SALT_SIZE = 16
_COST: dict[str, Any] = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26, "dklen": 32}
_ADVICE = "give all workers the same random text, for example from: openssl rand -hex 32"


class Secret(bytes):
    """Bytes that are never shown by accident, and do not travel."""

    def __repr__(self) -> str:
        return "<a secret>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SerializationError("the secret of a group is not sent to anybody")


def from_environment() -> Secret | None:
    """What AIORPC_SECRET says, None if it is not set. RendezvousError if it is empty or too short."""
    text = os.environ.get("AIORPC_SECRET")
    if text is None:
        return None
    secret = Secret(os.fsencode(text))
    if not secret:
        raise RendezvousError(f"AIORPC_SECRET is set, and empty: take it out of the environment, or {_ADVICE}")
    if len(secret) < MIN_SIZE:
        raise RendezvousError(
            f"AIORPC_SECRET has {len(secret)} bytes, and whoever guesses it can run code on all workers. It needs at "
            f"least {MIN_SIZE}: {_ADVICE}"
        )
    return secret


def make_key(secret: Secret, salt: bytes) -> Secret:
    """The key of the group that has that salt. It takes its time, without the interpreter lock."""
    return Secret(hashlib.scrypt(secret, salt=b"aiorpc\0" + salt, **_COST))
