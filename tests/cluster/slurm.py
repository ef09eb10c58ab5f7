"""A Slurm of its own: a login host, where its controller runs, and nodes with four processors each.

All its files lie in one folder, its daemons listen inside of their hosts (`hosts.py`), and end with them.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.processes.workers import wait_for

from .hosts import Machine, environment, find, machines, run

LOGIN = "login"
UP_SECONDS, COMMAND_SECONDS, POLL = 30.0, 30.0, 0.1
#: One socket for all: hosts share the folder, and that of munge proves who asks. No cgroups: hosts are namespaces.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={login}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,bf_interval=1
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
#: Seconds between the signal that asks and the one that kills, as most sites have it.
KILL_WAIT = 30
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up. folder: the shared one, and where users are."""

    folder: Path
    hosts: dict[str, Machine]

    @property
    def nodes(self) -> list[str]:
        return [name for name in self.hosts if name != LOGIN]

    def run(self, *words: str, on: str = LOGIN, **variables: str) -> str:
        """What a command prints on that host; AssertionError if it fails."""
        env = environment(self.folder, SLURM_CONF=str(self.folder / "slurm.conf"), USER="root", **variables)
        return run(self.hosts[on], *words, cwd=self.folder, env=env, seconds=COMMAND_SECONDS)

    def submit(self, script: str, *options: str, **variables: str) -> Job:
        """Have ``sbatch`` take a script, as a file of that text."""
        path = self.folder / f"job-{secrets.token_hex(4)}.sh"
        path.write_text(script)
        return Job(self, self.run("sbatch", "--parsable", *options, path.name, **variables).strip())


@dataclass(frozen=True)
class Job:
    """A job that was submitted."""

    slurm: Slurm
    number: str

    def settle(self, *states: str, seconds: float) -> str:
        """Wait for one of these states, and return it."""
        deadline = time.monotonic() + seconds
        while (state := self.shown("JobState")) not in states:
            assert time.monotonic() < deadline, f"{state} for {seconds:g} s:\n{self.log()}"
            time.sleep(POLL)
        return state

    def shown(self, field: str) -> str:
        """What ``scontrol`` shows of it, such as `JobState`."""
        found = re.search(rf"\b{field}=(\S*)", self.slurm.run("scontrol", "--oneliner", "show", "job", self.number))
        assert found, field
        return found[1]

    def log(self) -> str:
        """What it has written so far to the file that its script names."""
        path = Path(self.shown("StdOut"))
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_line(self, pattern: str, seconds: float) -> str:
        """Wait for a line of the log in which this is found."""

        def found() -> bool:
            time.sleep(POLL)
            state = self.shown("JobState")
            log = self.log()
            if re.search(pattern, log, re.MULTILINE):
                return True
            assert state not in ENDED, f"{state}, without {pattern!r}:\n{log}"
            return False

        wait_for(found, seconds)
        match = re.search(rf"^.*{pattern}.*$", self.log(), re.MULTILINE)
        assert match
        return match[0]

    def wait(self, seconds: float, state: str = "COMPLETED") -> str:
        """Wait until it has ended so; its log."""
        ended = self.settle(*ENDED, seconds=seconds)
        assert ended == state, f"{ended} {self.shown('ExitCode')}:\n{self.log()}"
        return self.log()

    def cancel(self) -> None:
        self.slurm.run("scancel", self.number)

    def kill(self, rank: int, text: str) -> None:
        """SIGKILL for the process with that pattern in its command line that a task has started, wherever that is."""
        which = {"SLURM_JOB_ID": self.number, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank)}
        nodes = self.slurm.nodes
        found = [
            (node, pid) for node in nodes for pid in find(self.slurm.hosts[node], text, self.slurm.folder, **which)
        ]
        assert len(found) == 1, found
        self.slurm.run("kill", "-KILL", str(found[0][1]), on=found[0][0])


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 4, rate: float = 1000.0) -> Iterator[Slurm]:
    """A Slurm with so many nodes, n1 and so on, up and idle. folder: one that all users may enter."""
    names = [LOGIN, *(f"n{number + 1}" for number in range(nodes))]
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    with machines(names, folder, rate) as hosts, contextlib.ExitStack() as stack:
        slurm = Slurm(folder, hosts)
        settings = CONFIGURATION.format(
            folder=folder, login=LOGIN, address=hosts[LOGIN].host.address, kill_wait=KILL_WAIT
        )
        lines = [f"NodeName={name} NodeAddr={hosts[name].host.address} CPUs=4" for name in slurm.nodes]
        (folder / "slurm.conf").write_text("\n".join([settings.strip(), *lines, ""]))
        started = [
            (LOGIN, ["munged", "--foreground", "--num-threads=2", *_munge(folder / "munge")]),
            (LOGIN, ["slurmctld", "-D"]),
            *((name, ["slurmd", "-D", "-N", name]) for name in slurm.nodes),
        ]
        for host, command in started:
            stack.callback(_end, _daemon(slurm, host, command))
            if command[0] == "munged":
                wait_for((folder / "munge" / "socket").exists, UP_SECONDS)
        # Hosts end before their daemons are waited for.
        for machine in hosts.values():
            stack.callback(machine.end)
        wait_for(lambda: _idle(slurm) == nodes, UP_SECONDS)
        yield slurm


def _munge(folder: Path) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={folder / name}" for option, name in files.items()]


def _daemon(slurm: Slurm, host: str, command: list[str]) -> subprocess.Popen[bytes]:
    with open(slurm.folder / f"{command[0]}-{host}.out", "wb") as out:
        return subprocess.Popen(
            slurm.hosts[host].command(*command, cwd=slurm.folder),
            env=environment(slurm.folder, SLURM_CONF=str(slurm.folder / "slurm.conf")),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.wait(UP_SECONDS)


def _idle(slurm: Slurm) -> int:
    command = slurm.hosts[LOGIN].command("sinfo", "--noheader", "--Node", "--format=%t", cwd=slurm.folder)
    env = environment(slurm.folder, SLURM_CONF=str(slurm.folder / "slurm.conf"))
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout.split().count("idle")
