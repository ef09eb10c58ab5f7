"""What `aiorpc.group` returns: several workers, as they are called together."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ...errors import Overloaded, RpcError, RpcUsageError
from ...futures import CallSite, Future, call_site
from ...protocol.identity import WorkerInfo
from ..caller.peer import Peer
from ..caller.peers import Peers
from ..caller.retrying import Retries, RetryOptions
from ..references.references import References
from .group_call import GroupCall
from .members import Home as MembersHome
from .members import Members
from .outcomes import Outcomes
from .sending import Home as SendingHome
from .sending import Sending

Quorum = int | float


class Home(MembersHome, SendingHome, Protocol):
    """What a group of peers needs of the worker whose calls are made through it."""

    peers: Peers
    references: References
    retries: Retries


class GroupOptions(NamedTuple):
    """How the calls of a group are made. timeout: seconds, 0 for no limit. quorum: see `check_quorum`; None for all.

    retry: how each member's call is tried again; with 0 retries it is not, and only its `wait` counts.
    """

    timeout: float
    quorum: Quorum | None
    retry: RetryOptions


def check_quorum(quorum: Any) -> Quorum | None:
    """A number of members, or a share of them above 0 and up to 1.0; None as it is. RpcUsageError for all else."""
    if quorum is None or (type(quorum) is int and quorum >= 1) or (type(quorum) is float and 0.0 < quorum <= 1.0):
        return quorum
    raise RpcUsageError(
        f"quorum is a number of members from 1 on, or a share of them as a float above 0 and up to 1.0, not {quorum!r}"
    )


def count_of(quorum: Quorum | None, members: int) -> int | None:
    """How many of so many members a quorum asks for. RpcUsageError if it is more than there are."""
    if type(quorum) is float:
        return math.ceil(quorum * members - 1e-9)  # of ten 0.3 are three, not four
    if quorum is not None and quorum > members:
        raise RpcUsageError(f"a quorum of {quorum} is more than the group has, which is {members}; nothing was sent")
    return quorum  # type: ignore[return-value]  # an int or None, as was just seen


class PeerGroup:
    """Several workers, with options for the calls made to them; see `aiorpc.group`. Any thread."""

    def __init__(self, home: Home, members: Members, options: GroupOptions) -> None:
        """Raises RpcUsageError for a quorum that a list of so many workers cannot have."""
        self._home = home
        self._members = members
        self._options = options
        if members.count is not None:
            count_of(options.quorum, members.count)

    @property
    def members(self) -> list[WorkerInfo]:
        """Name and id of each member that there is now, in the order of members. UnknownWorker if there are none.

        The id of a worker that has not joined yet is -1.
        """
        return [WorkerInfo(peer.name, -1) if peer.record is None else peer.record.info for peer in self._members.now()]

    # --- all of them --------------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> GroupCall:
        """Run ``function(*args, **kwargs)`` on every member; starts at once. Awaiting it gives `Outcomes`.

        ``async for name, outcome in group.call(...)`` gives those of the members as they come. Arguments are encoded
        once for all of them. Members that fail, die or are late are told of in the outcomes; only where a quorum of
        values cannot be had, awaiting raises GroupError. Cancelling it calls off what is under way.
        Raised here, with nothing sent to anybody: UnknownWorker where no worker is in the group, SerializationError,
        RpcUsageError for a quorum that is larger than the group and for what is no function, WorkerClosed.
        """
        return self._call(function, args, kwargs, self._options, call_site(sys._getframe(1)))

    def rpc_async(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> GroupCall:
        """`call` with torch's arguments. timeout: seconds, negative for that of the group, 0 for no limit.

        quorum: as of `aiorpc.group`, whose it is if None.
        """
        return self._call(func, args or (), kwargs, self._with(timeout, quorum), call_site(sys._getframe(1)))

    def rpc_sync(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> Outcomes:
        """`rpc_async`, and block for the outcomes. Not on the worker's loop: WouldBlockLoop, with nothing sent."""
        self._home.engine.refuse_on_loop("group.rpc_sync()", "await group.call(...)")
        return self._call(func, args or (), kwargs, self._with(timeout, quorum), call_site(sys._getframe(1))).wait()

    def _with(self, timeout: float, quorum: Quorum | None) -> GroupOptions:
        options = self._options
        return options._replace(
            timeout=options.timeout if timeout < 0 else self._home.engine.timeout(timeout),
            quorum=options.quorum if quorum is None else check_quorum(quorum),
        )

    def _call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        options: GroupOptions,
        site: CallSite,
    ) -> GroupCall:
        peers = self._members.now()
        quorum = count_of(options.quorum, len(peers))
        home, retry = self._home, options.retry
        sending = Sending(home, peers, function, args, kwargs, options.timeout, wait=retry.wait, site=site)
        sending.prepare()
        call = GroupCall(home.engine, sending.name, [peer.name for peer in peers], quorum, site)

        def send(place: int) -> Future[Any]:
            if not retry.retries:
                return sending.send(place)
            to = peers[place].name
            return home.retries.call(to, function, tuple(args), kwargs or {}, options.timeout, retry, site)

        send_all(call, len(peers), send)
        sending.flush()
        return call

    def __repr__(self) -> str:
        return f"<aiorpc.group {self._members.describe()}, timeout {self._options.timeout:g} s>"


def send_all(call: GroupCall, count: int, send: Callable[[int], Future[Any]]) -> None:
    """Make the calls to so many members, one after the other, unless the call is over before.

    What is wrong with the call itself is raised if that shows at the first one: then nothing has been sent.
    """
    try:
        for place in range(count):
            if call.over:
                return
            try:
                call.follow(place, send(place))
            except RpcError as error:
                if place == 0 and isinstance(error, RpcUsageError) and not isinstance(error, Overloaded):
                    raise
                call.refused(place, error)
    except BaseException:
        call.cancel()
        raise


def busyness(peer: Peer) -> int:
    """How many calls of users this worker has under way to that one."""
    return len(peer.owed.pending) - peer.owed.system
