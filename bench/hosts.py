"""Several hosts on one machine: network namespaces around a switch, each with a link that is as fast as is said.

To aiorpc they are hosts: a worker's host identity includes its network namespace. A link is a ``veth`` pair; ``tbf``
limits what each of its two ends sends. Needs root, and a kernel that has these and bridges.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "aiorpc-hosts"
NAMESPACES = Path("/run/netns")
DEVICE, SWITCH = "wire", "switch"
PORT = 29500  # the meeting place's: nobody else is there
COMMAND_SECONDS = 10.0
CLONE_NEWNET = 0x40000000


class NoHostsError(RuntimeError):
    """This system cannot have them; the text says what is missing."""


@dataclass(frozen=True)
class Host:
    """One of them: its network namespace, and its address on its link."""

    namespace: str
    address: str


@dataclass(frozen=True)
class Hosts:
    """Those that are joined by one switch; workers meet at the first."""

    all: tuple[Host, ...]

    @property
    def meeting(self) -> str:
        """An init_method for their workers."""
        return f"tcp://{self.all[0].address}:{PORT}"


@contextlib.contextmanager
def joined(count: int, rate: float) -> Iterator[Hosts]:
    """So many hosts, which are removed at the end of the block. rate: Mbit/s of each link, in each direction.

    NoHostsError where they cannot be had.
    """
    _remove_leftovers()
    stem = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
    switch = f"{stem}-{SWITCH}"
    hosts = [Host(f"{stem}-{number}", f"10.232.0.{number + 1}") for number in range(count)]
    made: list[str] = []
    try:
        for name in [switch, *(host.namespace for host in hosts)]:
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", SWITCH, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", SWITCH, "up")
        for number, host in enumerate(hosts):
            _link(host, switch, f"port{number}", rate)
        yield Hosts(tuple(hosts))
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def _link(host: Host, switch: str, port: str, rate: float) -> None:
    near = ("name", DEVICE, "netns", host.namespace)
    _run("ip", "link", "add", *near, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", SWITCH, "up")
    _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
    _run("ip", "-n", host.namespace, "link", "set", DEVICE, "up")
    for namespace, device in ((host.namespace, DEVICE), (switch, port)):
        # A short queue: what waits here delays the small messages as well, whoever sends.
        limits = ("rate", f"{rate}mbit", "burst", "256kb", "latency", "10ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def enter(namespace: str) -> None:
    """Take the calling thread, and those it starts later, to a named network namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(NAMESPACES / namespace, "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the namespace {namespace}: {os.strerror(code)}")


def _remove_leftovers() -> None:
    """Remove what runs left that were killed: the process in the name is gone."""
    for path in NAMESPACES.glob(f"{PREFIX}-*"):  # of a folder that is not there: nothing
        found = re.fullmatch(rf"{PREFIX}-(\d+)-.*", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with contextlib.suppress(NoHostsError):  # another run may have been quicker
                _run("ip", "netns", "delete", path.name)


def _run(*command: str) -> None:
    """Run a command; NoHostsError when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except OSError as error:
        raise NoHostsError(f"there is no {command[0]} command: {error}") from None
    if done.returncode != 0:
        raise NoHostsError(f"{' '.join(command)}: {done.stderr.strip()}")
