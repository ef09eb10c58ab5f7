"""Published values among several hosts: one reader of each fetches for all, in a chain that is mended where it breaks.

The hosts are made up: workers of this process that believe to be on different ones, and so use TCP between them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from aiorpc import NotAllowed, Overloaded, RpcBackendOptions, RpcUsageError, Worker, exposed
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.protocol.publication import VersionArrived, Want
from aiorpc.runtime.calls.values import Results
from aiorpc.runtime.publication.publisher import Publisher
from aiorpc.runtime.publication.relay import PIECE_SIZE
from aiorpc.runtime.publication.version_store import Stored
from aiorpc.testing import cluster
from aiorpc.types import Subscription
from tests.processes.workers import until
from tests.runtime.test_publishing import number_of, weights

PIECES = 5
SIZE = PIECES * PIECE_SIZE // 4


@contextlib.asynccontextmanager
async def hosts(patch: pytest.MonkeyPatch, *, allow: Any = None, **names: str) -> AsyncIterator[dict[str, Worker]]:
    """A free group of workers, each on the host that is said. allow: the option; with it, each has its name as role."""
    store, workers = HashStore(), {}
    try:
        for name, host in names.items():
            patch.setattr("aiorpc.runtime.lifecycle.host_identity", lambda host=host: host)
            options = RpcBackendOptions(require_secret=False, address="127.0.0.1", rpc_timeout=30, allow=allow)
            workers[name] = await Worker(name, store=store, options=options, role=name if allow else "")
        yield workers
    finally:
        for worker in reversed(list(workers.values())):
            await worker.shutdown()


def sent(worker: Worker) -> int:
    """Bytes that it has written to sockets."""
    return worker.statistics().bytes_sent


async def turn(subscriptions: list[Subscription[Any]], version: int) -> None:
    """All get that version."""
    for got in await asyncio.gather(*map(anext, subscriptions)):
        assert (got.version, number_of(got.value), got.publisher.name) == (version, version, "learner")


async def read_first(learner: Worker, *readers: Worker) -> list[Subscription[Any]]:
    """Subscriptions of these, one after the other, that have got version 1; the first one's worker leads its host."""
    await learner.publish("policy", weights(1, SIZE))
    subscriptions: list[Subscription[Any]] = []
    for reader in readers:
        subscriptions.append(reader.subscribe("policy"))
        await turn(subscriptions[-1:], 1)
    return subscriptions


async def test_what_leaves_the_publisher_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """For three other hosts with five readers: each host fetches once, and not all of them from the publisher."""
    names = {"learner": "a", "a1": "a", "b1": "b", "b2": "b", "c1": "c", "c2": "c", "d1": "d"}
    async with hosts(monkeypatch, **names) as workers:
        learner = workers["learner"]
        subscriptions = [worker.subscribe("policy") for name, worker in workers.items() if name != "learner"]
        for version in (1, 2, 3):
            last = await learner.publish("policy", weights(version, SIZE))
            await turn(subscriptions, version)
            delivery = await last.delivered(quorum=6)
            assert delivery.reached and len(delivery.has) == 6 and not delivery.missing
        before = sent(learner)
        await learner.publish("policy", weights(4, SIZE))
        await turn(subscriptions, 4)
        assert 4 * SIZE <= sent(learner) - before < 2 * 4 * SIZE
        assert sum(len(worker._node.publications.relays) for worker in workers.values()) == 3
        for subscription in subscriptions:
            subscription.close()
        await until(lambda: not any(worker._node.publications.relays for worker in workers.values()))
        await until(lambda: learner._node.memory.slots.used == 1)


@pytest.mark.parametrize("leads", ["", "actor"])
async def test_who_fetches_for_a_host_takes_no_rights_from_the_publisher(
    monkeypatch: pytest.MonkeyPatch, leads: str
) -> None:
    """A pickle that may be read is, whoever of the host fetches it: the reader itself, or one whose pickles are not."""
    names = {"learner": "a", **({leads: "b"} if leads else {}), "reader": "b"}
    allow = {"learner": "*", "actor": [exposed, "published/policy:read"], "reader": "published/*:read"}
    async with hosts(monkeypatch, allow=allow, **names) as workers:
        learner, subscriptions = workers["learner"], []
        await learner.publish("policy", weights(1, SIZE))
        for name in (leads, "reader") if leads else ("reader",):
            subscriptions.append(workers[name].subscribe("policy"))
            await turn(subscriptions[-1:], 1)
        assert workers[leads or "reader"]._node.publications.relays  # as it has asked first
        last = await learner.publish("policy", weights(2, SIZE))
        await turn(subscriptions, 2)
        assert (await last.delivered(quorum=len(subscriptions))).reached
        for subscription in subscriptions:
            subscription.close()


async def test_another_reader_fetches_when_the_leader_of_a_host_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its host, and the host behind it in the chain, get the next version all the same."""
    names = {"learner": "a", "c1": "c", "b1": "b", "b2": "b"}
    async with hosts(monkeypatch, **names) as workers:
        learner = workers["learner"]
        subscriptions = [workers[name].subscribe("policy") for name in ("b1", "b2", "c1")]
        await learner.publish("policy", weights(1, SIZE))
        await turn(subscriptions, 1)
        (leader,) = [name for name in ("b1", "b2") if workers[name]._node.publications.relays]
        left = subscriptions.pop(("b1", "b2").index(leader))
        await workers.pop(leader)._drop()
        last = await learner.publish("policy", weights(2, SIZE))
        await turn(subscriptions, 2)
        assert (await last.delivered(quorum=2)).reached
        left.close()
        for subscription in subscriptions:
            subscription.close()


async def test_the_next_publisher_is_followed_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited at a leader asks the new publisher."""
    async with hosts(monkeypatch, other="a", b1="b", b2="b", learner="a") as workers:
        subscriptions = [workers[name].subscribe("policy") for name in ("b1", "b2")]
        await workers["learner"].publish("policy", weights(1, SIZE))
        await turn(subscriptions, 1)
        await workers.pop("learner").shutdown()
        await until(lambda: len(workers["other"].worker_infos()) == 3)
        published = await workers["other"].publish("policy", weights(2, SIZE))
        assert published.version == 2
        for subscription in subscriptions:
            got = await anext(subscription)
            assert (got.version, got.publisher.name, number_of(got.value)) == (2, "other", 2)
            subscription.close()


async def test_all_hosts_let_go_of_a_name_that_is_unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their readers have the last version, also where it came in pieces meanwhile; nobody fetches or keeps it then."""
    async with hosts(monkeypatch, learner="a", a="a", b1="b", b2="b", c="c") as workers:
        learner = workers["learner"]
        subscriptions = [worker.subscribe("policy") for worker in workers.values()]

        def all_ask() -> bool:  # the readers of its own host, and who fetches for another one
            subscribers = learner._node.publications.publishers["policy"].subscribers.values()
            return sum(each.asked is not None for each in subscribers) == 4

        for version in (1, 3):
            await learner.publish("policy", weights(version, SIZE))
            await turn(subscriptions, version)
            await until(all_ask)
            last = await learner.publish("policy", weights(version + 1, SIZE))
            await learner.unpublish("policy")
            assert last.version == version + 1
            await turn(subscriptions, version + 1)
            for subscription in subscriptions:
                with pytest.raises(StopAsyncIteration):
                    await anext(subscription)
            await until(lambda: not any(worker._node.publications.relays for worker in workers.values()))
            await until(lambda: not any(worker._node.memory.slots.used for worker in workers.values()))
            subscriptions = [worker.subscribe("policy") for worker in workers.values()]
        for subscription in subscriptions:
            subscription.close()


async def test_what_a_reader_has_by_way_of_another_is_told_again_if_it_was_not_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deliveries would wait for it, although it has the version."""
    arrived, refused = Publisher.arrived, 0

    def refuse(self: Publisher, reader: WorkerRecord, said: VersionArrived) -> None:
        nonlocal refused
        refused += 1
        if refused < 4:
            raise Overloaded("too many calls")
        arrived(self, reader, said)

    monkeypatch.setattr(Publisher, "arrived", refuse)
    async with hosts(monkeypatch, learner="a", b="b") as workers, workers["b"].subscribe("policy") as versions:
        published = await workers["learner"].publish("policy", weights(1, SIZE))
        await turn([versions], 1)
        assert (await published.delivered(quorum=1)).has == (workers["b"].info,)


async def test_a_reader_without_shared_memory_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent the bytes by the publisher, and the others of its host have theirs."""
    async with hosts(monkeypatch, learner="a", b1="b", b2="b") as workers:
        workers["b2"]._node.engine.options.shared_memory = 0
        subscriptions = [workers[name].subscribe("policy") for name in ("b1", "b2")]
        for version in (1, 2):
            last = await workers["learner"].publish("policy", weights(version, SIZE))
            await turn(subscriptions, version)
            assert (await last.delivered(quorum=2)).reached
        assert not workers["b2"]._node.publications.relays
        for subscription in subscriptions:
            subscription.close()


async def test_without_leave_to_map_bytes_come_from_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is used again when the answers that brought its bytes are through."""
    async with hosts(monkeypatch, learner="a", b1="b") as workers:
        workers["b1"]._node.engine.options.shared_memory = 0
        async with workers["b1"].subscribe("policy") as versions:
            for version in range(1, 6):
                await workers["learner"].publish("policy", weights(version, SIZE))
                await turn([versions], version)
            await until(lambda: workers["learner"]._node.memory.slots.used == 1)
            assert len(workers["learner"]._node.memory.slots.numbers()) <= 3


FEW = {"b1": "published/policy:read", "c1": "published/policy:read", "*": "*"}


def corrupt(stored: Stored) -> None:
    """Other numbers in place of those that were published."""
    stored.data[:] = 7


def misname(stored: Stored) -> None:
    """What is said of the value is that of another one."""
    stored.bodies = (stored.bodies[0].replace(b"w", b"v"),)


@pytest.mark.parametrize("change", [corrupt, misname])
async def test_what_a_relay_hands_on_is_what_was_published(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Callable[[Stored], None]
) -> None:
    """A reader compares it with the digest of the publisher, takes the version from there, and says so once."""
    async with hosts(monkeypatch, learner="a", b1="b", b2="b", allow=FEW) as workers:
        learner, relays, reader = workers["learner"], workers["b1"]._node.publications.relays, workers["b2"]
        subscriptions = await read_first(learner, workers["b1"], reader)
        finish = relays["policy"].finish

        def lie(stored: Stored) -> None:
            change(stored)
            finish(stored)

        monkeypatch.setattr(relays["policy"], "finish", lie)
        for version in (2, 3):
            last = await learner.publish("policy", weights(version, SIZE))
            await turn(subscriptions[1:], version)
            assert reader.info in (await last.delivered(quorum=2)).has
        said = [record.message for record in caplog.records if "is not what learner" in record.message]
        assert len(said) == 1 and "what b1 (" in said[0] and "version 2 of 'policy'" in said[0]
        for subscription in subscriptions:
            subscription.close()


async def test_what_was_compared_cannot_be_changed_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has a copy of its own of what came through the memory of another worker than the publisher."""
    async with hosts(monkeypatch, learner="a", b1="b", b2="b", allow=FEW) as workers:
        subscriptions = await read_first(workers["learner"], workers["b1"])
        subscriptions.append(workers["b2"].subscribe("policy"))
        got = await anext(subscriptions[1])
        relay = workers["b1"]._node.publications.relays["policy"]
        (stored,) = relay._stored.values()
        corrupt(stored)
        assert number_of(got.value) == 1
        for subscription in subscriptions:
            subscription.close()


async def test_the_next_host_gets_what_was_published(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the one before it in the chain hands on: who fetches for a host compares it as well."""
    async with hosts(monkeypatch, learner="a", b1="b", c1="c", allow=FEW) as workers:
        subscriptions = await read_first(workers["learner"], workers["b1"], workers["c1"])
        relay = workers["b1"]._node.publications.relays["policy"]
        filled_to = relay.filled_to

        def lie(stored: Stored, end: int) -> None:
            corrupt(stored)
            filled_to(stored, end)

        monkeypatch.setattr(relay, "filled_to", lie)
        for version in (2, 3):
            await workers["learner"].publish("policy", weights(version, SIZE))
            await turn(subscriptions[1:], version)
        assert caplog.text.count("what b1 (") == 1
        for subscription in subscriptions:
            subscription.close()


async def nothing(*_: object) -> Any:
    """In place of an answer."""
    await asyncio.get_running_loop().create_future()


def rubbish(*_: object) -> Any:
    """No version."""
    return Results((b"\x90",))


def refuse(*_: object) -> Any:
    """As to who may not read."""
    raise NotAllowed("not for you")


@pytest.mark.parametrize("answer", [nothing, rubbish, refuse])
async def test_a_leader_that_hands_on_nothing_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]
) -> None:
    """Its readers get the versions from the publisher, and go on."""
    async with hosts(monkeypatch, learner="a", b1="b", b2="b") as workers:
        learner, leads, reader = workers.values()
        reader._node.engine.bounds = replace(reader._node.engine.bounds, stalled=0.02)
        subscriptions = await read_first(learner, leads)
        relay = leads._node.publications.relays["policy"]
        want = relay.want

        def stand(record: WorkerRecord, said: Want) -> Any:
            if record != reader._node.engine.record:
                return want(record, said)
            return asyncio.ensure_future(answer()) if answer is nothing else answer()

        monkeypatch.setattr(relay, "want", stand)
        subscriptions.append(reader.subscribe("policy"))
        for version in (1, 2):
            await turn(subscriptions[1:], version)
            await learner.publish("policy", weights(version + 1, SIZE))
        await turn(subscriptions[1:], 3)
        for subscription in subscriptions:
            subscription.close()


async def test_digests_are_those_of_the_latest_versions() -> None:
    """One that has gone is an error, which says so."""
    async with cluster(2) as workers:
        await workers[0].publish("policy", weights(1))
        there, record = workers[1]._node.publications.outbound, workers[0]._node.engine.record
        first = await there.digest(record, "policy", 1)
        assert type(first) is bytes and len(first) == 32 and await there.digest(record, "policy", 1) == first
        await workers[0].publish("policy", weights(2))
        assert await there.digest(record, "policy", 2) != first == await there.digest(record, "policy", 1)
        with pytest.raises(RpcUsageError, match="has version 7 of 'policy' no more"):
            await there.digest(record, "policy", 7)
        await until(lambda: workers[0]._node.memory.slots.used == 1)
