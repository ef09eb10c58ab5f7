"""Who is believed to publish a name, and who may: what the store says, and the rules of each worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import RpcBackendOptions, Worker
from aiorpc.protocol.publication import (
    LAST_VERSION,
    DigestWanted,
    Latest,
    LatestWanted,
    Lease,
    PieceWanted,
    SubscriptionClosed,
    Unpublished,
    VersionsReleased,
    Want,
    write,
)
from aiorpc.runtime.publication import leases, version_store
from aiorpc.runtime.publication.content import take_apart
from aiorpc.runtime.publication.handlers import digest, ended, latest, leased, pieced, released, unpublished, wanted
from aiorpc.runtime.publication.leases import StandingLease
from aiorpc.runtime.publication.publisher import Publisher
from aiorpc.testing import cluster
from tests.processes.workers import until
from tests.runtime.stores import Stuck, WatchedStore

FEW = {"actor": ["published/policy:read", "published/own/*:publish"], "*": "*"}


def say(liar: Worker, other: Worker, function: Callable[..., Any], message: Any) -> Any:
    """What another worker answers to a message of the runtime."""
    peer = liar._node.peers.of(other._node.engine.record)
    return peer.call(function, (write(message),), None, 20.0, system=True)


async def pretend(liar: Worker, value: float, turn: int = 1 << 30) -> Lease:
    """Give versions of "policy" to those that ask, without the name; the lease that goes with it."""
    record = liar._node.engine.record
    lease = Lease("policy", turn, record.id, record.name, 5)
    publisher = Publisher(liar._node, StandingLease(lease, record.incarnation, 1000))
    liar._node.publications.publishers["policy"] = publisher
    await publisher.put(take_apart("policy", torch.full((4,), value), liar._node.engine))
    return lease


async def test_a_lease_that_the_store_does_not_have_is_not_believed(trio: list[Worker]) -> None:
    """Readers stay with who has the name, and those that come later find it, whatever another member says."""
    learner, reader, liar = trio
    await learner.publish("policy", torch.zeros(4))
    async with reader.subscribe("policy", timeout=20) as versions:
        assert (await anext(versions)).publisher == learner.info
        lease = await pretend(liar, 666.0)
        for other in (learner, reader):
            await say(liar, other, leased, lease)
        for number in (1.0, 2.0):
            await learner.publish("policy", torch.full((4,), number))
            got = await anext(versions)
            assert (got.publisher, got.value[0]) == (learner.info, number)
        await say(liar, reader, unpublished, Unpublished("policy", 1))
        await say(liar, reader, unpublished, Unpublished("policy", lease.turn))
        async with reader.subscribe("policy", timeout=20) as late:
            assert (await anext(late)).publisher == learner.info
        last = await learner.publish("policy", torch.full((4,), 3.0))
        assert (await anext(versions)).value[0] == 3
        assert (await last.delivered(quorum=1)).has == (reader.info,)
    del liar._node.publications.publishers["policy"]


async def test_a_name_that_only_a_member_tells_of_has_no_publisher(pair: list[Worker]) -> None:
    """The store has no lease to it, so a reader waits for one, and whoever makes it is followed."""
    reader, liar = pair
    async with reader.subscribe("policy", timeout=20) as versions:
        await say(liar, reader, leased, await pretend(liar, 666.0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(versions), 0.3)
        del liar._node.publications.publishers["policy"]
        await reader.publish("policy", torch.ones(4))
        assert (await anext(versions)).publisher == reader.info


async def test_while_the_store_says_nothing_a_living_publisher_is_not_replaced() -> None:
    """What another member tells is believed for a name alone that no member is known to publish."""
    inner, stuck = HashStore(), Stuck()
    silent = WatchedStore(inner)
    async with AsyncExitStack() as stack:
        learner = await stack.enter_async_context(Worker("learner", store=inner))
        liar = await stack.enter_async_context(Worker("liar", store=inner))
        reader = await stack.enter_async_context(Worker("reader", store=silent))
        await until(lambda: len(learner.worker_infos()) == 3)
        await learner.publish("policy", torch.zeros(4))
        versions = stack.enter_context(reader.subscribe("policy", timeout=20))
        assert (await anext(versions)).publisher == learner.info
        silent.look = stuck
        stack.callback(stuck.open.set)
        await say(liar, reader, leased, await pretend(liar, 666.0))
        await learner.publish("policy", torch.ones(4))
        assert (await anext(versions)).publisher == learner.info
        del liar._node.publications.publishers["policy"]


async def test_what_a_member_says_of_versions_counts_up_to_what_the_store_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often a name is taken over past a member that lies, it stays of use."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (liar,):
        monkeypatch.setattr(liar._node.publications, "latest", lambda name: Latest(name, LAST_VERSION - 1, 0))
        for number in range(3):
            async with Worker(f"guest{number}", store=store) as guest:
                published = await guest.publish("policy", torch.ones(4))
                assert published.version <= number * (leases.RESERVED + 2) + 1
                await guest.shutdown(graceful=False)
            await until(lambda: len(liar.worker_infos()) == 1)
        async with Worker("last", store=store) as last:
            assert (await last.publish("policy", torch.ones(4))).version < 4 * leases.RESERVED
            await last.unpublish("policy")
        assert (await liar.publish("policy", torch.ones(4))).version < 4 * leases.RESERVED + 10


# --- rules for names ----------------------------------------------------------------------------------------------


async def test_who_may_not_publish_a_name_gets_nothing_of_it() -> None:
    """It is told so by a rule of those that would read it; others may have the name, and its own names are its own."""
    options = RpcBackendOptions(allow=FEW)
    async with cluster(3, options=options, roles=["learner", "actor", "reader"]) as (learner, actor, reader):
        with pytest.raises(rpc.NotAllowed, match=r"may not publish 'policy'.*Add 'published/policy:publish'") as raised:
            await actor.publish("policy", torch.zeros(4))
        assert (raised.value.caller, raised.value.role) == (actor.info.name, "actor")
        await learner.publish("policy", torch.ones(4))
        await actor.publish("own/steps", torch.zeros(4))
        async with actor.subscribe("policy", timeout=20) as versions, reader.subscribe("own/steps") as steps:
            assert (await anext(versions)).publisher == learner.info
            assert (await anext(steps)).publisher == actor.info


@pytest.mark.parametrize("allow", [{"actor": [rpc.exposed], "*": "*"}, {"actor": [], "*": "*"}])
async def test_who_may_not_read_a_name_gets_nothing_of_it(allow: Any) -> None:
    """Neither a version, nor a piece of one or its digest, nor what there is; functions that are exposed are none."""
    async with cluster(2, options=RpcBackendOptions(allow=allow), roles=["learner", "actor"]) as (learner, actor):
        await learner.publish("policy", torch.ones(1 << 16))
        async with actor.subscribe("policy", timeout=20) as versions:
            with pytest.raises(rpc.NotAllowed, match=r"may not read 'policy'.*Add 'published/policy:read'"):
                await anext(versions)
        for function, message in (
            (pieced, PieceWanted("policy", 1, 0, 64)),
            (digest, DigestWanted("policy", 1)),
            (latest, LatestWanted("policy")),
        ):
            with pytest.raises(rpc.NotAllowed, match="may not read"):
                await say(actor, learner, function, message)


async def test_a_lease_of_who_may_not_publish_keeps_a_name_from_nobody() -> None:
    """Also one that it has written into the store itself: readers do not follow it, and another one takes the name."""
    store, options = HashStore(), RpcBackendOptions(allow=FEW)
    async with AsyncExitStack() as stack:
        learner = await stack.enter_async_context(Worker("learner", store=store, options=options))
        actor = await stack.enter_async_context(Worker("actor", store=store, role="actor"))
        await until(lambda: len(learner.worker_infos()) == 2)

        async def write_lease() -> Lease:
            lease = await pretend(actor, 666.0)
            rendezvous, record = actor._node.rendezvous, actor._node.engine.record
            said = [lease.turn, lease.publisher, lease.worker, record.incarnation, lease.first, 1000]
            held = await asyncio.to_thread(rendezvous.look_up, "published/policy")
            await asyncio.to_thread(rendezvous.swap, "published/policy", held or "", json.dumps(said))
            return lease

        lease = await write_lease()
        with pytest.raises(rpc.NotAllowed):
            await say(actor, learner, leased, lease)
        versions = stack.enter_context(learner.subscribe("policy", timeout=0.2))
        with pytest.raises(rpc.RpcTimeout, match=r"'actor' \(id 1\) leases it, and is not followed: allow= gives"):
            await anext(versions)
        published = await learner.publish("policy", torch.ones(4))
        stays = stack.enter_context(learner.subscribe("policy", timeout=20))
        assert (await anext(stays)).publisher == learner.info and published.version > 5
        await write_lease()
        late = stack.enter_context(learner.subscribe("policy", timeout=20))
        assert (await anext(late)).publisher == learner.info
        await learner.publish("policy", torch.ones(4))
        assert (await anext(stays)).publisher == learner.info
        del actor._node.publications.publishers["policy"]


async def test_what_a_publisher_has_left_is_taken_from_those_that_may_publish_it() -> None:
    """What a member hands on is its own word: it has to be one whose own versions would be read."""
    store, options = HashStore(), RpcBackendOptions(allow=FEW)
    async with AsyncExitStack() as stack:
        actor = await stack.enter_async_context(Worker("actor", store=store, role="actor"))
        kept = stack.enter_context(actor.subscribe("policy", timeout=20))
        async with Worker("learner", store=store) as learner:
            await learner.publish("policy", torch.ones(4))
            await anext(kept)
        late = await stack.enter_async_context(Worker("late", store=store, options=options))
        with late.subscribe("policy", timeout=0.3) as versions, pytest.raises(rpc.RpcTimeout):
            await anext(versions)
        trusting = await stack.enter_async_context(Worker("trusting", store=store))
        with trusting.subscribe("policy", timeout=20) as versions:
            assert (await anext(versions)).version == 1


async def test_subscriptions_that_have_ended_count_as_long_as_they_hold_versions(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that ends them and lets go of nothing gets no more of them; what it was not given does not count."""
    monkeypatch.setattr(version_store, "_MOST_SUBSCRIPTIONS", 4)
    learner, reader = pair
    await learner.publish("policy", torch.ones(4096))

    async def read(number: int, held: list[int]) -> None:
        await say(reader, learner, wanted, Want("policy", number, 0, True, [], False))
        await say(reader, learner, ended, SubscriptionClosed("policy", number, held))

    for number in range(1, 11):
        await read(number, [2, 3])  # versions that it does not have
    for number in range(11, 15):
        await read(number, [1])
    with pytest.raises(rpc.Overloaded, match="4 subscriptions to 'policy', with those that have ended"):
        await read(15, [1])
    await say(reader, learner, released, VersionsReleased("policy", 11, [2]))
    with pytest.raises(rpc.Overloaded, match="4 subscriptions"):
        await read(15, [1])
    await say(reader, learner, released, VersionsReleased("policy", 11, [1]))
    await read(15, [1])
    with pytest.raises(rpc.Overloaded, match="4 subscriptions"):
        await read(16, [1])
