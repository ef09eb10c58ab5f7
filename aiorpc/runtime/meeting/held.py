"""The secret that the members of a group have made themselves, as one of them holds it, and its file for the others."""

from __future__ import annotations

import os
import secrets
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import RendezvousError
from ...protocol.identity import WorkerRecord
from ...transport import sockets
from ...transport.sockets import SECRET_SUFFIX
from .secret import Secret

SECRET_BYTES = 32
ADVICE = "which is a way to run code in workers: set AIORPC_SECRET for all, or meet in a file of this user's (file://)"


@dataclass
class HeldSecret:
    """This worker's copy of the group's secret, empty until it is made or taken.

    path: of the file that we keep it in for others, if we do. published: the offer of it that we wrote into the store.
    """

    record: WorkerRecord
    directory: Path
    value: bytes = field(default=b"", repr=False)
    path: Path | None = None
    published: str = field(default="", repr=False)
    _descriptor: int | None = field(default=None, repr=False)  # of the file
    # Two newcomers may be let in at once, each by a thread that finds no file; and the loop removes it.
    _filing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def offer(self, openly: bool) -> dict[str, str]:
        """What goes into the store: where the file is, and the secret itself only if `openly`."""
        with self._filing:
            self.value = self.value or Secret(secrets.token_bytes(SECRET_BYTES))
            if self.path is None:
                # A name of its own: workers of one process may share the directory. That of the socket, if there is
                # one: whoever finds the socket of a dead worker removes both.
                stem = Path(self.record.unix_path).stem or secrets.token_hex(8)
                self.path = self.directory / f"{stem}{SECRET_SUFFIX}"
        self.write()
        offer = {"owner": self.record.incarnation, "host": self.record.host, "path": str(self.path)}
        return {**offer, "value": self.value.hex()} if openly else offer

    def write(self) -> None:
        """Keep the secret in our file, if we have offered one and it is not there. RendezvousError if that fails."""
        with self._filing:
            if self.path is not None and not self.path.exists():
                self._let_go()
                try:
                    self._descriptor = sockets.write_secret(self.path, self.value)
                except OSError as error:
                    raise RendezvousError(f"cannot write the group's secret to {self.path}: {error}") from error

    def remove(self) -> None:
        """Remove our file. OSError if that fails."""
        with self._filing:
            self._let_go()
            if self.path is not None:
                self.path.unlink(missing_ok=True)

    def _let_go(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self, text: str, owner: WorkerRecord) -> bytes | None:
        """What stands in the file of a member on this host; None if it is not there."""
        path = Path(text)
        # Nothing is resolved: a member's path is spelled as we spell ours.
        if not sockets.is_beside(self.directory, path.parent) or path.suffix != SECRET_SUFFIX or "\0" in text:
            raise RendezvousError(
                f"the store says that the group's secret, made by {owner.describe()}, is in {text[:200]!r}, which is "
                f"no secret in a private directory of this user beside {self.directory}. Either that worker has "
                "another TMPDIR or user: give all the same, or set AIORPC_SECRET. Or somebody else has written into "
                f"the store, {ADVICE}"
            )
        return _read_private(text)


def from_hex(text: str) -> bytes:
    """The bytes of a text; none if it is no such text."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _read_private(path: str) -> bytes | None:
    """Content of a file that only this user can have written; None if it is not there, or is just being written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RendezvousError(f"cannot read the group's secret ({error}); set AIORPC_SECRET for all") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise RendezvousError(f"{path} is not a private file of this user (mode 0600); set AIORPC_SECRET instead")
        content = file.read(SECRET_BYTES + 1)
    return content if len(content) >= SECRET_BYTES else None
