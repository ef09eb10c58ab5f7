"""Processes with the variables of a launcher: they meet with nothing named, jobs do not meet, and errors reach all."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

import aiorpc as rpc
from tests.processes.test_init_errors import SLACK
from tests.processes.workers import Child, Children, Link, Place, private_directory, processes, wait_for
from tests.runtime.test_launchers import ONE_NODE, SLURM, Environ

PLACE = Place("w{rank}", -1, None, "env://")
LIMIT = 30.0


def task(rank: int, size: int = 2, job: str = "7", base: Environ = ONE_NODE) -> Environ:
    """The environment of one task of a step."""
    ranks = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": str(size)}
    return base | {"SLURM_JOB_ID": job} | ranks


def meet(place: Place, link: Link, pause: bool = False, **options: object) -> list[str]:
    """Body: join; the names of the members."""
    place.init_rpc(rpc_timeout=LIMIT, **options)
    link.tell("joined")
    if pause:
        link.hear()
    names = sorted(info.name for info in rpc.current().worker_infos())
    assert rpc.rpc_sync("w0", len, args=("abc",)) == 3
    rpc.shutdown()
    return names


def fail(place: Place, link: Link, require_secret: bool | None = None) -> str:
    """Body: joining fails; with what."""
    with pytest.raises(rpc.errors.RendezvousError) as caught:
        place.init_rpc(rpc_timeout=LIMIT, require_secret=require_secret)
    return str(caught.value)


def started(children: Children, environs: Sequence[Environ], pause: bool = False) -> list[Child]:
    return [children.start(PLACE, meet, pause, env=environ) for environ in environs]


def told(child: Child) -> object:
    assert child.hear() == "joined"
    return child.hear()


@pytest.mark.parametrize("base", [ONE_NODE, SLURM], ids=["one node", "two nodes"])
def test_two_jobs_at_once_do_not_meet(base: Environ) -> None:
    """Each finds its own members, by a file or by a port; nothing is left behind."""
    with processes() as children:
        tasks = [task(rank, job=job, base=base) for job in ("7", "8") for rank in range(2)]
        for child in started(children, tasks):
            assert told(child) == ["w0", "w1"]
        children.check_ended()
    assert not list(private_directory().glob("meet-*"))


def test_a_task_that_is_killed_and_started_again_takes_its_place() -> None:
    """With the same variables, in the same step; the other one stays."""
    with processes() as children:
        first, second = started(children, [task(0), task(1)], pause=True)
        assert first.hear() == second.hear() == "joined"
        second.kill(signal.SIGKILL)
        second.join()
        (third,) = started(children, [task(1)])
        assert third.hear() == "joined"
        first.tell("go on")
        assert third.hear() == first.hear() == ["w0", "w1"]
        assert (first.join(), third.join()) == (0, 0)
    assert not list(private_directory().glob("meet-*"))


def test_a_job_that_was_killed_is_forgotten_by_its_next_try() -> None:
    """It has the same variables, as in a loop of a script, and finds nothing of the first."""
    with processes() as children:
        for child in (before := started(children, [task(0), task(1)], pause=True)):
            assert child.hear() == "joined"
        for child in before:
            child.kill(signal.SIGKILL)
            child.join()
        assert wait_for(lambda: list(private_directory().glob("meet-*")))
        for child in (again := started(children, [task(0), task(1)])):
            assert told(child) == ["w0", "w1"]
        assert [child.join() for child in again] == [0, 0]
    assert not list(private_directory().glob("meet-*"))


def test_the_rank_of_a_living_member_is_refused() -> None:
    """A second process with the variables of the first; the group goes on."""
    with processes() as children:
        pair = started(children, [task(0), task(1)], pause=True)
        assert [child.hear() for child in pair] == ["joined"] * 2
        text = children.start(PLACE, fail, env=task(1)).hear()
        assert "w1" in text and "lives" in text, text
        for child in pair:
            child.tell("go on")
        assert [child.hear() for child in pair] == [["w0", "w1"]] * 2
        children.check_ended()


def test_no_secret_where_one_is_demanded_is_told_to_all() -> None:
    """It says what to set."""
    with processes() as children:
        failing = [children.start(PLACE, fail, True, env=task(rank)) for rank in range(2)]
        for child in failing:
            assert "set AIORPC_SECRET (or secret_file) for all workers" in child.hear(LIMIT + SLACK)
        children.check_ended()
