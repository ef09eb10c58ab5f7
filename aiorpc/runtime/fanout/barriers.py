"""Barriers: the members of a group wait for each other at the one with the lowest id.

A tag and the ids of the members name a barrier. It exists from the first arrival until all have come, or no member
waits any more. That member's loop ends it: when the last member arrives, or when a member is gone. A member that gives
up before leaves the barrier, and may come again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from ...errors import Overloaded, PeerLeft, PeerLost, RpcError, RpcTimeout, RpcUsageError
from ...futures import Future
from ...protocol.identity import NAME_LIMIT
from ..caller.peer import Peer
from ..caller.reworded import RewordedFuture
from ..calls.current import current_call
from ..calls.declared import pack
from ..calls.failures import came_from_afar
from ..calls.functions import system
from .home import Home

_MOST, _MOST_MEMBERS = 256, 4096  # barriers where one member waits here; members of a barrier
# A caller waits longer than the barrier's timeout, for the names of the missing members: by this share of the timeout,
# and by so many seconds at least and at most.
_SHARE, _LEAST_GRACE, _GRACE = 0.1, 0.5, 5.0


def come(home: Home, peers: Sequence[Peer], tag: str, timeout: float) -> Future[None]:
    """This worker comes to a barrier of `peers`. Raises RpcUsageError, and the errors of `Peers.number_of`."""
    if type(tag) is not str or len(tag) > NAME_LIMIT:
        raise RpcUsageError(f"the tag of a barrier is a text of at most {NAME_LIMIT} characters, not {tag!r:.80}")
    home.engine.lifetime.check_begin()
    ids = {home.peers.number_of(peer): peer for peer in peers}
    if home.engine.id not in ids:
        raise RpcUsageError(
            f"worker {home.engine.name!r} is no member of the group, so no member waits for it at a barrier"
        )
    patience = timeout + min(_GRACE, max(_LEAST_GRACE, _SHARE * timeout)) if timeout else 0.0
    host = ids[min(ids)]
    call = host.call(come_to_barrier, (tag, pack(sorted(ids)), timeout), None, patience, system=True)
    call.parked = True
    return _AtBarrier(call, partial(_in_words_of_barriers, host, f"barrier {tag!r} of {len(ids)} workers", timeout))


def _in_words_of_barriers(host: Peer, what: str, timeout: float, error: BaseException | None) -> BaseException | None:
    """The error of the call, in words of barriers. host: the member that keeps the barrier."""
    if error is None or came_from_afar(error):
        return error
    gone = host.gone or host.parting
    if isinstance(error, (PeerLost, PeerLeft)) and gone is not None:
        failure: RpcError = type(error)(f"{what}: {host.name} will not come any more: {gone}")
        failure.__dict__.update(error.__dict__)
        return failure
    if isinstance(error, RpcTimeout):
        late = f". {error.late}" if error.late else ""
        text = f"{what}: {host.name}, where they wait for each other, has not answered after {timeout:g} s{late}"
        return RpcTimeout(text, worker=host.name, function="barrier", seconds=timeout)
    return error


class _AtBarrier(RewordedFuture):
    """The Future of a barrier: this worker is at it, or on its way, until it settles."""

    def wait(self, timeout: float | None = None) -> None:
        """See `Future.wait`. An interrupt, such as Ctrl-C, also leaves the barrier, unless others wait here.

        Otherwise the worker could not come again while this Future waits.
        """
        try:
            super().wait(timeout)
        except RpcError:  # of the barrier, or of waiting
            raise
        except BaseException:
            if not self._waiters:
                self.cancel()
            raise


class _Key(NamedTuple):
    tag: str
    members: tuple[int, ...]


class _Barrier:
    """One barrier. over: its result has the ids of gone members; it is empty if all have come."""

    def __init__(self, over: asyncio.Future[tuple[int, ...]], watch: asyncio.Task[None]) -> None:
        self.over = over
        self.watch = watch
        self.arrived: set[int] = set()


class Barriers:
    """The barriers at which members wait here. On the loop."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._barriers: dict[_Key, _Barrier] = {}
        self._waits: Counter[int] = Counter()  # by member: the number of barriers where it waits

    async def arrive(self, caller: int, tag: str, members: tuple[int, ...], timeout: float) -> None:
        """Wait for all members. timeout: seconds, 0 for no limit. Raises the errors of `PeerGroup.barrier`."""
        if caller not in members or self._home.engine.id != min(members) or len({*members}) < len(members):
            raise RpcUsageError("a member comes to a barrier of its own group, at the member with the lowest id")
        if self._waits[caller] >= _MOST:
            raise Overloaded(
                f"worker {self._name(caller)!r} waits at {_MOST} barriers of worker {self._home.engine.name!r} already"
            )
        key = _Key(tag, members)
        barrier = self._barriers.get(key)
        if barrier is None:
            over = self._home.engine.loop.create_future()
            watch = self._home.engine.tasks.spawn(self._watch(members, over))
            barrier = self._barriers[key] = _Barrier(over, watch)
        if caller in barrier.arrived:
            raise RpcUsageError(
                f"worker {self._name(caller)!r} waits at barrier {tag!r} already; give one of them a tag"
            )
        barrier.arrived.add(caller)
        self._waits[caller] += 1
        if len(barrier.arrived) == len(members):
            self._end(key, barrier, ())
        try:
            # Not `wait_for`: in Python 3.11 its cancellation takes some turns of the loop.
            async with asyncio.timeout(timeout or None):
                gone = await asyncio.shield(barrier.over)
        except TimeoutError:
            if not barrier.over.done():
                missing = ", ".join(self._name(each) for each in members if each not in barrier.arrived)
                text = f"barrier {tag!r} of {len(members)} workers: after {timeout:g} s {missing} had not come"
                raise RpcTimeout(text, function="barrier", seconds=timeout) from None
            gone = barrier.over.result()  # the last member came in the turn in which the time was up
        finally:
            self._waits[caller] -= 1
            if not self._waits[caller]:
                del self._waits[caller]
            barrier.arrived.discard(caller)
            if not barrier.arrived and self._barriers.get(key) is barrier:
                self._end(key, barrier, ())
        if gone:
            self._raise(tag, gone)

    def _end(self, key: _Key, barrier: _Barrier, gone: tuple[int, ...]) -> None:
        self._barriers.pop(key, None)
        barrier.watch.cancel()
        if not barrier.over.done():
            barrier.over.set_result(gone)

    async def _watch(self, members: tuple[int, ...], over: asyncio.Future[tuple[int, ...]]) -> None:
        """End a barrier when one of its members is gone."""
        listener, has_gone = self._home.events.listen(), self._home.group.has_gone
        try:
            while not (gone := tuple(each for each in members if has_gone(each))):
                await anext(listener)
            if not over.done():
                over.set_result(gone)
        except StopAsyncIteration:  # this worker leaves, and tells the members
            pass
        finally:
            await listener.aclose()

    def _name(self, member: int) -> str:
        return self._home.peers.describe(member)

    def _raise(self, tag: str, gone: tuple[int, ...]) -> None:
        first = next((each for each in gone if each in self._home.group.lost), None)
        text = f"barrier {tag!r}: {', '.join(map(self._name, gone))} will not come any more: "
        if first is not None:
            who = self._home.peers.info(first)
            lost = PeerLost(f"{text}{who.name} was lost", worker=who.name, rank=who.id)
            failure = self._home.peers.by_id(first).gone
            if isinstance(failure, PeerLost):  # if not, it refused this worker, which is a loss as well
                lost.host, lost.pid, lost.cause = failure.host, failure.pid, failure.cause
            raise lost
        raise PeerLeft(f"{text}{self._name(gone[0])} has shut down")


@system
async def come_to_barrier(
    tag: Annotated[str, Meta(max_length=NAME_LIMIT)],
    members: Annotated[list[int], Meta(min_length=1, max_length=_MOST_MEMBERS)],
    timeout: Annotated[float, Meta(ge=0)],
) -> None:
    """Handler, at the member with the lowest id: the caller has come to a barrier. Answers when all have."""
    call = current_call.get()
    assert call is not None, "this function is a handler"
    if call.permits is not None:
        call.permits.check_resource("barrier", tag, "come")
    node: Any = call.node  # always a Node
    await node.barriers.arrive(call.caller_id, tag, tuple(members), timeout)
