"""How the calls of a group of peers are made."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import RpcUsageError
from ...protocol.publication import share_of
from ..caller.retrying import RetryOptions

Quorum = int | float


class GroupOptions(NamedTuple):
    """How the calls of a group are made. timeout: seconds, 0 for no limit. quorum: see `check_quorum`; None for all.

    retry: how each member's call is tried again; with 0 retries it is not, and only its `wait` counts. progress:
    whether `PeerGroup.call` shows how many outcomes have come.
    """

    timeout: float
    quorum: Quorum | None
    retry: RetryOptions
    progress: bool = False


def check_quorum(quorum: object) -> Quorum | None:
    """Return a valid quorum: None, a number of members, or a share above 0 and up to 1.0. If not, RpcUsageError."""
    if quorum is None or (type(quorum) is int and quorum >= 1) or (type(quorum) is float and 0.0 < quorum <= 1.0):
        return quorum
    raise RpcUsageError(
        f"quorum is a number of members from 1 on, or a share of them as a float above 0 and up to 1.0, not {quorum!r}"
    )


def count_of(quorum: Quorum | None, members: int) -> int | None:
    """The number of members that a quorum needs. Raises RpcUsageError if it is more than `members`."""
    if type(quorum) is float:
        return share_of(quorum, members)
    if quorum is not None and quorum > members:
        raise RpcUsageError(f"a quorum of {quorum} is more than the group has, which is {members}; nothing was sent")
    return quorum  # type: ignore[return-value]  # an int or None, as was just seen
