"""Whether a process of this host is gone."""

from __future__ import annotations

import os

import pytest

from aiorpc.runtime.engine import host


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


def test_a_zombie_that_is_collected_during_the_look_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid was there, and its state could not be read any more."""
    pid = ended_child()
    kill = os.kill

    def find_and_collect(number: int, signal: int) -> None:
        kill(number, signal)
        os.waitpid(number, 0)

    monkeypatch.setattr(os, "kill", find_and_collect)
    assert host.is_gone(pid)
