"""``python -m bench.thousands``: a simulation of free groups of a thousand and ten thousand members, without I/O.

Two ways of knowing each other: the list of all members under one key, as it is, and the plan of the page on stars and
meshes, where each member adds one line to a log, the oldest member of each host looks after its host, and news goes
down a tree of these. Simulated are the store, which serves one request after the other, and what waits for it; the
costs are those measured with torch's TCPStore on one machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

ENTRY = 0.6  # KB that the list has for each member
REQUEST, READ, SWAP = 30e-6, 2.5e-6, 30e-9  # seconds for a request, for each KB read, for the square of each KB swapped
PARSE, HOP = 40e-6, 0.5e-3  # seconds to take in one new member, and for one message between two members
TURN, LONGEST_TURN, PAUSE, MANY = 0.004, 0.1, 0.25, 64  # as of `meeting.free` and `lifecycle`
PER_HOST, BRANCHES, GATHER = 16, 16, 0.05  # of the plan: members of a host, branches of the tree, seconds between looks

#: What a member does next: wait for so many seconds, or (negative) a request that takes the store so long.
Step = float
Member = Iterator[Step]


@dataclass
class World:
    """What is so far. free: when the store has nothing more to do. known: when each has heard of all, or of a death."""

    size: int
    now: float = 0.0
    free: float = 0.0
    requests: int = 0
    kilobytes: float = 0.0
    joined: int = 0
    dead: bool = False
    known: list[float] = field(default_factory=list)

    def ask(self, read: float = 0.0, swapped: float = 0.0) -> Step:
        """A request. read, swapped: KB that the store sends, or compares and sets."""
        self.requests += 1
        self.kilobytes += read + 2 * swapped
        return -(REQUEST + read * READ + swapped * swapped * SWAP)

    def run(self, members: list[Member]) -> None:
        """Until all have done all."""
        order = itertools.count()
        due = [(0.0, next(order), each) for each in members]
        while due:
            self.now, _, member = heapq.heappop(due)
            step = next(member, None)
            if step is not None and step < 0.0:
                self.free = max(self.now, self.free) - step
                heapq.heappush(due, (self.free, next(order), member))
            elif step is not None:
                heapq.heappush(due, (self.now + step, next(order), member))


def listed(world: World, number: int, chance: random.Random) -> Member:
    """As it is: enter the list when it is this one's turn, and look at it until it has all."""
    yield world.ask()
    while world.joined < number:
        yield min(TURN * (number - world.joined), LONGEST_TURN)
        yield world.ask()
    known = world.joined
    yield world.ask(read=ENTRY * known)
    yield PARSE * known
    yield world.ask(swapped=ENTRY * (known + 1))
    world.joined += 1
    while known < world.size:
        yield PAUSE * max(1.0, known / MANY)
        yield world.ask()
        if world.joined > known:
            new = world.joined
            yield world.ask(read=ENTRY * new)
            yield PARSE * (new - known)
            known = new
    world.known.append(world.now)


def hears_by_list(world: World, number: int, chance: random.Random) -> Member:
    """One member has died: the first watcher strikes it off, and the others see that when they look."""
    if number == 0:
        yield world.ask(read=ENTRY * world.size)
        yield world.ask(swapped=ENTRY * world.size)
        world.dead = True
        return
    pause = PAUSE * max(1.0, world.size / MANY)
    yield chance.uniform(0.0, pause)
    yield world.ask()
    while not world.dead:
        yield pause
        yield world.ask()
    yield world.ask(read=ENTRY * world.size)
    yield HOP  # the dead one is asked, and its address refuses
    world.known.append(world.now)


def logged(world: World, number: int, chance: random.Random) -> Member:
    """The plan: add a line to the log; the root of the tree reads its end, and passes that on."""
    yield world.ask()
    yield world.ask(swapped=ENTRY)
    world.joined += 1
    known = 0
    while number == 0 and known < world.size:
        yield GATHER
        yield world.ask(read=ENTRY * (world.joined - known))
        known = world.joined
    if number == 0:
        world.known.extend(world.now + _down(world.size, number) for number in range(world.size))


def hears_by_tree(world: World, number: int, chance: random.Random) -> Member:
    """One member has died: the oldest of its host adds that to the log."""
    if number == 0:
        yield world.ask(swapped=ENTRY)
        yield chance.uniform(0.0, GATHER)
        yield world.ask(read=ENTRY)
        world.known.extend(world.now + _down(1, number) for number in range(world.size))


def _down(news: int, number: int) -> float:
    """Seconds until news of so many members have come down the tree to that member, beside what it takes them in."""
    depth, place = 0, number // PER_HOST
    while place:
        place, depth = (place - 1) // BRANCHES, depth + 1
    return (depth + 1) * (HOP + BRANCHES * HOP / 10) + PARSE * news


def simulate(size: int, joins: Callable[..., Member], hears: Callable[..., Member]) -> tuple[float, ...]:
    """Seconds until all know all; requests and MB at the store for each member until then; seconds until half of all,
    and all, have heard of a death."""
    chance = random.Random(size)
    forming, after = World(size), World(size)
    forming.run([joins(forming, number, chance) for number in range(size)])
    after.run([hears(after, number, chance) for number in range(size)])
    formed = max(forming.known)
    return formed, forming.requests / size, forming.kilobytes / 1e3 / size, median(after.known), max(after.known)


WAYS = {"list": (listed, hears_by_list), "log and tree": (logged, hears_by_tree)}
#: With the list ten thousand members would ask the store whose turn it is more often than it can answer.
SIZES = {"list": (256, 1_000, 2_000), "log and tree": (256, 1_000, 10_000)}


def main(most: int) -> None:
    """Print a table. most: members at most."""
    print("| way | members | all know all | requests of each | MB at the store for each | half know of a death | all |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for way, sizes in SIZES.items():
        for size in (each for each in sizes if each <= most):
            formed, requests, moved, half, all_ = simulate(size, *WAYS[way])
            row = f"{formed:.1f} s | {requests:.0f} | {moved:.4f} | {half:.2f} s | {all_:.2f} s"
            print(f"| {way} | {size:,} | {row} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
