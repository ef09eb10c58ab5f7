"""What launchers tell a process of its rank, of the size of its group, and of the place to meet: one table.

The variables are those of torchrun (PyTorch 2), Slurm (`srun(1)`, section "output environment variables"), Open MPI 4
and 5, Hydra (MPICH and Intel MPI), LeaderWorkerSet, SkyPilot, and Indexed Jobs of Kubernetes, of which a JobSet has
several. docs/reference/joining.md has the table for users.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...errors import RendezvousError, RpcUsageError

Environment = Mapping[str, str]

_RANK, _SIZE, _LOCAL, _HOST, _PORT = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
# Below the ports that systems give to outgoing connections (32768), above those of services.
_FIRST_PORT, _LAST_PORT = 12_000, 32_000
#: What a pattern for a name may have, and what to do if it is not known.
_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "rank": "give rank=, or start the program with a launcher that is known",
        "local_rank": "set LOCAL_RANK, or start the program with a launcher that tells it",
        "role": "give role=, or set AIORPC_ROLE",
    }
)
_PORTS = 4  # that follow from a job: two jobs or programs of a host hardly ever have all of them
#: In a pod, which has an address of its own, no other job can have a port.
POD_PORT = 29_400


@dataclass(frozen=True)
class Launcher:
    """A launcher, by the variables that it sets.

    name: for the log. rank, size: the variables with these; of several sizes the first that is set counts. by: a
    variable that no other launcher sets; empty: `rank` is one. local_rank: the variable with the rank among the
    processes of one host; empty if there is one process on a host. job: makes a text that no other job on any of its
    hosts has at the same time. host: finds the host of rank 0; "" if it is not known; it may look up names, and block.
    alone: whether all ranks run on this host. port: the one to meet at where there is no job.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    by: str = ""
    local_rank: str = ""
    job: Callable[[Environment], str] = lambda environ: ""
    host: Callable[[Environment], str] = lambda environ: ""
    alone: Callable[[Environment], bool] = lambda environ: False
    port: int = 0


@dataclass(frozen=True)
class Launched:
    """What the launcher of this process says of it.

    launcher: its name; "hand" if RANK and WORLD_SIZE were set without one. rank, world_size: of this process, and how
    many there are; None if that is not told, as a free group has no size. local_rank: among the processes of this host,
    for the choice of a device; None if it is not known. variables: that say so.
    """

    launcher: str
    rank: int
    world_size: int | None
    local_rank: int | None
    variables: tuple[str, ...]

    def __str__(self) -> str:
        size = "" if self.world_size is None else f" of {self.world_size}"
        return f"{self.launcher} (rank {self.rank}{size}, by {', '.join(self.variables)})"


@dataclass(frozen=True)
class Spot:
    """Where the processes of a launcher meet. host: of rank 0; empty if all run on this host. ports: to try there, in
    this order. job: see `Launcher`; empty if host and port were given by name, or are this job's alone."""

    host: str
    ports: tuple[int, ...]
    job: str


# --- hosts and jobs ---------------------------------------------------------------------------------------------------


def first_node(nodes: str) -> str:
    """The first name of a list of nodes as Slurm writes it: ``n[01-03,7],m2`` gives ``n01``. RpcUsageError if it cannot
    be read."""
    match = re.match(r"((?:[\w.-]|\[\d[\d,-]*\])+)(?:,|$)", nodes)
    if match is None:
        raise RpcUsageError(
            f"the list of nodes in SLURM_STEP_NODELIST cannot be read: {nodes[:80]!r}. Set MASTER_ADDR for all "
            "processes to the host of rank 0"
        )
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", match[1])


def _of_slurm(environ: Environment) -> str:
    """The node of rank 0, or the address from which the step was launched if that name stands for no address.

    A script of ``sbatch`` runs on the first node, and so does its ``srun``.
    """
    node = first_node(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR") or node
    return node


def _of_open_mpi(environ: Environment) -> str:
    """The host of ``mpirun``, which runs on that of rank 0 in a job of Slurm, and as a rule elsewhere; Open MPI 5 does
    not tell it."""
    match = re.search(r"tcp://([^,:;]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return match[1] if match else ""


def _of_indexed_job(environ: Environment) -> str:
    """The pod with index 0, which has this pod's name but for the index (a headless service gives it that name)."""
    name, _, domain = socket.getfqdn().partition(".")
    stem, dash, index = name.rpartition("-")
    if not dash or index != environ["JOB_COMPLETION_INDEX"]:
        return ""
    return f"{stem}-0.{domain}" if domain else f"{stem}-0"


def _proxy() -> str:
    """The process of Hydra on this host that started this one, perhaps through others; "" if it is not seen. No
    variable tells one job of Hydra from another."""
    pid = os.getppid()
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return ""
        fields = rest.split()
        if name == "hydra_pmi_proxy":
            return f"{pid}-{fields[19]}"  # with the time of its start: process ids return
        pid = int(fields[1])
    return ""


def _job(*names: str) -> Callable[[Environment], str]:
    return lambda environ: "-".join(environ[name] for name in names if environ.get(name))


def _is_one(*names: str) -> Callable[[Environment], bool]:
    return lambda environ: next((environ[name] == "1" for name in names if environ.get(name)), False)


def _same(local: str, size: str) -> Callable[[Environment], bool]:
    return lambda environ: bool(environ.get(local)) and environ.get(local) == environ.get(size)


_TORCHRUN = Launcher("torchrun", _RANK, (_SIZE,), by="TORCHELASTIC_RUN_ID", local_rank=_LOCAL)
_HAND = Launcher("hand", _RANK, (_SIZE,), local_rank=_LOCAL)

#: In this order: torchrun may be started by any other, and mpirun starts processes inside of a job of Slurm, whose
#: variables they inherit. A script of sbatch has SLURM_PROCID, too, and no SLURM_STEP_ID; srun sets PMI_RANK, too, but
#: not the other variables of Hydra.
LAUNCHERS: tuple[Launcher, ...] = (
    _TORCHRUN,
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        job=_job("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports"),
        host=_of_open_mpi,
        alone=_same("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ),
    Launcher(
        "Hydra (MPICH, Intel MPI)",
        "PMI_RANK",
        ("PMI_SIZE",),
        by="MPI_LOCALNRANKS",
        local_rank="MPI_LOCALRANKID",
        job=lambda environ: _proxy() if _same("MPI_LOCALNRANKS", "PMI_SIZE")(environ) else "",
        alone=_same("MPI_LOCALNRANKS", "PMI_SIZE"),
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        by="SLURM_STEP_ID",  # the script of sbatch has SLURM_PROCID as well, and is no task
        local_rank="SLURM_LOCALID",
        job=_job("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        host=_of_slurm,
        alone=_is_one("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"),
    ),
    Launcher(
        "LeaderWorkerSet",
        "LWS_WORKER_INDEX",
        ("LWS_GROUP_SIZE",),
        host=lambda environ: environ.get("LWS_LEADER_ADDRESS", ""),
        port=POD_PORT,
    ),
    Launcher(
        "SkyPilot",
        "SKYPILOT_NODE_RANK",
        ("SKYPILOT_NUM_NODES",),
        job=_job("SKYPILOT_TASK_ID"),
        host=lambda environ: environ.get("SKYPILOT_NODE_IPS", "").split("\n")[0].strip(),
    ),
    Launcher("Kubernetes (Indexed Job)", "JOB_COMPLETION_INDEX", (_SIZE,), host=_of_indexed_job, port=POD_PORT),
)


# --- looking ----------------------------------------------------------------------------------------------------------


def found(environ: Environment) -> Launched | None:
    """What the launcher says that has started this process, or RANK and WORLD_SIZE if they were set without one; None
    if nothing says anything. Does not block.

    RendezvousError if variables contradict each other; RpcUsageError for one that cannot be read. Both name the
    variables.
    """
    by_hand = all(environ.get(name) for name in (_RANK, _SIZE))
    launcher = next((each for each in LAUNCHERS if environ.get(each.by or each.rank) and environ.get(each.rank)), None)
    if launcher is None:
        return _launched(_HAND, _SIZE, environ) if by_hand else None
    size_of = next((name for name in launcher.size if environ.get(name)), None)
    if by_hand and (size_of is None or size_of == _SIZE or _number(environ, _SIZE) != _number(environ, size_of)):
        # Each process of the launcher starts several workers, or a JobSet several Jobs, and numbers them.
        return _launched(_TORCHRUN if launcher is _TORCHRUN else _HAND, _SIZE, environ)
    launched = _launched(launcher, size_of, environ)
    for name, said, own in ((_RANK, launched.rank, launcher.rank), (_SIZE, launched.world_size, size_of)):
        if environ.get(name) and said is not None and _number(environ, name) != said:
            raise RendezvousError(
                f"{name} is {environ[name]}, and {own}, by {launcher.name}, is {said}: set {name} to the same in each "
                f"process, or not at all; or, if {own} is left over in a shell, unset it there"
            )
    return launched


def _launched(launcher: Launcher, size_of: str | None, environ: Environment) -> Launched:
    rank, size = _number(environ, launcher.rank), _number(environ, size_of) if size_of else None
    local = next((name for name in (_LOCAL, launcher.local_rank) if name and environ.get(name)), None)
    local_rank = _number(environ, local) if local else None if launcher.local_rank else 0
    return Launched(launcher.name, rank, size, local_rank, (launcher.rank, *([size_of] if size_of else [])))


def size_for(launched: Launched, world_size: int | None) -> int:
    """The size of the group: that of the program (`world_size`), or else that of the launcher. RendezvousError if
    neither says it."""
    size = launched.world_size if world_size is None else world_size
    if size is None:
        variable = next((each.size[-1] for each in LAUNCHERS if each.name == launched.launcher), _SIZE)
        raise RendezvousError(
            f"{launched.launcher} has started this process ({launched.variables[0]} is set), and does not say how many "
            f"there are: set {variable} for all of them, or give world_size="
        )
    return size


def spot_of(launched: Launched, environ: Environment) -> Spot | None:
    """Where the processes of that launcher meet; None if MASTER_ADDR and MASTER_PORT have to say so. It may look up
    names, and block.

    RendezvousError if the launcher leaves it open.
    """
    launcher = next((each for each in LAUNCHERS if each.name == launched.launcher), _HAND)
    if launcher in (_TORCHRUN, _HAND):
        return None
    job = launcher.job(environ)
    if job and launcher.alone(environ) and not environ.get(_HOST):
        return Spot("", (), job)
    host = environ.get(_HOST) or launcher.host(environ)
    ports = ports_of(job) if job else (launcher.port,) if launcher.port else ()
    if environ.get(_PORT):
        job, ports = "", tuple([_number(environ, _PORT)])
        if not 0 < ports[0] < 1 << 16:
            raise RpcUsageError(f"{_PORT} must be between 1 and 65535, not {ports[0]}")
    missing = [name for name, has in ((_HOST, host), (_PORT, ports)) if not has]
    if missing:
        raise RendezvousError(
            f"{launched} has started this process, and does not say where the group can meet: set "
            f"{' and '.join(missing)} for all of them, to {'the host of rank 0' if _HOST in missing else ''}"
            f"{' and ' if len(missing) == 2 else ''}{'a port that is free there' if _PORT in missing else ''}"
        )
    return Spot(host, ports, job)


def ports_of(job: str) -> tuple[int, ...]:
    """The ports at which a job meets, the same for all of its processes: the first one that is free."""
    digest = hashlib.sha256(job.encode()).digest()
    numbers = (int.from_bytes(digest[4 * at : 4 * at + 4], "big") for at in range(_PORTS))
    return tuple(dict.fromkeys(_FIRST_PORT + number % (_LAST_PORT - _FIRST_PORT) for number in numbers))


def hint(environ: Environment) -> str:
    """For the error of a process that no launcher has started: what it has forgotten, or nothing."""
    if environ.get("SLURM_JOB_ID") and not environ.get("SLURM_STEP_ID"):
        return "This process runs in a job of Slurm, but not in a step of it: start it with srun. "
    if environ.get("PMI_RANK") or environ.get("PMIX_RANK"):
        return "PMI_RANK or PMIX_RANK, which are set, do not tell the launcher. "
    return ""


# --- names ------------------------------------------------------------------------------------------------------------


def role_of(environ: Environment) -> str:
    """The role that the environment gives to a worker that is given none: AIORPC_ROLE, or torchrun's ``--role``."""
    of_torchrun = environ.get("ROLE_NAME", "")
    return environ.get("AIORPC_ROLE") or ("" if of_torchrun == "default" else of_torchrun)


def filled(pattern: str, role: str, rank: int | None, environ: Environment) -> str:
    """The name that a pattern makes: ``{rank}``, ``{local_rank}`` and ``{role}`` are those of this worker, and
    ``{rank:02}`` has two digits at least.

    rank: given by the program; None takes it from the launcher. RpcUsageError for one that is not known; errors of
    `found`.
    """
    if not isinstance(pattern, str) or not re.search("[{}]", pattern):
        return pattern  # the check of names refuses other types
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None}
        if fields - _FIELDS.keys():
            raise ValueError(f"it may have {', '.join(f'{{{each}}}' for each in _FIELDS)}")
        launched = found(environ) if fields - {"role"} else None
        known: dict[str, str | int | None] = {
            "rank": rank if rank is not None or launched is None else launched.rank,
            "local_rank": launched.local_rank if launched is not None else None,
            "role": role or None,
        }
        unknown = next((field for field in _FIELDS if field in fields and known[field] is None), None)
        if unknown is not None:
            forgotten = hint(environ) if unknown != "role" else ""
            raise ValueError(f"the {unknown} of this worker is not known: {_FIELDS[unknown]}. {forgotten}".strip())
        return pattern.format(**known)
    except (ValueError, LookupError) as error:
        raise RpcUsageError(f"the name {pattern!r:.200} is a pattern, and makes no name: {error}") from None


def _number(environ: Environment, name: str) -> int:
    try:
        number = int(environ[name])
    except ValueError:
        raise RpcUsageError(f"{name} must be an integer, not {environ[name][:80]!r}") from None
    if number < 0:
        raise RpcUsageError(f"{name} must not be negative, but is {number}")
    return number
