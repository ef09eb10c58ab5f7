"""What workers of several hosts do beside publishing: the same bytes by a bare socket, and by one call."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from . import publishing_clients as clients
from .sides import RpcModule

WAIT_SECONDS = 60.0
_ACKNOWLEDGED = b"."


@dataclass
class _Receiver:
    """What is received by a bare socket lies here; kept, as new pages cost time."""

    data: bytearray | None = None


_receiver = _Receiver()


def listen(address: str, size: int) -> int:
    """In a reader: receive so many bytes from the first who comes, in a thread, and say so; the port."""
    if _receiver.data is None:
        _receiver.data = bytearray(size)
    listener = socket.create_server((address, 0))
    listener.settimeout(WAIT_SECONDS)
    threading.Thread(target=_receive, args=(listener, memoryview(_receiver.data)), daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def _receive(listener: socket.socket, rest: memoryview) -> None:
    with listener, listener.accept()[0] as peer:
        peer.settimeout(WAIT_SECONDS)
        while rest:
            count = peer.recv_into(rest)
            if not count:
                return
            rest = rest[count:]
        peer.sendall(_ACKNOWLEDGED)


def bare(rpc: RpcModule, readers: Sequence[str], address: str, size: int) -> float:
    """In the publisher: milliseconds until the first reader has said that it has all bytes. address: of its host."""
    data = bytearray(size)
    port = rpc.rpc_sync(readers[0], listen, args=(address, size))
    with socket.create_connection((address, port), WAIT_SECONDS) as peer:
        begun = time.perf_counter()
        peer.sendall(data)
        if peer.recv(1) != _ACKNOWLEDGED:
            raise ConnectionError("the bytes did not arrive")
        return 1e3 * (time.perf_counter() - begun)


def call(rpc: RpcModule, readers: Sequence[str], size: int) -> float:
    """Milliseconds until the first reader has looked at what came by one call."""
    return clients.send(rpc, readers[:1], size, 1)
