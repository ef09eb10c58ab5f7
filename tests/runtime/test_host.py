"""Whether a process of this host is gone, and who is on this host."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aiorpc import Worker
from aiorpc.runtime.engine import host

from .test_rendezvous import make_record

ELSEWHERE = f"{os.getuid()}@another-boot:1:1"


def of_another_user(identity: str) -> str:
    """The identity of this host as a process of another user has it."""
    return f"{os.getuid() + 1}@{identity.partition('@')[2]}"


def ended_child() -> int:
    """The pid of a child that has ended and was not waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_zombies_and_the_collected_are_gone() -> None:
    """A process counts as gone from its end on, whether or not its parent has looked."""
    pid = ended_child()
    assert host.is_gone(pid)
    os.waitpid(pid, 0)
    assert host.is_gone(pid)
    assert not host.is_gone(os.getpid()) and not host.is_gone(os.getppid())


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by signal 9 (SIGKILL)"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ended by signal 11 (SIGSEGV)"),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1), f"ended by signal {signal.SIGRTMIN + 1}"),
        (lambda: os._exit(3), "ended with exit code 3"),
        (lambda: os._exit(0), "has ended"),
    ],
)
def test_how_a_process_has_ended_is_shown_until_it_is_collected(end: Callable[[], object], how: str) -> None:
    """By which signal, or with which code; to look does not take it from whoever waits for the process."""
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(ready, 1)
        end()
        os._exit(77)
    assert host.how_ended(pid) == ""
    os.write(go, b".")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert host.how_ended(pid) == host.how_ended(pid) == how
    collected, status = os.waitpid(pid, 0)
    assert collected == pid and os.waitstatus_to_exitcode(status) != 77
    assert host.how_ended(pid) == "has ended"
    os.close(ready)
    os.close(go)


def test_two_users_of_a_host_see_each_other_and_are_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No unix socket of the one can be used by the other one; a death can still be seen."""
    here, uid = host.host_identity(), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    there = host.host_identity()
    assert there != here
    assert host.sees(here, there) and host.sees(there, here) and host.sees(here, here)
    assert not host.sees(here, ELSEWHERE)
    assert host.sees("elsewhere", "elsewhere") and not host.sees("elsewhere", "somewhere else")


def test_the_death_of_another_users_process_is_seen() -> None:
    """And that of a process with the same number on another host is not."""
    pid, here = ended_child(), host.host_identity()
    try:
        assert host.provably_dead(make_record("w", 0, host=of_another_user(here), pid=pid), here)
        assert not host.provably_dead(make_record("w", 0, host=of_another_user(here)), here)
        assert not host.provably_dead(make_record("w", 0, host=ELSEWHERE, pid=pid), here)
    finally:
        os.waitpid(pid, 0)


def test_a_host_without_proc_is_known_by_a_legible_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes any bytes for it, and a record does not."""

    def unreadable(path: Path, encoding: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", unreadable)
    monkeypatch.setattr(socket, "gethostname", lambda: "node\udcff\x1b")
    assert host.host_identity() == f"{os.getuid()}@host:node??"


async def test_a_member_of_another_user_is_watched_by_its_process(pair: list[Worker]) -> None:
    """So its death is told at once, whether or not it was ever connected to; one on another host cannot be watched."""
    group, record = pair[0]._node.group, pair[1]._node.engine.record
    other = replace(record, incarnation="other", host=of_another_user(record.host), pid=os.getppid())
    assert group.watch(other)
    assert not group.watch(replace(other, incarnation="far", host=ELSEWHERE))


def test_cores_are_those_of_the_process_and_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the groups that it is in, one within the other, the least; a group without a limit, or unseen, has none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    own = tmp_path / "own"
    groups = tmp_path / "groups"
    pod = groups / "pods" / "mine"
    pod.mkdir(parents=True)
    assert host.cores(groups, own) == 8
    own.write_text("4:memory:/elsewhere\n0::/pods/mine\n")
    assert host.cores(groups, own) == 8
    (pod / "cpu.max").write_text("max 100000\n")
    assert host.cores(groups, own) == 8
    (groups / "pods" / "cpu.max").write_text("150000 100000\n")
    assert host.cores(groups, own) == 1.5
    (pod / "cpu.max").write_text("50000 100000\n")
    assert host.cores(groups, own) == 0.5
    own.write_text("0::/\n")  # as a container is shown its own group
    (groups / "cpu.max").write_text("200000 100000\n")
    assert host.cores(groups, own) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert host.cores(groups, own) == 1
