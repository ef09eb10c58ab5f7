"""Members of a free group over TCP come, drain and are killed at random moments, while connections open and rest."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

import aiorpc as rpc
from aiorpc import RpcBackendOptions, Worker
from tests.runtime.inside import set_bounds

from .workers import LIMIT, Child, Link, Place, meeting_file, processes, rounds

PROCESSES, EACH = 6, 2
#: Of a failed call: its number, the member that was called, and the error.
Failed = tuple[str, str, str]


def names(process: str) -> list[str]:
    """The members of that process."""
    return [f"{process}-{number}" for number in range(EACH)]


async def join(name: str, init_method: str) -> Worker:
    """A member whose connections rest soon."""
    options = RpcBackendOptions(
        init_method=init_method, transports=("tcp",), rpc_timeout=LIMIT, drain_timeout=LIMIT, newcomer_grace=1.0
    )
    worker = await Worker(name, options=options)
    set_bounds(worker, rest=0.2)
    return worker


def member(place: Place, link: Link, path: str, seed: int) -> list[Failed]:
    """Body: members that call others until SIGTERM drains them; the calls that failed before."""

    async def main() -> list[Failed]:
        workers = await asyncio.gather(*(join(name, place.init_method) for name in names(place.name)))
        callers = [
            asyncio.create_task(call_others(worker, path, Random(2 * EACH * seed + 2 * at + number)))
            for at, worker in enumerate(workers)
            for number in range(2)
        ]
        link.tell("up")
        await asyncio.gather(*(worker.drained() for worker in workers))
        return [each for failed in await asyncio.gather(*callers) for each in failed]

    return asyncio.run(main())


async def call_others(worker: Worker, path: str, chance: Random) -> list[Failed]:
    """Call other members at random until the door of this one is closed."""
    failed: list[Failed] = []
    for count in range(1_000_000):
        if worker.closed:
            break
        others = [info.name for info in worker.worker_infos() if info.name not in (worker.name, "judge")]
        if others:
            number, to = f"{worker.name}-{id(chance)}-{count}", chance.choice(others)
            try:
                assert await worker.call(to, work, path, number, chance.choice((0.0, 0.05, 0.4))) == number
            except rpc.WorkerClosed:
                break
            except rpc.RpcError as error:
                failed.append((number, to, type(error).__name__))
        await asyncio.sleep(chance.choice((0.01, 0.1, 0.5)) * chance.random())
    return failed


def note(path: str, number: str) -> None:
    """Add a line to that file, to which all write."""
    with Path(path).open("a") as file:
        file.write(f"{number}\n")


async def work(path: str, number: str, seconds: float) -> str:
    """Handler: notes that it was accepted."""
    note(path, number)
    await asyncio.sleep(seconds)
    return number


def known() -> set[str]:
    """Handler: the members that this one knows."""
    return {info.name for info in rpc.current().worker_infos()}


async def agree(judge: Worker, running: Iterable[str]) -> None:
    """Wait until all members know the same."""
    expected = {name for process in running for name in names(process)} | {"judge"}
    deadline = time.monotonic() + LIMIT
    while True:
        told = await asyncio.gather(*(judge.call(name, known) for name in expected), return_exceptions=True)
        if all(each == expected for each in told):
            return
        assert time.monotonic() < deadline, f"{expected} expected, but {dict(zip(expected, told, strict=True))}"
        await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.random
@pytest.mark.parametrize("seed", rounds(5))
async def test_members_drain_and_die_while_connections_rest(seed: int, tmp_path: Path) -> None:
    """Survivors agree on who is there; no call hangs; none that a draining member has accepted is lost."""
    chance, path = Random(seed), tmp_path / "accepted"
    path.touch()
    failed: list[Failed] = []
    drained: set[str] = set()
    with processes() as children, meeting_file() as init_method:
        running: dict[str, Child] = {}

        async def fill() -> None:
            new = []
            while len(running) < PROCESSES:
                name = f"p{len(children.started)}"
                running[name] = children.start(Place(name, -1, None, init_method), member, str(path), seed)
                new.append(running[name])
            for child in new:
                assert await child.ahear() == "up"

        async def drain(*which: str) -> None:
            for name in which:
                running[name].kill(signal.SIGTERM)
                drained.update(names(name))
            for name in which:
                failed.extend(await running.pop(name).ahear())

        await fill()
        judge = await join("judge", init_method)
        await agree(judge, running)
        for _ in range(6):
            await asyncio.sleep(chance.random())
            for name in chance.sample(sorted(running), chance.choice((0, 1, 1, 2))):
                running.pop(name).kill()
            await drain(*chance.sample(sorted(running), chance.choice((0, 1, 1, 2, 3))))
            await agree(judge, running)
            await fill()
            await agree(judge, running)
        await drain(*running)
        await judge.shutdown()
        children.check_ended(
            but=tuple(child.place.name for child in children if f"{child.place.name}-0" not in drained)
        )
    accepted = set(path.read_text().split())
    assert {error for _, _, error in failed} <= {"PeerLeft", "PeerLost", "UnknownWorker"}
    assert [each for each in failed if each[1] in drained and each[0] in accepted] == []
    assert len(accepted) > 100
