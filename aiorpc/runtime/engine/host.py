"""This host and its processes: identities of the host and the main module, dead processes, and limits of the system."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TypedDict

import torch

from ..._forks import FAMILY
from ..._version import __version__
from ...protocol.identity import VERSION_LIMIT, WorkerRecord, legible


class Versions(TypedDict):
    """The software that a worker runs."""

    python: str
    torch: str
    aiorpc: str


_EXIT_CODE = 49  # its index among the fields of /proc/PID/stat, counted from the state


def host_identity() -> str:
    """Equal for two processes exactly when they can see each other's pids and use each other's unix sockets.

    One boot of one kernel, one network namespace, one pid namespace (containers may share some of them), and one user:
    sockets, secrets and memory are for this user alone. So two users of a host are like two hosts. The user is before
    the "@"; two processes with the same text after it see each other's pids (`sees`).
    """
    user = os.getuid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid")]
    except OSError:
        return f"{user}@host:{legible(socket.gethostname())}"
    return f"{user}@{':'.join([boot, *spaces])}"


def sees(here: str, host: str) -> bool:
    """Whether processes with these two host identities see each other's pids, even of two users."""
    return here == host or here.partition("@")[2] == host.partition("@")[2] != ""


def cores(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """How many cores this process may keep busy: its affinity, limited by its control groups.

    A container on a host of many cores may have the time of one (``cpu.max`` of cgroup v2), and is halted when it takes
    more. groups, own: the kernel's folder of groups, and the file with those of this process.
    """
    count = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/"):
                group = groups / line.removeprefix("0::/")
                for each in (group, *group.parents):
                    with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                        share, period = (each / "cpu.max").read_text(encoding="utf-8").split()
                        count = min(count, int(share) / int(period))
    return count


def main_identity() -> str:
    """Equal for two processes whose ``__main__`` defines the same names.

    Module name (``python -m``) or real path of the script, each with the file's content. Children that multiprocessing
    spawns load the parent's main again and get the parent's identity. Without a file (``python -c``, a notebook,
    the prompt): random per process, shared with children forked from it.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not isinstance(file, str):
        return f"process:{FAMILY}"
    try:
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return f"process:{FAMILY}"
    # The spec of a run folder or zip archive has the name "__main__".
    name = getattr(getattr(main, "__spec__", None), "name", "__main__")
    return f"file:{os.path.realpath(file)}:{digest}" if name == "__main__" else f"module:{name}:{digest}"


def versions() -> Versions:
    """The versions of Python, torch and aiorpc, for a record."""
    python, its_torch, own = (
        legible(each)[:VERSION_LIMIT] for each in (platform.python_version(), str(torch.__version__), __version__)
    )
    return {"python": python, "torch": its_torch, "aiorpc": own}


def most_descriptors() -> int:
    """How many descriptors this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 31


def provably_dead(record: WorkerRecord, here: str) -> bool:
    """True only if the record's process was on this host (identity `here`), of any user, and is gone or a zombie.

    A reused pid makes a dead process look alive.
    """
    return sees(here, record.host) and is_gone(record.pid)


def is_gone(pid: int) -> bool:
    """True if no process of this host has that pid, or only a zombie."""
    if pid == os.getpid():
        return False
    # The second look: its parent may reap the zombie just before its state is read.
    return not _exists(pid) or _is_zombie(pid) or not _exists(pid)


def how_ended(pid: int) -> str:
    """How the process of that pid on this host has ended, as the end of a sentence; empty while it lives.

    Until its parent reaps the process, the kernel shows the signal or exit code to processes of the same user. Reading
    it does not reap the process.
    """
    status = _exit_status(pid)  # first: its parent may reap it at any time
    if not is_gone(pid):
        return ""
    if status and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):  # a signal that Python has no name for
            return f"ended by signal {number} ({signal.Signals(number).name})"
        return f"ended by signal {number}"
    return f"ended with exit code {os.WEXITSTATUS(status)}" if status else "has ended"


def _exit_status(pid: int) -> int:
    """The wait status of a zombie; 0 if there is none, or it is not shown."""
    fields = _stat(pid)
    return int(fields[_EXIT_CODE]) if fields[:1] in (["Z"], ["X"]) and len(fields) > _EXIT_CODE else 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # of another user
    return True


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] in (["Z"], ["X"])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat, from the state on; empty without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command name, in parentheses, may hold anything; the state is the first field after it.
    return stat.rpartition(")")[2].split()
