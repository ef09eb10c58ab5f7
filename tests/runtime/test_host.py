"""Whether a process of this host is gone, and who is on this host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

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


def test_the_death_of_another_users_process_is_seen() -> None:
    """And that of a process with the same number on another host is not."""
    pid, here = ended_child(), host.host_identity()
    try:
        assert host.provably_dead(make_record("w", 0, host=of_another_user(here), pid=pid), here)
        assert not host.provably_dead(make_record("w", 0, host=of_another_user(here)), here)
        assert not host.provably_dead(make_record("w", 0, host=ELSEWHERE, pid=pid), here)
    finally:
        os.waitpid(pid, 0)
