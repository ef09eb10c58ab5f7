"""The certificates of TLS: what a worker shows, which ones it accepts, and which workers a certificate is for.

A certificate names workers in its DNS names, where ``*`` stands for any characters (``actor-*``, or ``*`` alone), and
roles in URIs of the form ``aiorpc:role:actor``. Names of workers are not host names: they are compared here, as a whole
and by case.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RpcUsageError
from ..logs import logger
from ..options import Tls
from ..private import exposure

ROLE = "aiorpc:role:"
# Rounds of the rehearsed handshake; it needs fewer.
_STEPS = 8
# Seconds after which unusable files are tried again without a change: a certificate may have become valid meanwhile, or
# the key's permissions may be right now.
TRY_AGAIN = 10.0

_Stamp = tuple[tuple[int, int, int, int], ...]


class Certificate(NamedTuple):
    """The contents of a certificate. digest: SHA-256 of the whole."""

    names: tuple[str, ...]
    roles: tuple[str, ...]
    digest: bytes

    @classmethod
    def of(cls, said: Mapping[str, Any] | None, whole: bytes | None) -> Certificate:
        """From what ssl returns: the decoded fields, and the whole in DER."""
        alternatives = (said or {}).get("subjectAltName", ())
        return cls(
            tuple(value for kind, value in alternatives if kind == "DNS"),
            tuple(value.removeprefix(ROLE) for kind, value in alternatives if kind == "URI" and value.startswith(ROLE)),
            hashlib.sha256(whole or b"").digest(),
        )

    def permits(self, name: str, role: str = "") -> bool:
        """Whether a worker of that name and role may show it. A worker's role must be one of its roles.

        A certificate with roles and no names is for any worker of these roles.
        """
        named = any(_matches(pattern, name) for pattern in self.names) or (not self.names and bool(self.roles))
        return named and (role in self.roles if role or not self.names else True)

    def is_of(self, name: str) -> bool:
        """Whether it is for the worker of that name alone."""
        return {*self.names} == {name} and "*" not in name

    def describe(self) -> str:
        """Which workers and roles it is for, for error messages."""
        said = [repr(name[:100]) for name in self.names[:5]] + [f"role {role[:100]!r}" for role in self.roles[:5]]
        return ", ".join(said) if said else "no worker (it has no DNS name and no role)"


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern with ``*`` fits a name. In linear time, unlike a regular expression."""
    first, *others = pattern.split("*")
    if not others:
        return name == first
    last, at = others.pop(), len(first)
    if len(name) < at + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    name = name[: len(name) - len(last)]
    for part in others:  # the first occurrence of each leaves the most for the following ones
        at = name.find(part, at) + len(part)
        if at < len(part):
            return False
    return True


class Credentials:
    """The files of a `Tls`, for new connections: they are read again when they have changed.

    Made in any thread, used on the loop. Raises RpcUsageError with the worker and the reason if they cannot be used.
    """

    def __init__(self, tls: Tls, name: str, role: str = "") -> None:
        self.tls = tls
        self._name, self._role = name, role
        self._stamp = _stamp(tls)
        self._failed: _Stamp | None = None
        self._failed_at = 0.0
        self._said = ""  # the reason why the files could not be used
        self._loaded = _Loaded.read(tls, name, role)

    def context(self, *, opener: bool) -> tuple[ssl.SSLContext, bytes]:
        """The context of the next connection, and the hash of the certificate that it shows.

        Changed files are used once all of them are right. Until then the old ones stay in use, with one line in the
        log: three files are replaced one after the other.
        """
        self._look()
        loaded = self._loaded
        return (loaded.opener if opener else loaded.acceptor), loaded.digest

    def objection(self, certificate: Certificate, name: str, role: str = "") -> str | None:
        """Why a peer with that certificate cannot be the worker of that name; None if it can."""
        if not self.tls.verify_names or certificate.permits(name, role):
            return None
        who = f"worker {name!r}" + (f" in the role {role!r}" if role else "")
        return f"the certificate that it shows is for {certificate.describe()}, and not for {who}"

    def _look(self) -> None:
        try:
            stamp, now = _stamp(self.tls), time.monotonic()
            if stamp == self._stamp or (stamp == self._failed and now < self._failed_at + TRY_AGAIN):
                return
            before, self._said = self._said if stamp == self._failed else "", ""
            self._failed, self._failed_at = stamp, now
            self._loaded = _Loaded.read(self.tls, self._name, self._role)
            self._stamp, self._failed = stamp, None
            logger.info("worker %s uses new TLS files from now on", self._name)
        except (OSError, RpcUsageError) as error:
            self._said = str(error)
            if self._said != before:  # logged once
                logger.of(self._name).warning("new TLS files are not used yet: %s", error)


class _Loaded(NamedTuple):
    """Contexts for both roles, and the hash of the certificate."""

    opener: ssl.SSLContext
    acceptor: ssl.SSLContext
    digest: bytes

    @classmethod
    def read(cls, tls: Tls, name: str, role: str) -> _Loaded:
        """Read the files and try them. RpcUsageError."""
        try:
            _check_files(tls)
            opener, acceptor = (_context(tls, kind) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
            own = _rehearse(opener, acceptor, tls)
        except _Unusable as error:
            raise RpcUsageError(f"worker {name!r} cannot use TLS: {error}") from None
        if tls.verify_names and not own.permits(name, role):
            it = f"it in the role {role!r}" if role else "it"
            raise RpcUsageError(
                f"worker {name!r} cannot use TLS: the certificate {tls.cert} is for {own.describe()}, and not for {it}"
            )
        return cls(opener, acceptor, own.digest)


class _Unusable(Exception):
    """Why files cannot be used."""


def _stamp(tls: Tls) -> _Stamp:
    found = []
    for path in (tls.cert, tls.key, tls.ca):
        try:
            status = os.stat(path)
            found.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            found.append((0, 0, 0, 0))
    return tuple(found)


def _check_files(tls: Tls) -> None:
    for what, path in (("certificate", tls.cert), ("key", tls.key), ("authority", tls.ca)):
        try:
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                Path(path).read_bytes()  # not of a pipe, which would block
        except OSError as error:
            raise _Unusable(f"the file of the {what} cannot be read: {error}") from None
        if not stat.S_ISREG(status.st_mode):
            raise _Unusable(f"the file of the {what} is no file: {path}")
    exposed = exposure(os.stat(tls.key))
    if exposed is not None:
        raise _Unusable(f"others than this user can read or write the key {tls.key} {exposed}")


def _context(tls: Tls, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # the names of workers are compared in `Certificate.permits`
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing is resumed: each connection proves both certificates
    try:
        context.load_verify_locations(tls.ca)
    except (ssl.SSLError, OSError) as error:
        raise _Unusable(f"{tls.ca} holds no certificate of an authority: {error}") from None
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except _Encrypted:
        raise _Unusable(f"the key {tls.key} is encrypted; workers need it without a password, in mode 0600") from None
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise _Unusable(f"the key {tls.key} does not fit the certificate {tls.cert}") from None
        raise _Unusable(f"{tls.cert} and {tls.key} are no certificate and its key: {error}") from None
    return context


class _Encrypted(Exception):
    """The key needs a password."""


def _no_password() -> str:
    raise _Encrypted


def _rehearse(opener: ssl.SSLContext, acceptor: ssl.SSLContext, tls: Tls) -> Certificate:
    """Shake hands with ourselves, which shows other workers' objections; returns our certificate as they see it."""
    to_opener, to_acceptor = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        opener.wrap_bio(to_opener, to_acceptor),
        acceptor.wrap_bio(to_acceptor, to_opener, server_side=True),
    )
    for _ in range(_STEPS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise _Unusable(
                    f"the certificate {tls.cert} is none that the authority {tls.ca} vouches for now: "
                    f"{error.verify_message}"
                ) from None
            except ssl.SSLError as error:
                why = str(error)
                if error.reason == "UNSUPPORTED_PROTOCOL":  # both sides are ours: TLS 1.3 cannot use the acceptor's key
                    why = "TLS 1.3 takes no key of its kind; make one of P-256, Ed25519 or RSA with 2048 bits"
                raise _Unusable(f"the certificate {tls.cert} cannot be used: {why}") from None
    return Certificate.of(ends[0].getpeercert(), ends[0].getpeercert(True))
