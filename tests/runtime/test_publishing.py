"""Published values among workers of this process: what readers get, in which order, and what the publisher is told."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs

import aiorpc as rpc
from aiorpc import RpcBackendOptions, Worker
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.publication import Message, SubscriptionClosed, VersionsReleased, Want
from aiorpc.runtime.publication.shelf import Key
from aiorpc.testing import cluster
from tests.processes.workers import until

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
    return worker.node.memory.slots.used


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
        assert len(pair[0].node.memory.slots.numbers()) <= 10


async def test_a_release_goes_along_with_the_next_question(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its whole time for that, whatever was released before it; only then it gets a message of its own."""
    publications = pair[1].node.publications
    said: dict[int, float] = {}

    def tell(record: WorkerRecord, message: Message) -> None:
        if isinstance(message, VersionsReleased):
            said.update(dict.fromkeys(message.versions, time.monotonic()))
        told(record, message)

    told = publications.tell
    monkeypatch.setattr(publications, "tell", tell)
    async with pair[1].subscribe("policy") as versions:
        for number in (1, 2, 3):
            await pair[0].publish("policy", weights(number))
            got = await anext(versions)
            released = time.monotonic()  # of the version before
            await asyncio.sleep(0.12)
        assert got.version == 3
        await until(lambda: 2 in said)
        # It waits for 0.2 s; timers are rounded to milliseconds. What was left of the time of the first one is 0.08 s.
        assert said[2] - released >= 0.15
        await until(lambda: slots_of(pair[0]) == 1)


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
    await until(lambda: not pair[1].node.publications.feeds)
    last = await pair[0].publish("policy", weights(2))
    assert await last.delivered() == rpc.Delivery(2, (), (), (), reached=True)


async def test_a_reader_that_holds_many_versions_gets_copies(pair: list[Worker]) -> None:
    """Who keeps all versions takes memory of its own for them, and the publisher's slots go round."""
    async with pair[1].subscribe("policy") as versions:
        kept = []
        for number in range(1, 20):
            last = await pair[0].publish("policy", weights(number))
            await last.delivered()
            kept.append((await anext(versions)).value)
        assert [number_of(value) for value in kept] == list(range(1, 20))
        assert len(pair[0].node.memory.slots.numbers()) <= 10


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
        assert workers[0].node.memory.slots.size <= limit


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
    assert delivery == rpc.Delivery(1, (trio[1].info,), (), (), reached=True)
    delivery = await first.delivered(quorum=2, timeout=0.05)
    assert delivery == rpc.Delivery(1, (trio[1].info,), (), (), reached=False)
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


async def test_two_that_claim_a_name_at_once_are_told_apart(pair: list[Worker]) -> None:
    """Exactly one of them publishes it."""
    outcomes = await asyncio.gather(*(worker.publish("policy", weights(1)) for worker in pair), return_exceptions=True)
    (refusal,) = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert isinstance(refusal, rpc.RpcUsageError)


async def test_a_turn_ends_in_time_and_may_be_tried_again(pair: list[Worker]) -> None:
    """The error says what was waited for, and why it has not come."""
    async with pair[1].subscribe("policy", timeout=0.05) as versions:
        with pytest.raises(rpc.RpcTimeout, match=r"no version of 'policy' has come .* nobody has published it yet"):
            await anext(versions)
    async with pair[1].subscribe("policy", timeout=20) as versions:
        await pair[0].publish("policy", weights(1))
        await anext(versions)
    async with pair[1].subscribe("policy", timeout=0.2) as versions:
        await anext(versions)
        with pytest.raises(rpc.RpcTimeout, match=r"newer than 1 .*: worker 'worker0' \(id 0\) publishes it"):
            await anext(versions)


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
    me = trio[0].node.engine.record
    publications = trio[1].node.publications
    asked = [publications.want(me, Want("policy", 99, 1, False, [], False)) for _ in range(2)]
    with pytest.raises(rpc.RpcUsageError, match="asked again"):
        await asked[0]
    asked[1].cancel()
    kept = publications.want(me, Want("policy", 98, 1, False, [], False))
    async with trio[2].subscribe("policy") as versions:
        assert (await anext(versions)).version == 1
        publications.tell(me, SubscriptionClosed("policy", 98, []))
        with pytest.raises(rpc.RpcUsageError, match="has ended"):
            await kept
        await trio[0].publish("policy", weights(2))
        assert (await anext(versions)).version == 2
    subscribers = trio[0].node.publications.publishers["policy"].subscribers
    publications.tell(me, SubscriptionClosed("policy", 99, []))
    await until(lambda: not subscribers)


async def test_an_answer_that_cannot_be_made_is_the_error_of_its_reader(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get the version, and whoever has published it hears of nothing."""
    await trio[0].publish("policy", weights(1))
    publisher = trio[0].node.publications.publishers["policy"]
    answer = publisher._answer

    def break_one(key: Key, *args: Any) -> Any:
        if key[0] == trio[1].info.id:
            raise RuntimeError("broken")
        return answer(key, *args)

    me = trio[0].node.engine.record
    future = trio[1].node.publications.want(me, Want("policy", 99, 1, False, [], False))
    async with trio[2].subscribe("policy") as versions:
        assert (await anext(versions)).version == 1
        await until(lambda: len(publisher.subscribers) == 2)
        monkeypatch.setattr(publisher, "_answer", break_one)
        await trio[0].publish("policy", weights(2))
        assert (await anext(versions)).version == 2
        with pytest.raises(RuntimeError, match="broken"):
            await future


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
    with pytest.raises(rpc.WouldBlockLoop):
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
    assert not pair[1].node.publications.publishers


async def test_a_reference_is_not_published(pair: list[Worker]) -> None:
    """It is counted for one receiver, and there is none."""
    reference = pair[0].remote("worker1", weights, 1)
    with pytest.raises(rpc.SerializationError, match="published as 'policy'"):
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
        with pytest.raises(rpc.SerializationError):
            workers[0].publish("policy", Unreadable())


async def test_a_publisher_with_few_rights_runs_no_pickle() -> None:
    """A reader whose rule is for the publisher's role reads plain tensors of it, and nothing that names a function."""
    options = RpcBackendOptions(serve={"learner": [rpc.exposed]})
    async with cluster(2, options=options, roles=["learner", "actor"]) as workers:
        versions = workers[1].subscribe("policy")
        await workers[0].publish("policy", torch.ones(LARGE))
        assert torch.equal((await anext(versions)).value, torch.ones(LARGE))
        await workers[0].publish("policy", weights(1))
        with pytest.raises(rpc.NotAllowed, match="serve"):
            await anext(versions)


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
