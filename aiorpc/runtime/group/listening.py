"""The sockets at which a worker can be reached. They are opened before it joins, because its record names them."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from ...errors import RendezvousError
from ...options import RpcBackendOptions
from ...transport import sockets


class Listeners:
    """The listening sockets of one worker. Others may connect as soon as they are open, and wait for `Acceptor.start`.

    unix_path, host, port: where the worker can be reached; an empty path and port 0 where it cannot.
    """

    def __init__(
        self, name: str, options: RpcBackendOptions, directory: Path, address: str, *, confined: bool = False
    ) -> None:
        """Open the listeners that the options ask for.

        directory: for the unix socket. address: of the interface that reaches the rendezvous. confined: all members are
        on this host, so a unix socket needs no TCP listener beside it. RendezvousError if no address or port of the
        options is free, or the directory takes no socket.
        """
        self.unix_path: str = ""
        self.port: int = 0
        self._sockets: list[tuple[socket.socket, str]] = []
        host = options.bind_address or address
        if "unix" in options.transports:
            try:
                sock, self.unix_path = sockets.listen_unix(directory)
            except OSError as error:
                raise RendezvousError(f"worker {name!r} cannot have a socket in {directory}: {error}") from error
            self._sockets.append((sock, self.unix_path))
        if "tcp" in options.transports and not (confined and self.unix_path):
            try:
                sock = sockets.listen_tcp(host, options.port_range)
            except OSError as error:
                self.close()
                raise RendezvousError(f"worker {name!r} cannot be reached by others: {error}") from error
            self._sockets.append((sock, ""))
            self.port = sock.getsockname()[1]
        # Others cannot connect to the wildcard address.
        self.host: str = address if sockets.is_wildcard(host) else host

    def sockets(self) -> list[socket.socket]:
        """The sockets that listen."""
        return [sock for sock, _ in self._sockets]

    def close_tcp(self) -> None:
        """Close the listener for TCP if there is a unix socket, because all members are on this host.

        Call it before `Acceptor.start`.
        """
        if any(path for _, path in self._sockets):
            for sock, path in self._sockets:
                if not path:
                    sock.close()
            self._sockets = [(sock, path) for sock, path in self._sockets if path]

    def close(self) -> None:
        """Listen no more. Idempotent."""
        for sock, _ in self._sockets:
            sock.close()
        self.unlink()

    def unlink(self) -> None:
        """Remove the unix socket's file. Any thread."""
        for _, path in self._sockets:
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def close_in_child(self) -> None:
        """After a fork: release the descriptors, which are the parent's."""
        for sock, _ in self._sockets:
            if sock.fileno() >= 0:
                os.close(sock.detach())
