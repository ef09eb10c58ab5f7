"""What launchers tell a process of its rank, of the size of its group, and of the place to meet: one table.

The variables are those of torchrun (PyTorch 2), Slurm (`srun(1)`, section "output environment variables"), Open MPI 4
and 5, PMI (MPICH's Hydra, Intel MPI), LeaderWorkerSet, Indexed Jobs of Kubernetes, and SkyPilot.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...errors import RendezvousError, RpcUsageError

Environment = Mapping[str, str]

# Below the ports that systems give to outgoing connections (32768), above those of services.
_FIRST_PORT, _LAST_PORT = 12_000, 32_000
# In a pod, which has an address of its own, no other job can have a port.
_POD_PORT = 29_400


@dataclass(frozen=True)
class Launcher:
    """A launcher, by the variables that it sets.

    name: for the log. rank, size: the variables with these; of several sizes the first that is set counts. by: a
    variable that no other launcher sets; empty: `rank` is one. local_rank: among the processes of one host. job: makes
    a text that no other job on any of its hosts has at the same time. host: finds the host of rank 0; "" if it is not
    known. alone: whether all ranks run on this host.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    by: str = ""
    local_rank: str = ""
    job: Callable[[Environment], str] = lambda environ: ""
    host: Callable[[Environment], str] = lambda environ: ""
    alone: Callable[[Environment], bool] = lambda environ: False


@dataclass(frozen=True)
class Launched:
    """What a launcher says of this process. host: of rank 0, and the port to meet at there; both empty if all ranks run
    on this host, which is `alone`. job: see `Launcher`. variables: with rank and size, for the log."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    host: str
    port: int
    job: str
    alone: bool
    variables: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.launcher} (rank {self.rank} of {self.size}, by {', '.join(self.variables)})"


# --- hosts ------------------------------------------------------------------------------------------------------------


def first_node(nodes: str) -> str:
    """The first name of a list of nodes as Slurm writes it: ``n[01-03,7],m2`` gives ``n01``. RpcUsageError if it cannot
    be read."""
    match = re.match(r"([^\[\],]+)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)", nodes)
    if match is None:
        raise RpcUsageError(f"SLURM_STEP_NODELIST cannot be read: {nodes[:80]!r}")
    before, numbers, after = match.groups()
    if numbers is None:
        return before + after
    first = re.match(r"\d+", numbers)
    if first is None:
        raise RpcUsageError(f"SLURM_STEP_NODELIST cannot be read: {nodes[:80]!r}")
    return before + first.group() + after


def _of_slurm(environ: Environment) -> str:
    """The node of rank 0, or the address from which the step was launched if that name stands for no address.

    A script of ``sbatch`` runs on the first node, and so do its ``srun``.
    """
    node = first_node(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return node


def _of_indexed_job(environ: Environment) -> str:
    """The pod with index 0, which has this pod's name but for the index (a headless service gives it that name)."""
    name, _, domain = socket.getfqdn().partition(".")
    stem, dash, index = name.rpartition("-")
    if not dash or index != environ["JOB_COMPLETION_INDEX"]:
        return ""
    return f"{stem}-0.{domain}" if domain else f"{stem}-0"


def _of_skypilot(environ: Environment) -> str:
    return environ.get("SKYPILOT_NODE_IPS", "").split("\n")[0].strip()


def _job(*names: str) -> Callable[[Environment], str]:
    return lambda environ: "-".join(environ.get(name, "") for name in names)


def _is_one(*names: str) -> Callable[[Environment], bool]:
    return lambda environ: next((environ[name] == "1" for name in names if environ.get(name)), False)


def _same(local: str, size: str) -> Callable[[Environment], bool]:
    return lambda environ: bool(environ.get(local)) and environ.get(local) == environ.get(size)


#: In this order: mpirun starts processes inside of a job of Slurm, whose variables they inherit. srun sets PMI_RANK
#: too, but not the variables of Hydra.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        job=_job("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        alone=_same("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ),
    Launcher(
        "PMI",
        "PMI_RANK",
        ("PMI_SIZE",),
        by="MPI_LOCALNRANKS",
        local_rank="MPI_LOCALRANKID",
        job=_job("PMI_PORT", "PMI_FD", "HYDI_CONTROL_FD"),
        alone=_same("MPI_LOCALNRANKS", "PMI_SIZE"),
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        by="SLURM_STEP_ID",  # the script of sbatch has SLURM_PROCID as well, and is no task
        local_rank="SLURM_LOCALID",
        job=_job("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        host=_of_slurm,
        alone=_is_one("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"),
    ),
    Launcher(
        "LeaderWorkerSet", "LWS_WORKER_INDEX", ("LWS_GROUP_SIZE",), host=lambda environ: environ["LWS_LEADER_ADDRESS"]
    ),
    Launcher(
        "SkyPilot", "SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",), job=_job("SKYPILOT_TASK_ID"), host=_of_skypilot
    ),
    Launcher("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", ("WORLD_SIZE",), host=_of_indexed_job),
)


def found(environ: Environment) -> Launched | None:
    """What the launcher says that has started this process; None for torchrun, or if no launcher is known.

    RendezvousError if it leaves something open, or if variables contradict each other; RpcUsageError for one that
    cannot be read. Both name the variables.
    """
    if environ.get("TORCHELASTIC_RUN_ID"):
        return None
    launcher = next((each for each in LAUNCHERS if environ.get(each.by or each.rank) and environ.get(each.rank)), None)
    if launcher is None:
        return None
    size_of = next((name for name in launcher.size if environ.get(name)), None)
    if size_of is None:
        raise RendezvousError(
            f"{launcher.name} has started this process ({launcher.rank} is set), and does not say how many there are: "
            f"set {launcher.size[-1]} for all of them"
        )
    rank, size = _number(environ, launcher.rank), _number(environ, size_of)
    if environ.get("RANK") and environ.get("WORLD_SIZE") and _number(environ, "WORLD_SIZE") != size:
        return None  # each process of the launcher starts several workers, and numbers them
    for name, said, own in (("RANK", rank, launcher.rank), ("WORLD_SIZE", size, size_of)):
        if environ.get(name) and _number(environ, name) != said:
            raise RendezvousError(
                f"{name} is {environ[name]}, and {own}, by {launcher.name}, is {said}: set {name} to the same in each "
                "process, or not at all"
            )
    if rank >= size:
        raise RendezvousError(f"{launcher.rank} is {rank} in a group of {size} ({size_of}): ranks begin with 0")
    job = launcher.job(environ)
    alone = launcher.alone(environ) and bool(job.strip("-")) and not environ.get("MASTER_ADDR")
    host = "" if alone else environ.get("MASTER_ADDR") or launcher.host(environ)
    if not (alone or host):
        raise RendezvousError(
            f"{launcher.name} has started this process (rank {rank} of {size}), and does not say where rank 0 runs: "
            "set MASTER_ADDR for all of them to its host"
        )
    port = _number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else port_of(job)
    local = environ.get(launcher.local_rank)
    local_rank = _number(environ, launcher.local_rank) if local else None
    names = (launcher.rank, size_of)
    return Launched(launcher.name, rank, size, local_rank, host, port, job, alone, names)


def port_of(job: str) -> int:
    """The port at which a job meets, the same for all of its processes. Two jobs of a host hardly have the same."""
    if not job.strip("-"):
        return _POD_PORT
    number = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    return _FIRST_PORT + number % (_LAST_PORT - _FIRST_PORT)


def _number(environ: Environment, name: str) -> int:
    try:
        number = int(environ[name])
    except ValueError:
        raise RpcUsageError(f"{name} must be an integer, not {environ[name][:80]!r}") from None
    if number < 0:
        raise RpcUsageError(f"{name} must not be negative, but is {number}")
    return number
