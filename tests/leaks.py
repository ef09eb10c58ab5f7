"""What a test may not leave behind: descriptors, threads, child processes, files, tasks.

A snapshot is taken before the test; what is new afterwards gets a bounded time to go away, and is then listed.
Everything is read from the operating system, so it does not matter which layer forgot to clean up. Without ``/proc``
(not Linux) descriptors and children are not seen.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from aiorpc.runtime.meeting.secret import USER_KEY

GRACE = 8.0  # seconds: closing is often finished by another thread or process
POLL = 0.01  # seconds between two looks
DEVICES = ("/dev/nvidia",)  # the driver opens these once for the life of the process


@dataclass(frozen=True)
class Snapshot:
    """What the process holds at one moment.

    descriptors: open descriptor -> what it is linked to. threads: Python threads alive.
    children: process id -> command line. files: paths in the private socket directories.
    """

    descriptors: Mapping[int, str]
    threads: frozenset[threading.Thread]
    children: Mapping[int, str]
    files: frozenset[str]


def take_snapshot() -> Snapshot:
    """Look at this process now."""
    return Snapshot(open_descriptors(), live_threads(), child_processes(), private_files())


def open_descriptors() -> dict[int, str]:
    """Open descriptors and their link targets, without those that multiprocessing keeps until the process ends."""
    found: dict[int, str] = {}
    for fd in _numbers("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor that listed the folder, closed by now
            continue
    standing = _standing("_fd", "_forkserver_alive_fd")
    return {fd: target for fd, target in found.items() if fd not in standing and not target.startswith(DEVICES)}


def live_threads() -> frozenset[threading.Thread]:
    """Python threads, daemons too; not the records of foreign threads (of torch's C++) that once ran Python."""
    return frozenset(t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))


def child_processes() -> dict[int, str]:
    """Direct children of all threads, zombies included, without the standing helpers of multiprocessing."""
    found: set[int] = set()
    for task in _numbers("/proc/self/task"):
        try:
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
        except OSError:  # the thread has ended
            continue
    return {pid: _command(pid) for pid in found - _standing("_pid", "_forkserver_pid")}


def private_files() -> frozenset[str]:
    """Files, sockets and pipes under the directories in which workers of this user meet, but for the user's key."""
    root = Path(tempfile.gettempdir())
    folders = root.glob(f"aiorpc-{os.getuid()}*") if hasattr(os, "getuid") else ()
    return frozenset(
        str(path) for folder in folders for path in folder.rglob("*") if path.name != USER_KEY and not _is_folder(path)
    )


def leaks_since(before: Snapshot) -> dict[str, list[str]]:
    """What is there now and was not in ``before``: kind of leak -> one line each. Empty when all is well."""
    now = take_snapshot()
    found = {
        "descriptors": [describe_descriptor(*item) for item in _new_descriptors(before.descriptors, now.descriptors)],
        "threads": [f"thread {t.name!r} (daemon={t.daemon})" for t in now.threads - before.threads],
        "children": [f"child {pid}: {now.children[pid]}" for pid in now.children.keys() - before.children.keys()],
        "files": [f"file {path}" for path in now.files - before.files],
    }
    return {kind: sorted(lines) for kind, lines in found.items() if lines}


def wait_until_clean(before: Snapshot, *, grace: float = GRACE, allowed: Collection[str] = ()) -> list[str]:
    """Give leaks up to ``grace`` seconds to go away and return those that stay, one line each.

    allowed: kinds of leak (keys of ``leaks_since``) that do not count.
    """

    def remaining() -> list[str]:
        return [line for kind, lines in leaks_since(before).items() if kind not in allowed for line in lines]

    return _poll(remaining, grace)


async def tasks_left(before: Collection[asyncio.Task[object]], *, grace: float = GRACE) -> list[str]:
    """Tasks of the running loop that are neither in ``before`` nor done within ``grace`` seconds, one line each."""
    deadline = time.monotonic() + grace
    while True:
        left = asyncio.all_tasks() - {*before, asyncio.current_task()}
        remaining = deadline - time.monotonic()
        if not left or remaining <= 0:
            return sorted(f"task {t.get_name()!r}: {t.get_coro()!r}" for t in left)
        await asyncio.wait(left, timeout=remaining)


def describe_descriptor(fd: int, target: str) -> str:
    """One line about a descriptor; a socket with its addresses."""
    return f"descriptor {fd} -> {target}{_addresses(fd) if target.startswith('socket:') else ''}"


def _poll(remaining: Callable[[], list[str]], grace: float) -> list[str]:
    """Call ``remaining`` until it returns nothing, for at most ``grace`` seconds; cycles are collected on the way."""
    deadline = time.monotonic() + grace
    left = remaining()
    if left:  # a full collection costs more than most tests, so only where something is left
        gc.collect()
        left = remaining()
    while left and time.monotonic() < deadline:
        time.sleep(POLL)
        left = remaining()
    return left


def _new_descriptors(before: Mapping[int, str], now: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Descriptors whose target is open more often than before: the number alone may be reused."""
    known = Counter(before.values())
    # Those with the same number and target first, so that a new duplicate is the one that is reported.
    for fd, target in sorted(now.items(), key=lambda item: before.get(item[0]) != item[1]):
        if known[target] > 0:
            known[target] -= 1
        else:
            yield fd, target


def _numbers(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder)]
    except OSError:
        return []


def _standing(tracker_field: str, forkserver_field: str) -> set[int]:
    """What multiprocessing's two helper processes own: started on first use, they live as long as this process."""
    owned = (
        getattr(resource_tracker._resource_tracker, tracker_field, None),
        getattr(forkserver._forkserver, forkserver_field, None),
    )
    return {number for number in owned if isinstance(number, int)}


def _command(pid: int) -> str:
    """The command line of a process, shortened; its name in the process table where it has none (a zombie)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return command[:120] or f"{Path(f'/proc/{pid}/comm').read_text().strip()} (ended, not waited for)"
    except OSError:
        return "(gone)"


def _addresses(fd: int) -> str:
    try:
        with socket.socket(fileno=os.dup(fd)) as twin:
            name, peer = twin.getsockname(), _peer(twin)
            return f" {twin.family.name} {name!r}{f' to {peer!r}' if peer else ''}"
    except OSError:
        return ""


def _peer(end: socket.socket) -> object:
    try:
        return end.getpeername()
    except OSError:
        return None


def _is_folder(path: Path) -> bool:
    """Whether it is a directory; a path that vanished meanwhile counts as one: it was not left behind."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return True
