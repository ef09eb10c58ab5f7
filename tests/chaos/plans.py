"""What happens in one round: the group, its load, and the faults that it meets; all of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .load import OPERATIONS

#: What may happen, and how it is said.
KINDS = {
    "kill": "a member is killed",
    "leader": "the leader is killed, which hosts the store where the group meets at tcp://",
    "stop": "a member is stopped, and goes on",
    "slow": "a member has the processor for a part of the time only",
    "block": "a member's interpreter does nothing for a while, its loop neither",
    "cut": "TCP connections of a member break",
    "line": "the network between two hosts is away for a while (network namespaces, for which one has to be root)",
    "leave": "a member leaves in good order, and in a group of fixed size at once",
    "restart": "a member is killed, and a new process takes its name, and in a group of fixed size its rank",
}
DEADLY = ("kill", "leader", "restart")
FINAL = (*DEADLY, "leave")
LASTING = ("stop", "slow", "block", "line")


@dataclass(frozen=True)
class Fault:
    """One thing that happens. at: seconds since the load began. victim: a rank. seconds: how long it lasts."""

    at: float
    kind: str
    victim: int
    seconds: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.at:.2f} s: {self.kind} w{self.victim}{lasts}"


@dataclass(frozen=True)
class Plan:
    """One round. seconds: of load. free: whether the group has no fixed size. meeting: "file" or "tcp".

    load: kinds of operations. hosts: that the members are on, by turns; one or two. delay, loss: of packets between
    two, in seconds and as a share.
    """

    seed: int
    number: int
    size: int
    free: bool
    meeting: str
    transports: tuple[str, ...]
    seconds: float
    load: tuple[str, ...]
    faults: tuple[Fault, ...]
    hosts: int = 1
    delay: float = 0.0
    loss: float = 0.0

    @property
    def form(self) -> str:
        """What kind of group it is."""
        size, where = "free" if self.free else "fixed", ", two hosts" if self.hosts > 1 else ""
        return f"{size}, {self.meeting}://, {'+'.join(self.transports)}{where}"

    def __str__(self) -> str:
        return f"{self.size} members ({self.form}); {'; '.join(map(str, self.faults))}"


def make_plan(seed: int, number: int, kinds: Sequence[str], load: Sequence[str] = tuple(OPERATIONS)) -> Plan:
    """That round of that seed, with faults and operations of these kinds."""
    rng = random.Random(f"{seed}:{number}")
    free = rng.random() < 0.4
    size = rng.choice((3, 3, 4, 4, 5))
    seconds = rng.uniform(0.3, 0.8)
    meeting = rng.choice(("file", "file", "tcp"))
    faults: list[Fault] = []
    gone: set[int] = set()
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        kind = rng.choice(tuple(kinds))
        if kind in FINAL and len(gone) >= size - 2:
            continue
        there = sorted(set(range(size)) - gone)
        victim = there[0] if kind == "leader" else rng.choice(there)
        if kind == "leave" and free and meeting == "tcp" and victim == 0:
            continue  # who hosts the store waits for the others
        if kind in FINAL:
            gone.add(victim)
        lasts = rng.uniform(0.05, 1.5 if kind == "line" else 0.6) if kind in LASTING else 0.0
        faults.append(Fault(rng.uniform(0.0, seconds), kind, victim, lasts))
    happens = {fault.kind for fault in faults}
    if not free and 0 in gone and "restart" in happens:
        meeting = "file"  # nobody comes back to a group of fixed size whose store has gone
    hosts = 2 if "line" in happens else 1
    return Plan(
        seed,
        number,
        size,
        free,
        meeting,
        ("tcp",) if "cut" in happens or rng.random() < 0.3 else ("unix", "tcp"),
        seconds,
        tuple(load),
        tuple(sorted(faults, key=lambda fault: fault.at)),
        hosts,
        rng.choice((0.0, 0.002, 0.02)) if hosts > 1 else 0.0,
        rng.choice((0.0, 0.0, 0.01)) if hosts > 1 else 0.0,
    )
