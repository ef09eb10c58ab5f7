"""A channel as another package would have one: each buffer is a file that the receiver reads and removes.

`tests/channels/test_contract.py` runs the contract suite for it, and `tests/processes/test_other_channels.py` installs
this file as a package of its own. It uses what the documents name (docs/howto/channels.md), and nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from aiorpc.channels import Channel, ChannelContext, ChannelLink, Wire
from aiorpc.errors import ProtocolError

LEAST, MOST = 64 * 1024, 1 << 30
_NAME = re.compile(r"[0-9a-f]{32}")


class FilesContext(ChannelContext):
    """What one worker has: a folder that only its user can enter."""

    name = "files"
    priority = 150  # before shared memory

    def __init__(self, worker: object) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="files-channel-"))

    def descriptor(self, link: ChannelLink) -> object:
        """The host, the user, and where the files are."""
        return {"host": socket.gethostname(), "user": os.getuid(), "folder": str(self._folder)}

    def obstacle(self, opener: Any, acceptor: Any) -> str:
        """Workers of one user on one host have the same files."""
        for each in (opener, acceptor):
            if not isinstance(each["folder"], str) or not Path(each["folder"]).is_absolute():
                raise ValueError("a folder that is none")
        same = (opener["host"], opener["user"]) == (acceptor["host"], acceptor["user"])
        return "" if same else "it has other files"

    def open(self, link: ChannelLink) -> FilesChannel:
        """An end that writes to this worker's folder."""
        return FilesChannel(self._folder)

    def close(self) -> None:
        """Remove what nobody has fetched."""
        shutil.rmtree(self._folder, ignore_errors=True)


class FilesChannel(Channel):
    """One end. What waits to be fetched are files in `folder`; the other end's are in the folder that it names."""

    name = FilesContext.name
    borrows = False  # a buffer is written when `send` returns

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._theirs = folder
        self._sent: set[str] = set()
        self._closed = False

    def introduced(self, theirs: Any) -> None:
        """Their files are there."""
        self._theirs = Path(theirs["folder"])

    @property
    def waiting(self) -> int:
        """How many files were not fetched yet."""
        return sum((self._folder / name).exists() for name in self._sent)

    def send(self, buffers: Sequence[Any], riders: list[Any], copies: object = None) -> list[Wire | None]:
        """Write the long ones. A wire is the name of a file and its size."""
        return [self._write(buffer) if len(buffer) >= LEAST and not self._closed else None for buffer in buffers]

    def _write(self, buffer: Any) -> Wire:
        name = secrets.token_hex(16)
        self._sent.add(name)
        (self._folder / name).write_bytes(buffer)
        self.traffic._count_sent(len(buffer))
        return [name, len(buffer)]

    def withdraw(self, wires: Sequence[Wire], *, named: bool) -> None:
        """The receiver of a message that was sent fetches its files all the same."""
        for name, _ in [] if named else wires:
            (self._folder / name).unlink(missing_ok=True)

    def receive(self, wires: Sequence[Wire], riders: Sequence[Any], arrived: Callable[[int, Any], None]) -> list[Any]:
        """Read and remove the files."""
        checked = [self._check(wire) for wire in wires]
        return [self._read(path, size) for path, size in checked]

    def _check(self, wire: Wire) -> tuple[Path, int]:
        try:
            name, size = wire
            if not _NAME.fullmatch(name) or type(wire) is not list or type(size) is not int or not 0 < size <= MOST:
                raise ValueError("no file")
        except (TypeError, ValueError):
            raise ProtocolError(f"not a file of the other end: {wire!r:.100}") from None
        return self._theirs / name, size

    def _read(self, path: Path, size: int) -> memoryview:
        data = numpy.empty(size, numpy.uint8).data
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != size or file.readinto(data) != size:
                    raise ProtocolError(f"a file of another size than {size}")
        except OSError as error:
            raise ProtocolError(f"a file of the other end that cannot be read: {error}") from None
        path.unlink(missing_ok=True)
        self.traffic._count_received(size)
        return data

    def close(self) -> None:
        """Nothing more is written. What was posted may still be fetched; the rest goes with the folder."""
        self._closed = True
