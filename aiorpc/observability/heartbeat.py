"""The heartbeat of a worker as others see it: a file in memory that its loop writes. Imports no torch, and little else.

The worker's end is `beating`. A link in the private directory of its user, ``NAME.PID.DESCRIPTOR.NAMESPACE.beat``, says
where the file is: it leads to ``/proc/PID/fd/DESCRIPTOR``. NAMESPACE is that of the process numbers, as containers that
share a folder have the same numbers. The file ends with its process, and a link that leads nowhere tells of a death.

Content: `MAGIC`, the time of the last beat by the monotonic clock of the host in nanoseconds, and the state.
"""

from __future__ import annotations

import os
import stat
import struct
import time

from ..private import process_namespace

#: Magic with the version, time, state.
FORMAT = struct.Struct("=8sqq")
MAGIC = b"aiorpc-1"
JOINING, READY, DRAINING, CLOSING = range(1, 5)
#: Seconds between two beats of a loop that runs, as of `runtime.engine.lag`; a loop that is later than `LATE` is stuck.
LATE = 1.0
#: Seconds for which a loop may be stuck, for a worker that is to live and for one that is to take calls.
STUCK_AFTER, READY_WITHIN = 30.0, 5.0
#: Characters, as in `transport.sockets`, which cannot be imported without torch.
_LONGEST_PATH = 60
_SAID = {
    JOINING: ("joining", "is joining its group"),
    READY: ("ready", "is ready for calls"),
    DRAINING: ("draining", "is draining: it finishes the calls that it has, and takes no new ones"),
    CLOSING: ("closing", "is closing: it takes no calls any more"),
}


def directories(folder: str) -> list[str]:
    """The private directories of this user, in which workers meet: see `transport.sockets.private_directory`. folder:
    where temporary files are."""
    own = os.path.join(folder, f"aiorpc-{os.getuid()}")
    if len(own) > _LONGEST_PATH:
        folder, own = "/tmp", f"/tmp/{os.path.basename(own)}"
    try:
        others = [each for each in os.listdir(folder) if each.startswith(f"{os.path.basename(own)}-")]
    except OSError:
        others = []
    return [path for path in (own, *(os.path.join(folder, each) for each in sorted(others))) if _is_private(path)]


def _is_private(path: str) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def how_it_stands(pid: int) -> str:
    """ "stopped" for a process that a signal or a debugger has stopped, "gone", or "" for one that may run."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "")


# --- where it is ------------------------------------------------------------------------------------------------------


def title_of(name: str) -> str:
    """What the file in memory of a worker is called."""
    return f"aiorpc-beat:{name}"


class Heart:
    """Where the heartbeat of a worker is, or was. No dataclass: that module takes half of the time of a probe."""

    def __init__(self, name: str, pid: int, descriptor: int) -> None:
        self.name = name
        self.pid = pid
        self.descriptor = descriptor

    @property
    def path(self) -> str:
        """The file."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    @property
    def link(self) -> str:
        """The name of the link to it."""
        return f"{self.name}.{self.pid}.{self.descriptor}.{process_namespace()}.beat"


def hearts(folders: list[str]) -> list[Heart]:
    """Those in these folders of processes that this one can see, also of processes that were killed; by number."""
    found, ending = [], [process_namespace(), "beat"]
    for entry in (each for folder in folders for each in os.listdir(folder)):
        name, *parts = entry.split(".")
        if parts[2:] == ending and parts[0].isdecimal() and parts[1].isdecimal():
            found.append(Heart(name, int(parts[0]), int(parts[1])))
    return sorted(found, key=lambda heart: (heart.pid, heart.descriptor))


# --- what it says -----------------------------------------------------------------------------------------------------


class Unreadable(Exception):
    """There is a heartbeat that cannot be read. Its text says why."""


def read(heart: Heart) -> tuple[int, float] | None:
    """The state, and for how many seconds the loop has not beaten; None if the process has ended. Raises Unreadable."""
    try:
        # The number may be that of another process by now, and the descriptor that of another file.
        if os.readlink(heart.path) != f"/memfd:{title_of(heart.name)} (deleted)":
            return None
        file = os.open(heart.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not _is_ours(heart.pid):  # the link, in a directory of this user, is of an earlier process of that number
            return None
        raise Unreadable(f"cannot be opened ({error.strerror}): run this as the user of the worker") from None
    try:
        info = os.fstat(file)
        data = _read_whole(file)
    finally:
        os.close(file)
    if info.st_uid != os.getuid():
        raise Unreadable(f"is of another user (uid {info.st_uid}): run this as that user")
    now = time.monotonic()
    if len(data) == FORMAT.size:
        magic, at, state = FORMAT.unpack(data)
        if magic == MAGIC and state in _SAID and 0 <= at / 1e9 < now + LATE:
            return state, max(0.0, now - at / 1e9)
    raise Unreadable(f"has unknown content {data!r}: the worker has another version of aiorpc, or broken memory")


def _is_ours(pid: int) -> bool:
    """Whether a process runs as this user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def _read_whole(file: int) -> bytes:
    """Its bytes, and one more if there are more. Two reads that agree: the loop may write between two words."""
    data = b""
    for _ in range(5):
        before, data = data, os.pread(file, FORMAT.size + 1, 0)
        if data == before:
            break
    return data


class Verdict:
    """What a probe says of a worker. seconds: since its loop has run; None if it is not known. text: a sentence."""

    def __init__(self, worker: str, pid: int | None, state: str, text: str) -> None:
        self.worker = worker
        self.pid = pid
        self.state = state
        self.seconds: float | None = None
        self.ok = False
        self.text = text


def judge(heart: Heart, *, ready: bool, stuck_after: float) -> Verdict:
    """Whether a worker lives, or with `ready` takes calls. stuck_after: seconds for which its loop may stand still."""
    who = f"worker {heart.name!r} (process {heart.pid})"
    stands = how_it_stands(heart.pid)
    try:
        beat = None if stands == "gone" else read(heart)
    except Unreadable as error:
        return Verdict(heart.name, heart.pid, "unreadable", f"the heartbeat of {who} {error}")
    if beat is None:
        text = f"{who} has ended without leaving its group: it was killed, or has crashed"
        return Verdict(heart.name, heart.pid, "ended", text)
    told, age = beat
    state, said = _SAID[told]
    # Nothing beats before there is a group: a worker that joins waits for others for as long as its options say.
    lives = told == JOINING or age <= stuck_after
    limit = "" if lives else f" (allowed: {stuck_after:g} s)"
    if stands:
        state, said = "stopped", f"is stopped by a signal or a debugger, and has not run for {age:.1f} s{limit}"
    elif told != JOINING and age > LATE:
        state, said = "stuck", f"{said.partition(':')[0]}, but stuck: its loop has not run for {age:.1f} s{limit}"
    verdict = Verdict(heart.name, heart.pid, state, f"{who} {said}")
    verdict.seconds = round(age, 3)
    verdict.ok = lives and (not ready or (told == READY and not stands))
    return verdict
