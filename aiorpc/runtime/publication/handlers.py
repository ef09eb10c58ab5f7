"""The handlers for questions and notices of other workers about published values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from msgspec import Struct

from ...errors import RpcUsageError
from ...protocol.identity import WorkerRecord
from ...protocol.publication import (
    DigestWanted,
    Latest,
    LatestWanted,
    Lease,
    LeaveWanted,
    PieceWanted,
    StillFetching,
    SubscriptionClosed,
    Unpublished,
    VersionArrived,
    VersionsReleased,
    Want,
    write,
)
from ..calls.current import current_call
from ..calls.functions import inline, system
from ..calls.values import Results
from .access import Access
from .publisher import Publisher
from .version_store import VersionStore


class PublicationsForOthers(Protocol):
    """The part of `Publications` that the handlers use. On the loop."""

    @property
    def publishers(self) -> Mapping[str, Publisher]:
        """Of the names that this worker publishes."""

    @property
    def access(self) -> Access:
        """Who may publish a name, and who may read it."""

    def on_lease(self, lease: Lease, record: WorkerRecord) -> int:
        """A worker publishes a name. Returns the number of subscriptions to it here."""

    def on_unpublished(self, message: Unpublished, caller_id: int) -> None:
        """A worker does not publish a name any more."""

    def version_store_of(self, name: str) -> VersionStore | None:
        """The publisher or relay of a name here; None if there is none."""

    def version_store_with(self, name: str, version: int) -> VersionStore | None:
        """The version store here that has a version of a name, even of an unpublished name; None if there is none."""

    def version_stores_of(self, name: str) -> list[VersionStore]:
        """The version stores that may have given versions of a name to readers."""

    def hand_on(self, message: Want) -> asyncio.Task[Results]:
        """The newest version that this worker has read, for a reader that came after the publisher had gone."""

    def latest(self, name: str) -> Latest:
        """What this worker has of a name."""


def _current() -> tuple[PublicationsForOthers, WorkerRecord]:
    """In a handler: this worker's published values, and the caller, which may not be known as a member yet."""
    call = current_call.get()
    assert call is not None and call.record is not None, "these functions are handlers"
    node: Any = call.node  # always a Node
    return node.publications, call.record


@system
@inline
def leased(lease: Lease) -> int:
    """Handler: the caller publishes a name. Returns the number of subscriptions to it here."""
    publications, caller = _current()
    return publications.on_lease(lease, caller)


@system
@inline
def leave(message: LeaveWanted) -> None:
    """Handler: raises NotAllowed if this worker would not take versions of a name from the caller."""
    publications, caller = _current()
    publications.access.check_publish(caller, message.name)


@system
@inline
def unpublished(message: Unpublished) -> None:
    """Handler: the caller does not publish a name any more."""
    publications, caller = _current()
    publications.on_unpublished(message, caller.id)


@system
@inline
def wanted(message: Want) -> Results | asyncio.Future[Results]:
    """Handler: the newest version of a name that this worker publishes, once it is newer than the caller's."""
    publications, caller = _current()
    publications.access.check_read(caller, message.name)
    versions = publications.version_store_of(message.name)
    before = [version for version in message.released if versions is None or not versions.has(version)]
    if before:  # versions from before the name was unpublished and published anew
        release = VersionsReleased(message.name, message.subscription, before)
        for other in publications.version_stores_of(message.name):
            if other is not versions:
                other.released(caller, release)
    if versions is None:
        return publications.hand_on(message)
    return versions.want(caller, message)


@system
async def pieced(message: PieceWanted) -> torch.Tensor:
    """Handler: some bytes of a version, once they are there, for a worker that fetches it for its host."""
    publications, caller = _current()
    publications.access.check_read(caller, message.name)
    versions = publications.version_store_with(message.name, message.version)
    if versions is None:
        raise RpcUsageError(f"worker {caller.name!r} asks for a version of {message.name!r} that is not here")
    return await versions.piece(caller, message)


@system
@inline
def digest(message: DigestWanted) -> asyncio.Future[bytes]:
    """Handler: the digest of a version that this worker publishes."""
    publications, caller = _current()
    publications.access.check_read(caller, message.name)
    return _publisher(publications, message.name).digest(message.version)


@system
@inline
def arrived(message: VersionArrived) -> None:
    """Handler: a subscription of the caller has a version whole that has come by way of another worker."""
    publications, caller = _current()
    _publisher(publications, message.name).arrived(caller, message)


@system
@inline
def fetching(message: StillFetching) -> None:
    """Handler: the caller goes on fetching for its host."""
    publications, caller = _current()
    _publisher(publications, message.name).goes_on(caller)


@system
@inline
def latest(message: LatestWanted) -> bytes:
    """Handler: what this worker has of a name, for a caller that may read it, or publish it next."""
    publications, caller = _current()
    name = message.name
    if not publications.access.may_publish(caller, name):
        publications.access.check_read(caller, name)
    return write(publications.latest(name))


@system
@inline
def released(message: VersionsReleased) -> None:
    """Handler: the caller does not use some versions any more."""
    publications, caller = _current()
    for versions in publications.version_stores_of(message.name):
        versions.released(caller, message)


@system
@inline
def ended(message: SubscriptionClosed) -> None:
    """Handler: a subscription of the caller has ended."""
    publications, caller = _current()
    for versions in publications.version_stores_of(message.name):
        versions.closed(caller, message)


def _publisher(publications: PublicationsForOthers, name: str) -> Publisher:
    publisher = publications.publishers.get(name)
    if publisher is None:
        raise RpcUsageError(f"this worker does not publish {name!r}")
    return publisher


#: The handler of each message that needs no answer.
SAID: dict[type[Struct], Callable[..., None]] = {
    VersionsReleased: released,
    SubscriptionClosed: ended,
    VersionArrived: arrived,
    StillFetching: fetching,
}
