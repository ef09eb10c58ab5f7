"""What belongs to this process alone: which files only it can read, and which processes it can see."""

from __future__ import annotations

import os
import stat

_FOR_GROUP = stat.S_IRGRP
_OF_GROUP = stat.S_IRWXG
_OF_OTHERS = stat.S_IRWXO


def process_namespace() -> str:
    """The number of the namespace in which this process has its number; "0" where the system does not tell.

    Processes in different containers may have the same number, and may share a folder.
    """
    try:
        return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:  # a sandbox without that
        return "0"


def exposure(status: os.stat_result) -> str | None:
    """Which other users may read or change a file, and the modes that are accepted; None if no other user may.

    The file must be this user's or root's, without rights for others. A file of root may be readable by a group of this
    process, because Kubernetes mounts secrets for pods with `fsGroup` in this way; PostgreSQL accepts the same.
    """
    mode = stat.S_IMODE(status.st_mode)
    shared = mode & (_OF_GROUP | _OF_OTHERS)
    if status.st_uid in (os.geteuid(), 0) and not shared:
        return None
    if status.st_uid == 0 and shared == _FOR_GROUP and status.st_gid in (os.getegid(), *os.getgroups()):
        return None
    return (
        f"(mode {mode:04o}, owner {status.st_uid}, group {status.st_gid}); mode 0600 or 0400 of this user or root will "
        "do, and 0640 or 0440 of root with a group of this process: make a new one, or use chmod if no one has read it"
    )
