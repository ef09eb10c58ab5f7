"""Two hosts on one machine: network namespaces, joined by a link that may be slow, lossy, or cut.

To aiorpc they are hosts: a worker's host identity includes its network namespace. Two kinds of link: a ``veth`` pair,
with ``tbf`` for its rate and ``netem`` for delay and loss, where the kernel has them; or the router of `relay.py`.
What cannot be had skips the test with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PREFIX = "aiorpc"
DEVICE = "wire"
ADDRESSES = ("10.231.0.1", "10.231.0.2")
PORT = 29500  # the meeting place's: nobody else is there
RELAY = Path(__file__).with_name("relay.py")
COMMAND_LIMIT = 10.0  # seconds
RELAY_MTU = 9000  # bytes: each packet costs the relay the same
SEED = 7


@dataclass(frozen=True)
class Quality:
    """How good the link is, each way. rate: Mbit/s, 0 for no limit. delay: seconds. loss: share of packets, 0 to 1."""

    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Host:
    """One end: its network namespace, and its address on the link."""

    namespace: str
    address: str

    def ip(self, *arguments: str) -> str:
        """What the ``ip`` command prints there; AssertionError when it fails."""
        return run("ip", "-n", self.namespace, *arguments)

    def received(self) -> int:
        """Bytes that came over the link so far."""
        [device] = json.loads(self.ip("-j", "-s", "link", "show", "dev", DEVICE))
        return int(device["stats64"]["rx"]["bytes"])


class Network:
    """Both hosts. They meet at `meeting`."""

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        self.left, self.right = hosts
        self.meeting = f"tcp://{self.left.address}:{PORT}"

    def cut(self) -> None:
        """From now on nothing arrives on either side."""
        raise NotImplementedError

    def mend(self) -> None:
        """It does again."""
        raise NotImplementedError

    def lost(self) -> int:
        """Packets that were dropped at random or for a cut."""
        raise NotImplementedError


class Veth(Network):
    """The far end's interface is taken down and up again; the near one only sees its carrier go."""

    def cut(self) -> None:
        self.right.ip("link", "set", DEVICE, "down")

    def mend(self) -> None:
        self.right.ip("link", "set", DEVICE, "up")

    def lost(self) -> int:
        shown = [
            run("tc", "-s", "-n", host.namespace, "qdisc", "show", "dev", DEVICE) for host in (self.left, self.right)
        ]
        return sum(int(count) for text in shown for count in re.findall(r"dropped (\d+)", text))


class Relayed(Network):
    """The router in between goes silent: no host hears of it."""

    def __init__(self, hosts: tuple[Host, Host], process: subprocess.Popen[str]) -> None:
        super().__init__(hosts)
        self._process = process

    def cut(self) -> None:
        self._order("cut")

    def mend(self) -> None:
        self._order("mend")

    def stall(self) -> None:
        """Nothing more arrives of the TCP connection that has carried most so far; the others go on."""
        self._order("stall")

    def lost(self) -> int:
        return sum(self._order("counts")["lost"])

    def _order(self, order: str) -> dict[str, list[int]]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return answer_of(self._process)


def answer_of(process: subprocess.Popen[str]) -> dict[str, list[int]]:
    """The relay's next line; AssertionError when it does not come in time."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], COMMAND_LIMIT)[0], "the relay does not answer"
    line = process.stdout.readline()
    assert line, "the relay has ended"
    counts: dict[str, list[int]] = json.loads(line)
    return counts


@contextlib.contextmanager
def linked(kind: str, **quality: float) -> Iterator[Network]:
    """Two hosts with a link of that kind, "veth" or "relay", and of that `Quality`; skips where it cannot be had."""
    make = {"veth": _veth, "relay": _relay}[kind]
    require_root()
    with (
        namespaces() as (left, right),
        make((Host(left, ADDRESSES[0]), Host(right, ADDRESSES[1])), Quality(**quality)) as network,
    ):
        yield network


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """The names of two new network namespaces, which are removed at the end of the block."""
    remove_leftovers()
    stem = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
    names = f"{stem}-left", f"{stem}-right"
    try:
        for name in names:
            attempt("network namespaces", "ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            if name in existing():
                run("ip", "netns", "delete", name)


def existing() -> list[str]:
    """Network namespaces with a name of ours, of any run."""
    folder = Path("/run/netns")
    return [path.name for path in folder.glob(f"{PREFIX}-*-*")] if folder.is_dir() else []


def remove_leftovers() -> None:
    """Remove what runs left that were killed: the process in the name is gone."""
    for name in existing():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-[0-9a-f]+-(left|right)", name)
        if found and not Path(f"/proc/{found[1]}").exists():
            # Another run may have been quicker.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=COMMAND_LIMIT, check=False)


@contextlib.contextmanager
def _veth(hosts: tuple[Host, Host], quality: Quality) -> Iterator[Network]:
    left, right = hosts
    ends = [
        *("name", DEVICE, "netns", left.namespace),
        "type",
        "veth",
        *("peer", "name", DEVICE, "netns", right.namespace),
    ]
    attempt("veth pairs", "ip", "link", "add", *ends)
    for host in hosts:
        _address(host)
        _shape(host, quality)
    yield Veth(hosts)


def _shape(host: Host, quality: Quality) -> None:
    """Rate, delay and loss of what this host sends. netem limits the rate too, so one of the two is enough."""
    tc = ["tc", "-n", host.namespace, "qdisc", "add", "dev", DEVICE, "root"]
    if quality.delay or quality.loss:
        rate = ["rate", f"{quality.rate}mbit"] if quality.rate else []
        bad = ["delay", f"{quality.delay * 1000}ms", "loss", f"{quality.loss * 100}%"]
        attempt("netem", *tc, "netem", "limit", "10000", *bad, *rate)
    elif quality.rate:
        # A short queue: what waits here delays the small calls as well, whoever sends.
        attempt("tbf", *tc, "tbf", "rate", f"{quality.rate}mbit", "burst", "256kb", "latency", "10ms")


@contextlib.contextmanager
def _relay(hosts: tuple[Host, Host], quality: Quality) -> Iterator[Network]:
    require_tun()
    told: dict[str, Any] = {"namespaces": [host.namespace for host in hosts], "device": DEVICE, "seed": SEED}
    told |= {"rate": quality.rate * 1e6 / 8, "delay": quality.delay, "loss": quality.loss}
    command = [sys.executable, "-I", str(RELAY), json.dumps(told)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            answer_of(process)
            for host in hosts:
                _address(host, "mtu", str(RELAY_MTU), "txqueuelen", "1000")
            yield Relayed(hosts, process)
            assert process.poll() is None, "the relay has ended"
        finally:
            process.kill()


def _address(host: Host, *settings: str) -> None:
    host.ip("address", "add", f"{host.address}/24", "dev", DEVICE)
    host.ip("link", "set", DEVICE, *settings, "up")


def require_root() -> None:
    """Skip where namespaces cannot even be asked for."""
    if not sys.platform.startswith("linux"):
        pytest.skip("network namespaces are of Linux")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command} command")


def require_tun() -> None:
    """Skip where there are no TUN devices."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        pytest.skip(f"there are no TUN devices: {error}")


def attempt(what: str, *command: str) -> None:
    """Run a command that needs something that not all systems have; skip the test where it is refused."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT, check=False)
    if done.returncode != 0:
        pytest.skip(f"this system has no {what}: {done.stderr.strip()}")


def run(*command: str) -> str:
    """What a command prints; AssertionError when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout
