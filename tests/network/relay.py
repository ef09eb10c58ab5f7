"""A router that is slow, loses packets, or is dead: a process between two TUN devices, each in its own namespace.

Real TCP of the kernel on both sides, and nothing needed of the kernel but ``/dev/net/tun``. Started by `hosts.py` as a
program of its own; imports nothing that takes time. Arguments: one JSON object, see `main`. Each line
on its input is an order, answered by one line of JSON with the counts so far:

    cut      from now on everything is dropped, what is under way too; nobody is told
    stall    the TCP connection that has carried most is dropped, both ways; the others go on
    forget   so are all TCP connections that there are; those that are made later pass
    mend     as before
    counts   nothing else
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import Counter, deque

from bench.hosts import enter

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
QUEUE = 0.05  # seconds that a packet may wait for its turn on a link with a rate; one that would wait longer is dropped
TURN = 64  # packets read from one side before the other gets its turn


def open_tun(namespace: str, device: str) -> int:
    """Make a TUN device there; the descriptor that its packets come from. It goes with the descriptor."""
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class Flows:
    """The TCP connections that pass, and which of them no longer do."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[int, int]] = Counter()
        self.stalled: set[tuple[int, int]] = set()

    def stall_largest(self) -> None:
        """Let nothing more of the connection pass that has carried most."""
        [(largest, _)] = self._bytes.most_common(1)
        self.stalled = {largest}

    def forget(self) -> None:
        """Let nothing more of those pass that there are."""
        self.stalled = {*self._bytes}

    def passes(self, packet: bytes) -> bool:
        """Count a packet; whether it may pass. Connections are told apart by their two ports, whoever sends."""
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return True
        start = 4 * (packet[0] & 15)
        source, target = struct.unpack_from("!HH", packet, start)
        flow = (source, target) if source < target else (target, source)
        self._bytes[flow] += len(packet)
        return flow not in self.stalled


class Way:
    """One direction. rate: bytes per second, 0 for no limit. delay: seconds. loss: share of packets, 0 to 1."""

    def __init__(
        self, source: int, sink: int, flows: Flows, *, rate: float, delay: float, loss: float, seed: int
    ) -> None:
        self.source = source
        self.sink = sink
        self.flows = flows
        self.cut = False
        self.passed = 0
        self.lost = 0
        self.overflowed = 0
        self._rate = rate
        self._delay = delay
        self._loss = loss
        self._random = random.Random(seed)
        self._free = 0.0  # when the last packet taken has left
        self._queue: deque[tuple[float, bytes]] = deque()  # in order: the delay is the same for all

    def drop_all(self) -> None:
        """Lose what is under way."""
        self._queue.clear()

    def take(self) -> None:
        """Read what the side sends, and decide when it arrives."""
        for _ in range(TURN):
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            self._route(packet, time.monotonic())

    def _route(self, packet: bytes, now: float) -> None:
        start = max(now, self._free)
        if self.cut or self._random.random() < self._loss or not self.flows.passes(packet):
            self.lost += 1
        elif start - now > QUEUE:
            self.overflowed += 1
        else:
            self._free = start + (len(packet) / self._rate if self._rate else 0.0)
            self._queue.append((self._free + self._delay, packet))

    def give(self) -> float | None:
        """Hand over what is due; seconds until the next packet is, None if there is none."""
        while self._queue:
            left = self._queue[0][0] - time.monotonic()
            if left > 0:
                return left
            self._write(self._queue.popleft()[1])
        return None

    def _write(self, packet: bytes) -> None:
        try:
            os.write(self.sink, packet)
            self.passed += 1
        except OSError as error:
            # What a router does with a packet that its neighbour does not take.
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.EIO):
                raise
            self.overflowed += 1


def obey(order: str, ways: list[Way]) -> None:
    """Carry out one order, and answer it."""
    if order == "stall":
        ways[0].flows.stall_largest()
    if order == "forget":
        ways[0].flows.forget()
    if order in ("cut", "mend"):
        ways[0].flows.stalled = set()
        for way in ways:
            way.cut = order == "cut"
            way.drop_all()
    print(
        json.dumps({key: [getattr(way, key) for way in ways] for key in ("passed", "lost", "overflowed")}), flush=True
    )


def run(ways: list[Way]) -> None:
    """Forward packets and obey orders until the input ends."""
    orders = b""
    while True:
        waits = [left for left in (way.give() for way in ways) if left is not None]
        sources = [way.source for way in ways]
        readable, _, _ = select.select([0, *sources], [], [], min(waits, default=None))
        for way in ways:
            if way.source in readable:
                way.take()
        if 0 in readable:
            data = os.read(0, 4096)
            if not data:
                return
            *lines, orders = (orders + data).split(b"\n")
            for line in lines:
                obey(line.decode(), ways)


def main() -> None:
    """Arguments: namespaces (two names), device, rate, delay, loss (of each way, see `Way`) and seed."""
    told = json.loads(sys.argv[1])
    left, right = (open_tun(namespace, told["device"]) for namespace in told["namespaces"])
    quality = {key: told[key] for key in ("rate", "delay", "loss")}
    flows = Flows()
    ways = [
        Way(left, right, flows, **quality, seed=told["seed"]),
        Way(right, left, flows, **quality, seed=told["seed"] + 1),
    ]
    obey("counts", ways)  # the devices are there
    run(ways)


if __name__ == "__main__":
    main()
