"""Where the threads of a process stand that does not answer, as after a look into its memory, or by a signal.

`py-spy`, where it is installed and permitted, reads the memory of the process without stopping it, and knows which
thread holds the interpreter lock. Without it `faulthandler` of the process writes its stacks when it gets `SIGNAL`.
Both work while a thread holds the interpreter lock; py-spy also while the process is stopped. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from . import reader
from .reader import SIGNAL, CannotLook, Process, SeenGroup

#: Seconds for one of these to answer.
_PATIENCE = 2.0
_LIBRARY = tuple(
    str(Path(sysconfig.get_path("stdlib")) / each)
    for each in ("threading.py", "selectors.py", "queue.py", "asyncio/", "concurrent/", "multiprocessing/", "socket.py")
)
_PACKAGE = str(Path(__file__).parent.parent)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
#: What every thread begins with.
_BEGIN = re.compile(r"/threading\.py:\d+ in (Thread\.)?(run|_bootstrap|_bootstrap_inner)$")
_FRAMES = 12
#: Bytes that a process may have written of its stacks before they are dropped.
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Thread:
    """A thread of a process. holds: whether it holds the interpreter lock. lines: innermost first."""

    title: str
    holds: bool
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Outside:
    """What was seen of the threads of a process. by: the tool; empty if none was available."""

    by: str = ""
    threads: tuple[Thread, ...] = ()

    @property
    def text(self) -> str:
        """All stacks, as `stacks.all_stacks` writes them; empty if there are none."""
        parts = []
        for thread in self.threads:
            holds = ", holds the interpreter lock" if thread.holds else ""
            parts.append("\n".join((f"{thread.title}{holds}", *(f"    {line}" for line in thread.lines), "")))
        return "\n".join(parts)

    @property
    def stands_at(self) -> list[str]:
        """The stack of the thread that holds the interpreter lock, or the innermost lines of those that may hold it."""
        for thread in self.threads:
            if thread.holds:
                return [line for line in thread.lines if not line.startswith(_PACKAGE) and not _BEGIN.search(line)][
                    :_FRAMES
                ]
        return [each.lines[0] for each in self.threads if each.lines and not each.lines[0].startswith(_IDLE)][:_FRAMES]


_IDLE = (*_LIBRARY, _PACKAGE)


def look(process: Process) -> Outside:
    """Where its threads stand, by the first tool that is available."""
    return _spied(process) or _dumped(process) or Outside()


def stacks(name: str) -> str:
    """As `reader.stacks`, and of a process of this host that does not answer what can be seen of its threads.

    CannotLook if there is no such worker, or its stacks are not available.
    """
    group = reader.group_of(name)
    try:
        return reader.stacks(name)
    except CannotLook as error:
        process = reader.process_of(name, group)
        seen = Outside() if process is None else look(process)
        if not seen.threads:
            tools = "" if process is None else " (py-spy is not installed or not permitted; faulthandler has no answer)"
            raise CannotLook(f"the stacks of worker {name!r} are not available{tools}: {error}", error.how) from None
        return (
            f"worker {name!r} does not answer: {error}\n"
            f"the stacks of its threads, by {seen.by}, innermost line first:\n\n{seen.text}"
        )


def add_places(group: SeenGroup) -> None:
    """Set `stands_at` of the members of this host that do not answer."""
    silent = {each.pid for each in group.unseen if each.how == "silent"}
    for process in reader.processes() if silent else ():
        if process.pid in silent:
            seen = look(process)
            for each in group.unseen:
                if each.pid == process.pid and each.name in process.names:
                    each.stands_at = seen.stands_at


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Spied(msgspec.Struct):
    thread_id: int
    owns_gil: bool
    frames: list[_Frame]
    thread_name: str | None = None


def _spied(process: Process) -> Outside | None:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    if program is None:
        return None
    command = [program, "dump", "--nonblocking", "--json", "--full-filenames", "--pid", str(process.pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE, check=True)
        found = msgspec.json.decode(done.stdout, type=list[_Spied])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):  # it is not permitted, or the process has ended
        return None
    return Outside(
        "py-spy",
        tuple(
            Thread(
                f"thread {each.thread_name or '?'} ({each.thread_id})",
                each.owns_gil,
                tuple(f"{frame.filename}:{frame.line} in {frame.name}" for frame in each.frames),
            )
            for each in found
        ),
    )


# --- faulthandler -----------------------------------------------------------------------------------------------------


def _dumped(process: Process) -> Outside | None:
    threads: list[Thread] = []
    for part in dump(process).split("\n\n"):
        title, *lines = part.strip().splitlines() or [""]
        found = [match for match in map(_FRAME.match, lines) if match]
        # It names the thread that got the signal as the current one, which says nothing of the lock.
        name = title.partition(" (most")[0].replace("Current thread", "thread").replace("Thread", "thread")
        threads.append(Thread(name, False, tuple(f"{m[1]}:{m[2]} in {m[3]}" for m in found)))
    threads = [each for each in threads if each.lines]
    return Outside("faulthandler", tuple(threads)) if threads else None


def dump(process: Process, patience: float = _PATIENCE) -> str:
    """What `faulthandler` of that process writes of its threads; empty if the process does not take `SIGNAL`.

    The signal is sent only to a process that handles it: its default action would end the process.
    """
    path = process.base.with_suffix(".stacks")
    try:
        before = path.stat().st_size
        if process.how_it_stands or not _handles(process.pid, SIGNAL):
            return ""
        if before > _LONGEST:  # of earlier looks
            os.truncate(path, 0)
            before = 0
        os.kill(process.pid, SIGNAL)
        until, size = time.monotonic() + patience, before
        while time.monotonic() < until:
            time.sleep(0.02)
            now = path.stat().st_size
            if now > before and now == size:
                break
            size = now
        with path.open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")
    except OSError:  # the process has ended meanwhile
        return ""


def _handles(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(masks[0] >> (number - 1) & 1)
