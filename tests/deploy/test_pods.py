"""Workers in pods: names whose addresses change, or come late; and signals for process 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.workers import wait_for

from .pods import LIMIT, SECRET, Cluster, Pod, cluster

NAME = SERVICE = "cartpole"
NOBODY = "10.232.0.200"  # on the nodes' network; no node has it
MEMBER = ["python", "-m", "tests.deploy.member"]

pytestmark = pytest.mark.slow


def start(made: Cluster, index: int, part: str = "member", *, known: bool = True, **more: str) -> Pod:
    """A pod of an Indexed Job of two, as its controller starts it."""
    env = {**SECRET, "WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": str(index), **more}
    return made.start(f"{NAME}-{index}", SERVICE, [*MEMBER, part], env, known=known)


def test_a_pod_comes_back_under_its_name_with_another_address(tmp_path: Path) -> None:
    """It takes the name and the rank of the one that was killed, and is called at its own address."""
    with cluster(tmp_path, 3) as made:
        first, second = start(made, 0, REPLACED="1"), start(made, 1)
        first.wait_for(f"first: {second.name} {second.address}")
        second.kill()
        another = start(made, 1)
        assert another.address != second.address
        first.wait_for(f"then: {another.name} {another.address}")
        assert (first.end(), another.end()) == (0, 0)


def test_a_name_that_is_not_known_yet_is_looked_up_again(tmp_path: Path) -> None:
    """The name of rank 0 is published only after rank 1 has asked for it, and heard that there is none."""
    with cluster(tmp_path, 2) as made:
        first, second = start(made, 0, known=False), start(made, 1)
        wait_for(lambda: made.asked(first.name, SERVICE) >= 3, LIMIT)
        made.publish(first.name, SERVICE, first.address)
        assert (first.end(), second.end()) == (0, 0)
        assert f"joined: {first.name} {first.address}" in first.said()


@pytest.mark.long
def test_an_old_address_is_looked_up_again(tmp_path: Path) -> None:
    """The name of rank 0 still stands for an address that nobody has any more as rank 1 joins."""
    with cluster(tmp_path, 2) as made:
        first = start(made, 0, known=False)
        made.publish(first.name, SERVICE, NOBODY)
        second = start(made, 1)
        wait_for(lambda: made.asked(first.name, SERVICE) >= 2, LIMIT)
        made.publish(first.name, SERVICE, first.address)
        assert (first.end(), second.end()) == (0, 0)


@pytest.mark.long
def test_a_name_that_stays_unknown_is_named(tmp_path: Path) -> None:
    """Joining ends within its bound, with the name that could not be looked up."""
    with cluster(tmp_path, 1) as made:
        second = start(made, 1, BOUND="3")
        assert second.end() == 1
        assert "RendezvousError" in second.said()
        assert f"'{NAME}-0.{SERVICE}.default.svc.cluster.local' cannot be resolved" in second.said()


@pytest.mark.long
def test_all_meet_again_after_the_death_of_rank_0(tmp_path: Path) -> None:
    """Which has the store: the other one ends, and both come back, each with another address."""
    with cluster(tmp_path, 4) as made:
        first, second = start(made, 0, "follower", STAYS="60"), start(made, 1, "follower")
        first.wait_for(f"other: {second.name} {second.address}")
        first.kill()
        third = start(made, 0, "follower", STAYS="0")
        assert second.end() == 1
        fourth = start(made, 1, "follower")
        third.wait_for(f"other: {fourth.name} {fourth.address}")
        assert (third.end(), fourth.end()) == (0, 0)


@pytest.mark.long
def test_members_find_the_host_of_the_store_at_its_new_address(tmp_path: Path) -> None:
    """A free group meets at a pod's name. That pod comes back with another address; the member that stayed finds it."""
    with cluster(tmp_path, 3) as made:
        env = {**SECRET, "MEET": "tcp://inference-0.inference.default:29500"}
        leader = made.start("inference-0", "inference", [*MEMBER, "web"], env)
        model = made.start("inference-0-1", "inference", [*MEMBER, "model"], env)
        leader.wait_for(f"model: {model.name} {model.address}")
        leader.kill()
        another = made.start("inference-0", "inference", [*MEMBER, "web"], env)
        assert another.address != leader.address
        another.wait_for(f"model: {model.name} {model.address}")
