"""Listening and connecting: who may, where, and what dead workers leave behind."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiorpc.transport import sockets
from tests.ports import free_range


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def temporary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory in which nobody has been."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


# --- the private directory --------------------------------------------------------------------------------------------


def test_private_directory_is_ours_alone(temporary: Path) -> None:
    """It is made with mode 0700, named after the user, and the same one the next time."""
    path = sockets.private_directory()
    assert path == temporary / f"aiorpc-{os.getuid()}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert sockets.private_directory() == path


def test_private_directory_made_by_many_at_once(temporary: Path) -> None:
    """Workers that start together agree on one directory."""
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(sockets.private_directory())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert set(found) == {temporary / f"aiorpc-{os.getuid()}"}
    assert len(found) == 8


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_private_directory_open_to_others_is_refused(temporary: Path, mode: int) -> None:
    """A directory that others can enter is not used, and the error says what to do."""
    path = temporary / f"aiorpc-{os.getuid()}"
    path.mkdir()
    path.chmod(mode)
    check_another(path)


def check_another(taken: Path) -> None:
    """Another directory is used, beside the one that is taken, and every time the same."""
    found = sockets.private_directory()
    assert found != taken and found.parent == taken.parent and found.name.startswith(f"{taken.name}-")
    assert stat.S_IMODE(found.stat().st_mode) == 0o700 and not found.is_symlink()
    assert sockets.private_directory() == found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory for another user")
def test_private_directory_that_another_user_made_does_not_keep_us_from_working(temporary: Path) -> None:
    """A directory that somebody else made first under our name is not used; nor are those with more behind it."""
    taken = temporary / f"aiorpc-{os.getuid()}"
    for path in (taken, temporary / f"{taken.name}-aaaaaaaa"):
        path.mkdir(mode=0o700)
        os.chown(path, 65534, 65534)
    check_another(taken)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_private_directory_that_is_none_is_refused(temporary: Path, kind: str) -> None:
    """Neither a file nor a link to a directory elsewhere is followed."""
    path = temporary / f"aiorpc-{os.getuid()}"
    if kind == "file":
        path.touch(0o700)
    else:
        (temporary / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(temporary / "elsewhere")
    check_another(path)


# --- unix sockets -----------------------------------------------------------------------------------------------------


def test_listening_socket_is_private_and_random(folder: Path) -> None:
    """Mode 0600, a name nobody can guess, short enough; ready for connections when its name appears."""
    first, path = sockets.listen_unix(folder)
    second, other = sockets.listen_unix(folder)
    with first, second:
        assert path != other
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert len(Path(path).stem) == 16
        assert not first.getblocking()
        assert sorted(str(each) for each in folder.iterdir()) == sorted([path, other])


async def test_connect_and_see_who_it_is(folder: Path) -> None:
    """Both ends see the other's user and process."""
    listener, path = sockets.listen_unix(folder)
    with listener, await sockets.connect_unix(path) as near:
        far, _ = listener.accept()
        with far:
            for end in (near, far):
                assert sockets.peer_uid(end) == os.getuid()
                assert sockets.peer_pid(end) == os.getpid()
            assert not near.getblocking()


async def test_listener_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that another user listens on is closed at once, before a byte is sent."""
    listener, path = sockets.listen_unix(folder)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with listener:
        with pytest.raises(PermissionError, match="belongs to another user"):
            await sockets.connect_unix(path)
        far, _ = listener.accept()
        with far:
            assert far.recv(1) == b""


async def test_connect_where_nobody_listens(folder: Path) -> None:
    """Missing and dead sockets raise OSError and leave no descriptor."""
    listener, path = sockets.listen_unix(folder)
    listener.close()
    for where in (path, str(folder / "missing.sock")):
        with pytest.raises(OSError, match=r"refused|No such file"):
            await sockets.connect_unix(where)


async def test_full_backlog_is_an_error_to_be_tried_again(folder: Path) -> None:
    """A listener that is too busy to take another connection is an OSError, not a connection to nobody."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "full.sock"))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(folder / "full.sock"))
            with pytest.raises(BlockingIOError):
                await sockets.connect_unix(str(folder / "full.sock"))


def test_stale_sockets_are_removed_and_live_ones_stay(folder: Path) -> None:
    """Sockets that nobody listens on go; those of the living, and files of others, stay."""
    dead, dead_path = sockets.listen_unix(folder)
    dead.close()
    live, live_path = sockets.listen_unix(folder)
    (folder / "secret").touch()
    with live:
        sockets.remove_stale(folder)
        assert sorted(folder.iterdir()) == sorted([Path(live_path), folder / "secret"])
        with pytest.raises(BlockingIOError):  # the probe was closed again, and is gone from the backlog with this
            live.accept()[0].close()
            live.accept()
    assert not Path(dead_path).exists()


# --- TCP --------------------------------------------------------------------------------------------------------------


def test_port_range_is_kept_and_ends() -> None:
    """Listeners take the ports of the range one by one; when none is left the error names the range."""
    ports = free_range(3)
    found = [sockets.listen_tcp("127.0.0.1", ports) for _ in range(3)]
    try:
        assert sorted(sock.getsockname()[1] for sock in found) == list(range(ports[0], ports[1] + 1))
        with pytest.raises(OSError, match=f"no port to listen on at 127.0.0.1 in .{ports[0]}, {ports[1]}."):
            sockets.listen_tcp("127.0.0.1", ports)
    finally:
        for sock in found:
            sock.close()


def test_address_that_is_not_ours() -> None:
    """An interface that this machine does not have is an OSError that names it, and no range that nobody has given."""
    with pytest.raises(OSError, match=r"no port to listen on at 192\.0\.2\.1: .*assign"):
        sockets.listen_tcp("192.0.2.1", None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_connect_tcp_notices_dead_networks(host: str) -> None:
    """A connection, also to a name with several addresses, sends small frames at once and probes an idle network."""
    with (
        sockets.listen_tcp("127.0.0.1", None) as listener,
        await sockets.connect_tcp(host, listener.getsockname()[1]) as sock,
    ):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0  # a busy worker is not dead
        assert sockets.peer_uid(sock) is None
        assert sockets.peer_pid(sock) is None
