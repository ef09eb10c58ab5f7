"""torchrun on one host and on two: the commands of its page; a round that fails, and the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .hosts import Machine, environment, machines
from .hosts import run as run_on
from .running import running, shown

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PAGE = "clusters/torchrun.md"
SECRET = "the secret of these tests alone"


@pytest.fixture(scope="module")
def hosts(shared: Path) -> Iterator[list[Machine]]:
    """Two, without anything that starts processes there."""
    with machines(["n1", "n2"], shared) as made:
        yield list(made.values())


def test_one_host_needs_no_secret(hosts: list[Machine], shared: Path) -> None:
    """The command of the page, as it stands there."""
    with running(shown(PAGE, "torchrun --standalone"), hosts[:1], shared) as run:
        assert "3 observers, batched: 1,500 steps" in run.wait()


def test_two_hosts_are_one_group(hosts: list[Machine], shared: Path) -> None:
    """The same command on both."""
    command = shown(PAGE, "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint n1:29400")
    with running(command, hosts, shared, AIORPC_SECRET=SECRET) as run:
        assert run.wait().count("3 observers, batched: 1,500 steps") == 1


def test_a_round_that_fails_is_followed_by_one_that_goes_on(hosts: list[Machine], shared: Path) -> None:
    """An actor is killed on the other host: torchrun starts all again, and the learner finds its checkpoint."""
    command = shown(PAGE, "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint n1:29401")
    with running(command, hosts, shared, AIORPC_SECRET=SECRET) as run:
        run.wait_for_line("^update ")
        run.kill("^[^ ]*python -u -m aiorpc.examples.actor_learner", RANK="2", TORCHELASTIC_RESTART_COUNT="0")
        done = int(run.wait_for_line("^goes on after update").split()[-1])
        assert 0 < done < 60
        assert f" updates after {done}, " in run.wait()


def test_a_store_for_all_hosts_says_an_address_that_they_reach(hosts: list[Machine], shared: Path) -> None:
    """Where no route leads to the rest of the world: that of the host's name."""
    command = "timeout --preserve-status 10 python -m aiorpc store --host 0.0.0.0 --port 29500"
    said = run_on(hosts[0], "sh", "-c", command, cwd=shared, env=environment(shared), seconds=60.0)
    assert said == f"tcp://{hosts[0].host.address}:29500\n"
