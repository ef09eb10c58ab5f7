"""Open MPI's mpirun on one host: the commands of its page; a process that is killed. test_slurm.py has two hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pages

from .hosts import Machine, machines
from .running import MPI, running, shown

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PAGE = "clusters/mpi.md"


@pytest.fixture(scope="module")
def host(shared: Path) -> Iterator[Machine]:
    with machines(["n1"], shared) as made:
        yield made["n1"]


def test_one_host_needs_no_secret(host: Machine, shared: Path) -> None:
    """The command of the page, as it stands there; twice at once."""
    command = shown(PAGE, "mpirun -n 4")
    (other := shared / "other").mkdir()
    with running(command, [host], other, **MPI) as first, running(command, [host], shared, **MPI) as second:
        for run in (first, second):
            assert run.wait().count("3 observers, batched: 450 steps") == 1


def test_a_run_that_fails_is_followed_by_one_that_goes_on(host: Machine, shared: Path) -> None:
    """A process is killed, and mpirun ends the others; the script of the page begins again, from the checkpoint."""
    (shared / "again.sh").write_text(pages.files(PAGE)["again.sh"])
    with running("bash again.sh", [host], shared, **MPI) as run:
        run.wait_for_line("update ")
        run.kill("^python -m aiorpc.examples.actor_learner", OMPI_COMM_WORLD_RANK="2")
        run.wait_for_line("^try 1 has ended")
        done = int(run.wait_for_line("goes on after update").split()[-1])
        assert 0 < done < 60
        assert f" updates after {done}, " in run.wait()
