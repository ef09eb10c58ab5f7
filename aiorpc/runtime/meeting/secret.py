"""The secret that people give to a group in AIORPC_SECRET or a file, and the key that its members make of it.

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
import stat
from typing import NoReturn

from ...errors import RendezvousError, SerializationError
from ...private import exposure

#: Bytes. A random text of that length cannot be guessed: 128 bits, as RFC 9257 (section 6) asks for.
MIN_SIZE = 16
SALT_SIZE = 16
# Bytes of a file that are looked at.
_MAX_SIZE = 64 * 1024
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


#: What stands in place of the key where certificates say who is a member. It is no secret: it proves nothing.
CERTIFIED = Secret(hashlib.sha256(b"aiorpc: members are known by their certificates").digest())


def given_secret(path: str | os.PathLike[str] | None = None) -> Secret | None:
    """What stands in that file, or that of AIORPC_SECRET_FILE, or what AIORPC_SECRET says; None if nothing is set.

    RendezvousError if it is empty or too short, in a file that others may read, or given twice.
    """
    text, path = os.environ.get("AIORPC_SECRET"), path or os.environ.get("AIORPC_SECRET_FILE")
    if path is not None and text is not None:
        raise RendezvousError(
            "the secret of the group is given twice, by AIORPC_SECRET and by a file (secret_file or "
            "AIORPC_SECRET_FILE); give one of them"
        )
    if path is not None:
        return _checked(_in_file(path), f"the secret in {os.fspath(path)}", "write one there")
    if text is not None:
        return _checked(os.fsencode(text), "AIORPC_SECRET", "take it out of the environment")
    return None


def _checked(text: bytes, name: str, instead: str) -> Secret:
    if not text:
        raise RendezvousError(f"{name} is set, and empty: {instead}, or {_ADVICE}")
    if len(text) < MIN_SIZE:
        raise RendezvousError(
            f"{name} has {len(text)} bytes, and whoever guesses it can run code on all workers. It needs at least "
            f"{MIN_SIZE}: {_ADVICE}"
        )
    return Secret(text)


def _in_file(path: str | os.PathLike[str]) -> bytes:
    """What stands in a file that is for this process alone (`private`), without the space around it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RendezvousError(f"the secret's file {path} is no file")
            exposed = exposure(status)
            if exposed is not None:
                raise RendezvousError(f"others than this user can read or write the secret's file {path} {exposed}")
            return os.read(descriptor, _MAX_SIZE).strip()
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise RendezvousError(f"the secret's file {path} cannot be read: {error}") from None


def make_key(secret: Secret, salt: bytes) -> Secret:
    """The key of the group that has that salt. It takes its time, without the interpreter lock."""
    return Secret(hashlib.scrypt(secret, salt=b"aiorpc\0" + salt, n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32))
