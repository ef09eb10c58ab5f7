"""Files with a name in /dev/shm, where other programs have theirs as well."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from tests.leaks import open_descriptors

FOLDER = "/dev/shm"


def named_shared_files() -> set[str]:
    """Names of the files in /dev/shm that could be aiorpc's: called so, or open or mapped in this process.

    The memory that workers share has no name, so whoever uses some finds here what was there before.
    """
    used = _open_files() | _mapped_files()
    found = set()
    with os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = entry.stat(follow_symlinks=False)
                ours = "aiorpc" in entry.name or (status.st_dev, status.st_ino) in used
                if ours and stat.S_ISREG(status.st_mode):
                    found.add(entry.name)
    return found


def _open_files() -> set[tuple[int, int]]:
    found = set()
    for fd in open_descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(fd)
            found.add((status.st_dev, status.st_ino))
    return found


def _mapped_files() -> set[tuple[int, int]]:
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        device, inode = line.split()[3:5]
        major, minor = (int(number, 16) for number in device.split(":"))
        found.add((os.makedev(major, minor), int(inode)))
    return found
