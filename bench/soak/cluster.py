"""The processes of a soak: the store, the members that stay, and guests that come and are killed or leave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from ..cohort import fork_server
from ..stats import BenchError
from .member import LEAVE, SAMPLE, MemberSpec, Sample, start

PATIENCE = 300.0  # seconds for what takes one at most, unless the machine is very busy
STORE = "store"
STEADY = ("hub", "near", "far", "cut")
RETURNING = "returning"
GUEST = "guest"


@dataclass
class Member:
    """One process of the soak."""

    spec: MemberSpec
    process: ForkServerProcess
    pipe: Connection

    async def hear(self) -> Any:
        """What it says next; BenchError if it says nothing, or what went wrong."""
        try:
            if not await asyncio.to_thread(self.pipe.poll, PATIENCE):
                raise BenchError(f"{self.spec.name} said nothing for {PATIENCE:g} s")
            said = self.pipe.recv()
        except (EOFError, OSError):
            raise BenchError(f"{self.spec.name} ended without a word") from None
        if isinstance(said, str) and said != "joined":
            raise BenchError(f"{self.spec.name} failed:\n{said}")
        return said

    async def sample(self) -> Sample:
        """How it is now."""
        self.pipe.send(SAMPLE)
        said = await self.hear()
        assert isinstance(said, Sample)
        return said

    async def leave(self) -> None:
        """Have it leave; BenchError if it does not end well."""
        self.pipe.send(LEAVE)
        await asyncio.to_thread(self.process.join, PATIENCE)
        if self.process.exitcode != 0:
            raise BenchError(f"{self.spec.name} did not leave well (exit {self.process.exitcode})")

    def kill(self) -> None:
        """End it at once, if it is still there."""
        self.process.kill()
        self.process.join(PATIENCE)
        self.pipe.close()


@dataclass
class Cluster:
    """All of them. stay: seconds for which a guest stays. events: what was done, by name."""

    address: str
    store: subprocess.Popen[str]
    stay: float
    cuts: float
    rng: random.Random
    members: dict[str, Member] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    async def start(self, name: str, **how: Any) -> Member:
        """Start a member, and wait until it has joined."""
        context = fork_server()
        ours, theirs = context.Pipe()
        spec = MemberSpec(name, self.address, self.secret, [*STEADY], [RETURNING, GUEST], **how)
        process = context.Process(target=start, args=(spec, theirs), name=name, daemon=True)
        process.start()
        theirs.close()
        member = self.members[name] = Member(spec, process, ours)
        await member.hear()
        return member

    async def start_all(self) -> None:
        """Start those who stay, and the one that leaves and comes again."""
        how: dict[str, dict[str, Any]] = {"far": {"tcp": True}, "cut": {"tcp": True, "cuts": self.cuts}}
        for name in STEADY:
            await self.start(name, **how.get(name, {}))
        await self.start(RETURNING, away=self.stay)

    async def keep_guests(self) -> None:
        """One guest after the other, of the same name, in processes of their own; every other one is killed."""
        while True:
            guest = await self.start(GUEST, tcp=self.rng.random() < 0.5)
            await asyncio.sleep(self.stay * self.rng.uniform(0.5, 1.5))
            if self.events["guests"] % 2:
                guest.kill()
                self.events["guests killed"] += 1
            else:
                await guest.leave()
                guest.kill()
            del self.members[GUEST]
            self.events["guests"] += 1

    async def leave(self) -> None:
        """Have all leave, as users would."""
        await asyncio.gather(*(member.leave() for member in self.members.values()))


@contextlib.asynccontextmanager
async def cluster(stay: float, cuts: float, seed: int) -> AsyncIterator[Cluster]:
    """A store and an empty cluster; at the end nothing of them is left."""
    store = await asyncio.to_thread(_start_store)
    made = None
    try:
        assert store.stdout is not None
        address = (await asyncio.to_thread(store.stdout.readline)).strip()
        made = Cluster(address, store, stay, cuts, random.Random(seed))
        yield made
    finally:
        for member in made.members.values() if made else ():
            member.kill()
        store.terminate()
        await asyncio.to_thread(store.communicate)


def _start_store() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "aiorpc", "store", "--port", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
