"""Members that come and go, at random, while all goes on at once: no wait is for ever, no error without a reason.

Each way of leaving has tests of its own. These are for what they do to everything that is under way: workers join a
group without a size, leave it in good order or at once, are killed, and come back under their names with other roles,
while each does everything to every other one. In the end nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch.distributed import Store

import aiorpc as rpc
from aiorpc.testing import Faults
from tests.limits import busy
from tests.runtime import test_extremes as extremes
from tests.runtime.inside import breakable
from tests.runtime.stores import WatchedStore
from tests.runtime.test_extremes import Doing, full, is_full, one_more, value_of, what_is_left
from tests.runtime.waiting import until
from tests.tiers import examples

NAMES = tuple(f"{kind}{number}" for kind in ("actor", "keeper") for number in range(3))
ROLES = ("learner", "teacher", "")
RPC_TIMEOUT = 20.0  # seconds; nothing comes near it
PATIENCE = 30.0  # seconds for one thing that is done
SHORT = 0.3  # seconds for what may be waited for in vain
GAVE_UP = "gave up joining"
AT_ONCE_GONE = ("killed", "left at once")
LEAST = 2  # workers that are there at any time
AT_ONCE = 3  # things that one worker does at a time
NEVER = float("inf")
STALL = 0.3  # seconds
TICK = 0.02
TRIES = 3
NEWS = "news"  # what all of them publish in turn


def soon() -> float:
    """Seconds in which all have heard who came and who went; so long they wait, too, for somebody to come."""
    return 1.5 * busy()


@dataclass(eq=False)
class Lifecycle:
    """One worker, from its joining to its end.

    came, ended: when it had joined, and when nothing of it was left. way: how it goes, "" until then. stop: it begins
    nothing more. queue: its own, once it has one.
    """

    number: int
    name: str
    role: str
    worker: rpc.Worker
    came: float = NEVER
    way: str = ""
    ended: float = NEVER
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    queue: rpc.Queue[Any] | None = None
    id: int = -1

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


@dataclass(eq=False)
class Put:
    """An item. owner: of the queue that has it, if that was there all the time. large: it stays with its producer.

    done: whether that was told that it is in the queue.
    """

    item: tuple[int, int]
    producer: Lifecycle
    owner: Lifecycle | None
    large: bool
    done: bool = False


@dataclass(eq=False)
class World:
    """What has happened.

    ran: how often each number was run in each life. wasted: items that consumers who went may have taken along, by the
    owner of the queue. wrong: whatever should not be. log: who came and went, and when.
    """

    lives: list[Lifecycle] = field(default_factory=list)
    ran: Counter[tuple[int, int]] = field(default_factory=Counter)
    puts: dict[tuple[int, int], Put] = field(default_factory=dict)
    got: Counter[tuple[int, int]] = field(default_factory=Counter)
    wasted: Counter[Lifecycle] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    log: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def runs(self, number: int) -> list[int]:
        """How often that was run, in each life in which it was."""
        return [count for (each, _), count in self.ran.items() if each == number]

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:7.3f} {text}")

    def living(self) -> list[Lifecycle]:
        return [life for life in self.lives if life.came < NEVER and not life.way]

    def here(self, name: str) -> Lifecycle | None:
        return next((life for life in self.living() if life.name == name), None)

    def was_away(self, name: str, since: float) -> bool:
        """Whether there was a moment since then without a worker of that name, as far as others have heard."""
        return not any(life.name == name and life.came <= since - soon() and not life.way for life in self.lives)

    def was_without(self, pattern: str, since: float) -> bool:
        """Whether nobody needs to have been known whose name fits."""
        return all(self.was_away(name, since) for name in NAMES if fnmatch(name, pattern))


WORLD = [World()]


def me() -> Lifecycle:
    """The worker that this runs on."""
    worker = rpc.current()
    return next(life for life in WORLD[0].lives if life.worker is worker)


# --- handlers ---------------------------------------------------------------------------------------------------------


async def noted(number: int) -> tuple[str, str]:
    life = me()
    WORLD[0].ran[number, life.number] += 1
    return life.name, life.role


async def noted_slowly(number: int, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return (await noted(number))[0]


async def sum_of(first: Any, to: str) -> Any:
    """Somebody else's value and one of a third worker."""
    second = rpc.remote(to, one_more, 1)
    return await first + await second


async def pass_on(ref: Any, *to: str) -> Any:
    if to:
        return await rpc.call(to[0], pass_on, ref, *to[1:])
    return await ref


async def meet(names: list[str], tag: str) -> str:
    await rpc.group(names, timeout=soon()).barrier(tag)
    return rpc.current().name


async def for_ever() -> None:
    await asyncio.Event().wait()


async def nothing_ever() -> AsyncIterator[int]:
    await asyncio.Event().wait()
    yield 0


class Ledger:
    """What each worker serves by a name, from before it joins."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: list[int] = []

    async def enter(self, entry: int) -> tuple[int, int]:
        self.entries.append(entry)
        return self.number, len(self.entries)

    async def wait(self) -> None:
        await for_ever()

    async def read(self, count: int) -> AsyncIterator[int]:
        for each in range(count):
            yield each


# --- what is done -----------------------------------------------------------------------------------------------------


@dataclass
class Deed(Doing):
    """What one step needs, see `Doing`. life: who does it. fourth: one more worker. began: when. step: its name."""

    life: Lifecycle
    fourth: str
    began: float
    step: str

    def judge(self, error: BaseException) -> None:
        """Tell of an error that there is no reason for."""
        if wrong := reason_missing(error, self):
            self.tell(wrong)

    def tell(self, wrong: str) -> None:
        world = WORLD[0]
        time_of = f"{self.began - world.began:.3f}-{time.monotonic() - world.began:.3f}"
        said = f"{self.life} {self.step} {self.to} {self.third} {self.fourth}, {time_of}"
        world.wrong.append(f"[{said}] {wrong}")


def reason_missing(error: BaseException, do: Deed) -> str:
    """What is wrong with an error, "" for one that has to be expected."""
    world = WORLD[0]
    described = f"{type(error).__name__}: {error}"
    if not isinstance(error, rpc.RpcError):
        return described
    if do.life.way:  # it has left or was killed itself
        return ""
    if isinstance(error, rpc.Overloaded):  # by options
        return ""
    if isinstance(
        error, rpc.errors.GroupError
    ):  # a member that was called off for the errors of others is one of its errors
        caused = [each for each in error.exceptions if not isinstance(each, rpc.RpcCancelled)]
        return "; ".join(filter(None, (reason_missing(each, do) for each in caused or error.exceptions)))
    named = [name for name in NAMES if name in str(error)]
    away = [name for name in named if world.was_away(name, do.began)]
    if isinstance(error, rpc.PeerLost):
        lost = [life for life in world.lives if (life.name, life.id) == (error.worker, error.rank)]
        return "" if error.worker in away and any(life.way == "killed" for life in lost) else described
    if isinstance(error, rpc.RpcTimeout):
        return "" if away else described
    if isinstance(error, rpc.PeerLeft):
        fits = any(life.name in away and life.way not in ("", "killed") for life in world.lives)
        return "" if fits else described
    if isinstance(error, rpc.errors.UnknownWorker) and "is in the group" in str(error):
        pattern = str(error).split("'")[1]
        return "" if world.was_without(pattern, do.began) else described
    if isinstance(error, rpc.errors.UnknownWorker) and (
        found := re.match(r"there is no worker (\d+) in the group", str(error))
    ):
        return "" if any(life.id == int(found[1]) and life.way for life in world.lives) else described
    if isinstance(error, rpc.WorkerClosed | rpc.errors.UnknownWorker):
        return "" if away else described
    return described


async def call_noted(do: Deed) -> None:
    number = next(WORLD[0].numbers)
    try:
        found, _ = await rpc.call(do.to, noted, number)
        assert found == do.to
        assert WORLD[0].runs(number) == [1]
    finally:
        assert WORLD[0].runs(number) in ([], [1])


async def try_again(do: Deed) -> None:
    """Until there is somebody of that name, which runs it once at most."""
    number = next(WORLD[0].numbers)
    handle = rpc.peer(
        do.to, timeout=soon(), retries=20, backoff=(0.02, 0.2), idempotent=True, wait=do.random.random() < 0.5
    )
    try:
        assert (await handle.call(noted_slowly, number, do.random.choice((0.0, 0.05)))) == do.to
    finally:
        assert set(WORLD[0].runs(number)) <= {1}


async def wait_for_one(do: Deed) -> None:
    try:
        info = await rpc.wait_for(do.to, timeout=SHORT)
    except rpc.RpcTimeout:
        assert WORLD[0].was_away(do.to, do.began), f"{do.to} was there"
    else:
        assert info.name == do.to
        found = [life for life in WORLD[0].lives if life.name == do.to and life.ended > do.began - soon()]
        assert any(life.id in (info.id, -1) for life in found), info  # the id of one that joins is not known yet


async def use_ledgers(do: Deed) -> None:
    """By its name, also of the one that takes the place of another."""
    handle = rpc.peer(do.to, retries=20, backoff=(0.02, 0.2), wait=True, timeout=soon()).object("ledger")
    number, length = await handle.enter(1)
    assert any(life.number == number and life.name == do.to for life in WORLD[0].lives) and length > 0
    plain = rpc.peer(do.third).object("ledger")
    assert [each async for each in plain.stream().read(3)] == [0, 1, 2]


async def pass_references(do: Deed) -> None:
    x, size = do.number(), do.size()
    ref = rpc.remote(do.to, full, size, x)
    assert is_full(await rpc.call(do.third, pass_on, ref, do.fourth), size, x)
    own: Any = rpc.RRef(full(3, x))
    assert is_full(await rpc.call(do.third, pass_on, own, do.to, do.fourth), 3, x)
    assert is_full(await rpc.call(do.third, sum_of, own, do.to), 3, x + 2)
    later = rpc.remote(do.third, value_of, ref)
    del ref
    assert is_full(await rpc.call(do.fourth, value_of, later), size, x)


async def call_some(do: Deed) -> None:
    """By a pattern or a role: an outcome of each."""
    number = next(WORLD[0].numbers)
    if do.random.random() < 0.3:
        group = rpc.group(role="learner")
    else:
        group = rpc.group(do.random.choice(("actor*", sorted({do.to, do.third}))))
    try:
        call = group.call(noted, number)
    except rpc.errors.UnknownWorker as error:
        if "of role" not in str(error):
            raise
        there = [each for each in WORLD[0].living() if each.role == "learner" and each.came < do.began - soon()]
        assert not there, f"{error}, where there are {[each.name for each in there]}"
        return
    for outcome in await call:
        if outcome.error is not None:
            do.judge(outcome.error)
    assert set(WORLD[0].runs(number)) <= {1}


async def call_any(do: Deed) -> None:
    number = next(WORLD[0].numbers)
    group = rpc.group(["actor*", "keeper*"][do.number() % 2], retries=30, backoff=(0.02, 0.2), timeout=soon())
    await group.any(noted, number)
    assert set(WORLD[0].runs(number)) <= {1}


async def map_over(do: Deed) -> None:
    group = rpc.group(do.random.choice(("actor*", "*0", "*")), retries=30, backoff=(0.02, 0.2), timeout=soon())
    results = [value async for value in group.map(one_more, range(20))]
    assert results == list(range(1, 21))


async def meet_others(do: Deed) -> None:
    names = sorted({do.to, do.third, do.fourth})
    tag = f"tag {next(WORLD[0].numbers)}"
    outcomes = list(await rpc.group(names).call(meet, names, tag))
    late = [outcome for outcome in outcomes if isinstance(outcome.error, rpc.RpcTimeout)]
    if len(late) == len(names):
        assert any(WORLD[0].was_away(name, do.began) for name in [*names, do.life.name]), late
    for outcome in outcomes:
        if outcome.error is None:
            assert outcome.value == outcome.name
        elif outcome not in late:
            do.judge(outcome.error)


async def merge_streams(do: Deed) -> None:
    seen: dict[str, list[int]] = {}
    try:
        async for name, item in rpc.group(sorted({do.to, do.third})).stream(extremes.counted, 5, 10):
            seen.setdefault(name, []).append(int(item[0]))
    finally:
        assert all(items == list(range(len(items))) for items in seen.values())


async def put_items(do: Deed) -> None:
    world, queue = WORLD[0], rpc.queue(f"of-{do.to}", owner=do.to, timeout=SHORT)

    async def put_one() -> None:
        before = world.here(do.to)
        size = do.random.choice((1, 3000, 70_000, 300_000))
        item = do.life.number, next(world.numbers)
        put = world.puts[item] = Put(item, do.life, None, size > 3000)
        try:
            await queue.put((item, full(size, item[1])))
        except rpc.RpcTimeout:
            return
        except rpc.errors.UnknownObject:
            assert before is None or before.queue is None or before.way
            return
        except rpc.QueueShutDown:
            assert before is None or before.stop.is_set() or before.way
            return
        put.done = True
        if before is not None and not before.way:
            put.owner = before

    await asyncio.gather(*(put_one() for _ in range(4)))


async def get_items(do: Deed) -> None:
    world, queue = WORLD[0], rpc.queue(f"of-{do.to}", owner=do.to, timeout=SHORT)
    owner = world.here(do.to)

    def took(item: Any) -> None:
        key, tensor = item
        assert is_full(tensor, len(tensor), key[1])
        world.got[key] += 1
        if world.got[key] > 1:
            world.wrong.append(f"item {key} of {do.to} was handed out twice")

    async def get_some() -> None:
        count = do.random.choice((1, 1, 3))
        try:
            if count == 1:
                took(await queue.get())
            else:
                for each in await queue.get_many(count):
                    took(each)
        except rpc.RpcTimeout:
            if do.life.way and owner is not None:
                world.wasted[owner] += count
        except rpc.errors.UnknownObject:
            assert owner is None or owner.queue is None or owner.way
        except rpc.QueueShutDown:
            assert owner is None or owner.stop.is_set() or owner.way
        except rpc.errors.ItemLost as error:
            assert any(life.name == error.worker and life.way for life in world.lives), str(error)
        except BaseException:
            if owner is not None:
                world.wasted[owner] += count
            raise

    await asyncio.gather(*(get_some() for _ in range(3)))


async def hear_of_its_end(do: Deed) -> None:
    """What waits for one worker, in whatever way and for ever, ends with that one."""
    world, life = WORLD[0], WORLD[0].here(do.to)
    if life is None or life is do.life or life.queue is None or life.id not in ids_of(do.life.worker):
        return
    handle = rpc.peer(life.id, timeout=0)
    quiet = rpc.queue(f"quiet-{do.to}", owner=do.to, timeout=0)

    async def by_stream() -> None:
        async with handle.stream(nothing_ever) as stream:
            await anext(stream)

    async def by_reference() -> None:
        await handle.remote(extremes.doze, 1.5)

    async def by_third() -> None:
        ref = handle.remote(extremes.doze, 1.5)
        await rpc.peer(do.third, timeout=0).call(value_of, ref)

    async def by_group() -> None:
        names = sorted({do.to, do.life.name})
        outcomes = await rpc.group(names, timeout=0, quorum=len(names)).call(end_here_or_wait, do.to)
        outcomes.values()

    async def by_barrier() -> None:
        await rpc.group(sorted({do.to, do.life.name}), timeout=0).barrier(f"never {next(world.numbers)}")

    async def by_graph() -> None:
        async with rpc.autograd.context():
            await handle.call(for_ever)

    async def by_object() -> None:
        await handle.object("ledger").wait()

    async def by_call() -> None:
        await handle.call(for_ever)

    async def by_get() -> None:
        await quiet.get()

    async def by_join() -> None:
        await quiet.join()

    kinds = [by_stream, by_reference, by_third, by_group, by_barrier, by_graph, by_object, by_call, by_get, by_join]
    kind = do.random.choice(kinds)
    do.step = kind.__name__
    waiting = asyncio.ensure_future(kind())
    await asyncio.wait([waiting], timeout=do.random.uniform(0.1, 0.7))
    if not waiting.done() and not {life.way, do.life.way}.isdisjoint(AT_ONCE_GONE):
        await asyncio.wait([waiting], timeout=PATIENCE / 2)
        if not waiting.done():
            do.tell(f"still waits for {life}, which has gone: {life.way}; {life.worker!r}")
    if not waiting.done():
        waiting.cancel()
    try:
        await waiting
    except asyncio.CancelledError:
        if not waiting.cancelled():
            raise
    except rpc.errors.UnknownObject:
        assert kind in (by_get, by_join), kind
    except rpc.QueueShutDown:
        assert life.way or life.stop.is_set()
    else:
        if kind not in (by_reference, by_third, by_get):
            do.tell("waiting for ever has ended without an error")


async def end_here_or_wait(name: str) -> None:
    if rpc.current().name == name:
        await for_ever()


async def keep_references(do: Deed) -> None:
    """For longer than their owner may be there."""
    x = do.number()
    made = rpc.remote(do.to, extremes.Total, x)
    await rpc.call(do.third, keep_for_a_while, made, do.random.uniform(0.0, 0.5))
    own = rpc.RRef(extremes.Total(x))
    await rpc.call(do.to, keep_for_a_while, own, do.random.uniform(0.0, 0.5))
    await asyncio.sleep(do.random.uniform(0.0, 0.3))
    assert await made.rpc_async().add(1) == x + 1


async def keep_for_a_while(ref: Any, seconds: float) -> None:
    KEPT.append(ref)
    asyncio.get_running_loop().call_later(seconds, KEPT.remove, ref)


KEPT: list[Any] = []


async def read_news(do: Deed) -> None:
    """Come late to what others publish."""
    name = do.random.choice((NEWS, f"by-{do.to}"))
    version = 0
    seen: set[tuple[int, int]] = set()
    try:
        async with rpc.subscribe(name, timeout=SHORT * 2) as versions:
            async for each in versions:
                assert each.version > version, f"{each.version} after {version}"
                version = each.version
                stamp = check_version(each.value)
                assert stamp not in seen
                seen.add(stamp)
                if len(seen) == 3:
                    break
    except rpc.RpcTimeout:  # nobody publishes it just now
        pass


def check_version(value: dict[str, torch.Tensor]) -> tuple[int, int]:
    life, number = (int(each) for each in value["stamp"])
    assert is_full(value["large"], 50_000, float(number)), "a torn version"
    return life, number


STEPS: tuple[Callable[[Any], Awaitable[None]], ...] = (
    extremes.call,
    extremes.call_often,
    extremes.send_tensors,
    extremes.have_tensors_made,
    extremes.read_a_stream,
    extremes.leave_a_stream,
    extremes.give_up,
    extremes.hold_references,
    extremes.fill_batches,
    extremes.ask_for_gradients,
    call_noted,
    try_again,
    wait_for_one,
    use_ledgers,
    pass_references,
    call_some,
    call_any,
    map_over,
    meet_others,
    merge_streams,
    put_items,
    get_items,
    put_items,
    get_items,
    read_news,
    hear_of_its_end,
    hear_of_its_end,
    hear_of_its_end,
    keep_references,
)


# --- one worker -------------------------------------------------------------------------------------------------------


async def work(life: Lifecycle, chance: random.Random) -> None:
    """One thing after the other, until it is to stop."""
    while not life.stop.is_set() and not life.way:
        step = chance.choice(STEPS)
        to, third, fourth = (chance.choice(NAMES) for _ in range(3))
        do = Deed(to, third, random.Random(chance.random()), life, fourth, time.monotonic(), step.__name__)
        try:
            async with asyncio.timeout(PATIENCE):
                await step(do)
        except TimeoutError as error:
            if isinstance(error, rpc.RpcError):
                do.judge(error)
            else:
                pending = "" if life.way else life.worker.pending_calls()
                do.tell(f"did not end in time; pending: {pending}")
        except AssertionError as error:
            do.tell("".join(traceback.format_exception(error)))
        except Exception as error:
            do.judge(error)
        await asyncio.sleep(chance.uniform(0, 0.01))


async def publish_now_and_then(life: Lifecycle, chance: random.Random) -> None:
    world, number = WORLD[0], 0
    while not life.stop.is_set() and not life.way:
        number += 1
        value = {"stamp": torch.tensor([life.number, number]), "large": full(50_000, number)}
        name = chance.choice((NEWS, f"by-{life.name}"))
        try:
            made = await rpc.publish(name, value)
            world.note(f"{life} has published {name!r} as version {made.version}: {(life.number, number)}")
            if chance.random() < 0.3:
                delivery = await made.delivered(timeout=PATIENCE / 2)
                if not delivery.reached and not life.way:
                    world.wrong.append(f"{life}: {name!r}, version {made.version}, is not delivered: {delivery}")
            if chance.random() < 0.2:
                await rpc.unpublish(name)
                world.note(f"{life} has unpublished {name!r}")
        except rpc.RpcError as error:
            if not (life.way or (isinstance(error, rpc.RpcUsageError) and (name == NEWS or had_the_name(life)))):
                world.wrong.append(f"{life} publishes {name!r}: {type(error).__name__}: {error}")
        await wait_a_little(life, chance.uniform(0, 0.1))


def had_the_name(life: Lifecycle) -> bool:
    """Whether another one had its name, and may be taken for one that is there still."""
    others = [each for each in WORLD[0].lives if each.name == life.name and each is not life]
    return any(each.ended > life.came - soon() for each in others)


async def read_all_the_time(life: Lifecycle) -> None:
    world, newest = WORLD[0], 0
    while not life.stop.is_set() and not life.way:
        newest -= 1  # who begins anew reads the newest one once more
        try:
            async with rpc.subscribe(NEWS, timeout=SHORT) as versions:
                async for each in versions:
                    stamp = check_version(each.value)
                    if each.version <= newest:
                        world.wrong.append(f"{life} reads version {each.version} after {newest}: {stamp}")
                    newest = each.version
                    if life.stop.is_set():
                        break
        except rpc.RpcTimeout:
            pass
        except (rpc.RpcError, AssertionError) as error:
            if not life.way:
                world.wrong.append(f"{life} reads: {type(error).__name__}: {error}")
        await asyncio.sleep(0)


async def wait_a_little(life: Lifecycle, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(life.stop.wait(), seconds)


async def has_joined(life: Lifecycle, store: Store, chance: random.Random, gone: asyncio.Future[str]) -> bool:
    """Whether it did, before it was to go."""
    world, began = WORLD[0], time.monotonic()
    while True:
        life.worker.serve("ledger", Ledger(life.number))
        joining: asyncio.Future[Any] = asyncio.ensure_future(life.worker.start())
        await asyncio.wait([joining, gone], return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not joining.done():
            life.way = GAVE_UP
            world.note(f"{life} gives up")
            async with asyncio.timeout(PATIENCE):
                if chance.random() < 0.5:
                    joining.cancel()
                else:
                    await life.worker.shutdown(graceful=chance.random() < 0.5)
                try:
                    await joining
                except (asyncio.CancelledError, rpc.WorkerClosed, rpc.errors.RendezvousError):
                    pass
                else:
                    await life.worker.shutdown()
            world.note(f"{life} has given up, {life.worker!r}")
            return False
        try:
            await joining
            return True
        except rpc.errors.RendezvousError as error:
            before = [each for each in world.lives if each.name == life.name and each is not life]
            assert any(each.ended > began or each.way == "killed" for each in before), str(error)
        await asyncio.sleep(0.01)
        life.worker = rpc.init(life.name, store=store, role=life.role, options=life.worker.options)


async def live(life: Lifecycle, group: Group, chance: random.Random) -> None:
    """Join, do all that, and leave in the way that the group says."""
    world, gone = WORLD[0], group.gone[life]
    try:
        if await has_joined(life, group.store, chance, gone):
            with contextlib.ExitStack() as stack:
                async with life.worker as worker:
                    if group.slow:
                        delay_some(stack.enter_context(Faults(worker)), chance)
                    await work_until(life, gone, chance)
    except BaseException as error:
        world.wrong.append(f"{life}: {type(error).__name__}: {error}")
        raise
    finally:
        life.ended = time.monotonic()
        life.way = life.way or "failed"


def delay_some(faults: Faults, chance: random.Random) -> None:
    for kind in ("call", "remote", "fetch", "reply", "item", "reference", "cancel", "gradient", "context"):
        faults.delay(0.04, kind, when=lambda message: chance.random() < 0.1)


async def work_until(life: Lifecycle, gone: asyncio.Future[str], chance: random.Random) -> None:
    """As the current worker: do all that until it is to go, and go."""
    world, worker = WORLD[0], life.worker
    life.id = worker.id
    quiet: rpc.Queue[Any] = rpc.Queue(f"quiet-{life.name}")
    await quiet.put(None)  # which is never finished
    with contextlib.suppress(rpc.QueueEmpty):  # somebody waits for it already
        await quiet.get_nowait()
    life.queue = rpc.Queue(f"of-{life.name}", maxsize=chance.choice((0, 3)))
    life.came = time.monotonic()
    world.note(f"{life} is there, of role {life.role!r}, with id {life.id}")
    doing = [asyncio.create_task(work(life, random.Random(chance.random()))) for _ in range(AT_ONCE)]
    doing.append(asyncio.create_task(publish_now_and_then(life, random.Random(chance.random()))))
    doing.append(asyncio.create_task(read_all_the_time(life)))
    way = await gone
    world.note(f"{life} goes: {way}")
    if way == "left":
        life.stop.set()
        if chance.random() < 0.5:
            await asyncio.gather(*doing)
        if chance.random() < 0.5:
            life.queue.close()
    life.way = way
    async with asyncio.timeout(PATIENCE):
        if way == "killed":  # by anybody who knows it; it knows itself
            knows = [each.worker for each in world.living() if life.id in ids_of(each.worker)]
            await Faults(chance.choice([*knows, worker])).kill(life.id)
        else:
            report = await worker.shutdown(graceful=way == "left")
            killed = {each.name for each in world.lives if each.way == "killed"}
            if report.timed_out or not {info.name for info in report.lost} <= killed:
                world.wrong.append(f"{life} has left with {report}")
    world.note(f"{life} has gone")
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*doing)


# --- all of them ------------------------------------------------------------------------------------------------------


class Group:
    """Those that are there, and how they come and go.

    slow: whether some of what they send is delayed. gone: is given the way in which each is to go. tasks: their lives.
    """

    def __init__(self, seed: int, options: dict[str, Any]) -> None:
        self.chance = random.Random(seed)
        self.options = rpc.RpcBackendOptions(rpc_timeout=RPC_TIMEOUT, newcomer_grace=SHORT, **options)
        self.store = WatchedStore()
        if self.chance.random() < 0.4:
            slow = random.Random(seed)
            self.store.look = lambda *_: time.sleep(slow.random() ** 2 * 0.03)  # in a thread
        self.slow = self.chance.random() < 0.4
        self.gone: dict[Lifecycle, asyncio.Future[str]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, name: str, *, wait: bool = True) -> Lifecycle:
        world, role = WORLD[0], self.chance.choice(ROLES)
        worker = rpc.init(name, store=self.store, role=role, options=self.options)
        life = Lifecycle(len(world.lives), name, role, worker)
        world.lives.append(life)
        world.note(f"{life} comes")
        self.gone[life] = asyncio.get_running_loop().create_future()
        self.tasks.append(asyncio.create_task(live(life, self, random.Random(self.chance.random()))))
        if wait:
            await until(lambda: life.came < NEVER or life.ended < NEVER, PATIENCE)
        return life

    def go(self, life: Lifecycle, way: str) -> None:
        if not self.gone[life].done():
            self.gone[life].set_result(way)

    def cut(self) -> None:
        """Break connections over TCP, which are mended."""
        lines = [each for life in WORLD[0].living() for each in breakable(life.worker)]
        if lines:
            self.chance.choice(lines).break_off(1.0)

    async def change(self) -> None:
        """One thing that happens to somebody."""
        world, staying = WORLD[0], [life for life in WORLD[0].living() if not self.gone[life].done()]
        free = [name for name in NAMES if name not in {life.name for life in world.lives if life.ended == NEVER}]
        action = self.chance.choice(("come", "come", "left", "left at once", "killed", "return", "cut"))
        if action == "come" and free:
            life = await self.come(self.chance.choice(free), wait=self.chance.random() < 0.5)
            if self.chance.random() < 0.2:
                await asyncio.sleep(self.chance.uniform(0.0, 0.05))
                self.go(life, "left at once")
        elif action == "cut":
            self.cut()
        elif action != "come" and len(staying) > LEAST:
            life = self.chance.choice(staying)
            self.go(life, self.chance.choice(("left", "left at once", "killed")) if action == "return" else action)
            if action == "return":
                if self.chance.random() < 0.5:
                    await until(lambda: life.ended < NEVER)
                else:
                    await until(lambda: life.way)
                await self.come(life.name, wait=self.chance.random() < 0.5)
        await asyncio.sleep(self.chance.choice((0.0, 0.02, 0.1)))


async def run(seed: int, changes: int = 10, **options: Any) -> None:
    world = WORLD[0] = World()
    group = Group(seed, options)
    try:
        for name in group.chance.sample(NAMES, 4):
            await group.come(name)
        for _ in range(changes):
            await group.change()
            if world.wrong:
                break
        await until(lambda: all(life.came < NEVER or life.ended < NEVER for life in world.lives))
        staying = [life for life in world.living() if not group.gone[life].done()]
        for life in staying:
            life.stop.set()
        await until(lambda: all(life.ended < NEVER for life in world.lives if life not in staying))
        await until(lambda: all(life.worker.is_idle() for life in staying))
        if not world.wrong:
            names = {life.name for life in staying}
            for life in staying:
                await until(lambda: {info.name for info in life.worker.worker_infos()} == names)  # noqa: B023  # as below
                await drain(life)
            for life in staying:
                try:
                    await until(lambda: not left_of(life))  # noqa: B023  # awaited in the same turn
                except AssertionError:
                    world.wrong.append(f"{life} has left: {left_of(life)}")
    finally:
        for life, gone in group.gone.items():
            if not gone.done():
                group.go(life, group.chance.choice(("left", "left at once", "killed")))
        outcomes = await asyncio.gather(*group.tasks, return_exceptions=True)
    assert not world.wrong, "\n".join([*world.wrong, "", *world.log])
    assert not any(isinstance(each, BaseException) for each in outcomes), outcomes


def left_of(life: Lifecycle) -> dict[str, Any]:
    """But for memory that was lent to workers which are gone: the process that they were in, this one, lives."""
    found = what_is_left(life.worker)
    retired = [lender for _, lender in life.worker._node.memory._retired]
    if found.get("shared_leases") == sum(lender.leases for lender in retired):
        found = {name: count for name, count in found.items() if not name.startswith("shared_")}
    return found


def ids_of(worker: rpc.Worker) -> set[int]:
    return {info.id for info in worker.worker_infos()}


async def drain(life: Lifecycle) -> None:
    """What was put into its queue is there or was handed out, but for what consumers and producers took along."""
    world, queue = WORLD[0], life.queue
    assert queue is not None
    left: set[Any] = set()
    while True:
        try:
            key, _ = await queue.get_nowait()
        except rpc.QueueEmpty:
            break
        except rpc.errors.ItemLost as error:
            if not any(each.name == error.worker and each.way for each in world.lives):
                world.wrong.append(f"drain: {error}")
            continue
        left.add(key)
        if world.got[key]:
            world.wrong.append(f"item {key} of {life.name} was handed out, and was still there")
    put = [each for each in world.puts.values() if each.owner is life and each.done]
    missing = [each for each in put if each.item not in left and not world.got[each.item]]
    missing = [each for each in missing if not (each.large and each.producer.way)]
    if len(missing) > world.wasted[life]:
        items = [each.item for each in missing]
        world.wrong.append(f"items {items} of {life} are lost, and {world.wasted[life]} may be")


def some_options(seed: int) -> dict[str, Any]:
    """None but the transports, or some at an end."""
    chance = random.Random(seed)
    options: dict[str, Any] = {"transports": chance.choice((("unix",), ("tcp",), ("unix", "tcp")))}
    names = [name for name in extremes.ENDS if name not in ("reconnect_grace", "busy_wait")]
    chosen = chance.sample(names, chance.choice((0, 1, 3)))
    return options | {name: chance.choice(extremes.ENDS[name]) for name in chosen}


@asynccontextmanager
async def watched_for_stalls() -> AsyncIterator[list[float]]:
    """Gives the longest time, in seconds, in which this process did not run as it should."""
    longest = [0.0]

    async def look() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK)
            longest[0] = max(longest[0], time.monotonic() - before - TICK)

    task = asyncio.create_task(look())
    try:
        yield longest
    finally:
        task.cancel()


@pytest.mark.random
@pytest.mark.slow
async def test_members_come_and_go_while_all_goes_on() -> None:
    """In a group without a size, over whatever transport, and with options at their ends.

    What each has heard by then is judged by `soon`. On a machine that stood still meanwhile that says nothing of a
    worker, so the seed is tried again there.
    """
    for seed in range(examples(10)):
        options = some_options(seed)
        for tries in itertools.count(1):
            async with watched_for_stalls() as longest:
                try:
                    await run(seed, **options)
                    break
                except BaseException as error:
                    error.add_note(f"seed {seed}, {options}; stood still for {longest[0]:.2f} s")
                    if not isinstance(error, AssertionError) or longest[0] < STALL or tries == TRIES:
                        raise
