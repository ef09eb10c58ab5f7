"""Hosts of a cluster on one machine: those of `bench.hosts`, each with names, processes and files of its own.

Beside its network namespace each has its own host name (UTS), process ids, ``/tmp``, ``/dev/shm`` and ``/etc/hosts``,
which knows all of them. One folder is shared, under the same path, as a cluster's file system is. To end a host kills
all that runs on it, as a power failure does.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import hosts

ROOT = Path(__file__).parents[2]
#: What a host does first, as its process 1. It reaps what is orphaned there: SIGCHLD stays ignored.
SETTLE = """
set -e
hostname {name}
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mkdir -p /mnt
mount -t tmpfs tmpfs /mnt
i=0
for kept in {kept}; do
    i=$((i + 1)); mkdir /mnt/$i; mount --bind $kept /mnt/$i
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
i=0
for kept in {kept}; do
    i=$((i + 1)); mkdir -p $kept; mount --bind /mnt/$i $kept
done
trap '' CHLD
echo ready
exec sleep infinity
"""


@dataclass(frozen=True)
class Machine:
    """One of them. process: of its ``unshare``, whose child is its process 1."""

    name: str
    host: hosts.Host
    process: subprocess.Popen[str]

    def command(self, *words: str, cwd: Path) -> list[str]:
        """The command line that runs these words there."""
        first = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0]
        return ["nsenter", "--target", first, "--net", "--uts", "--pid", "--mount", f"--wdns={cwd}", *words]

    def end(self) -> None:
        """Kill it, and so all that runs there."""
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def machines(names: Sequence[str], folder: Path, rate: float = 1000.0) -> Iterator[dict[str, Machine]]:
    """Hosts with these names, by name, joined by one switch; they are gone at the end of the block.

    folder: the one that they share. rate: Mbit/s of each link. NoHostsError where they cannot be had.
    """
    with hosts.joined(len(names), rate) as joined, contextlib.ExitStack() as stack:
        known = "".join(f"{host.address} {name}\n" for name, host in zip(names, joined.all, strict=True))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        found: dict[str, Machine] = {}
        for name, host in zip(names, joined.all, strict=True):
            machine = Machine(name, host, _start(name, host, folder))
            stack.callback(machine.end)
            found[name] = machine
        for machine in found.values():
            assert machine.process.stdout is not None
            line = machine.process.stdout.readline()
            if line != "ready\n":
                raise hosts.NoHostsError(f"{machine.name} does not start: {machine.process.communicate()[1]}")
        yield found


def _start(name: str, host: hosts.Host, folder: Path) -> subprocess.Popen[str]:
    script = SETTLE.format(name=name, folder=shlex.quote(str(folder)), kept=shlex.join(_kept(folder)))
    inside = f"--net={hosts.NAMESPACES / host.namespace}"
    # If the test run dies, so do its hosts: the kernel ends what is in a process namespace with its process 1.
    apart = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "nsenter", inside, *apart, "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _kept(folder: Path) -> list[str]:
    """The shared folder, and what of Python and of the project lies under /tmp."""
    needed = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
    under = {str(path.resolve()) for path in needed if path.resolve().is_relative_to("/tmp")}
    return [str(folder.resolve()), *sorted(under)]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The variables of a user who has logged in there: with this Python, and programs of the shared folder, first."""
    system = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
    path = os.pathsep.join([f"{folder}/bin", str(Path(sys.executable).parent), *system])
    return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), **more}


def run(machine: Machine, *words: str, cwd: Path, env: Mapping[str, str], seconds: float) -> str:
    """What a command prints there; AssertionError with all that it said if it fails."""
    command = machine.command(*words, cwd=cwd)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def find(machine: Machine, text: str, folder: Path, **variables: str) -> list[int]:
    """Processes there with that pattern in their command lines and these variables: ids as that host counts them."""
    asked = "".join(f" -e {name}={value}" for name, value in variables.items()) or " -e ''"
    script = f"""
        for p in /proc/[0-9]*; do
            [ $(tr '\\0' '\\n' < $p/environ | grep -cx{asked}) -ge {len(variables)} ] &&
                tr '\\0' ' ' < $p/cmdline | grep -q -- {shlex.quote(text)} && echo ${{p#/proc/}}
        done 2>/dev/null
        true"""
    return [int(word) for word in run(machine, "sh", "-c", script, cwd=folder, env={}, seconds=10.0).split()]
