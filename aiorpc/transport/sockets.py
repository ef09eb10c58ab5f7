"""Listening, connecting and what the system knows about the other end, for unix sockets and TCP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import socket
import stat
import struct
import tempfile
import termios
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..errors import Overloaded
from ..private import process_namespace
from ..threads import run_in_thread
from ..undoing import on_error

BACKLOG = 1024
# Seconds of unanswered data or probes after which a connection between hosts counts as broken.
TCP_TIMEOUT = 20
# Seconds for each address of a name except the last, which has the rest of the time; and until the next one is tried.
_EACH, _NEXT = 2.0, 0.3
# Longest pause between two retransmissions, in milliseconds: the system soon notices that a network is back. Linux 6.15
# and later have the option; others wait for up to two minutes.
_RTO_MAX_MS = getattr(socket, "TCP_RTO_MAX_MS", 44)
_RTO_MAX = 3000
#: An address of a name: family, kind, protocol, official name and address.
_Found = tuple[int, int, int, str, tuple[object, ...]]
# The system's errors for an address that this host does not have.
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def private_directory() -> Path:
    """This user's directory for sockets and secrets: ours alone, mode 0700. Short, as unix paths end at 108 bytes.

    If another user has taken its name, or others may enter it, its name gets a suffix that cannot be foreseen. Raises
    OSError if none can be made.
    """
    path = Path(tempfile.gettempdir()) / f"aiorpc-{os.getuid()}"
    if len(str(path)) > 60:
        path = Path("/tmp") / path.name
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    others = sorted(path.parent.glob(f"{path.name}-*")) if not _is_private(path) else []
    for found in (path, *others):
        if _is_private(found):
            return found
    return Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))


def _is_private(path: Path) -> bool:
    try:
        info = path.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def remove_stale(directory: Path) -> None:
    """Remove the sockets that dead workers left behind, and links to their heartbeats (`observability.heartbeat`)."""
    for path in directory.glob("*.sock"):
        remove_if_stale(path)
    remove_dead_links(directory)


def remove_dead_links(directory: Path, pid: int | str = "*") -> None:
    """Remove links to the heartbeats of dead workers. pid: of their process; of any by default."""
    for path in directory.glob(f"*.{pid}.*.{process_namespace()}.beat"):
        # It leads to a descriptor of the process. The number may be that of another user's process by now.
        with contextlib.suppress(PermissionError):
            if not path.exists():
                path.unlink(missing_ok=True)


def remove_if_stale(path: Path) -> None:
    """Remove one socket if no process listens on it, and the files of its name beside it. Does not wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            for other in path.parent.glob(f"{path.stem}.*"):
                other.unlink(missing_ok=True)


def listen_unix(directory: Path) -> tuple[socket.socket, str]:
    """A listening unix socket with a random name in the private directory, and its path."""
    path = directory / f"{secrets.token_hex(8)}.sock"
    # Between bind and listen it refuses connections, which is how `remove_stale` of another worker recognises a dead
    # socket: it gets its real name only when it listens.
    unready = path.with_suffix(".new")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with on_error(unready.unlink, True), on_error(sock.close):
        sock.bind(str(unready))
        unready.chmod(0o600)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        unready.rename(path)
    return sock, str(path)


def listen_tcp(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A listening TCP socket on one interface, on a free port or one of a range. Raises OSError if none is free.

    host: an address, or a name: the first of its addresses that this host has, preferably of IPv4.
    """
    failure: OSError | None = None
    for family, address in _own_addresses(host):
        for port in range(ports[0], ports[1] + 1) if ports else (0,):
            try:
                return _listen_at(family, (address[0], port, *address[2:]), reuse=ports is not None)
            except OSError as error:
                failure = error
                if error.errno in _NOT_OURS:
                    break
        if failure is not None and failure.errno not in _NOT_OURS:
            break  # connections to the name try this address first
    within = f" in {ports}" if ports else ""
    raise OSError(f"no port to listen on at {host}{within}: {failure}") from failure


def _own_addresses(host: str) -> list[tuple[int, tuple[object, ...]]]:
    """The addresses of a host name or an address, with their families, those of IPv4 first. OSError."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OSError(f"{host!r} stands for no address to listen on: {error}") from error
    addresses = dict.fromkeys((int(family), address) for family, _, _, _, address in found)
    return sorted(addresses, key=lambda each: each[0] != socket.AF_INET)


def _listen_at(family: int, address: tuple[object, ...], *, reuse: bool) -> socket.socket:
    """A listening TCP socket. reuse: also if connections of an earlier listener are still winding up. OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    with on_error(sock.close):
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    return sock


def is_wildcard(host: str) -> bool:
    """Whether listening there means listening on all interfaces."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


async def connect_unix(path: str) -> socket.socket:
    """Connect to a unix socket; the peer's uid must be ours. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    with on_error(sock.close):
        # It succeeds or fails at once. A full backlog gives EAGAIN, which event loops take for a connection in progress
        # and then, as the socket is writable, for a made connection.
        sock.connect(path)
    if peer_uid(sock) not in (os.getuid(), None):
        sock.close()
        raise PermissionError(f"{path} belongs to another user's process")
    return sock


async def connect_tcp(host: str, port: int) -> socket.socket:
    """Connect over TCP, with the options that notice a dead network. Raises OSError."""
    # A name may stand for several addresses (localhost: ::1 and 127.0.0.1), of which the listener bound one.
    found = await _look_up(host, port)
    if not found:
        raise ConnectionError(f"{host!r} stands for no address")
    sock = await (_connect(found[0], None) if len(found) == 1 else _connect_first(found))
    tune_tcp(sock)
    return sock


async def _look_up(host: str, port: int) -> Sequence[_Found]:
    """The addresses of a name. Raises OSError.

    In a thread of ours, not by the loop: uvloop would start threads of libuv, for which libuv waits as the process
    exits, also in a forked child. The child does not have these threads, and ends by SIGSEGV.
    """
    with contextlib.suppress(OSError):  # a name needs a resolver, and a thread
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    try:
        return await run_in_thread(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM), "aiorpc-names")
    except Overloaded as error:
        raise OSError(f"{host!r} cannot be looked up: {error}") from error


async def _connect_first(found: Sequence[_Found]) -> socket.socket:
    """A connection to the first of these addresses that answers; if none does, the error of the last one.

    They are tried in order, the next one while those before are silent: an address that swallows packets, as behind a
    firewall, must not use up the time of those that answer.
    """
    rest = deque(found)
    trying: set[asyncio.Task[socket.socket]] = set()
    try:
        while rest or trying:
            if rest:
                last = asyncio.create_task(_connect(rest.popleft(), _EACH if rest else None))
                trying.add(last)
            patience = _NEXT if rest else None
            done, trying = await asyncio.wait(trying, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            connected = [task.result() for task in done if task.exception() is None]
            for sock in connected[1:]:
                sock.close()
            if connected:
                return connected[0]
        return last.result()
    finally:
        for task in trying:
            task.cancel()
        for late in await asyncio.gather(*trying, return_exceptions=True):
            if isinstance(late, socket.socket):
                late.close()


async def _connect(found: _Found, seconds: float | None) -> socket.socket:
    family, kind, proto, _, address = found
    sock = socket.socket(family, kind, proto)
    sock.setblocking(False)
    with on_error(sock.close):
        async with asyncio.timeout(seconds):
            await _connect_socket(sock, address)
    return sock


async def _connect_socket(sock: socket.socket, address: tuple[object, ...]) -> None:
    """Not by the loop: uvloop would look the address up again, without its scope, and in threads of libuv."""
    error = sock.connect_ex(address)
    if error == errno.EINPROGRESS:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(sock, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, f"{os.strerror(error)} (to {address})")


def tune_tcp(sock: socket.socket) -> None:
    """No delay for small frames; keep-alive notices a vanished host while nothing is sent.

    While something is sent, `silence` notices it.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_TIMEOUT // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, TCP_TIMEOUT // 10))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _RTO_MAX)


def unread(sock: socket.socket) -> int:
    """Bytes that have come and are unread; 0 if the socket is closed, or the system does not tell."""
    count = bytearray(struct.calcsize("@i"))
    try:
        fcntl.ioctl(sock, termios.FIONREAD, count)
    except (OSError, ValueError):
        return 0
    found: int = struct.unpack("@i", count)[0]
    return found


def peer_uid(sock: socket.socket) -> int | None:
    """The user id of the process at the other end of a unix socket; None over TCP."""
    return None if sock.family != socket.AF_UNIX else _peer_credentials(sock)[1]


def peer_pid(sock: socket.socket) -> int | None:
    """The pid of that process in this process's namespace; None over TCP, or from another pid namespace."""
    return None if sock.family != socket.AF_UNIX else _peer_credentials(sock)[0] or None


def origin(sock: socket.socket) -> str:
    """The other end, for messages: an address, or a process of this host; empty if the system does not tell.

    The address may be that of a proxy or gateway in between.
    """
    if sock.family == socket.AF_UNIX:
        pid = peer_pid(sock)
        return "" if pid is None else f"process {pid}"
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Pid and user id."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
