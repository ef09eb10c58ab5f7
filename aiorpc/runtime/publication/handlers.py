"""What the workers of a group ask each other about published values, and tell each other: the functions for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ...errors import RpcUsageError
from ...protocol.identity import WorkerRecord
from ...protocol.publication import (
    Claim,
    Latest,
    LatestWanted,
    Message,
    PieceWanted,
    ReadersOfHost,
    SubscriptionClosed,
    Unpublished,
    VersionsReleased,
    Want,
    read,
    write,
)
from ..calls.current import caller, current_call
from ..calls.functions import inline, system
from ..calls.values import Results
from .publisher import Publisher
from .shelf import Shelf


class PublicationsForOthers(Protocol):
    """The published values of a worker (`Publications`), as far as other workers ask for them. On the loop."""

    @property
    def publishers(self) -> Mapping[str, Publisher]:
        """Of the names that this worker publishes."""

    def on_claim(self, claim: Claim, caller_id: int) -> int:
        """A worker says that it publishes a name. How many subscriptions to it there are here."""

    def on_unpublished(self, message: Unpublished, caller_id: int) -> None:
        """A worker does not publish a name any more."""

    def shelf_of(self, name: str) -> Shelf | None:
        """What gives versions of a name to others here; None if nothing does."""

    def shelf_with(self, name: str, version: int) -> Shelf | None:
        """What gives a version of a name to others here, also where the name was unpublished; None if nothing does."""

    def shelves_of(self, name: str) -> list[Shelf]:
        """Those that may have given versions of a name to somebody."""

    def hand_on(self, message: Want) -> asyncio.Task[Results]:
        """The newest version of a name that this worker reads, for who has come after its publisher had gone."""

    def latest(self, name: str) -> Latest:
        """What this worker has of a name."""

    def member(self, worker_id: int) -> WorkerRecord | None:
        """The member of that id, if there is one that lives."""

    def record_of(self, worker_id: int) -> WorkerRecord:
        """The record of a member that calls. RpcUsageError if it is none any more."""


def _current() -> tuple[PublicationsForOthers, int]:
    """In a handler: the published values of this worker, and the id of the caller."""
    call = current_call.get()
    assert call is not None, "these functions are handlers"
    node: Any = call.node  # a Node: there is nothing else
    return node.publications, call.caller_id


@system
@inline
def claimed(said: bytes) -> int:
    """Handler: the caller publishes a name. How many subscriptions to it there are here."""
    publications, caller_id = _current()
    return publications.on_claim(read(Claim, said), caller_id)


@system
@inline
def unpublished(said: bytes) -> None:
    """Handler: the caller does not publish a name any more."""
    publications, caller_id = _current()
    publications.on_unpublished(read(Unpublished, said), caller_id)


@system
@inline
def wanted(said: bytes) -> Results | asyncio.Future[Results]:
    """Handler: the newest version of a name that this worker publishes, once the caller has not got it."""
    publications, caller_id = _current()
    message = read(Want, said)
    shelf = publications.shelf_of(message.name)
    before = [version for version in message.released if shelf is None or not shelf.has(version)]
    if before:  # of before the name was unpublished, and published anew
        release = VersionsReleased(message.name, message.subscription, before)
        for other in publications.shelves_of(message.name):
            if other is not shelf:
                other.released(publications.record_of(caller_id), release)
    if shelf is None:
        return publications.hand_on(message)
    return shelf.want(publications.record_of(caller_id), message)


@system
async def pieced(said: bytes) -> torch.Tensor:
    """Handler: some bytes of a version, once they are there, for a worker that fetches it for its host."""
    publications, caller_id = _current()
    message = read(PieceWanted, said)
    shelf = publications.shelf_with(message.name, message.version)
    if shelf is None:
        raise RpcUsageError(f"worker {caller().name!r} asks for a version of {message.name!r} that is not here")
    return await shelf.piece(publications.record_of(caller_id), message)


@system
@inline
def readers(said: bytes) -> None:
    """Handler: what the readers of another host have, for which the caller fetches."""
    publications, caller_id = _current()
    message = read(ReadersOfHost, said)
    publisher = publications.publishers.get(message.name)
    if publisher is not None:
        have = {publications.member(worker): version for worker, version in message.readers}
        known = {record: version for record, version in have.items() if record is not None}
        publisher.on_readers_of_host(publications.record_of(caller_id), known)


@system
@inline
def latest(said: bytes) -> bytes:
    """Handler: what this worker has of a name."""
    publications, _ = _current()
    return write(publications.latest(read(LatestWanted, said).name))


@system
@inline
def released(said: bytes) -> None:
    """Handler: the caller does not use some versions any more."""
    publications, caller_id = _current()
    message = read(VersionsReleased, said)
    for shelf in publications.shelves_of(message.name):
        shelf.released(publications.record_of(caller_id), message)


@system
@inline
def ended(said: bytes) -> None:
    """Handler: a subscription of the caller has ended."""
    publications, caller_id = _current()
    message = read(SubscriptionClosed, said)
    for shelf in publications.shelves_of(message.name):
        shelf.closed(publications.record_of(caller_id), message)


#: Of what needs no answer: which function it is said by.
SAID: dict[type[Message], Callable[[bytes], None]] = {
    VersionsReleased: released,
    SubscriptionClosed: ended,
    ReadersOfHost: readers,
}
