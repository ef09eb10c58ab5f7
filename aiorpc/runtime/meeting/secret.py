"""The secret that proves membership in a group: given by people, or made of the key of the user.

The user's key is a random file in the private directory of a user on one host. Members without AIORPC_SECRET derive the
secret of their group from it: only that user can read it. Over unix sockets the kernel names the user (SO_PEERCRED);
over TCP on one host only such a secret does.

A chosen secret can be guessed, and a stranger who has seen a handshake or a record in the store can try guesses offline
(`protocol/handshake.py`). So the key of AIORPC_SECRET is made by scrypt (RFC 7914), which takes memory as well as time.
With N = 2^15, r = 8, p = 1 each guess, and each worker that joins, needs 32 MiB and about a tenth of a second. The salt
is random, and the first worker leaves it in the store for the group: guesses for one group are worth nothing for
another, and records from another store are not believed in this one. A stranger who writes another salt there makes
keys that do not fit, and so keeps workers from joining, but still has to guess.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from ...errors import RendezvousError, SerializationError
from ...private import exposure

#: Bytes. A random text of that length cannot be guessed: 128 bits, as RFC 9257 (section 6) asks for.
MIN_SIZE = 16
SALT_SIZE = 16
# Bytes of a file that are read.
_MAX_SIZE = 64 * 1024
#: The name of the file with the user's key, and its bytes.
USER_KEY, USER_KEY_SIZE = "user.key", 32
_ADVICE = "give all workers the same random text, for example from: openssl rand -hex 32"


class Secret(bytes):
    """Bytes that are never shown by accident and cannot be pickled."""

    def __repr__(self) -> str:
        return "<a secret>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SerializationError("the secret of a group is not sent to anybody")


#: In place of the key where certificates prove membership. It is no secret, and proves nothing.
CERTIFIED = Secret(hashlib.sha256(b"aiorpc: members are known by their certificates").digest())


def given_secret(path: str | os.PathLike[str] | None = None) -> Secret | None:
    """The secret in that file, in the file of AIORPC_SECRET_FILE, or in AIORPC_SECRET; None if nothing is set.

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
            f"{name} has {len(text)} bytes, and everyone who guesses it can run code on all workers. It needs at least "
            f"{MIN_SIZE}: {_ADVICE}"
        )
    return Secret(text)


def _in_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that is private to this user (`private`), without surrounding space."""
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
    """The key of the group that has that salt. Takes about 0.1 s, without the interpreter lock."""
    return Secret(hashlib.scrypt(secret, salt=b"aiorpc\0" + salt, n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32))


def derived(user_key: bytes, salt: bytes) -> Secret:
    """The secret that members on one host derive for the group of that salt."""
    return Secret(hmac.digest(user_key, b"aiorpc group\0" + salt, "sha256"))


def fingerprint(secret: bytes) -> str:
    """Tells two secrets apart and reveals nothing of either: it may stand in the store."""
    return hmac.digest(secret, b"aiorpc fingerprint", "sha256")[:8].hex()


def user_key(directory: Path) -> bytes:
    """The key of this user in that private directory. The first worker makes it; it stays.

    RendezvousError if it cannot be read or written, or if it is not this user's alone.
    """
    path = directory / USER_KEY
    try:
        if not os.path.lexists(path):
            keep_user_key(directory, secrets.token_bytes(USER_KEY_SIZE))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(USER_KEY_SIZE + 1)
    except OSError as error:
        raise RendezvousError(f"cannot read this user's key ({error}); set AIORPC_SECRET for all") from None
    private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not private or len(content) != USER_KEY_SIZE:
        raise RendezvousError(
            f"{path} is not a private file of this user (mode 0600) with a key; remove it, or set AIORPC_SECRET"
        )
    return content


def keep_user_key(directory: Path, key: bytes) -> None:
    """Write the user's key if it is missing, and touch its file, because clean-up programs remove old files.
    OSError."""
    path = directory / USER_KEY
    with contextlib.suppress(FileNotFoundError):
        os.utime(path, follow_symlinks=False)
        return
    unready = path.with_suffix(f".{secrets.token_hex(8)}")
    descriptor = os.open(unready, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, key)
        with contextlib.suppress(FileExistsError):  # another worker was faster
            os.link(unready, path)
    finally:
        os.close(descriptor)
        unready.unlink()
