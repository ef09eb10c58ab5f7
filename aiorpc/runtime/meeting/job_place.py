"""Where the processes of a launcher's job meet: in a file on one host, at a port of rank 0 else. Nobody names either.

Everything here blocks: call it in a helper thread, never on a loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from dataclasses import replace
from pathlib import Path

from ...errors import RendezvousError
from .key_value import KeyValueClient
from .meeting_place import MeetingPlace
from .patience import Patience
from .stores import Hosting, Visitor, is_taken, open_tcp

_JOB = "job"  # this key has the mark of the job whose store it is
_ASKING = 5.0  # seconds for one port to answer, before the next one is asked


class JobFolder:
    """The folder of the file at which a job on one host meets. Each of its workers holds a lock on it; the last to
    leave removes it.

    The kernel releases the locks of processes that were killed. What they left is removed as the next job comes: a
    later try of the same job begins with an empty folder, unless a process of the earlier one still lives.
    """

    def __init__(self, path: Path) -> None:
        """Raises RendezvousError if there can be no such folder."""
        self._path = path
        for each in path.parent.glob("meet-*"):
            with contextlib.suppress(OSError):  # what cannot be removed is no concern of this job
                _remove_unused(each)
        try:
            self._lock = _locked(path)
        except OSError as error:
            raise RendezvousError(f"the workers of this job cannot meet in {path}: {error}") from error

    def leave(self) -> None:
        """Give up the lock, and remove the folder if no other worker has one. Once only."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for children that have inherited the descriptor
        os.close(self._lock)
        with contextlib.suppress(OSError):  # the next job tries it again
            _remove_unused(self._path)


def _locked(path: Path) -> int:
    """A descriptor of the folder, with a shared lock on it."""
    while True:
        with contextlib.suppress(FileExistsError):  # `exist_ok` looks again, when it may be gone
            path.mkdir(mode=0o700)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # another process has just removed it
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # the other lock is held only while the folder is removed
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _remove_unused(path: Path) -> None:
    """Remove a job's folder if no process has a lock on it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for each in path.iterdir():
            each.unlink()
        path.rmdir()
    except (BlockingIOError, FileNotFoundError):  # in use, or another process removes it, too
        pass
    finally:
        os.close(descriptor)


def open_job_port(place: MeetingPlace, patience: Patience, grace: float) -> tuple[MeetingPlace, Hosting]:
    """The store of the job, and the place with the port where it is: the first of `place.ports` that is free.

    Rank 0 hosts it, and marks it (`mark_job`); the others ask each port for a store with that mark, so jobs never meet,
    even if they have the same ports. RendezvousError if the time passes without one.
    """
    troubles: dict[int, str] = {}
    for _ in patience.tries():
        for port in place.ports:
            at = replace(place, port=port)
            trouble = _not_ours(at, patience, grace) if place.rank or is_taken(port) else ""
            if not trouble:
                hosting = open_tcp(at, patience, grace)
                if hosting.hosted or not (trouble := _mark_of_another(hosting.kv, at)):
                    return at, hosting
                hosting.kv.close()  # another job was faster, just now
            troubles[port] = trouble
            patience.trouble = "; ".join(f"port {each}: {why}" for each, why in sorted(troubles.items()))
    raise RendezvousError(
        f"the workers of this job ({place.launched}) have not met at {place.host} within {patience.seconds:g} s. "
        f"{patience.trouble}. Set MASTER_ADDR to the host of rank 0 if that is another one, and MASTER_PORT to a port "
        "that is free there"
    )


def mark_job(kv: KeyValueClient, place: MeetingPlace) -> None:
    """Say in a store that this process hosts whose it is."""
    if place.job:
        kv.put(_JOB, _mark(place))


def _mark(place: MeetingPlace) -> str:
    return hashlib.sha256(place.job.encode()).hexdigest()


def _mark_of_another(kv: KeyValueClient, place: MeetingPlace) -> str:
    mark = kv.get(_JOB)
    if mark == _mark(place):
        return ""
    return "a store without a job is there" if mark is None else "another job is there"


def _not_ours(place: MeetingPlace, patience: Patience, grace: float) -> str:
    """Why no store of this job is at that port, as far as is known; "" if it is there."""
    asking = Patience(min(_ASKING, patience.attempt()), patience.stop)
    try:
        kv = Visitor(place, asking, grace).visit()
        if kv is None:
            return asking.trouble
        try:
            return _mark_of_another(kv, place)
        finally:
            kv.close()
    except RendezvousError as error:  # it has just gone, or is no store of torch
        return str(error)
