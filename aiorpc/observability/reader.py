"""Looks at the workers of this user on this host from outside, and through them at their groups. Imports no torch.

A worker is asked at the endpoint of its process (`endpoint`). Members that have none here, on other hosts or of other
users, are asked by a member of their group that has one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from . import heartbeat
from .heartbeat import how_it_stands
from .report import (
    LONGEST_ANSWER,
    Answer,
    GroupTrace,
    Look,
    LookAround,
    Question,
    RecordGroup,
    Refused,
    Reports,
    Stacks,
    Text,
    Unseen,
    WorkerReport,
)

#: Seconds for a process of this host to answer for itself.
PATIENCE = 1.0
#: Seconds for members that are asked through another one.
FAR_PATIENCE = 2.0
#: As in `endpoint`, which cannot be imported without torch.
SIGNAL = int(signal.SIGRTMAX) - 1

#: Seconds between the looks at a group by which troubles are found.
PAUSES = (0.3, 0.7)
#: Seconds for a recording to begin and to be fetched.
_TO_FETCH = 65.0

_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
A = TypeVar("A")


class CannotLook(Exception):
    """There is nothing to look at, or it does not answer. Its text is for the user. how: as in `Unseen`."""

    def __init__(self, text: str, how: str = "") -> None:
        super().__init__(text)
        self.how = how


@dataclass(frozen=True)
class Process:
    """A process of this host with workers. path: of its endpoint. names: of the workers. stacks: the file into which it
    writes its stacks when it gets `SIGNAL`; None if it does not."""

    pid: int
    path: Path
    names: tuple[str, ...] = ()
    stacks: Path | None = None

    @property
    def how_it_stands(self) -> str:
        """ "stopped" for a process that a signal has stopped, "gone", or "" for one that may run."""
        return how_it_stands(self.pid)


@dataclass
class SeenGroup:
    """A group: the reports of its members, and those without a report, each with the reason."""

    reports: list[WorkerReport] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of all members that are known, those without a report too."""
        return sorted({each.name for each in self.reports} | {each.name for each in self.unseen})


# --- processes --------------------------------------------------------------------------------------------------------


def directories() -> list[Path]:
    """The private directories of this user, in which workers meet: see `transport.sockets.private_directory`."""
    return [Path(each) for each in heartbeat.directories(tempfile.gettempdir())]


def processes() -> list[Process]:
    """The processes of this user on this host that have workers now, by number."""
    found = [process for directory in directories() for process in _in(directory)]
    return sorted(found, key=lambda process: process.pid)


def _in(directory: Path) -> Iterator[Process]:
    for path in directory.glob("look-*.sock"):
        found = re.fullmatch(r"look-(\d+)-(\d+)-(\d+)", path.stem)
        if found is None:
            continue
        pid, names, stacks = map(int, found.groups())
        listed = _names_in(_file_of(pid, names, "aiorpc-names"))
        if listed:
            yield Process(pid, path, listed, _file_of(pid, stacks, "aiorpc-stacks"))


def _file_of(pid: int, descriptor: int, name: str) -> Path | None:
    """The file in memory of that name which the process has under that descriptor; None if the process is another one,
    or has none."""
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    with contextlib.suppress(OSError):
        if os.readlink(path).startswith(f"/memfd:{name}"):
            return path
    return None


def _names_in(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    for _ in range(3):
        try:
            return tuple(msgspec.json.decode(path.read_bytes(), type=list[str]))
        except OSError:  # it has ended
            return ()
        except msgspec.DecodeError:  # it was being written
            time.sleep(0.001)
    return ()


# --- questions --------------------------------------------------------------------------------------------------------


def ask(process: Process, question: Question, patience: float = PATIENCE) -> Answer:
    """The answer of a process. CannotLook if none comes within `patience` seconds; its text says how it stands."""
    until = time.monotonic() + patience
    stands = process.how_it_stands
    if stands:
        by = ", by SIGSTOP or a debugger" if stands == "stopped" else ""
        raise CannotLook(f"process {process.pid} is {stands}{by}", stands)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            _connect(connection, process, until)
            data = msgspec.msgpack.encode(question)
            connection.sendall(struct.pack("!I", len(data)) + data)
            size: int = struct.unpack("!I", _receive(connection, 4, until))[0]
            if size > LONGEST_ANSWER:
                raise CannotLook(f"process {process.pid} gives an answer of {size} bytes")
            return _ANSWERS.decode(_receive(connection, size, until))
    except TimeoutError:
        raise CannotLook(
            f"process {process.pid} has not answered within {patience:g} s: a thread of it holds the interpreter lock, "
            "or it gets no processor",
            "silent",
        ) from None
    except (OSError, msgspec.DecodeError, struct.error) as error:
        raise CannotLook(f"process {process.pid} cannot be asked: {error}") from None


def _connect(connection: socket.socket, process: Process, until: float) -> None:
    """Connect to its endpoint. TimeoutError if that has too many connections for all the time."""
    while True:
        connection.settimeout(max(0.001, until - time.monotonic()))
        try:
            return connection.connect(str(process.path))
        except BlockingIOError:  # its backlog is full
            if time.monotonic() > until:
                raise TimeoutError from None
            time.sleep(0.01)


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    parts: list[bytes] = []
    while size:
        connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(min(size, 1 << 20))
        if not more:
            raise ConnectionResetError("it has closed the connection")
        parts.append(more)
        size -= len(more)
    return b"".join(parts)


def _all(function: Callable[[Process], A], of: Sequence[Process]) -> list[A]:
    """The function of each process, side by side: one that does not answer holds up no other."""
    if not of:
        return []
    with ThreadPoolExecutor(min(32, len(of))) as pool:
        return list(pool.map(function, of))


def _look(process: Process, question: Look) -> Reports:
    try:
        answer = ask(process, question)
    except CannotLook as error:
        here = socket.gethostname()
        return Reports(unseen=[Unseen(name, process.pid, here, str(error), error.how) for name in process.names])
    if isinstance(answer, Reports):
        return answer
    return Reports(unseen=[Unseen(name, process.pid, why=str(answer)) for name in process.names])


# --- groups -----------------------------------------------------------------------------------------------------------


def groups(*, far: bool = True, question: Look | None = None) -> list[SeenGroup]:
    """The groups that have members here, each with all reports that can be had.

    far: also ask for members that are not of this user on this host, through those that are. question: what to ask.
    """
    question = question or Look()
    found = processes()
    answers = _all(lambda process: _look(process, question), found)
    seen = _joined(report for answer in answers for report in answer.reports)
    for answer in answers:
        for each in answer.unseen:
            _place(seen, each)
    if far:
        by_pid = {process.pid: process for process in found}
        for group in seen:
            _look_around(group, by_pid, question)
    for group in seen:
        group.reports.sort(key=lambda report: report.id)
    return sorted(seen, key=lambda group: group.names)


def group_of(name: str | None = None) -> SeenGroup:
    """The group with a worker of that name; without a name the only group. CannotLook if there is none, or several."""
    found = groups()
    if not found:
        where = ", ".join(map(str, directories())) or f"{tempfile.gettempdir()}/aiorpc-{os.getuid()}"
        raise CannotLook(f"no worker of this user runs on this host (looked into {where}; TMPDIR must be the workers')")
    if name is None:
        if len(found) > 1:
            those = "; ".join(", ".join(group.names[:4]) for group in found)
            raise CannotLook(f"there are {len(found)} groups here, so name a worker of the one that is meant: {those}")
        return found[0]
    having = [group for group in found if name in group.names]
    if not having:
        there = ", ".join(each for group in found for each in group.names)
        raise CannotLook(f"there is no worker {name!r} here; there are {there}")
    if len(having) > 1:
        raise CannotLook(f"{len(having)} groups here have a worker {name!r}")
    return having[0]


def _joined(reports: Iterable[WorkerReport]) -> list[SeenGroup]:
    """Reports by group: members of one know each other by their marks."""
    groups: list[tuple[SeenGroup, set[str]]] = []
    for report in reports:
        keys = {each.mark for each in report.members if each.mark}
        mine = [each for each in groups if report.mark in each[1] or any(r.mark in keys for r in each[0].reports)]
        merged = SeenGroup([report]), keys
        for each in mine:
            merged[0].reports.extend(each[0].reports)
            merged[1].update(each[1])
            groups.remove(each)
        groups.append(merged)
    return [group for group, _ in groups]


def _place(groups: list[SeenGroup], unseen: Unseen) -> None:
    """Put a worker that does not answer into the group that knows it, or into one of its own."""
    for group in groups:
        if any(each.name == unseen.name and each.pid == unseen.pid for r in group.reports for each in r.members):
            group.unseen.append(unseen)
            return
    groups.append(SeenGroup(unseen=[unseen]))


def _look_around(group: SeenGroup, processes: dict[int, Process], question: Look) -> None:
    """Ask for the members that have no endpoint here."""
    members = {
        each.name: each
        for report in group.reports
        for each in report.members
        if each.state not in ("lost", "gone") and each.name not in group.names
    }
    if not members:
        return
    wanted = list(members)
    refused: dict[str, Unseen] = {}
    for report in sorted(group.reports, key=lambda report: report.loop.silent):
        process = processes.get(report.pid)
        if process is None or not wanted:
            continue
        around = LookAround(report.name, wanted, FAR_PATIENCE, question.tally, question.log)
        try:
            answer = ask(process, around, 2 * FAR_PATIENCE)
        except CannotLook:
            continue
        if isinstance(answer, Reports):
            group.reports.extend(answer.reports)
            refused |= {each.name: each for each in answer.unseen}
            for each in answer.unseen if report.loop.silent else ():
                each.how = ""  # it may have answered: who asked stands still itself
            # Another member may have the right to ask; one that does not answer would answer no other member.
            wanted = [each.name for each in answer.unseen if not each.how]
    for name in [each for each in members if each not in group.names]:
        unseen = refused.get(name) or Unseen(name, why="no member here can ask it")
        unseen.hostname, unseen.pid = members[name].hostname, members[name].pid
        group.unseen.append(unseen)


# --- recordings -------------------------------------------------------------------------------------------------------


def record(name: str | None, seconds: float, *, profile: bool = False) -> bytes:
    """What the group of a worker does for so many seconds, as Chrome's JSON: see `recorder`. CannotLook if no member
    here can record it."""
    group = group_of(name)
    own = [each for each in processes() if any(report.pid == each.pid for report in group.reports)]
    recorders = [(each, worker) for each in own for worker in each.names if worker in group.names]
    recorders.sort(key=lambda each: each[1] != name)
    if not recorders:
        raise CannotLook(f"no member of the group of {', '.join(group.names)} answers here")
    process, worker = recorders[0]
    answer = ask(process, RecordGroup(worker, seconds, profile), seconds + _TO_FETCH)
    if not isinstance(answer, GroupTrace):
        raise CannotLook(f"worker {worker!r} cannot record: {answer.why if isinstance(answer, Refused) else answer}")
    return answer.trace


# --- stacks -----------------------------------------------------------------------------------------------------------


def stacks(name: str) -> str:
    """The stacks of all threads and tasks of the process of a worker, of a member elsewhere through a member here.

    CannotLook if there is no such worker, or nobody answers; `how` of it is "silent" or "stopped" for a process of this
    host, whose threads `outside` can look at.
    """
    group = group_of(name)
    process = process_of(name, group)
    answer = _ask_far(group, name) if process is None else ask(process, Stacks())
    if isinstance(answer, Text):
        return answer.text
    raise CannotLook(answer.why if isinstance(answer, Refused) else f"it answers a {type(answer).__name__}")


def process_of(name: str, group: SeenGroup) -> Process | None:
    """The process of this host with that member; None for a member elsewhere."""
    pids = {each.pid for each in group.reports if each.name == name}
    pids |= {each.pid for each in group.unseen if each.name == name}
    return next((each for each in processes() if each.pid in pids and name in each.names), None)


def _ask_far(group: SeenGroup, name: str) -> Answer:
    pids = {each.pid: each.name for each in group.reports}
    why = f"no member here can ask worker {name!r}"
    for process in processes():
        if process.pid not in pids:
            continue
        try:
            answer = ask(process, Stacks(pids[process.pid], name, FAR_PATIENCE), 2 * FAR_PATIENCE)
        except CannotLook as error:
            why = str(error)
            continue
        if isinstance(answer, Text):
            return answer
        own = pids[process.pid]
        why = f"worker {own!r} cannot get the stacks of worker {name!r}: {getattr(answer, 'why', answer)}"
    return Refused(why)


def looks(find: Callable[[], SeenGroup], pauses: Sequence[float] = PAUSES) -> list[SeenGroup]:
    """A group at several moments: some troubles are seen by what has not changed. find: as `group_of`."""
    found = [find()]
    for pause in pauses:
        time.sleep(pause)
        found.append(find())
    return found
