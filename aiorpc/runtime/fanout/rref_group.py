"""References to values of several workers, whose methods are called together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, NoReturn, overload

from ..._typing import Args, Kwargs, T
from ...collecting import wait_alone
from ...errors import RpcUsageError
from ...futures import Future
from ...protocol.messages import Fetch, Method
from ...rights import FETCH
from ...sites import CallSite, call_site
from ..caller.member_call import MemberCall
from ..caller.waiting import nothing
from ..calls.options import CallOptions
from ..references.rref import RRef
from .group_call import GroupCall
from .home import Home
from .options import GroupOptions, count_of
from .outcomes import Outcomes
from .proxies import GroupProxy
from .sending import Called, Sending, send_all


class RRefGroup(Sequence[RRef[T]], Generic[T]):
    """An `RRef` for each member of a group, in the order of members; ``refs["a0"]`` is that of one. Any thread.

    `rpc_async`, `rpc_sync` and `remote` give proxies, as those of an RRef do, whose methods run on all owners.
    """

    def __init__(self, home: Home, made: Sequence[tuple[str, RRef[T]]], options: GroupOptions) -> None:
        self._home = home
        self._names = [name for name, _ in made]
        self._refs = [ref for _, ref in made]
        self._options = options

    def rpc_async(self, timeout: float = -1.0) -> GroupProxy[GroupCall[Any]]:
        """A proxy whose methods run on all owners and return a `GroupCall` at once.

        timeout: seconds; negative for that of the group, 0 for no limit.
        """
        return GroupProxy(lambda name, args, kwargs, site: self._call(name, args, kwargs, timeout, site))

    def rpc_sync(self, timeout: float = -1.0) -> GroupProxy[Outcomes[Any]]:
        """A proxy whose methods block for the `Outcomes`; not on the worker's loop. timeout: as of `rpc_async`."""

        def call(name: str, args: Args, kwargs: Kwargs, site: CallSite) -> Outcomes[object]:
            self._home.engine.refuse_on_loop(f"refs.rpc_sync().{name}()", f"await refs.rpc_async().{name}()")
            return wait_alone(self._call(name, args, kwargs, timeout, site))

        return GroupProxy(call)

    def remote(self, timeout: float = -1.0) -> GroupProxy[RRefGroup[Any]]:
        """A proxy whose methods return an `RRefGroup` of their results at once. timeout: as of `rpc_async`."""

        def call(name: str, args: Args, kwargs: Kwargs, _: CallSite) -> RRefGroup[object]:
            made = [getattr(ref.remote(self._seconds(timeout)), name)(*args, **kwargs) for ref in self._refs]
            return RRefGroup(self._home, [*zip(self._names, made, strict=True)], self._options)

        return GroupProxy(call)

    def to_here(self, timeout: float = -1.0) -> Outcomes[T]:
        """Copies of all values, as `Outcomes`; blocks. Not on the worker's loop: ``await refs`` there."""
        self._home.engine.refuse_on_loop("refs.to_here()", "await refs")
        return wait_alone(self._fetch(self._seconds(timeout), call_site(sys._getframe(1))))

    def __await__(self) -> Generator[object, None, Outcomes[T]]:
        """The same as `to_here`, without blocking."""
        return self._fetch(self._options.timeout, call_site(sys._getframe(1))).__await__()

    def _seconds(self, timeout: float) -> float:
        return self._home.engine.timeout(timeout, self._options.timeout)

    def _call(self, name: str, args: Args, kwargs: Kwargs, timeout: float, site: CallSite) -> GroupCall[object]:
        peers = [self._home.peers.by_id(ref._owner) for ref in self._refs]
        methods = [Method(*ref._name(), name) for ref in self._refs]
        seconds = self._seconds(timeout)
        sending = Sending(self._home, peers, Called(None, args, kwargs, methods, self._refs), seconds, site)
        tracer = self._home.engine.tracer
        if tracer is None:
            sending.prepare()
        else:
            sending.prepare_traced(tracer)
        call = self._make(name, site)
        call._span = sending.span
        self._send_all(call, sending.send, sending.flush)
        for ref in self._refs:
            ref._asked(call)
        return call

    def _fetch(self, seconds: float, site: CallSite) -> GroupCall[Any]:
        by_id = self._home.peers.by_id

        tracer = self._home.engine.tracer
        span = None if tracer is None else tracer.made(FETCH, None)

        def send(place: int, _: GroupCall[object]) -> Future[object]:
            ref = self._refs[place]
            fetch, options = Fetch(*ref._name()), CallOptions(site=site, keeps=ref, span=span)
            return ref._asked(by_id(ref._owner).call(fetch, (), None, seconds, options=options))

        call = self._make(FETCH, site)
        call._span = span
        self._send_all(call, send)
        return call

    def _make(self, function: str, site: CallSite) -> GroupCall[Any]:
        quorum = count_of(self._options.quorum, len(self._refs))
        return GroupCall(self._home.engine, function, self._names, quorum, site)

    def _send_all(
        self,
        call: GroupCall[object],
        send: Callable[[int, GroupCall[object]], Future[object] | MemberCall],
        flush: Callable[[], None] = nothing,
    ) -> None:
        """Send to owners of usable references; the other members get their outcomes at once."""
        usable = []
        for place, ref in enumerate(self._refs):
            try:
                ref._check()
            except Exception as error:
                call._refused(place, error)
            else:
                usable.append(place)
        send_all(call, usable, send, flush)

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[RRef[T]]:
        return iter(self._refs)

    @overload
    def __getitem__(self, which: int | str) -> RRef[T]: ...

    @overload
    def __getitem__(self, which: slice) -> list[RRef[T]]: ...

    def __getitem__(self, which: int | str | slice) -> RRef[T] | list[RRef[T]]:
        """By place, or by the name of a member. KeyError if there is no such member."""
        if not isinstance(which, str):
            return self._refs[which]
        if which not in self._names:
            raise KeyError(which)
        return self._refs[self._names.index(which)]

    def __reduce__(self) -> NoReturn:
        raise RpcUsageError("references of a group travel as a list: pass list(refs)")

    def __repr__(self) -> str:
        return f"<aiorpc.types.RRefGroup of {len(self._refs)} references>"
