"""Sends one call to several workers, and encodes the common part once.

The arguments are encoded for the first worker whose message others can share; only the head, with the number of the
function, is written for each. All refusals come before anything is sent. `Peer.call` sends a call of its own to a
worker whose message others cannot share: the worker is not known yet, the call is in a context of autograd, there are
devices, or a reference travels in the arguments.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

from ...callbacks import current_autograd
from ...channels.shm import Copies
from ...errors import RpcError, RpcUsageError, SerializationError
from ...futures import Future
from ...protocol.frames import CALL, HEAD, encode_frame
from ...protocol.messages import (
    Call,
    Function,
    Method,
    ObjectMethod,
    Values,
    with_function,
    without_function,
    write_plain,
)
from ...protocol.states import CallOutcome
from ...sites import CallSite
from ...undoing import on_error
from ..caller.future import cannot_send
from ..caller.known import FunctionEntry
from ..caller.member_call import MemberCall
from ..caller.misuse import OF_GROUPS, check_keywords, no_function
from ..caller.peer import Peer
from ..caller.waiting import WaitingCall, WaitingFrame, nothing
from ..calls import tracing
from ..calls.current import current_call
from ..calls.failures import NO_VALUE, absence_behind
from ..calls.functions import describe, name_of
from ..calls.options import CallOptions
from ..calls.values import encode
from ..engine.call_tracing import CallTracer, MadeSpan, Raised
from ..links.link import FEW, Link
from .group_call import GroupCall
from .home import Home


class _Arguments(NamedTuple):
    """The common part of a call: its body without the function, and its buffers."""

    rest: bytes
    buffers: Sequence[Any]


class _Letter(NamedTuple):
    """The call for one worker."""

    entry: FunctionEntry
    body: bytes
    buffers: Sequence[Any]


class Called(NamedTuple):
    """The function of a call and its arguments. function: a callable, or a method of a served object; or None.

    methods: without a function, a method of the value of a reference for each worker. keeps: see `Peer.call`.
    """

    function: Callable[..., object] | ObjectMethod | None
    args: Sequence[object]
    kwargs: dict[str, object] | None
    methods: Sequence[Method] = ()
    keeps: Sequence[object] = ()


class Sending:
    """One call to several workers. `prepare` writes it and raises errors; `send` sends it to each worker, except large
    buffers, which `flush` sends at last.

    timeout: seconds, 0 for no limit. site: where the call was made. wait: as of `Peer.call`. span: of the whole, if
    calls are traced: all members get its context.
    """

    def __init__(
        self,
        home: Home,
        peers: Sequence[Peer],
        called: Called,
        timeout: float,
        site: CallSite,
        wait: bool = False,
    ) -> None:
        self._home = home
        self._peers = peers
        function, args, kwargs, methods, keeps = called
        self._function = function
        self._methods: Sequence[Method | ObjectMethod] = methods
        if type(function) is ObjectMethod:
            self._methods = [function] * len(peers)
        self._keeps = keeps
        self._args = args
        self._kwargs = kwargs
        self._timeout = timeout
        self._wait = wait
        self._site = site
        self._now = time.monotonic()
        self._deadline = self._now + timeout if timeout else None
        self._origin: tuple[int, int] | None = None
        self._trace = tracing.current()
        self.span: MadeSpan | None = None
        self._parent: tuple[str, int] | None = None
        serving = current_call.get()
        if serving is not None and not serving.replied and serving.node is home:
            self._origin = serving.origin
            self._parent = serving.caller.name, serving.call_id
            if serving.deadline is not None and (self._deadline is None or serving.deadline < self._deadline):
                self._deadline = serving.deadline
        self._values = list(args)
        self._names: list[str] | None = None
        if kwargs:
            self._names = list(kwargs)
            self._values.extend(kwargs.values())
        self._letters: list[_Letter | None] = [None] * len(peers)
        self._parcels: list[tuple[Peer, Link, WaitingCall]] = []

    @property
    def name(self) -> str:
        """The name of the function, for texts."""
        return self._methods[0].name if self._methods and self._function is None else describe(self._function)

    # --- before anything is sent ------------------------------------------------------------------------------------

    def prepare_traced(self, tracer: CallTracer) -> None:
        """As `prepare`, with a span."""
        named = None if self._methods else name_of(self._function)
        span = tracer.made(named or self.name, None)
        if span is not None:
            self.span, self._trace = span, span.context
        try:
            self.prepare()
        except Exception as error:
            if span is not None:
                span.ended(CallOutcome.REFUSED, Raised(error))
            raise

    def prepare(self) -> None:
        """Encode the call, and send nothing. Raises the errors of `Peer.call`, except Overloaded."""
        self._home.engine.lifetime.check_begin()
        if not self._methods:
            if not callable(self._function):
                raise RpcUsageError(no_function(self._function, self._peers[0].name, verb="group"))
            if self._kwargs and not self._home.gradients.as_torch and not OF_GROUPS.isdisjoint(self._kwargs):
                check_keywords(self._function, self._kwargs, self._peers[0].name, verb="group")
        if current_autograd.get():
            return
        written: dict[tuple[bool, bool], _Arguments | None] = {}
        bodies: dict[tuple[Function, bool], bytes] = {}
        for place, peer in enumerate(self._peers):
            if peer.record is None or peer.devices or peer.route is not None or peer.gone is not None:
                continue
            entry, named = self._named(place, peer)
            if named is None and (peer.safe or type(self._function) is MethodType):
                continue  # `Peer.call` refuses or writes it
            kind = named is None, peer.same_main
            if kind not in written:
                written[kind] = self._write(peer, named)
            arguments = written[kind]
            if arguments is None:
                return
            key = named, peer.same_main
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = with_function(named, arguments.rest)
                if len(body) > peer.max_body:
                    return
            self._letters[place] = _Letter(entry, body, arguments.buffers)

    def _named(self, place: int, peer: Peer) -> tuple[FunctionEntry, Function]:
        """The entry of the function at a worker, and its name in a message."""
        function: Any = self._methods[place] if self._methods else self._function
        return peer.name_of(function)

    def _call(self, named: Function, values: list[Any]) -> Call:
        remaining = None if self._deadline is None else self._deadline - self._now
        return Call(named, Values(values), self._names, remaining, self._origin, self._trace)

    def _write(self, peer: Peer, named: Function) -> _Arguments | None:
        """The encoded arguments; None if workers cannot share them."""
        call = self._call(named, self._values if named is not None else [self._function, *self._values])
        frame = write_plain(CALL, 0, call, peer.max_body)
        if frame is not None:
            return _Arguments(without_function(bytes(frame[0][HEAD.size :]), named), ())
        try:
            body, buffers, out = encode(call, peer)
        except SerializationError as error:
            absence = absence_behind(error)
            if isinstance(absence, NO_VALUE):  # as `Peer.call`
                raise copy.copy(absence) from None
            target, count = f"{len(self._peers)} workers", len(self._args)
            raise cannot_send(error, self.name, target, named is None, count, self._names) from error.__cause__
        if out is not None:
            out.unsend()
            return None
        return _Arguments(without_function(body, named), buffers)

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, place: int, group: GroupCall[object]) -> Future[object] | MemberCall:
        """Send the call to one worker, once. Any thread. Raises Overloaded and the errors of `Peer.call`.

        group: gets the outcome of a `MemberCall`.
        """
        peer, letter = self._peers[place], self._letters[place]
        keeps = self._keeps[place] if self._keeps else None
        if letter is None:
            function: Any = self._methods[place] if self._methods else self._function
            options = CallOptions(
                self._wait, site=self._site, keeps=keeps, part_of=("group", group._number), span=self.span
            )
            return peer.call(function, self._args, self._kwargs, self._timeout, options=options)
        entry, body, buffers = letter
        pending, link, connection = peer.pending, peer.link, peer.connection
        if pending.calls or connection is None or connection.queue.frames or connection.queue.begun:
            refusal = peer.refusal()
            if refusal is not None:
                raise refusal
        call_id = next(pending.ids)
        call = MemberCall(group, place, peer, entry, call_id, self._now, self._deadline, self._site, self._parent)
        try:
            if keeps is not None:
                pending.lent[call_id] = [keeps]
            pending.begin(call, len(body) + sum(map(len, buffers)) if peer.engine.call_observers else 0)
            if buffers and (link is None or not link.distribution.rides(buffers)):
                self._send_buffers(peer, None if connection is None else link, WaitingCall(call, body, buffers, None))
            else:
                frame = encode_frame(CALL, call_id, body, buffers)
                if link is None or connection is None:
                    peer.send_later(WaitingFrame(CALL, call_id, frame, call))
                else:
                    if peer.engine.call_observers:
                        pending.tell("running", call)
                    urgent = len(pending.calls) <= FEW + pending.system
                    link.send(CALL, call_id, frame, urgent=urgent, call=call)
        except Exception:
            call.cancel()
            raise
        if peer.gone is not None:  # as in `Peer.call`
            pending.fail_one(call_id, peer.gone)
        return call

    def _send_buffers(self, peer: Peer, link: Link | None, message: WaitingCall) -> None:
        """Send a call whose buffers are no part of its frame, once there is a link."""
        if link is None:
            peer.send_buffers(message)
        else:
            self._parcels.append((peer, link, message))

    def flush(self) -> None:
        """Send the calls with large buffers, in a thread if that would take too long here.

        Shared memory gets one copy for all workers that can borrow it.
        """
        parcels, self._parcels = self._parcels, []
        if any(link.distribution.too_long_for_loop(message.buffers) for _, link, message in parcels):
            self._home.engine.in_background(self._post, parcels)
        elif parcels:
            self._post(parcels)

    def _post(self, parcels: Sequence[tuple[Peer, Link, WaitingCall]]) -> None:
        copies = Copies(self._home.memory.arena)
        try:
            for peer, link, message in parcels:
                peer.post(link, message, copies)
        finally:
            copies.close()


def send_all(
    call: GroupCall[object],
    places: Sequence[int],
    send: Callable[[int, GroupCall[object]], Future[object] | MemberCall],
    flush: Callable[[], None] = nothing,
) -> None:
    """Make the calls to the members at `places`, one after the other, unless the call is over before.

    flush: sends what `send` has kept. An exception cancels all of them, because the program does not get the call. A
    misuse at the first member is raised: nothing has been sent then.
    """
    with on_error(call.cancel):
        for place in places:
            over = call._over
            if over:
                break
            try:
                sent = send(place, call)
                call._calls[place] = sent
                if isinstance(sent, Future):
                    call._follow(place, sent)
                if call._over:  # checked after entering it: a thread that ended the call before may have missed it
                    sent.cancel()
                    call._calls.pop(place, None)
            except RpcError as error:
                if place == places[0] and isinstance(error, RpcUsageError):
                    raise
                call._refused(place, error)
        flush()
