"""The tools of these tests themselves: nothing of them stays behind, and links are as bad as they are told to be."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest

from bench.hosts import PREFIX, Host, existing, namespaces, run

from .hosts import linked, needed


def test_namespaces_go_when_their_test_fails() -> None:
    """Whatever ends the block."""
    with pytest.raises(LookupError), linked("veth") as network:
        made = {network.left.namespace, network.right.namespace}
        assert made <= set(existing())
        raise LookupError
    assert not made & set(existing())


def test_leftovers_of_a_killed_run_go_with_the_next() -> None:
    """Those whose process is gone, and no others."""
    with contextlib.ExitStack() as stack:
        with needed("network namespaces"):
            mine = stack.enter_context(namespaces("left", "right"))
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            theirs = f"{PREFIX}-{process.pid}-00000000-left"
            run("ip", "netns", "add", theirs)
            with namespaces("left"):
                assert {theirs, *mine} <= set(existing())  # its process lives
            process.send_signal(signal.SIGKILL)
        with namespaces("left"):
            assert theirs not in existing()
            assert set(mine) <= set(existing())


# UDP, one datagram after the other: who answers, and who asks and counts.
ECHO = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 9))
print("ready", flush=True)
while True:
    sock.sendto(*sock.recvfrom(100))
"""
PROBE = """
import contextlib, socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect((sys.argv[1], 9))
sock.settimeout(0.5)
sent = {}
for n in range(300):
    sent[b"%d" % n] = time.monotonic()
    sock.send(b"%d" % n)
times = []
with contextlib.suppress(TimeoutError):
    while len(times) < len(sent):
        times.append(-sent[sock.recv(100)] + time.monotonic())
print(len(sent), len(times), min(times))
"""


def inside(host: Host, program: str, *arguments: str) -> list[str]:
    """A command that runs a program there."""
    return ["ip", "netns", "exec", host.namespace, sys.executable, "-I", "-c", program, *arguments]


def test_the_relay_delays_packets_and_loses_them() -> None:
    """By as much as it was told, each way."""
    with linked("relay", delay=0.02, loss=0.2) as network:
        address = network.right.address
        with subprocess.Popen(inside(network.right, ECHO, address), stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None and server.stdout.readline() == b"ready\n"
                sent, answered, fastest = run(*inside(network.left, PROBE, address)).split()
            finally:
                server.kill()
        assert network.lost() >= int(sent) - int(answered)
    assert 0.4 < int(answered) / int(sent) < 0.9  # 0.64 make it both ways
    assert 0.04 < float(fastest) < 0.2
