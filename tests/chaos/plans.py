"""What happens in one round: the group, its load, and the faults that it meets; all of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: What may happen, and how it is said.
KINDS = {
    "kill": "a member is killed",
    "leader": "the leader is killed, which hosts the store where the group meets at tcp://",
    "stop": "a member is stopped, and goes on",
    "slow": "a member has the processor for a part of the time only",
    "block": "a member's interpreter does nothing for a while, its loop neither",
    "cut": "TCP connections of a member break",
    "restart": "a member is killed, and a new process takes its name, and in a group of fixed size its rank",
}
DEADLY = ("kill", "leader", "restart")


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
    """One round. seconds: of load. free: whether the group has no fixed size. meeting: "file" or "tcp"."""

    seed: int
    number: int
    size: int
    free: bool
    meeting: str
    transports: tuple[str, ...]
    seconds: float
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        form = f"{'free' if self.free else 'fixed'} group of {self.size} at {self.meeting}, {'+'.join(self.transports)}"
        return f"{form}; {'; '.join(map(str, self.faults))}"


def make_plan(seed: int, number: int, kinds: Sequence[str]) -> Plan:
    """That round of that seed, with faults of these kinds."""
    rng = random.Random(f"{seed}:{number}")
    free = rng.random() < 0.4
    size = rng.choice((3, 3, 4, 4, 5))
    seconds = rng.uniform(0.3, 0.8)
    meeting = rng.choice(("file", "file", "tcp"))
    faults: list[Fault] = []
    dead: set[int] = set()
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        kind = rng.choice(tuple(kinds))
        if kind in DEADLY and len(dead) >= size - 2:
            continue
        victim = min(set(range(size)) - dead) if kind == "leader" else rng.choice(sorted(set(range(size)) - dead))
        if kind in DEADLY:
            dead.add(victim)
        lasts = rng.uniform(0.05, 0.6) if kind in ("stop", "slow", "block") else 0.0
        faults.append(Fault(rng.uniform(0.0, seconds), kind, victim, lasts))
    if not free and 0 in dead and any(fault.kind == "restart" for fault in faults):
        meeting = "file"  # nobody comes back to a group of fixed size whose store has gone
    over_tcp = any(fault.kind == "cut" for fault in faults) or rng.random() < 0.3
    return Plan(
        seed,
        number,
        size,
        free,
        meeting,
        ("tcp",) if over_tcp else ("unix", "tcp"),
        seconds,
        tuple(sorted(faults, key=lambda fault: fault.at)),
    )
