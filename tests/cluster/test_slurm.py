"""A real Slurm on four hosts: the scripts of its page, jobs beside each other, workers killed, jobs put back."""

from __future__ import annotations

import re

import pytest

from tests import pages

from .running import MPI
from .slurm import Job, Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PAGE = "clusters/slurm.md"
SCRIPTS = pages.files(PAGE)
WORKER = "^[^ ]*python -m aiorpc.examples.actor_learner"
LIMIT = 60.0  # seconds for a job that takes about ten


def look(job: Job, *command: str) -> str:
    """What a command that the page shows prints, on the first node of the job."""
    shown = next(line for line in pages.commands(PAGE) if line.startswith("srun") and line.endswith(" ".join(command)))
    return job.slurm.run("sh", "-c", shown.replace("4711", job.number))


def test_a_batch_job_trains_on_two_nodes(slurm: Slurm) -> None:
    """The script of the page: four workers find each other, and rank 0 tells the result."""
    log = slurm.submit(SCRIPTS["cartpole.sh"]).wait(LIMIT)
    assert re.findall(r"^(\d): 3 observers, batched: 1,500 steps in .* reward .* -> .*$", log, re.MULTILINE) == ["0"]


@pytest.mark.parametrize(("page", "script"), [("torchrun", "torchrun.sh"), ("mpi", "mpi.sh")])
def test_another_launcher_in_a_job(slurm: Slurm, page: str, script: str) -> None:
    """Its variables win over those of Slurm, which its workers inherit."""
    log = slurm.submit(pages.files(f"clusters/{page}.md")[script], **MPI).wait(LIMIT)
    assert log.count("3 observers, batched: 1,500 steps in ") == 1


def test_two_jobs_share_nodes(slurm: Slurm) -> None:
    """At the same time, on the same two nodes, of one user: each has its own group."""
    nodes = ["--nodelist", "n1,n2"]
    jobs = [slurm.submit(SCRIPTS["cartpole.sh"], *nodes) for _ in range(2)]
    assert [job.settle("RUNNING", seconds=LIMIT) for job in jobs] == ["RUNNING"] * 2
    for job in jobs:
        assert job.shown("NodeList") == "n[1-2]"
        assert "0: 3 observers, batched: 1,500 steps" in job.wait(LIMIT)


def test_workers_that_are_killed_come_back(slurm: Slurm) -> None:
    """Their tasks start them again, under their ranks: an actor joins its group, a learner begins a new one.

    Commands of the page see all of them meanwhile.
    """
    job = slurm.submit(SCRIPTS["actors.sh"], UPDATES="100000")
    job.wait_for_line("^0: update", LIMIT)
    seen = look(job, "aiorpc", "ps")
    assert all(name in seen for name in ("learner", "actor0", "actor1", "actor2")), seen
    assert "actor1" in look(job, "stacks", "actor1")
    assert "waits" in look(job, "wait-graph")

    job.kill(2, WORKER)
    job.wait_for_line("^2: rank 2 has ended, try 1", LIMIT)
    job.wait_for_line("^0: update .* 1 killed", LIMIT)
    assert "0: rank 0 has ended" not in job.log()

    job.kill(0, WORKER)
    went_on = job.wait_for_line("^0: goes on after update", LIMIT)
    assert int(went_on.split()[-1]) > 0
    job.cancel()
    assert job.wait(LIMIT, "CANCELLED")


def test_a_job_that_is_put_back_goes_on_from_its_checkpoint(slurm: Slurm) -> None:
    """As after preemption: it is the same job, which runs its script anew."""
    job = slurm.submit(SCRIPTS["actors.sh"], UPDATES="100000")
    job.wait_for_line(r"^0: update +\d", LIMIT)
    slurm.run("scontrol", "requeue", job.number)
    job.settle("PENDING", seconds=LIMIT)
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # else in two minutes
    went_on = job.wait_for_line("^0: goes on after update", LIMIT)
    job.wait_for_line(rf"^0: update +{int(went_on.split()[-1]) + 1} ", LIMIT)
    assert job.shown("Restarts") == "1"
    job.cancel()
    job.wait(LIMIT, "CANCELLED")


def test_steps_of_one_job_are_one_group(slurm: Slurm) -> None:
    """They meet at the store that the script has started."""
    (slurm.folder / "member.py").write_text(SCRIPTS["member.py"])
    log = slurm.submit(SCRIPTS["steps.sh"]).wait(LIMIT)
    assert sorted(line for line in log.splitlines() if " has " in line) == ["client0 has 3", "client1 has 3"]


def test_the_script_of_a_job_is_no_task(slurm: Slurm) -> None:
    """It has a rank in its environment, that of its first task; a worker that it starts is told to have none."""
    program = "import aiorpc as rpc; rpc.init_rpc('w')"
    log = slurm.submit(f'#!/bin/bash\n#SBATCH --ntasks 2\npython -c "{program}"\n').wait(LIMIT, "FAILED")
    assert "RendezvousError: init_method env:// needs the environment variable RANK" in log


def test_scancel_drains(slurm: Slurm) -> None:
    """SIGTERM comes while calls are under way: each that was accepted runs to its end and is answered."""
    script = (
        "#!/bin/bash\n#SBATCH --nodes 2 --ntasks-per-node 1\n"
        "export AIORPC_SECRET=$(head -c 32 /dev/urandom | base64)\n"
        "srun --kill-on-bad-exit=0 python -m tests.cluster.drained\n"
    )
    job = slurm.submit(script)
    job.wait_for_line("^all accepted", LIMIT)
    assert "served" not in job.log()
    job.cancel()
    log = job.wait(LIMIT, "CANCELLED")
    assert sorted(re.findall(r"^served (\d+)$", log, re.MULTILINE), key=int) == [str(each) for each in range(20)]
    assert re.search("^answers 20$", log, re.MULTILINE), log
