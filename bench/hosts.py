"""Several hosts on one machine: network namespaces, joined by links that are as fast as is said.

To aiorpc they are hosts: a worker's host identity includes its network namespace. A link is a ``veth`` pair; ``tbf``
limits what each of its two ends sends. Needs root, and a kernel that has these, and bridges to join more than two.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "aiorpc"
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

    def ip(self, *arguments: str) -> str:
        """What the ``ip`` command prints there. NoHostsError when it fails."""
        return run("ip", "-n", self.namespace, *arguments)

    def set_up(self, *settings: str) -> None:
        """Give its end of the link its address and those settings, and take it into use."""
        self.ip("address", "add", f"{self.address}/24", "dev", DEVICE)
        self.ip("link", "set", DEVICE, *settings, "up")

    def received(self) -> int:
        """Bytes that came over the link so far."""
        [device] = json.loads(self.ip("-j", "-s", "link", "show", "dev", DEVICE))
        return int(device["stats64"]["rx"]["bytes"])


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
    with namespaces(SWITCH, *map(str, range(count))) as (switch, *names):
        hosts = [Host(name, f"10.232.0.{number + 1}") for number, name in enumerate(names)]
        run("ip", "-n", switch, "link", "add", SWITCH, "type", "bridge")
        run("ip", "-n", switch, "link", "set", SWITCH, "up")
        for number, host in enumerate(hosts):
            port = f"port{number}"
            make_pair(host.namespace, DEVICE, switch, port)
            run("ip", "-n", switch, "link", "set", port, "master", SWITCH, "up")
            host.set_up()
            limit(host.namespace, DEVICE, rate)
            limit(switch, port, rate)
        yield Hosts(tuple(hosts))


@contextlib.contextmanager
def namespaces(*ends: str) -> Iterator[list[str]]:
    """The names of new network namespaces, each with that end; they are removed at the end of the block."""
    remove_leftovers()
    stem = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
    made: list[str] = []
    try:
        for end in ends:
            run("ip", "netns", "add", f"{stem}-{end}")
            made.append(f"{stem}-{end}")
            run("ip", "-n", made[-1], "link", "set", "lo", "up")
        yield made
    finally:
        for name in made:
            run("ip", "netns", "delete", name)


def existing() -> list[str]:
    """Network namespaces with a name of ours, of any run."""
    return [path.name for path in NAMESPACES.glob(f"{PREFIX}-*-*")]  # of a folder that is not there: nothing


def remove_leftovers() -> None:
    """Remove what runs left that were killed: the process in the name is gone."""
    for name in existing():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-.*", name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with contextlib.suppress(NoHostsError):  # another run may have been quicker
                run("ip", "netns", "delete", name)


def make_pair(namespace: str, device: str, other: str, other_device: str) -> None:
    """Join two namespaces by a pair of devices: what one sends arrives at the other."""
    near, far = ("name", device, "netns", namespace), ("name", other_device, "netns", other)
    run("ip", "link", "add", *near, "type", "veth", "peer", *far)


def limit(namespace: str, device: str, rate: float) -> None:
    """Let a device send so many Mbit/s at most."""
    # A short queue: what waits here delays the small messages as well, whoever sends.
    limits = ("rate", f"{rate}mbit", "burst", "256kb", "latency", "10ms")
    run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def enter(namespace: str) -> None:
    """Take the calling thread, and those it starts later, to a named network namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(NAMESPACES / namespace, "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the namespace {namespace}: {os.strerror(code)}")


def run(*command: str) -> str:
    """What a command prints; NoHostsError when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except OSError as error:
        raise NoHostsError(f"there is no {command[0]} command: {error}") from None
    if done.returncode != 0:
        raise NoHostsError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
