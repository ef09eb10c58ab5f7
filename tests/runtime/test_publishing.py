"""Published values among workers of this process: what readers get, in which order, and what the publisher is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import RpcBackendOptions, Worker
from aiorpc.protocol.publication import SubscriptionClosed, Unpublished, Want
from aiorpc.testing import cluster
from aiorpc.types import Subscription
from tests.processes.workers import until
from tests.unlooked import unlooked_at

LARGE = 1 << 16  # floats: more than stands in a message itself


def weights(number: float, size: int = LARGE) -> dict[str, torch.Tensor]:
    """Some tensors whose elements are all that number."""
    return {"w": torch.full((size,), float(number)), "b": torch.full((3,), float(number))}


def number_of(value: dict[str, torch.Tensor]) -> float:
    """The number that all elements are; fails if they are several."""
    numbers = {float(limit) for tensor in value.values() for limit in tensor.aminmax()}
    assert len(numbers) == 1, numbers
    return numbers.pop()


def slots_of(worker: Worker) -> int:
    """How many slots are in use."""
    return worker._node.memory.slots.used


async def test_readers_get_what_was_published(trio: list[Worker]) -> None:
    """Each reader, the publisher itself among them, gets the value with its version and its publisher."""
    subscriptions = [worker.subscribe("policy") for worker in trio]
    published = await trio[0].publish("policy", weights(1))
    assert (published.name, published.version) == ("policy", 1)
    for subscription in subscriptions:
        async with subscription:
            got = await anext(subscription)
            assert number_of(got.value) == 1
            assert (got.version, got.publisher) == (1, trio[0].info)
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)


async def test_a_late_subscriber_begins_with_the_newest_version(pair: list[Worker]) -> None:
    """What was published before it came is skipped but for the last one."""
    for number in (1, 2, 3):
        await pair[0].publish("policy", weights(number))
    async with pair[1].subscribe("policy") as versions:
        got = await anext(versions)
        assert (got.version, number_of(got.value)) == (3, 3)


async def test_versions_that_nobody_began_are_skipped(pair: list[Worker]) -> None:
    """A reader that was busy for a while gets the newest version, not the next one."""
    async with pair[1].subscribe("policy") as versions:
        await pair[0].publish("policy", weights(1))
        assert (await anext(versions)).version == 1
        for number in (2, 3, 4):
            last = await pair[0].publish("policy", weights(number))
        assert (await last.delivered()).reached
        got = await anext(versions)
        assert (got.version, number_of(got.value)) == (4, 4)


ENDED = threading.Semaphore(0)  # for each handler below that has waited


def read_one() -> Any:
    try:
        return next(rpc.subscribe("policy"))
    finally:
        ENDED.release()


def wait_for_readers() -> bool:
    try:
        return rpc.publish("policy", 1).wait().delivered(quorum=2).wait().reached
    finally:
        ENDED.release()


def publish_one() -> None:
    rpc.publish("policy", 5).wait()


async def test_a_thread_that_waits_for_a_version_leaves_its_place_to_others() -> None:
    """As one that waits for a call does: the handler that publishes it may be behind."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=1, rpc_timeout=30.0)) as workers:
        reading = workers[0].call("worker1", read_one)
        await workers[0].call("worker1", publish_one)
        assert (await reading).value == 5
    assert ENDED.acquire(blocking=False)


@pytest.mark.parametrize("handler", [read_one, wait_for_readers])
async def test_who_waits_in_a_thread_waits_no_longer_than_its_caller(pair: list[Worker], handler: Any) -> None:
    """For a version, and for those who read one: the thread is free then."""
    with pytest.raises(rpc.RpcTimeout):
        await pair[0].peer("worker1", timeout=0.1).call(handler)
    assert await asyncio.to_thread(ENDED.acquire, timeout=30.0)


async def test_a_reader_may_write_and_nobody_sees_it(trio: list[Worker]) -> None:
    """The tensors are the reader's own, in the version that it has and in later ones in the same memory."""
    first, second = trio[1].subscribe("policy"), trio[2].subscribe("policy")
    await trio[0].publish("policy", weights(1))
    mine, theirs = await anext(first), await anext(second)
    mine.value["w"].fill_(7)
    assert number_of(theirs.value) == 1
    late = await anext(trio[1].subscribe("policy"))
    assert number_of(late.value) == 1
    for number in range(2, 8):
        del mine, theirs
        last = await trio[0].publish("policy", weights(number))
        await last.delivered()
        mine, theirs = await anext(first), await anext(second)
        assert number_of(mine.value) == number_of(theirs.value) == number
        mine.value["w"][::1000].fill_(-1)
    first.close()
    second.close()


async def test_the_publisher_may_change_its_tensors_afterwards(pair: list[Worker]) -> None:
    """A version is the value as it was: what is written to it later, readers do not see."""
    value = weights(1)
    await pair[0].publish("policy", value)
    value["w"].fill_(2)
    async with pair[1].subscribe("policy") as versions:
        assert number_of((await anext(versions)).value) == 1


async def test_structure_sharing_and_strides_are_kept(pair: list[Worker]) -> None:
    """Trees, dtypes, strides, Parameters and storages that tensors share arrive as they were."""
    base = torch.arange(LARGE, dtype=torch.float64).reshape(256, -1)
    value = OrderedDict(
        tied=[base, base],
        part=base[3:5],
        turned=base.t(),
        parameter=torch.nn.Parameter(torch.ones(2048)),
        small=torch.ones(2, dtype=torch.bfloat16),
        empty=torch.empty(0, 4),
        other=("text", 5, {"nested": torch.arange(5000)}),
    )
    await pair[0].publish("tree", value)
    async with pair[1].subscribe("tree") as versions:
        got = (await anext(versions)).value
    assert type(got) is OrderedDict and list(got) == list(value)
    assert torch.equal(got["tied"][0], base) and got["turned"].stride() == base.t().stride()
    got["tied"][0][3, 0] = -1
    assert got["tied"][1][3, 0] == got["part"][0, 0] == got["turned"][0, 3] == -1
    assert type(got["parameter"]) is torch.nn.Parameter and got["parameter"].requires_grad
    assert got["small"].dtype is torch.bfloat16 and got["empty"].shape == (0, 4)
    assert got["other"][:2] == ("text", 5) and torch.equal(got["other"][2]["nested"], torch.arange(5000))


async def test_a_slot_is_used_again_once_its_readers_have_let_go(pair: list[Worker]) -> None:
    """A version stays as it is while one of its tensors lives; afterwards a few slots go round."""
    async with pair[1].subscribe("policy") as versions:
        await pair[0].publish("policy", weights(1))
        kept = (await anext(versions)).value["w"]
        for number in range(2, 22):
            last = await pair[0].publish("policy", weights(number))
            await last.delivered()
            assert (await anext(versions)).version == number
        assert kept.unique().tolist() == [1]
        del kept
        await until(lambda: slots_of(pair[0]) == 1)
        assert len(pair[0]._node.memory.slots.numbers()) <= 10


async def test_the_last_tensor_gives_the_slot_back_after_the_subscription(pair: list[Worker]) -> None:
    """A subscription that has ended does not end what was taken from it."""
    versions = pair[1].subscribe("policy")
    await pair[0].publish("policy", weights(1))
    kept = (await anext(versions)).value["w"]
    versions.close()
    await pair[0].publish("policy", weights(2))
    assert slots_of(pair[0]) == 2 and kept.unique().tolist() == [1]
    del kept
    await until(lambda: slots_of(pair[0]) == 1)


async def test_a_subscription_that_is_dropped_ends(pair: list[Worker]) -> None:
    """Nobody has to close it."""
    versions = pair[1].subscribe("policy")
    await pair[0].publish("policy", weights(1))
    await anext(versions)
    del versions
    gc.collect()
    await until(lambda: not pair[1]._node.publications.prefetchers)
    last = await pair[0].publish("policy", weights(2))
    assert await last.delivered() == rpc.types.Delivery(2, (), (), (), reached=True)


class Signals:
    """Its unpickling is interrupted by a signal, as long as a handler is there."""

    def __reduce__(self) -> Any:
        return signal.raise_signal, (signal.SIGUSR1,)


# If it comes just before one of these is awaited:


async def test_a_reader_that_holds_many_versions_gets_copies(pair: list[Worker]) -> None:
    """Who keeps all versions takes memory of its own for them, and the publisher's slots go round."""
    async with pair[1].subscribe("policy") as versions:
        kept = []
        for number in range(1, 20):
            last = await pair[0].publish("policy", weights(number))
            await last.delivered()
            kept.append((await anext(versions)).value)
        assert [number_of(value) for value in kept] == list(range(1, 20))
        assert len(pair[0]._node.memory.slots.numbers()) <= 10


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["none", "little"])
async def test_without_shared_memory_versions_come_with_the_answers(limit: int) -> None:
    """Where there is none, or none is left, all goes on as before."""
    async with cluster(2, options=RpcBackendOptions(shared_memory=limit)) as workers:
        versions = workers[1].subscribe("policy")
        kept = []
        for number in range(1, 8):
            last = await workers[0].publish("policy", weights(number))
            await last.delivered()
            kept.append((await anext(versions)).value)
        assert [number_of(value) for value in kept] == list(range(1, 8))
        assert workers[0]._node.memory.slots.size <= limit


async def test_a_version_that_is_too_long_for_its_reader_is_told_in_a_turn() -> None:
    """Without a timeout it would wait for ever. It is not asked again before somebody wants a version."""
    store, few = HashStore(), RpcBackendOptions(max_incoming_bytes=1 << 20, shared_memory=0)
    async with rpc.init("worker0", store=store) as publisher, rpc.init("worker1", store=store, options=few) as reader:
        await publisher.publish("policy", weights(1, 1 << 20))
        versions = reader.subscribe("policy", timeout=0)
        for _ in range(2):
            with pytest.raises(rpc.RpcError, match=r"newest version of 'policy' cannot come .*max_incoming_bytes"):
                await anext(versions)
        with pytest.raises(rpc.RpcError, match=r"newest version of 'policy' cannot come .*max_incoming_bytes"):
            await asyncio.to_thread(next, versions)
        await publisher.publish("policy", weights(2))
        async with asyncio.timeout(20):
            assert number_of((await told_and_then(versions)).value) == 2
        versions.close()


async def told_and_then(versions: Subscription[Any]) -> rpc.types.PublishedVersion[Any]:
    """The next version, behind what was told of the one before."""
    while True:
        with contextlib.suppress(rpc.RpcError):
            return await anext(versions)


async def test_publishing_and_reading_at_the_same_time(trio: list[Worker]) -> None:
    """Versions go up at each reader, and each is whole."""
    value = weights(0, 1 << 19)

    async def read(worker: Worker) -> list[int]:
        seen = []
        async for got in worker.subscribe("policy"):
            assert number_of(got.value) == got.version
            seen.append(got.version)
            if got.version == 30:
                return seen
        raise AssertionError("it ended")

    readers = [asyncio.ensure_future(read(worker)) for worker in trio]
    for number in range(1, 31):
        for tensor in value.values():
            tensor.fill_(number)
        await trio[0].publish("policy", value)
    for seen in await asyncio.gather(*readers):
        assert seen == sorted(set(seen))


async def test_delivery_names_who_has_it_and_who_is_missing(trio: list[Worker]) -> None:
    """It settles with the quorum, or when the time is up, and never raises for that."""
    subscription = trio[1].subscribe("policy")
    first = await trio[0].publish("policy", weights(1))
    delivery = await first.delivered()
    assert delivery == rpc.types.Delivery(1, (trio[1].info,), (), (), reached=True)
    delivery = await first.delivered(quorum=2, timeout=0.05)
    assert delivery == rpc.types.Delivery(1, (trio[1].info,), (), (), reached=False)
    waiting = first.delivered(quorum=2)
    other = trio[2].subscribe("policy")
    assert (await waiting).has == (trio[1].info, trio[2].info)
    assert (await first.delivered(quorum=0.5)).reached
    subscription.close()
    other.close()


async def test_a_name_has_one_publisher(pair: list[Worker]) -> None:
    """The second one is told who has it; several names are several things."""
    await pair[0].publish("policy", weights(1))
    with pytest.raises(rpc.RpcUsageError, match=r"'policy' is published by worker 'worker0' \(id 0\)"):
        await pair[1].publish("policy", weights(1))
    assert (await pair[1].publish("value", weights(1))).version == 1


async def test_two_that_lease_a_name_at_once_are_told_apart(pair: list[Worker]) -> None:
    """Exactly one of them publishes it."""
    outcomes = await asyncio.gather(*(worker.publish("policy", weights(1)) for worker in pair), return_exceptions=True)
    (refusal,) = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert isinstance(refusal, rpc.RpcUsageError)


async def test_a_turn_ends_in_time_and_may_be_tried_again(pair: list[Worker]) -> None:
    """The error says what was waited for, and why it has not come."""
    async with pair[1].subscribe("policy", timeout=0.05) as versions:
        why = r"no version of 'policy' has come .* no worker publishes it at present"
        with pytest.raises(rpc.RpcTimeout, match=why):
            await anext(versions)
    async with pair[1].subscribe("policy", timeout=20) as versions:
        await pair[0].publish("policy", weights(1))
        await anext(versions)
    async with pair[1].subscribe("policy", timeout=0.2) as versions:
        await anext(versions)
        with pytest.raises(rpc.RpcTimeout, match=r"newer than 1 .*: worker 'worker0' \(id 0\) publishes it"):
            await anext(versions)


async def test_the_newest_version_is_there_at_once_or_not(pair: list[Worker]) -> None:
    """In a loop and in a thread: once for each version; None where nothing is newer, and when the name has ended."""
    async with pair[1].subscribe("policy") as versions:
        assert versions.newest() is None
        for number in (1, 2):
            await (await pair[0].publish("policy", weights(number))).delivered(quorum=1)
            got = versions.newest() if number == 1 else await asyncio.to_thread(versions.newest)
            assert got is not None and (got.version, number_of(got.value)) == (number, number)
            assert versions.newest() is None
        await (await pair[0].publish("policy", weights(3))).delivered(quorum=1)
        await pair[0].unpublish("policy")
        got = versions.newest()
        assert got is not None and got.version == 3
        assert versions.newest() is None
        with pytest.raises(StopAsyncIteration):
            await anext(versions)
    assert versions.newest() is None


async def test_taking_a_version_may_be_cancelled(pair: list[Worker]) -> None:
    """Whoever is cancelled while he waits loses none."""
    async with pair[1].subscribe("policy") as versions:
        waiting = asyncio.ensure_future(anext(versions))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await pair[0].publish("policy", weights(1))
        assert (await anext(versions)).version == 1


async def test_a_reader_that_gives_up_holds_up_nobody(trio: list[Worker]) -> None:
    """Not one that asks no more, nor one that asks twice, whose first question is refused; and its place is free."""
    await trio[0].publish("policy", weights(1))
    me = trio[0]._node.engine.record
    publications = trio[1]._node.publications
    asked = [publications.outbound.want(me, Want("policy", 99, 1, False, [], False)) for _ in range(2)]
    with pytest.raises(rpc.RpcUsageError, match="asked again"):
        await asked[0]
    asked[1].cancel()
    kept = publications.outbound.want(me, Want("policy", 98, 1, False, [], False))
    async with trio[2].subscribe("policy") as versions:
        assert (await anext(versions)).version == 1
        publications.outbound.tell(me, SubscriptionClosed("policy", 98, []))
        with pytest.raises(rpc.RpcUsageError, match="has ended"):
            await kept
        await trio[0].publish("policy", weights(2))
        assert (await anext(versions)).version == 2
    subscribers = trio[0]._node.publications.publishers["policy"].subscribers
    publications.outbound.tell(me, SubscriptionClosed("policy", 99, []))
    await until(lambda: not subscribers)


async def test_what_no_reader_could_read_is_not_published() -> None:
    """A value that just fits into a message does not fit into one that also says where its tensors lie."""
    limit = 20_000
    async with cluster(2, options=RpcBackendOptions(max_frame_bytes=limit)) as workers:
        read = refused = 0
        for size in range(limit - 1500, limit, 50):
            value = ["a" * size, *[torch.zeros(2000)] * 3]
            try:
                await workers[0].publish("policy", value)
            except rpc.errors.SerializationError as error:
                assert "max_frame_bytes" in str(error)
                refused += 1
            else:
                async with workers[1].subscribe("policy", timeout=20) as versions:
                    assert (await anext(versions)).value[0] == value[0]
                read += 1
        assert read and refused


async def test_a_publish_that_fails_unseen_is_logged(pair: list[Worker], caplog: pytest.LogCaptureFixture) -> None:
    """With the place that it was made at, as a call that fails; what somebody has looked at is not."""

    logged = partial(unlooked_at, caplog)

    await pair[0].publish("policy", weights(1))
    with caplog.at_level(logging.ERROR, "aiorpc"):
        with pytest.raises(rpc.RpcUsageError):
            await pair[1].publish("policy", weights(1))
        assert logged() == []
        pair[1].publish("policy", weights(1))
        await until(logged)
    (line,) = logged()
    assert line.startswith(f"publishing 'policy' (made at {__file__}:") and "is published by worker 'worker0'" in line


async def test_the_blocking_form(pair: list[Worker]) -> None:
    """A thread publishes with ``wait`` and reads with ``for``; on the loop that is refused."""
    publisher, reader = pair

    def read() -> list[int]:
        seen = []
        with reader.subscribe("policy", timeout=20) as versions:
            for number in (1, 2):
                published = publisher.publish("policy", weights(number)).wait()
                assert published.delivered(quorum=1).wait().reached
                seen.append(next(versions).version)
            versions.close()
            assert list(versions) == []
        return seen

    assert await asyncio.to_thread(read) == [1, 2]
    with pytest.raises(rpc.errors.WouldBlockLoop):
        next(iter(reader.subscribe("policy")))


async def test_bad_input_is_refused_before_anything_is_sent(pair: list[Worker]) -> None:
    """Names, timeouts, quorums and values that cannot be."""
    attempts: list[Callable[[], Any]] = [
        lambda: pair[0].publish("", weights(1)),
        lambda: pair[0].publish("a name", weights(1)),
        lambda: pair[0].publish("n" * 128, weights(1)),
        lambda: pair[0].subscribe(3),  # type: ignore[arg-type]  # that is the point
        lambda: pair[0].subscribe("policy", timeout=-1),
        lambda: pair[0].publish("policy", (number for number in range(3))),
    ]
    for attempt in attempts:
        with pytest.raises(rpc.RpcUsageError):
            attempt()
    published = await pair[0].publish("policy", weights(1))
    for quorum in (0, -1, 1.5, True, "all", 3):
        with pytest.raises(rpc.RpcUsageError, match="quorum"):
            published.delivered(quorum=quorum)  # type: ignore[arg-type]  # that is the point
    assert not pair[1]._node.publications.publishers


async def test_a_reference_is_not_published(pair: list[Worker]) -> None:
    """It is counted for one receiver, and there is none."""
    reference = pair[0].remote("worker1", weights, 1)
    with pytest.raises(
        rpc.errors.SerializationError, match=r"published as 'policy' .*a reference is sent to one worker"
    ):
        await pair[0].publish("policy", {"reference": reference})
    await reference


async def test_what_cannot_be_read_says_so(pair: list[Worker]) -> None:
    """The turn raises, and the next one goes on."""
    async with pair[1].subscribe("policy") as versions:
        await pair[0].publish("policy", Unreadable())
        with pytest.raises(rpc.RpcError, match=r"version 1 of 'policy' cannot be read here: .*not today"):
            await anext(versions)
        await pair[0].publish("policy", weights(2))
        assert (await anext(versions)).version == 2


class Unreadable:
    """It can be written and not read."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not today")


async def test_safe_groups_publish_too() -> None:
    """Without pickles, and with the rule that they have by default."""
    async with cluster(2, options=RpcBackendOptions(serialization="safe")) as workers:
        async with workers[1].subscribe("policy") as versions:
            await workers[0].publish("policy", weights(1))
            assert number_of((await anext(versions)).value) == 1
        with pytest.raises(rpc.errors.SerializationError):
            workers[0].publish("policy", Unreadable())


async def test_a_publisher_with_few_rights_runs_no_pickle() -> None:
    """A reader whose rule is for the publisher's role reads plain tensors of it, and nothing that names a function."""
    options = RpcBackendOptions(allow={"learner": ["published/policy:publish"], "actor": ["published/policy:read"]})
    async with cluster(2, options=options, roles=["learner", "actor"]) as workers:
        versions = workers[1].subscribe("policy")
        await workers[0].publish("policy", torch.ones(LARGE))
        assert torch.equal((await anext(versions)).value, torch.ones(LARGE))
        await workers[0].publish("policy", weights(1))
        with pytest.raises(rpc.NotAllowed, match=r"allow.* publish each tensor by itself"):
            await anext(versions)


@pytest.mark.parametrize("role", ["actor", "learner"])
async def test_what_a_publisher_has_left_behind_is_read_by_the_rights_that_it_had(role: str) -> None:
    """Also by who comes after it had gone, and never knew it: whoever hands the version on says what role it had."""
    store, options = HashStore(), RpcBackendOptions(allow={"actor": ["published/*:publish"], "*": "*"})
    async with Worker("reader", store=store, options=options) as reader:
        versions = reader.subscribe("policy")
        async with Worker("publisher", store=store, role=role) as publisher:
            await (await publisher.publish("policy", weights(1))).delivered()
        await until(lambda: reader._node.group.is_gone(publisher._node.engine.record))
        async with (
            Worker("newcomer", store=store, options=options) as newcomer,
            newcomer.subscribe("policy") as late,
        ):
            for each in (versions, late):
                if role == "actor":
                    with pytest.raises(rpc.NotAllowed, match="allow"):
                        await anext(each)
                else:
                    assert number_of((await anext(each)).value) == 1
        versions.close()


async def test_a_worker_that_leaves_ends_its_subscriptions_and_waits() -> None:
    """Whoever waits for a version, or for a delivery, is told that the worker has shut down."""
    async with cluster(2) as workers:
        versions = workers[1].subscribe("policy")
        waiting = asyncio.ensure_future(anext(versions))
        published = await workers[1].publish("value", weights(1))
        delivered = published.delivered(quorum=2)
        await asyncio.sleep(0)
    with pytest.raises(rpc.WorkerClosed):
        await waiting
    with pytest.raises(rpc.WorkerClosed):
        await delivered
    with pytest.raises(rpc.WorkerClosed):
        workers[1].publish("value", weights(1))


async def test_who_has_left_holds_nothing_though_its_process_lives() -> None:
    """Its publishers heard before it left that its subscriptions end."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (first,):
        for number in range(3):
            async with Worker("second", store=store) as second:
                versions = second.subscribe("policy")
                await first.publish("policy", weights(number))
                await anext(versions)
        await first.publish("policy", weights(3))
        await until(lambda: slots_of(first) == 1)


async def test_newcomers_of_a_free_group_read_and_publish() -> None:
    """They hear who publishes what when they join, and may take a name over from one that has left."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (first,):
        await first.publish("policy", weights(1))
        second = await Worker("second", store=store)
        versions = second.subscribe("policy")
        assert (await anext(versions)).version == 1
        await second.publish("value", weights(1))
        third = await Worker("third", store=store)
        assert (await anext(third.subscribe("value"))).publisher == second.info
        await second.shutdown()
        with pytest.raises(rpc.RpcUsageError, match="'policy' is published by worker 'worker0'"):
            await third.publish("policy", weights(2))
        assert (await third.publish("value", weights(2))).version == 2
        await third.shutdown()


@asynccontextmanager
async def three_of_a_free_group() -> AsyncIterator[tuple[Worker, Worker, Worker]]:
    """Of whom the first may leave meanwhile."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (third,):
        second = await Worker("second", store=store)
        first = await Worker("first", store=store)
        yield first, second, third
        await first.shutdown()
        await second.shutdown()


@pytest.mark.parametrize("value", [torch.ones(LARGE), torch.ones(64, 4), {"step": 3}], ids=["large", "small", "none"])
async def test_the_last_version_stays_with_its_readers(value: Any) -> None:
    """Whoever subscribes after its publisher has left gets it from a reader, whether it has large tensors or none."""
    async with three_of_a_free_group() as (first, reader, late):
        await first.publish("policy", value)
        async with reader.subscribe("policy") as versions:
            assert (await anext(versions)).version == 1
            await first.shutdown()
            async with late.subscribe("policy", timeout=20) as others:
                got = await anext(others)
        assert (got.version, got.publisher) == (1, first.info)
        assert torch.equal(got.value, value) if isinstance(value, torch.Tensor) else got.value == value


async def test_versions_go_on_where_they_were_though_nobody_reads_them_just_then() -> None:
    """Whoever has read a name, and subscribes to it again, gets no other version under a number that it has read."""
    async with three_of_a_free_group() as (first, second, reader):
        for number in (1, 2, 3):
            await first.publish("policy", weights(number))
        for _ in range(2):
            async with reader.subscribe("policy", timeout=20) as versions:
                assert (await anext(versions)).version == 3
        await first.shutdown()
        assert (await second.publish("policy", weights(4))).version == 4
        async with reader.subscribe("policy", timeout=20) as versions:
            got = await anext(versions)
            assert (got.version, number_of(got.value)) == (4, 4.0)


async def test_a_publisher_forgets_whom_it_has_told_once_they_are_gone() -> None:
    """However many workers come and leave, it keeps no more than those that are there."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (first,):
        await first.publish("policy", weights(1))
        publisher = first._node.publications.publishers["policy"]
        for number in range(3):
            guest = await Worker(f"guest{number}", store=store)
            async with guest.subscribe("policy", timeout=20) as versions:
                assert (await anext(versions)).version == 1
            assert len(publisher.told) == 1
            await guest.shutdown()
            await until(lambda: not publisher.told)


async def test_subscriptions_end_when_the_name_is_unpublished(trio: list[Worker]) -> None:
    """On all workers, the publisher's own among them, whether they wait or have something to take."""
    waiting = [worker.subscribe("policy") for worker in trio]
    idle = trio[1].subscribe("policy")
    other = trio[2].subscribe("other")
    published = await trio[0].publish("policy", weights(1))
    got = [await anext(subscription) for subscription in waiting]
    turns = [asyncio.ensure_future(anext(subscription)) for subscription in waiting]
    await published.delivered()
    await trio[0].unpublish("policy")
    for turn in turns:
        with pytest.raises(StopAsyncIteration):
            await turn
    assert [each.version async for each in idle] == [1]
    assert [number_of(each.value) for each in got] == [1, 1, 1]
    await trio[0].publish("other", weights(2))
    assert number_of((await anext(other)).value) == 2
    for subscription in (*waiting, idle, other):
        subscription.close()


async def test_a_name_that_was_unpublished_may_be_published_anew(trio: list[Worker]) -> None:
    """By another worker or by the same one; versions go on, and who subscribes from then on reads that."""
    for number, publisher in enumerate((trio[0], trio[1], trio[1], trio[2], trio[0])):
        published = await publisher.publish("policy", weights(number))
        assert published.version == number + 1
        async with trio[2].subscribe("policy") as versions:
            got = await anext(versions)
            assert (got.version, got.publisher, number_of(got.value)) == (number + 1, publisher.info, number)
            await publisher.unpublish("policy")
            assert [each async for each in versions] == []


async def test_the_blocking_form_of_unpublishing(pair: list[Worker]) -> None:
    """A thread unpublishes with ``wait``, and its ``for`` ends."""

    def read() -> list[int]:
        published = pair[0].publish("policy", weights(1)).wait()
        with pair[1].subscribe("policy", timeout=20) as versions:
            published.delivered(quorum=1).wait()
            pair[0].unpublish("policy").wait()
            return [each.version for each in versions]

    assert await asyncio.to_thread(read) == [1]


async def test_publishing_and_unpublishing_take_turns(pair: list[Worker]) -> None:
    """What was published before is published still, and what is published behind it begins the name anew."""
    async with pair[1].subscribe("policy") as versions:
        await pair[0].publish("policy", weights(1))
        assert (await anext(versions)).version == 1
        first = pair[0].publish("policy", weights(2))
        ended = pair[0].unpublish("policy")
        second = await pair[0].publish("policy", weights(3))
        assert first.done() and ended.done()
        assert ((await first).version, second.version) == (2, 3)
        assert [each.version async for each in versions] in ([], [2])
    async with pair[1].subscribe("policy") as versions:
        assert number_of((await anext(versions)).value) == 3


async def test_the_memory_of_a_name_that_was_unpublished_goes_with_its_readers(pair: list[Worker]) -> None:
    """At once where nobody reads it; else what a reader holds stays as it is until that is dropped."""
    for number in range(3):
        await pair[0].publish(f"of{number}", weights(number))
    assert slots_of(pair[0]) == 3
    async with pair[1].subscribe("of1") as versions:
        got = await anext(versions)
        for number in range(3):
            await pair[0].unpublish(f"of{number}")
        assert slots_of(pair[0]) == 1
        await pair[0].publish("of1", weights(7))
        assert number_of(got.value) == 1
        del got
        await until(lambda: slots_of(pair[0]) == 1)
        await pair[0].unpublish("of1")
    await until(lambda: slots_of(pair[0]) == 0)
    assert not pair[0]._node.publications.publishers and pair[1]._node.publications.names.get("of1") is None


async def test_a_delivery_of_a_name_that_was_unpublished_settles(pair: list[Worker]) -> None:
    """As it stands then; afterwards nobody knows any more who has got it."""
    published = await pair[0].publish("policy", weights(1))
    delivered = published.delivered(quorum=2, timeout=0)
    async with pair[1].subscribe("policy") as versions:
        await anext(versions)
        await published.delivered(quorum=1)
        await pair[0].unpublish("policy")
        delivery = await delivered
        assert (delivery.has, delivery.reached) == ((pair[1].info,), False)
    with pytest.raises(rpc.RpcUsageError, match="worker 'worker0' has unpublished 'policy'"):
        await published.delivered()


async def test_only_its_publisher_may_unpublish_a_name(pair: list[Worker]) -> None:
    """The others are told who that is; what never was one is no name here either."""
    with pytest.raises(rpc.RpcUsageError, match=r"worker 'worker0' cannot unpublish 'policy'.*no worker publishes it"):
        await pair[0].unpublish("policy")
    await pair[1].publish("policy", weights(1))
    await until(lambda: pair[0]._node.publications.names.get("policy"))
    with pytest.raises(rpc.RpcUsageError, match=r"it does not publish it: worker 'worker1' .* publishes it"):
        await pair[0].unpublish("policy")
    with pytest.raises(rpc.RpcUsageError, match="what is published has a name"):
        pair[0].unpublish("no name")
    pair[0]._node.publications.on_unpublished(Unpublished("policy", 1), pair[0].info.id)  # who speaks for itself alone
    async with pair[0].subscribe("policy") as versions:
        assert (await anext(versions)).version == 1
