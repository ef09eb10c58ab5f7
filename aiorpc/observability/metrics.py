"""Metrics of a worker for Prometheus: the option ``metrics``, and the life of the server.

`serving` has the server and `measures` the metrics. Both are loaded only where metrics are on.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import RpcUsageError
from ..locks import Lock
from ..logs import logger
from ..options import host_and_port
from ..private import exposure
from ..runtime.calls.current import registry
from ..runtime.engine.tally import Tally
from ..runtime.node import Node

if TYPE_CHECKING:
    from .serving import MetricsServer

_ADDRESS, _TOKEN, _TOKEN_FILE = "AIORPC_METRICS", "AIORPC_METRICS_TOKEN", "AIORPC_METRICS_TOKEN_FILE"
_LEAST_TOKEN = 16
# Bytes of a file with a token that are read.
_MOST_TOKEN = 4096


class Metrics:
    """The metrics of one worker; see `node.Attachment` for the methods. Does nothing if the worker has none.

    Workers of one process with the same address share a server, which the last of them closes.
    """

    def __init__(self, worker: str, option: str | None) -> None:
        """worker: its name. option: ``metrics``; None takes the environment's."""
        self._worker = worker
        self._option = option
        self._lock: Any = Lock()  # held while the server is taken or let go
        self._server: MetricsServer | None = None
        self._key = ""
        self._node: Node | None = None

    def open(self, stop: threading.Event) -> None:
        """Take a server. Raises RpcUsageError for an address that cannot be used, and without `prometheus_client`."""
        wanted = os.environ.get(_ADDRESS, "") if self._option is None else self._option
        if not wanted:
            return
        said = _ADDRESS if self._option is None else "option metrics"
        family, address = _resolve(wanted, said)
        token = _token(os.environ)
        if not token and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
            raise RpcUsageError(
                f"worker {self._worker!r} serves no metrics at {wanted} ({said}), as other hosts can read them there: "
                f"set a token, {_TOKEN} or {_TOKEN_FILE}, which Prometheus then has to show (`authorization` in its "
                "configuration), or take an address of this host alone, such as 127.0.0.1:9400"
            )
        with self._lock, registry.sharing:
            if stop.is_set():  # `close` may have been called before
                return
            server = registry.servers.get(wanted) or self._listen(family, address, token, wanted, said)
            server.users += 1
            registry.servers[wanted] = self._server = server
            self._key = wanted
        logger.of(self._worker).info("metrics at http://%s/metrics", server.address)

    def _listen(self, family: int, address: Any, token: bytes, wanted: str, said: str) -> MetricsServer:
        try:
            from .serving import MetricsServer
        except ImportError as error:
            raise RpcUsageError(
                f"worker {self._worker!r} has metrics ({said}), and these need prometheus-client ({error}): "
                "pip install 'aiorpc-torch[metrics]'"
            ) from error
        try:
            return MetricsServer(family, address, token)
        except OSError as error:
            raise RpcUsageError(
                f"worker {self._worker!r} cannot serve metrics at {wanted} ({said}): {error.strerror or error}. Give "
                "each process a port of its own, or port 0 for any free one; the log then says which"
            ) from error

    def attach(self, node: Node) -> None:
        """Count, and be read, from now on."""
        server = self._server
        if server is not None:
            node.engine.tally = tally = Tally()
            node.metrics_address = server.address
            self._node = node
            server.collected.add(node, tally)

    def close(self) -> None:
        """Be read no more, and let the server go."""
        with self._lock:
            server, self._server = self._server, None
            node, self._node = self._node, None
            if server is None:
                return
            if node is not None:
                node.metrics_address = ""
                server.collected.remove(node)
            with registry.sharing:
                server.users -= 1
                last = not server.users
                if last:
                    registry.servers.pop(self._key, None)
                    server.close()
        if last:
            server.join()

    def close_in_child(self) -> None:
        """Let go of the descriptors, without a lock."""
        server, self._server = self._server, None
        if server is not None:
            server.close_in_child()


def _resolve(wanted: str, said: str) -> tuple[int, Any]:
    """The family and the address of a socket. RpcUsageError if it is none."""
    host, port = host_and_port(wanted, said)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RpcUsageError(f"{said}: the host of {wanted!r} is not known here: {error}") from error
    return found[0][0], found[0][4]


def _token(environment: Mapping[str, str]) -> bytes:
    """What readers have to show; empty for nothing. Raises RpcUsageError if it cannot be used."""
    text, path = environment.get(_TOKEN), environment.get(_TOKEN_FILE)
    if text is not None and path is not None:
        raise RpcUsageError(f"the token of metrics is given twice, by {_TOKEN} and by {_TOKEN_FILE}; give one of them")
    if path is not None:
        token = _read(path)
    elif text is not None:
        token = os.fsencode(text)
    else:
        return b""
    name = _TOKEN if path is None else f"the token in {path} ({_TOKEN_FILE})"
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.decode().isprintable():
        raise RpcUsageError(f"{name} must have at least {_LEAST_TOKEN} characters, and only those of ASCII")
    return token


def _read(path: str) -> bytes:
    """The content of a file that is private to this user, without surrounding space."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            content = file.read(_MOST_TOKEN).strip() if stat.S_ISREG(status.st_mode) else b""
    except (OSError, ValueError) as error:  # ValueError for what is no path
        raise RpcUsageError(f"{_TOKEN_FILE}: {path!r} cannot be read: {error}") from error
    exposed = exposure(status)
    if exposed is not None:
        raise RpcUsageError(f"{_TOKEN_FILE}: others than this user can read or write {path!r} {exposed}")
    return content
