"""What launchers say: their environments as they were read from each, what is missing or contradicts, and names."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

import aiorpc
from aiorpc.errors import RendezvousError, RpcUsageError
from aiorpc.runtime.meeting import launchers
from aiorpc.runtime.meeting.job_place import JobFolder, mark_job, open_job_port
from aiorpc.runtime.meeting.launchers import LAUNCHERS, POD_PORT, first_node, found, ports_of
from aiorpc.runtime.meeting.meeting_place import MeetingPlace, parse
from aiorpc.runtime.meeting.patience import Patience
from aiorpc.runtime.meeting.stores import Hosting
from aiorpc.transport.sockets import private_directory
from tests.ports import free_port

Environ = dict[str, str]
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 20.0

#: Of `srun -N2 -n2` with Slurm 22.05, task 1.
SLURM = {
    "SLURMD_NODENAME": "n2",
    "SLURM_CLUSTER_NAME": "one",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
#: Of `srun -N1 -n2` in a job of two nodes.
ONE_NODE = SLURM | {
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
#: Of the script of `sbatch -N2 -n2` itself.
BATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
}
#: Of `mpirun -n 2` with Open MPI 4.1, rank 1.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1552941057",
    "OMPI_MCA_orte_hnp_uri": "1552941056.0;tcp://192.0.2.2:35085;tcp6://[fd00::2]:53043",
    "OMPI_MCA_orte_precondition_transports": "7c7752bf8bda1cb8-7da03e7923620426",
    "PMIX_NAMESPACE": "1552941057",
    "PMIX_RANK": "1",
}
#: Of `mpirun -n 2` in a job of Slurm with two nodes: the daemons that it starts there are a step.
MPI_IN_SLURM = SLURM | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
#: Of `mpiexec -n 2` with MPICH 5.0, rank 1.
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
#: Of `srun --mpi=pmi2`, in addition.
PMI2 = {"PMI_FD": "11", "PMI_JOBID": "2.1", "PMI_RANK": "1", "PMI_SIZE": "2"}
LWS = {
    "LWS_GROUP_SIZE": "4",
    "LWS_LEADER_ADDRESS": "serving-0.serving.default",
    "LWS_WORKER_INDEX": "3",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-01-02-03-04-05-000006_train_1",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}
TORCHRUN = {
    "GROUP_RANK": "0",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "vm",
    "MASTER_PORT": "29400",
    "RANK": "3",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "4",
}
HAND = {"RANK": "1", "WORLD_SIZE": "4"}


def place_of(environ: Environ, rank: int | None = None, world_size: int | None = None) -> MeetingPlace:
    return parse("env://", rank, world_size, environ)


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This host has the name of a pod of a JobSet."""
    name = "train-workers-0-3.train.default.svc.cluster.local"
    monkeypatch.setattr(socket, "getfqdn", lambda name_=name: name_)
    yield


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing of a launcher in the environment of this process."""
    for name in list(os.environ):
        if re.match(r"SLURM|OMPI|PMI|LWS|SKYPILOT|JOB_|MPI_|TORCHELASTIC|RANK$|WORLD_SIZE$|LOCAL_RANK$|MASTER_", name):
            monkeypatch.delenv(name)
    return monkeypatch


# --- who and how many -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size", "local_rank"),
    [
        (SLURM, "Slurm", 1, 2, 0),
        (ONE_NODE, "Slurm", 1, 2, 1),
        (SLURM | PMI2, "Slurm", 1, 2, 0),
        (OPEN_MPI, "Open MPI", 1, 2, 1),
        (MPI_IN_SLURM, "Open MPI", 1, 2, 0),
        (HYDRA, "Hydra (MPICH, Intel MPI)", 1, 2, 1),
        (SLURM | HYDRA, "Hydra (MPICH, Intel MPI)", 1, 2, 1),
        (LWS, "LeaderWorkerSet", 3, 4, 0),
        (SKYPILOT, "SkyPilot", 1, 2, 0),
        (INDEXED_JOB, "Kubernetes (Indexed Job)", 3, 4, 0),
        (TORCHRUN, "torchrun", 3, 4, 1),
        (SLURM | TORCHRUN, "torchrun", 3, 4, 1),
        (SKYPILOT | TORCHRUN, "torchrun", 3, 4, 1),
        (INDEXED_JOB | TORCHRUN, "torchrun", 3, 4, 1),
        (HAND, "hand", 1, 4, None),
        (HAND | {"LOCAL_RANK": "1"}, "hand", 1, 4, 1),
        (SLURM | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "hand", 5, 8, 1),  # several of each task
        (INDEXED_JOB | {"RANK": "5", "WORLD_SIZE": "8"}, "hand", 5, 8, None),  # the second Job of a JobSet
    ],
)
def test_a_launcher_is_known(environ: Environ, launcher: str, rank: int, size: int, local_rank: int | None) -> None:
    """By its own variables, also where it was started by another one."""
    said = found(environ)
    assert said is not None
    assert (said.launcher, said.rank, said.world_size, said.local_rank) == (launcher, rank, size, local_rank)
    assert set(said.variables) <= environ.keys()


@pytest.mark.parametrize(
    "environ", [{}, BATCH, PMI2, {"RANK": "1"}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}], ids=str
)
def test_what_is_no_launcher_says_nothing(environ: Environ) -> None:
    """Not the script of sbatch, nor the shell of salloc, nor half of what is set by hand."""
    assert found(environ) is None


def test_the_page_has_the_table_of_launchers() -> None:
    """docs/reference/joining.md says what the code reads."""
    page = (ROOT / "docs/reference/joining.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (`.+?) \| (`.+?) \| (.+?) \| .+ \|$", page.partition("<!-- launchers")[2], re.M)
    assert rows == [
        (
            each.name,
            f"`{each.rank}`",
            ", ".join(f"`{name}`" for name in each.size),
            f"`{each.local_rank}`" if each.local_rank else "0",
        )
        for each in LAUNCHERS
    ]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("n[01-03,7],m2", "n01"),
        ("gpu-a[007,010-012]", "gpu-a007"),
        ("a,b[1-3]", "a"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("n[1-2].example.org", "n1.example.org"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_the_first_node_of_a_list_is_read(nodes: str, first: str) -> None:
    """As Slurm writes them."""
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",n1", "n[", "n[]", "n[a-b]", "n]1", "[n1]", "n1 n2", "(null)"])
def test_a_list_of_nodes_that_cannot_be_read_is_an_error(nodes: str) -> None:
    """It names the variable, and what to set."""
    environ = SLURM | {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_NODELIST": nodes}
    with pytest.raises(RpcUsageError, match=r"SLURM_STEP_NODELIST cannot be read.*Set MASTER_ADDR"):
        place_of(environ)
    assert place_of(environ | {"MASTER_ADDR": "n1"}).host == "n1"


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "host", "ports"),
    [
        (SLURM, "127.0.0.1", None),  # no such name as n1 here
        (SLURM | {"SLURM_STEP_NODELIST": "localhost,n2"}, "localhost", None),
        (SLURM | {"MASTER_ADDR": "n1.example"}, "n1.example", None),
        (SLURM | {"MASTER_PORT": "29600"}, "127.0.0.1", (29600,)),
        (MPI_IN_SLURM, "192.0.2.2", None),
        (HYDRA | {"MASTER_ADDR": "n1", "MASTER_PORT": "29600"}, "n1", ()),
        (LWS, "serving-0.serving.default", (POD_PORT,)),
        (SKYPILOT, "10.0.0.4", None),
        (INDEXED_JOB, "train-workers-0-0.train.default.svc.cluster.local", (POD_PORT,)),
        (INDEXED_JOB | {"MASTER_ADDR": "train-0"}, "train-0", (POD_PORT,)),
        (TORCHRUN, "vm", ()),
        (SLURM | TORCHRUN, "vm", ()),
        (SLURM | {"MASTER_ADDR": "n1", "MASTER_PORT": "29600"}, "n1", ()),
    ],
)
@pytest.mark.usefixtures("pod")
def test_the_place_follows_from_the_launcher(environ: Environ, host: str, ports: tuple[int, ...] | None) -> None:
    """Its host, and ports of the job, unless they are given."""
    place = place_of(environ)
    assert place.host == host
    assert place.launched is not None and (place.rank, place.world_size) == (
        place.launched.rank,
        place.launched.world_size,
    )
    if ports is None:
        assert place.ports == ports_of(place.job) and len(place.ports) > 1
        assert all(12_000 <= port < 32_000 for port in place.ports)
    else:
        assert place.ports == ports
        assert place.job == ""
    assert place.agent is (environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def test_on_one_host_the_place_is_a_file_of_the_job() -> None:
    """All ranks of it name the same, and each other job or try another one."""
    tries = [
        ONE_NODE,
        ONE_NODE | {"SLURM_STEP_ID": "3"},
        ONE_NODE | {"SLURM_JOB_ID": "2"},
        ONE_NODE | {"SLURM_RESTART_COUNT": "1"},
        ONE_NODE | {"SLURM_CLUSTER_NAME": "other"},
        OPEN_MPI,
        OPEN_MPI | {"PMIX_NAMESPACE": "1552941058"},
    ]
    paths = [place_of(environ).path for environ in tries]
    assert len(set(paths)) == len(paths)
    assert place_of(ONE_NODE | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "7"}).path == paths[0]
    assert place_of(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}).path == paths[5]
    assert all(Path(path).is_relative_to(private_directory()) for path in paths)


def test_the_variables_by_hand_are_taken_as_before() -> None:
    """A rank and a size as arguments win over those of the environment, and over a launcher if the place is named."""
    given = {"MASTER_ADDR": "a", "MASTER_PORT": "29600"}
    place = place_of(HAND | given, world_size=2)
    assert (place.rank, place.world_size, place.host, place.port, place.job) == (1, 2, "a", 29600, "")
    place = place_of(ONE_NODE | given, rank=3, world_size=4)
    assert (place.rank, place.world_size, place.host, place.launched) == (3, 4, "a", None)
    place = place_of({"RANK": "0"} | given, world_size=2)
    assert (place.rank, place.world_size) == (0, 2)


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, r"needs the environment variable RANK, which is not set. Start the program with torchrun"),
        (BATCH, r"runs in a job of Slurm, but not in a step of it: start it with srun"),
        (PMI2, r"PMI_RANK or PMIX_RANK, which are set, do not tell the launcher"),
        (HAND, r"MASTER_ADDR, which is not set"),
        (SLURM | {"RANK": "0"}, r"RANK is 0, and SLURM_PROCID, by Slurm, is 1: set RANK to the same.*unset it there"),
        (SLURM | {"WORLD_SIZE": "4"}, r"WORLD_SIZE is 4, and SLURM_STEP_NUM_TASKS, by Slurm, is 2"),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "2"}, r"RANK is 0, and SLURM_PROCID, by Slurm, is 1"),
        (OPEN_MPI | {"RANK": "0"}, r"RANK is 0, and OMPI_COMM_WORLD_RANK, by Open MPI, is 1"),
        ({"JOB_COMPLETION_INDEX": "1"}, r"does not say how many there are: set WORLD_SIZE for all of them"),
        ({"LWS_WORKER_INDEX": "1"}, r"set LWS_GROUP_SIZE for all"),
        ({"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"}, r"set MASTER_ADDR for all of them, to the host of rank 0$"),
        (INDEXED_JOB, r"Kubernetes \(Indexed Job\) \(rank 3 of 4, by JOB.*set MASTER_ADDR"),
        (HYDRA, r"set MASTER_ADDR and MASTER_PORT for all of them, to the host of rank 0 and a port that is free"),
        (HYDRA | {"MASTER_ADDR": "a"}, r"set MASTER_PORT for all of them, to a port that is free there"),
        (TORCHRUN | {"MASTER_ADDR": ""}, r"MASTER_ADDR, which is not set"),
    ],
)
def test_what_is_missing_or_contradicts_is_named(environ: Environ, said: str) -> None:
    """With the variables and what to do."""
    with pytest.raises(RendezvousError, match=said):
        place_of(environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (SLURM | {"SLURM_PROCID": "one"}, "SLURM_PROCID must be an integer, not 'one'"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "-2"}, "SLURM_STEP_NUM_TASKS must not be negative, but is -2"),
        (SLURM | {"SLURM_LOCALID": "?"}, "SLURM_LOCALID must be an integer"),
        (SLURM | {"RANK": "x"}, "RANK must be an integer"),
        (SLURM | {"MASTER_PORT": "http"}, "MASTER_PORT must be an integer"),
        (SLURM | {"MASTER_PORT": "70000"}, "MASTER_PORT must be between 1 and 65535, not 70000"),
    ],
)
def test_a_number_that_is_none_is_named(environ: Environ, said: str) -> None:
    """The variable, and what it holds."""
    with pytest.raises(RpcUsageError, match=said):
        place_of(environ)


def test_a_size_that_contradicts_the_launcher_is_refused() -> None:
    """As in a shell of `srun --pty`, whose variables stay for what is started there."""
    shell = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    with pytest.raises(
        RendezvousError,
        match=r"world_size is 2, and .* Slurm \(rank 0 of 1, by SLURM_PROCID, SLURM_STEP_NUM_TASKS\).*unset it there",
    ):
        place_of(shell, rank=1, world_size=2)
    assert place_of(shell).world_size == 1


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("{role}{rank}", "actor1"),
        ("{rank}", "1"),
        ("actor", "actor"),
        ("w{rank:03}-{local_rank}", "w001-0"),
        ("{role}:{role}", "actor:actor"),
    ],
)
def test_a_pattern_makes_a_name(pattern: str, name: str, no_launcher: pytest.MonkeyPatch) -> None:
    """Of what the launcher says, before joining."""
    for key, value in (SLURM | {"AIORPC_ROLE": "actor"}).items():
        no_launcher.setenv(key, value)
    worker = aiorpc.init(pattern)
    assert (worker.name, worker.role) == (name, "actor")
    said = aiorpc.launched()
    assert said is not None and (said.launcher, said.rank, said.local_rank) == ("Slurm", 1, 0)


def test_a_rank_and_a_role_that_are_given_win(no_launcher: pytest.MonkeyPatch) -> None:
    """Over those of the environment; torchrun's usual role is none."""
    for key, value in TORCHRUN.items():
        no_launcher.setenv(key, value)
    assert aiorpc.init("{role}{rank}", rank=2, world_size=4, role="learner").name == "learner2"
    assert aiorpc.init("w{rank}").role == ""
    no_launcher.setenv("ROLE_NAME", "actor")
    assert aiorpc.init("{role}{rank}").name == "actor3"
    no_launcher.setenv("AIORPC_ROLE", "learner")
    assert aiorpc.init("{role}{rank}").name == "learner3"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        # As of `python -m aiorpc.run --free`, which tells no size, and as of an Indexed Job.
        ({"RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "aiorpc-1-2"}, "w1-1"),
        ({"JOB_COMPLETION_INDEX": "3"}, "w3-0"),
    ],
)
def test_a_member_of_a_free_group_needs_no_size(environ: Environ, name: str, no_launcher: pytest.MonkeyPatch) -> None:
    """For its name, and for its device. One of a fixed size is given it, or the error says so."""
    for key, value in environ.items():
        no_launcher.setenv(key, value)
    assert aiorpc.init("w{rank}-{local_rank}", init_method="tcp://127.0.0.1:29500").name == name
    said = aiorpc.launched()
    assert said is not None and said.world_size is None and str(said.rank) in str(said)
    there = environ | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert place_of(there, world_size=8).world_size == 8
    assert place_of({"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "n1"}, world_size=8).world_size == 8
    with pytest.raises(RendezvousError, match=r"not say how many there are: set WORLD_SIZE for all.*or give world_siz"):
        place_of(there)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("{role}{rank}", r"the rank of this worker is not known: give rank=, or start"),
        ("{role}", r"the role of this worker is not known: give role=, or set AIORPC_ROLE"),
        ("w{local_rank}", r"the local_rank of this worker is not known: set LOCAL_RANK"),
        ("w{host}", r"it may have \{rank\}, \{local_rank\}, \{role\}"),
        ("w{}", r"it may have"),
        ("w{0}", r"it may have"),
        ("w{rank", r"is a pattern, and makes no name: expected '}'"),
        ("w}", r"is a pattern, and makes no name: Single '}'"),
        ("w{rank!x}", r"is a pattern, and makes no name"),
    ],
)
def test_a_pattern_that_makes_no_name_says_why(pattern: str, said: str, no_launcher: pytest.MonkeyPatch) -> None:
    """As an error of `init` itself."""
    no_launcher.delenv("AIORPC_ROLE", raising=False)
    with pytest.raises(RpcUsageError, match=said):
        aiorpc.init(pattern)
    if pattern == "w{rank!x}":
        with pytest.raises(RpcUsageError, match="conversion"):
            aiorpc.init(pattern, rank=0, world_size=1)
    assert aiorpc.launched() is None


def test_a_task_of_slurm_is_not_told_to_start_with_srun(no_launcher: pytest.MonkeyPatch) -> None:
    """It was; it lacks a role, or the place that numbers set by hand need."""
    for key, value in SLURM.items():
        no_launcher.setenv(key, value)
    with pytest.raises(RpcUsageError, match=r"the role of this worker is not known.*AIORPC_ROLE") as caught:
        aiorpc.init("{role}{rank}")
    with pytest.raises(RendezvousError, match="MASTER_ADDR, which is not set") as lacking:
        place_of(SLURM | {"RANK": "5", "WORLD_SIZE": "8"})
    assert "but not in a step" not in f"{caught.value} {lacking.value}"


def test_a_pattern_in_the_script_of_a_job_says_how_to_start_a_step(no_launcher: pytest.MonkeyPatch) -> None:
    """The program lacks a rank because srun was left out."""
    for key, value in BATCH.items():
        no_launcher.setenv(key, value)
    with pytest.raises(
        RpcUsageError, match=r"rank of this worker is not known.*not in a step of it: start it with srun"
    ):
        aiorpc.init("w{rank}")


async def test_one_name_for_all_ranks_says_how_to_name_them() -> None:
    """By a pattern."""
    store = HashStore()
    options = aiorpc.RpcBackendOptions(rpc_timeout=LIMIT)
    first, second = (aiorpc.init("actor", rank=rank, world_size=2, store=store, options=options) for rank in range(2))
    with pytest.raises(RendezvousError, match=r"ranks 0 and 1 have it.*by the pattern 'actor\{rank\}'"):
        thread = threading.Thread(target=lambda: _joins(second))
        thread.start()
        try:
            await first
        finally:
            thread.join()


def _joins(worker: aiorpc.Worker) -> None:
    import asyncio

    async def join() -> None:
        with contextlib.suppress(RendezvousError):
            await worker

    asyncio.run(join())


# --- a folder of a job ------------------------------------------------------------------------------------------------


def test_the_last_worker_of_a_job_removes_its_folder(tmp_path: Path) -> None:
    """What is in it stays for those who come back meanwhile."""
    path = tmp_path / "meet-1"
    first, second = JobFolder(path), JobFolder(path)
    (path / "store").write_text("")
    first.leave()
    assert (path / "store").exists()
    third = JobFolder(path)
    second.leave()
    assert (path / "store").exists()
    third.leave()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_job_left_is_removed_as_the_next_comes(tmp_path: Path) -> None:
    """Its own next try begins anew; folders of jobs that live stay."""
    program = (
        "import os, sys, pathlib\n"
        "from aiorpc.runtime.meeting.job_place import JobFolder\n"
        "folders = [JobFolder(pathlib.Path(path)) for path in sys.argv[1:]]\n"
        "for path in sys.argv[1:]: (pathlib.Path(path) / 'store').write_text('old')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    paths = [tmp_path / "meet-1", tmp_path / "meet-2"]
    subprocess.run([sys.executable, "-c", program, *map(str, paths)], check=False, timeout=60)
    assert all((path / "store").read_text() == "old" for path in paths)
    living = JobFolder(tmp_path / "meet-3")
    assert not any(path.exists() for path in paths)
    again = JobFolder(paths[0])
    assert list(paths[0].iterdir()) == [] and (tmp_path / "meet-3").exists()
    again.leave()
    living.leave()


def test_a_folder_is_entered_while_others_leave_it(tmp_path: Path) -> None:
    """Nobody is in a folder that was removed."""
    path = tmp_path / "meet-1"
    failures: list[BaseException] = []

    def come_and_go(number: int) -> None:
        try:
            for turn in range(100):
                folder = JobFolder(path)
                own = path / f"{number}-{turn}"
                own.write_text("")
                assert own.exists()
                folder.leave()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert failures == [] and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """It says which; what else has such a name does no harm."""
    (tmp_path / "meet-1").write_text("")
    JobFolder(tmp_path / "meet-2").leave()
    with pytest.raises(RendezvousError, match=r"workers of this job cannot meet in .*meet-1: .*"):
        JobFolder(tmp_path / "meet-1")


# --- a port of a job --------------------------------------------------------------------------------------------------


def job_place(rank: int, ports: tuple[int, ...], job: str = "one", host: str = "127.0.0.1") -> MeetingPlace:
    launched = launchers.Launched("Slurm", rank, 2, 0, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    return MeetingPlace(rank, 2, "", host, ports[0], launched=launched, job=job, ports=ports)


def open_port(place: MeetingPlace, seconds: float = LIMIT) -> tuple[int, Hosting]:
    at, hosting = open_job_port(place, Patience(seconds), 0.0)
    if hosting.hosted:
        mark_job(hosting.kv, at)
    return at.port, hosting


@pytest.mark.usefixtures("server_made_once")
def test_jobs_with_the_same_ports_do_not_meet() -> None:
    """The second one takes the next port, and each finds its own store."""
    ports = (free_port(), free_port(), free_port())
    with contextlib.ExitStack() as stack:
        for number, job in enumerate(("one", "two")):
            port, hosting = open_port(job_place(0, ports, job))
            stack.callback(hosting.kv.close)
            assert (port, hosting.hosted) == (ports[number], True)
            hosting.kv.put("whose", job)
        for number, job in enumerate(("one", "two")):
            port, hosting = open_port(job_place(1, ports, job))
            stack.callback(hosting.kv.close)
            assert (port, hosting.hosted, hosting.kv.get("whose")) == (ports[number], False, job)


@pytest.mark.usefixtures("server_made_once")
def test_a_port_of_another_program_is_passed_over() -> None:
    """Whether it speaks, or says nothing."""
    ports = (free_port(), free_port())
    with socket.create_server(("127.0.0.1", ports[0])) as other, contextlib.ExitStack() as stack:
        answering = threading.Thread(target=_answer, args=(other,), daemon=True)
        answering.start()
        stack.callback(answering.join, LIMIT)
        stack.callback(other.shutdown, socket.SHUT_RDWR)
        port, hosting = open_port(job_place(0, ports))
        with contextlib.closing(hosting.kv):
            assert port == ports[1]
            port, client = open_port(job_place(1, ports))
            client.kv.close()
            assert port == ports[1]


def _answer(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 400 no\r\n\r\n")


@pytest.mark.usefixtures("server_made_once")
def test_all_ports_taken_are_named_with_what_has_them() -> None:
    """And the error says what to set; so it does where nobody listens."""
    ports = (*sorted((free_port(), free_port())),)
    _, hosting = open_port(job_place(0, ports[:1], "another"))
    with contextlib.closing(hosting.kv):
        said = rf"job \(Slurm \(rank \d of 2, by .* have not met at 127.0.0.1 within 1 s. port {ports[0]}: another job"
        for rank in range(2):
            with pytest.raises(RendezvousError, match=said + r".*Set MASTER_ADDR .* MASTER_PORT"):
                open_port(job_place(rank, ports[:1]), 1.0)
        with pytest.raises(
            RendezvousError, match=rf"another job is there; port {ports[1]}: .*refused.*Set MASTER_ADDR"
        ):
            open_port(job_place(1, ports), 1.0)


def test_an_address_that_is_not_of_this_host_is_an_error_of_rank_0() -> None:
    """An address for documentation, which leads nowhere."""
    with pytest.raises(
        RendezvousError, match=r"192\.0\.2\.77 is no address of this host.*an address of this host in MASTER_ADDR"
    ):
        open_port(job_place(0, (free_port(),), host="192.0.2.77"), 1.0)


async def test_the_log_says_who_has_started_a_worker(
    no_launcher: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And by which variables, and where it meets the others; the folder is gone at the end."""
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    for key, value in (ONE_NODE | alone).items():
        no_launcher.setenv(key, value)
    with caplog.at_level(logging.INFO, "aiorpc"):
        async with aiorpc.init("w{rank}") as worker:
            assert await worker.call("w0", len, "abc") == 3
            assert list(private_directory().glob("meet-*"))
    said = r"started by Slurm \(rank 0 of 1, by SLURM_PROCID, SLURM_STEP_NUM_TASKS\); the group meets at file:///"
    assert re.search(said, caplog.text)
    assert not list(private_directory().glob("meet-*"))
