"""`PeerGroup`, which `aiorpc.group` returns: several workers that are called together."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, overload

from ... import progress
from ..._typing import Arg, Args, Function, Items, Kwargs, Later, P, T
from ...collecting import wait_alone
from ...errors import RpcUsageError, UnknownWorker
from ...futures import Future
from ...notebooks import html_table
from ...protocol.identity import WorkerInfo, check_object_name
from ...protocol.messages import ObjectMethod
from ...sites import CallSite, call_site
from ..caller.misuse import check_arguments, stays_here
from ..caller.peer import Peer
from ..caller.stream import open_stream
from ..calls.batched import Batched
from ..calls.functions import describe
from ..calls.options import CallOptions
from .barriers import come
from .group_call import GroupCall
from .group_object import GroupObject
from .group_stream import GroupStream
from .home import Home
from .mapping import GroupMap
from .members import Members
from .options import GroupOptions, Quorum, check_quorum, count_of
from .outcomes import Outcomes
from .rref_group import RRefGroup
from .sending import Called, Sending, send_all

S = TypeVar("S")


class PeerGroup:
    """Several workers, with options for the calls made to them; see `aiorpc.group`. Any thread."""

    def __init__(self, home: Home, members: Members, options: GroupOptions) -> None:
        """Raises RpcUsageError for a quorum larger than a list of workers."""
        self._home = home
        self._members = members
        self._options = options
        self._turns = itertools.count()
        if members.count is not None:
            count_of(options.quorum, members.count)

    @property
    def members(self) -> list[WorkerInfo]:
        """Name and id of each present member, in the order of members. Raises UnknownWorker if there are none.

        The id of a worker that has not joined yet is -1.
        """
        return [WorkerInfo(peer.name, -1) if peer.record is None else peer.record.info for peer in self._members.now()]

    # --- all of them --------------------------------------------------------------------------------------------------

    @overload
    def call(self, function: Batched[..., Arg, T], /, *args: Arg, **kwargs: Arg) -> GroupCall[T]: ...

    @overload
    def call(self, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> GroupCall[T]: ...

    @overload
    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> GroupCall[T]: ...

    def call(self, function: Function, /, *args: Arg, **kwargs: Arg) -> GroupCall[Any]:
        """Run ``function(*args, **kwargs)`` on every member; starts at once. Awaiting it gives `Outcomes`.

        ``async for name, outcome in group.call(...)`` gives the outcomes as they come. Arguments are encoded once for
        all members. The outcome of a member that fails, dies or is late has the error; awaiting raises GroupError only
        if a quorum of values cannot be reached. Cancelling it cancels the calls under way.

        Raised here, with nothing sent: UnknownWorker if no worker is in the group, SerializationError, RpcUsageError
        for a quorum larger than the group or an argument that is not a function, WorkerClosed.
        """
        return self._call(function, args, kwargs, self._options, call_site(sys._getframe(1)))

    @overload
    def rpc_async(
        self,
        func: Batched[..., Arg, T],
        args: Sequence[Arg] | None = None,
        kwargs: dict[str, object] | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> GroupCall[T]: ...

    @overload
    def rpc_async(
        self,
        func: Callable[..., Later[T]],
        args: Sequence[Arg] | None = None,
        kwargs: dict[str, object] | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> GroupCall[T]: ...

    @overload
    def rpc_async(
        self,
        func: Callable[..., T],
        args: Sequence[Arg] | None = None,
        kwargs: dict[str, object] | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> GroupCall[T]: ...

    def rpc_async(
        self,
        func: Function,
        args: Sequence[Arg] | None = None,
        kwargs: Kwargs | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> GroupCall[Any]:
        """`call` with torch's arguments. timeout: seconds, negative for the group's, 0 for no limit.

        quorum: see `aiorpc.group`; None for the group's.
        """
        if type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
            args, kwargs = check_arguments(args, kwargs)
        return self._call(func, args, kwargs, self._with(timeout, quorum), call_site(sys._getframe(1)))

    @overload
    def rpc_sync(
        self,
        func: Batched[..., Arg, T],
        args: Sequence[Arg] | None = None,
        kwargs: dict[str, object] | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> Outcomes[T]: ...

    @overload
    def rpc_sync(
        self,
        func: Callable[..., Later[T]],
        args: Sequence[Arg] | None = None,
        kwargs: dict[str, object] | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> Outcomes[T]: ...

    @overload
    def rpc_sync(
        self,
        func: Callable[..., T],
        args: Sequence[Arg] | None = None,
        kwargs: dict[str, object] | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> Outcomes[T]: ...

    def rpc_sync(
        self,
        func: Function,
        args: Sequence[Arg] | None = None,
        kwargs: Kwargs | None = None,
        timeout: float = -1.0,
        quorum: Quorum | None = None,
    ) -> Outcomes[object]:
        """`rpc_async`, and block for the outcomes. Not on the worker's loop: WouldBlockLoop, with nothing sent."""
        self._home.engine.refuse_on_loop("group.rpc_sync()", "await group.call(...)")
        if type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
            args, kwargs = check_arguments(args, kwargs)
        return wait_alone(self._call(func, args, kwargs, self._with(timeout, quorum), call_site(sys._getframe(1))))

    def _with(self, timeout: float, quorum: Quorum | None) -> GroupOptions:
        options = self._options
        return options._replace(
            timeout=self._home.engine.timeout(timeout, options.timeout),
            quorum=options.quorum if quorum is None else check_quorum(quorum),
        )

    def _call(
        self,
        function: Function | ObjectMethod,
        args: Sequence[Arg],
        kwargs: Kwargs | None,
        options: GroupOptions,
        site: CallSite,
    ) -> GroupCall[object]:
        peers = self._members.now()
        quorum = count_of(options.quorum, len(peers))
        home, retry = self._home, options.retry
        sending = Sending(home, peers, Called(function, args, kwargs), options.timeout, site, retry.wait)
        if home.engine.tracer is None or retry.retries:  # each member's call with retries has its own span
            sending.prepare()
        else:
            sending.prepare_traced(home.engine.tracer)
        call: GroupCall[object] = GroupCall(home.engine, sending.name, [peer.name for peer in peers], quorum, site)
        if options.progress:
            call._show(progress.begin(sending.name))
        call._span = sending.span

        def try_again(place: int, _: GroupCall[object]) -> Future[object]:
            to = peers[place].name
            return home.retries.call(to, function, tuple(args), kwargs or {}, options.timeout, retry, site)

        send_all(call, range(len(peers)), try_again if retry.retries else sending.send, sending.flush)
        return call

    # --- one of them --------------------------------------------------------------------------------------------------

    @overload
    def any(self, function: Batched[..., Arg, T], /, *args: Arg, **kwargs: Arg) -> Future[T]: ...

    @overload
    def any(self, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    @overload
    def any(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    def any(self, function: Function, /, *args: Arg, **kwargs: Arg) -> Future[Any]:
        """Run ``function(*args, **kwargs)`` on the least busy member; the Future of its result, as of `aiorpc.call`.

        The least busy member has the fewest calls of this worker under way; equals take turns. A member that is known
        to drain is not chosen; where there is no connection to it yet, or a resting one, a refused call tells that.
        With ``retries=`` each try goes to the member that is the least busy then.

        Raised here, with nothing sent: the errors of `aiorpc.call`, and Overloaded.
        """
        return self._call_one(function, args, kwargs, call_site(sys._getframe(1)))

    def _call_one(
        self,
        function: Function,
        args: Args,
        kwargs: Kwargs,
        site: CallSite,
        *,
        met: bool = False,
    ) -> Future[Any]:
        """See `any`. site: where the call was made. met: as of `Retries.call`."""
        options, home = self._options, self._home
        if options.retry.retries:
            return home.retries.call(
                lambda: self._least_busy().name, function, args, kwargs, options.timeout, options.retry, site, met=met
            )
        call_options = CallOptions(options.retry.wait, site=site)
        peer = self._least_busy()
        return peer.call(function, args, kwargs, options.timeout, options=call_options)

    def _least_busy(self) -> Peer:
        peers = self._members.now()
        first = next(self._turns) % len(peers)
        living = [peer for peer in (*peers[first:], *peers[:first]) if peer.gone is None]
        taking = [peer for peer in living if not peer.drains]
        return min(taking or living, key=_calls_of, default=peers[first])

    @overload
    def map(self, function: Batched[..., Arg, T], items: Iterable[Arg] | AsyncIterable[Arg], /) -> GroupMap[T]: ...

    @overload
    def map(self, function: Callable[[S], Later[T]], items: Iterable[S] | AsyncIterable[S], /) -> GroupMap[T]: ...

    @overload
    def map(self, function: Callable[[S], T], items: Iterable[S] | AsyncIterable[S], /) -> GroupMap[T]: ...

    def map(self, function: Function, items: Iterable[Arg] | AsyncIterable[Arg], /) -> GroupMap[Any]:
        """``async for result in group.map(function, items)``: ``function(item)`` for each, on the least busy member.

        ``for`` does the same in a thread that may block. Results come in the order of items. At most two items for each
        member are under way or wait to be taken (back-pressure), so the map takes items only as the program takes
        results. An item that fails raises its error in its place; with ``retries=`` an item whose member was lost goes
        to another member. Leaving the loop early cancels the calls under way.

        Raised here, with nothing sent: RpcUsageError if `items` is not iterable.
        """
        site, many = call_site(sys._getframe(1)), 0

        def ahead() -> int:
            nonlocal many
            try:
                many = len(self._members.now())
            except UnknownWorker:
                if not many or not self._options.retry.retries:
                    raise
            return 2 * many

        return GroupMap(
            self._home.engine,
            lambda item: self._call_one(function, (item,), {}, site, met=ahead() > 0),
            items,
            ahead,
        )

    # --- streams, references ------------------------------------------------------------------------------------------

    def stream(self, function: Callable[P, Items[T]], /, *args: P.args, **kwargs: P.kwargs) -> GroupStream[T]:
        """``async for name, item in group.stream(generator_function, *args)``: the items of all members, as they come.

        ``for`` does the same in a thread that may block. The items of one member are in their order. A member that
        fails or is lost does not end the others. The timeout is for each item.

        Raised here: the errors of `aiorpc.stream`; RpcUsageError for groups with ``retries=``.

        Raised after the last item: GroupError, if members failed.
        """
        return self._stream(function, args, kwargs, self._options.timeout)

    def _stream(
        self,
        function: Function | ObjectMethod,
        args: Args,
        kwargs: Kwargs,
        timeout: float,
        depth: int = 3,
    ) -> GroupStream[Any]:
        self._refuse_retries("stream")
        streams, wait = [], self._options.retry.wait
        for peer in self._members.now():
            stream = open_stream(peer, function, args, kwargs, timeout, wait=wait, depth=depth)
            streams.append((peer.name, stream))
        return GroupStream(self._home.engine, describe(function), streams)

    @overload
    def remote(self, function: Batched[..., Arg, T], /, *args: Arg, **kwargs: Arg) -> RRefGroup[T]: ...

    @overload
    def remote(self, function: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> RRefGroup[T]: ...

    @overload
    def remote(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRefGroup[T]: ...

    def remote(self, function: Function, /, *args: Arg, **kwargs: Arg) -> RRefGroup[Any]:
        """References to the results of ``function(*args, **kwargs)`` on each member, to be called together.

        Raises the errors of `aiorpc.remote`, and RpcUsageError for groups with ``retries=``.
        """
        return self._remote(function, args, kwargs, self._options.timeout)

    def _remote(
        self,
        function: Function | ObjectMethod,
        args: Args,
        kwargs: Kwargs,
        timeout: float,
        depth: int = 3,
    ) -> RRefGroup[object]:
        self._refuse_retries("remote")
        made, create = [], self._home.references.create
        for peer in self._members.now():  # a comprehension has a frame of its own before Python 3.12
            made.append((peer.name, create(peer, function, args, kwargs, timeout, depth=depth)))
        return RRefGroup(self._home, made, self._options)

    def object(self, name: str) -> GroupObject:
        """The objects that the members serve under a name, to be called together. Sends nothing.

        ``await group.object("buffer").put(x)`` gives `Outcomes`; the outcome of a member without such an object is
        UnknownObject. See `aiorpc.serve`. Raises RpcUsageError for an invalid name.
        """
        return GroupObject(check_object_name(name), self._call_object)

    def _call_object(
        self,
        verb: str,
        timeout: float,
        function: ObjectMethod,
        args: Args,
        kwargs: Kwargs,
        site: CallSite,
    ) -> Any:
        options = self._with(timeout, None)
        if verb == "stream":
            return self._stream(function, args, kwargs, options.timeout, depth=5)
        if verb == "remote":
            return self._remote(function, args, kwargs, options.timeout, depth=5)
        if verb == "rpc_sync":
            what = f"objects.rpc_sync().{function.name}()"
            self._home.engine.refuse_on_loop(what, f"await the objects' {function.name}()")
        future = self._call(function, args, kwargs, options, site)
        return wait_alone(future) if verb == "rpc_sync" else future

    def _refuse_retries(self, verb: str) -> None:
        if self._options.retry.retries:
            raise RpcUsageError(f"{verb}() is not tried again: use a group without retries=")

    # --- together -----------------------------------------------------------------------------------------------------

    def barrier(self, tag: str = "") -> Future[None]:
        """Wait until every member has come to a barrier; each member calls this, on a group of the same members.

        Returns a Future, to await or to wait for. Cancelling it, or a timeout, ends this worker's wait at the barrier.

        tag: which barrier; two tags are two barriers.

        Raised here: RpcUsageError for a worker that is no member; UnknownWorker for a member that has not joined yet,
        which `aiorpc.wait_for` waits for.

        Raised by the Future: PeerLost as soon as a member is lost, PeerLeft if one has left; RpcTimeout, which names
        the missing members, after the group's timeout, or up to five seconds later if the member with the lowest id
        does not answer.
        """
        return come(self._home, self._members.now(), tag, self._options.timeout)

    def __copy__(self) -> PeerGroup:
        return PeerGroup(self._home, self._members, self._options)

    def __reduce__(self) -> NoReturn:
        """Not supported: it makes calls of this worker."""
        raise stays_here(self, "rpc.group(...)")

    def _repr_html_(self) -> str:
        """For notebooks: the present members, with the calls to each that are under way."""
        try:
            peers = self._members.now()
        except UnknownWorker:
            peers = []
        rows = [
            (peer.name, "" if (known := peer.record) is None else known.id, peer.state.value, _calls_of(peer))
            for peer in peers
        ]
        title = f"group {self._members.describe()}, timeout {self._options.timeout:g} s"
        return html_table(title, ("worker", "id", "connection", "calls under way"), rows)

    def __repr__(self) -> str:
        return f"<aiorpc.group {self._members.describe()}, timeout {self._options.timeout:g} s>"


def _calls_of(peer: Peer) -> int:
    """How many calls of users are under way to a peer."""
    return len(peer.pending.calls) - peer.pending.system
