"""Two hosts on one machine, as those of `bench.hosts`, joined by a link that may be slow, lossy, or cut.

Two kinds of link: a ``veth`` pair, with ``tbf`` for its rate and ``netem`` for delay and loss, where the kernel has
them; or the router of `relay.py`. What cannot be had skips the test with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.hosts import DEVICE, PORT, Host, NoHostsError, limit, make_pair, namespaces, run

ADDRESSES = ("10.231.0.1", "10.231.0.2")
ROOT = Path(__file__).parents[2]
COMMAND_LIMIT = 10.0  # seconds
RELAY_MTU = 9000  # bytes: each packet costs the relay the same
SEED = 7


@dataclass(frozen=True)
class Quality:
    """How good the link is, each way. rate: Mbit/s, 0 for no limit. delay: seconds. loss: share of packets, 0 to 1."""

    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0


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

    def forget(self) -> None:
        """Nothing more arrives of the TCP connections that there are; those that are made later are not known yet."""
        self._order("forget")

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
    with contextlib.ExitStack() as stack:
        with needed("network namespaces"):
            left, right = stack.enter_context(namespaces("left", "right"))
        hosts = Host(left, ADDRESSES[0]), Host(right, ADDRESSES[1])
        yield stack.enter_context(make(hosts, Quality(**quality)))


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
    """Skip the test, with the reason, where this system does not have what the block asks for."""
    try:
        yield
    except NoHostsError as error:
        pytest.skip(f"this system has no {what}: {error}")


@contextlib.contextmanager
def _veth(hosts: tuple[Host, Host], quality: Quality) -> Iterator[Network]:
    left, right = hosts
    with needed("veth pairs"):
        make_pair(left.namespace, DEVICE, right.namespace, DEVICE)
    for host in hosts:
        host.set_up()
        _shape(host, quality)
    yield Veth(hosts)


def _shape(host: Host, quality: Quality) -> None:
    """Rate, delay and loss of what this host sends. netem limits the rate too, so one of the two is enough."""
    if quality.delay or quality.loss:
        rate = ["rate", f"{quality.rate}mbit"] if quality.rate else []
        bad = ["delay", f"{quality.delay * 1000}ms", "loss", f"{quality.loss * 100}%"]
        tc = ["tc", "-n", host.namespace, "qdisc", "add", "dev", DEVICE, "root"]
        with needed("netem"):
            run(*tc, "netem", "limit", "10000", *bad, *rate)
    elif quality.rate:
        with needed("tbf"):
            limit(host.namespace, DEVICE, quality.rate)


@contextlib.contextmanager
def _relay(hosts: tuple[Host, Host], quality: Quality) -> Iterator[Network]:
    require_tun()
    told: dict[str, Any] = {"namespaces": [host.namespace for host in hosts], "device": DEVICE, "seed": SEED}
    told |= {"rate": quality.rate * 1e6 / 8, "delay": quality.delay, "loss": quality.loss}
    command = [sys.executable, "-m", "tests.network.relay", json.dumps(told)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            answer_of(process)
            for host in hosts:
                host.set_up("mtu", str(RELAY_MTU), "txqueuelen", "1000")
            yield Relayed(hosts, process)
            assert process.poll() is None, "the relay has ended"
        finally:
            process.kill()


def require_tun() -> None:
    """Skip where there are no TUN devices."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        pytest.skip(f"there are no TUN devices: {error}")
