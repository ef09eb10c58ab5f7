"""Spans of OpenTelemetry for the calls of one worker (`runtime.engine.call_tracing`).

It is imported when traces are switched on, and needs `opentelemetry-api`.

To make and to end a span of the SDK takes as long as half of a short call. So as much of it as possible is done when
nobody waits: spans end on the loop, some at a time, a moment later, and the span of a served call is made only then,
unless its handler looks at it before. Times are taken when things happen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from threading import RLock
from time import time_ns
from typing import Any, Protocol

from opentelemetry.context import Context, attach
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    TraceState,
    get_current_span,
    get_tracer_provider,
    set_span_in_context,
)

from .. import foreign
from .._version import __version__
from ..errors import Overloaded, PeerLeft, PeerLost, RpcCancelled, RpcTimeout, WorkerClosed
from ..logs import logger
from ..protocol.identity import WorkerRecord
from ..protocol.states import CallOutcome
from ..protocol.trace_context import TraceContext
from ..runtime.calls import tracing
from ..runtime.engine.call_tracing import Callee, Exchange, Failing, Part, ServedSpan, Traceable
from ..runtime.engine.engine import Engine
from ..sites import spates
from . import conventions

_NOTHING = Context()
# Seconds until spans that are over are ended. To do it at once would delay the next call.
_PAUSE = 0.05
# How many are ended in one turn of the loop, at least; half of them if there are more.
_AT_ONCE = 8
# Other workers whose attributes are kept.
_MOST_PEERS = 1024
_KINDS: Mapping[Exchange, SpanKind] = {
    "put": SpanKind.PRODUCER,
    "publish": SpanKind.PRODUCER,
    "get": SpanKind.CONSUMER,
    "receive": SpanKind.CONSUMER,
}
_EVENTS: Mapping[Part, str] = {
    "retry": conventions.RETRY,
    "member_failed": conventions.MEMBER_FAILED,
}
_OUTCOMES: tuple[tuple[tuple[type[BaseException], ...], CallOutcome], ...] = (
    ((RpcTimeout,), CallOutcome.TIMEOUT),
    ((RpcCancelled, asyncio.CancelledError), CallOutcome.CANCELLED),
    ((PeerLost, PeerLeft, WorkerClosed), CallOutcome.LOST),
    ((Overloaded,), CallOutcome.REFUSED),
)
_Attributes = Mapping[str, str | int]


class _Ending(Protocol):
    """A span that has ended. finish: tells OpenTelemetry; raises what its SDK raises."""

    def finish(self) -> None: ...


class CallSpans:
    """Makes the spans of one worker: the `CallTracer` of OpenTelemetry. Any thread.

    lock: of served spans that are made.
    """

    def __init__(self, engine: Engine, provider: TracerProvider | None = None) -> None:
        """provider: of the SDK; None takes the global one, also one that is set later."""
        self.lock: RLock = RLock()
        self._engine = engine
        self._tracer = (provider or get_tracer_provider()).get_tracer(
            conventions.SYSTEM, __version__, conventions.SCHEMA_URL, {conventions.WORKER: engine.name}
        )
        self._peers: dict[str, tuple[WorkerRecord | None, _Attributes]] = {}
        self._methods: dict[str, str] = {}
        self._ended: deque[_Ending] = deque()
        self._planned = False  # whether a turn of the loop is about to end spans
        self._closed = False

    # --- at the caller ------------------------------------------------------------------------------------------------

    def made(self, function: str, to: Callee | None, *, stream: bool = False) -> _Made | None:
        """See `CallTracer`."""
        method = self._method(function)
        attributes = {conventions.RPC_SYSTEM_NAME: conventions.SYSTEM, conventions.RPC_METHOD: method}
        made = self._begin(method, SpanKind.CLIENT, attributes, stream)
        if made is not None:
            made.to = to
        return made

    def exchanged(self, exchange: Exchange, name: str) -> _Made | None:
        """See `CallTracer`."""
        return self._begin(f"{exchange} {name}", _KINDS[exchange], {conventions.NAME: name})

    def _begin(self, name: str, kind: SpanKind, attributes: _Attributes, stream: bool = False) -> _Made | None:
        try:
            context: Context | None = None  # the current one
            if not get_current_span().get_span_context().is_valid:
                context = _remote(tracing.current())
            span = self._tracer.start_span(name, context, kind, attributes)
            found = span.get_span_context()
            return _Made(self, span, _written(found), stream) if found.is_valid else None
        except Exception as error:
            self._log(error)
            return None

    # --- at the worker that serves ------------------------------------------------------------------------------------

    def served(self, call: Traceable, *, known: bool = True) -> _Served | None:
        """See `CallTracer`."""
        began = time_ns() - int((time.monotonic() - call.started) * 1e9)
        return _Served(self, call, began, known)

    def batch(self, function: str, spans: Sequence[ServedSpan]) -> _Batch | None:
        """See `CallTracer`."""
        try:
            method = self._method(function)
            links = [Link(each.get_span_context()) for each in spans if isinstance(each, Span)]
            attributes = {conventions.RPC_SYSTEM_NAME: conventions.SYSTEM, conventions.RPC_METHOD: method}
            return _Batch(self, self._tracer.start_span(method, _NOTHING, SpanKind.INTERNAL, attributes, links))
        except Exception as error:
            self._log(error)
            return None

    def start_served(
        self, function: str, known: bool, record: WorkerRecord | None, trace: TraceContext | None, began: int
    ) -> Span:
        """The span of a served call. began: nanoseconds since 1970. Without one if the SDK raises."""
        try:
            attributes: dict[str, str | int] = {conventions.RPC_SYSTEM_NAME: conventions.SYSTEM}
            if record is not None:
                attributes.update(self.peer_attributes(record.name, record))
            method = attributes[conventions.RPC_METHOD] = self._method(function) if known else conventions.OTHER
            if not known:
                attributes[conventions.RPC_METHOD_ORIGINAL] = function
            context = _remote(trace)
            return self._tracer.start_span(method, context, SpanKind.SERVER, attributes, start_time=began)
        except Exception as error:
            self._log(error)
            return NonRecordingSpan(_read(trace)) if trace is not None else INVALID_SPAN

    # --- ends ---------------------------------------------------------------------------------------------------------

    def later(self, ending: _Ending) -> None:
        """End a span in a later turn of the loop."""
        loop = self._engine.loop
        if self._closed or loop.is_closed():
            self._finish(ending)
            return
        self._ended.append(ending)
        if not self._planned:
            self._planned = True
            self._engine.call_on_loop(loop.call_later, _PAUSE, self._end_some)

    def _end_some(self) -> None:
        self._planned = False  # first: a thread that adds a span now plans another turn
        for _ in range(max(_AT_ONCE, len(self._ended) // 2)):
            if not self._ended:
                return
            self._finish(self._ended.popleft())
        if self._ended:
            self._planned = True
            self._engine.loop.call_soon(self._end_some)

    def close(self) -> None:
        """See `CallTracer`. Idempotent."""
        self._closed = True
        while self._ended:
            self._finish(self._ended.popleft())

    def _finish(self, ending: _Ending) -> None:
        try:
            ending.finish()
        except Exception as error:
            self._log(error)

    # --- names --------------------------------------------------------------------------------------------------------

    def _method(self, function: str) -> str:
        method = self._methods.get(function)
        if method is None:
            if len(self._methods) > _MOST_PEERS:  # of functions that go by value, or of objects that come and go
                self._methods.clear()
            method = self._methods[function] = conventions.method_name(function)
        return method

    def peer_attributes(self, name: str, record: WorkerRecord | None) -> _Attributes:
        """The attributes that tell the other worker."""
        kept = self._peers.get(name)
        if kept is not None and kept[0] is record:
            return kept[1]
        attributes: dict[str, str | int] = {conventions.PEER: name}
        if record is not None:
            if record.unix_path and record.host == self._engine.record.host:
                attributes[conventions.NETWORK_PEER_ADDRESS] = record.unix_path
            elif record.tcp_port:
                attributes[conventions.NETWORK_PEER_ADDRESS] = record.tcp_host
                attributes[conventions.NETWORK_PEER_PORT] = record.tcp_port
        if len(self._peers) > _MOST_PEERS:
            self._peers.clear()
        self._peers[name] = record, attributes
        return attributes

    def _log(self, error: Exception) -> None:
        """What the SDK raises, as of a sampler, changes nothing for calls."""
        more = spates.line("a tracer raised")
        if more is not None:
            said = "worker %s: the tracer of its calls raised, and a span is not recorded%s"
            foreign.log_error(logger, logging.ERROR, error, said, self._engine.name, more)


class _Made:
    """See `MadeSpan`. to: the called worker; its attributes are set at the end, when no one waits.

    stream: whether its cancellation is no error, as a consumer may end a stream early.
    """

    __slots__ = ("_of", "_outcome", "_over", "_span", "_spans", "_stream", "context", "to")

    def __init__(self, spans: CallSpans, span: Span, context: TraceContext, stream: bool) -> None:
        self.context: TraceContext = context
        self.to: Callee | None = None
        self._spans = spans
        self._span = span
        self._stream = stream
        self._over = 0  # when it ended: nanoseconds since 1970
        self._outcome: CallOutcome | None = None
        self._of: Failing | None = None

    def linked(self, context: TraceContext | None) -> None:
        """See `MadeSpan`."""
        if context is not None:
            self._span.add_link(_read(context))

    def failed_in_part(self, part: Part, worker: str, error: BaseException) -> None:
        """See `MadeSpan`."""
        if self._span.is_recording():
            attributes = {conventions.ERROR_TYPE: _type_of(error), conventions.PEER: worker}
            self._span.add_event(_EVENTS[part], attributes)

    def ended(self, outcome: CallOutcome | None, of: Failing) -> None:
        """See `MadeSpan`."""
        if not self._over:
            self._over, self._outcome, self._of = time_ns(), outcome, of
            self._spans.later(self)

    def finish(self) -> None:
        """See `_Ending`."""
        error = None if self._of is None else self._of._error
        self._of = None
        outcome = self._outcome or _outcome_of(error)
        if self.to is not None:
            self._span.set_attributes(self._spans.peer_attributes(self.to.name, self.to.record))
        if error is not None or outcome is not CallOutcome.VALUE:
            _record(self._span, outcome, error, self._stream)
        self._span.end(self._over)


class _Served(Span):
    """See `ServedSpan`: stands for a span of the SDK, which is made when the handler looks at it, or after the answer.

    To handlers it is their current span.
    """

    def __init__(self, spans: CallSpans, call: Traceable, began: int, known: bool) -> None:
        self._spans = spans
        self._call = call.function, known, call.record, call.trace, began
        self._stream = call.credit is not None
        self._span: Span | None = None
        self._error: BaseException | None = None
        self._outcome = CallOutcome.VALUE
        self._over = 0

    def _made(self) -> Span:
        if self._span is None:
            with self._spans.lock:
                if self._span is None:
                    self._span = self._spans.start_served(*self._call)
        return self._span

    def enter(self) -> None:
        """See `ServedSpan`."""
        attach(set_span_in_context(self, _NOTHING))

    def failed(self, error: BaseException) -> None:
        """See `ServedSpan`."""
        self._error = error

    def ended(self, outcome: CallOutcome) -> None:
        """See `ServedSpan`."""
        self._over, self._outcome = time_ns(), outcome
        self._spans.later(self)

    def finish(self) -> None:
        """See `_Ending`."""
        span, error = self._made(), self._error
        self._error = None
        if self._outcome is not CallOutcome.VALUE:
            _record(span, self._outcome, error, self._stream)
        span.end(self._over)

    # --- the span that it stands for ----------------------------------------------------------------------------------

    def end(self, end_time: int | None = None) -> None:
        self._made().end(end_time)

    def get_span_context(self) -> SpanContext:
        return self._made().get_span_context()

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._made().set_attributes(attributes)

    def set_attribute(self, key: str, value: Any) -> None:
        self._made().set_attribute(key, value)

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        self._made().add_event(name, attributes, timestamp)

    def add_link(self, context: SpanContext, attributes: Any = None) -> None:
        self._made().add_link(context, attributes)

    def update_name(self, name: str) -> None:
        self._made().update_name(name)

    def is_recording(self) -> bool:
        return self._made().is_recording()

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._made().set_status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Any = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        self._made().record_exception(exception, attributes, timestamp, escaped)

    def __getattr__(self, name: str) -> Any:
        """What spans of the SDK have beside these: name, attributes, parent."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._made(), name)


class _Batch:
    """See `ServedSpan`: the run of a batch."""

    def __init__(self, spans: CallSpans, span: Span) -> None:
        self._spans = spans
        self._span = span
        self._error: BaseException | None = None
        self._outcome = CallOutcome.VALUE
        self._over = 0

    def enter(self) -> None:
        """See `ServedSpan`."""
        attach(set_span_in_context(self._span, _NOTHING))

    def failed(self, error: BaseException) -> None:
        """See `ServedSpan`."""
        self._error = error

    def ended(self, outcome: CallOutcome) -> None:
        """See `ServedSpan`."""
        self._over, self._outcome = time_ns(), outcome
        self._spans.later(self)

    def finish(self) -> None:
        """See `_Ending`."""
        if self._outcome is not CallOutcome.VALUE:
            _record(self._span, self._outcome, self._error)
        self._error = None
        self._span.end(self._over)


def _record(span: Span, outcome: CallOutcome, error: BaseException | None, stream: bool = False) -> None:
    """Record an end without a value. stream: whether a consumer could end it."""
    if not span.is_recording():
        return
    if stream and outcome is CallOutcome.CANCELLED:
        span.set_attribute(conventions.RPC_STATUS_CODE, str(outcome))
        return
    kind = str(outcome) if error is None else _type_of(error)
    span.set_attributes({conventions.RPC_STATUS_CODE: str(outcome), conventions.ERROR_TYPE: kind})
    span.set_status(Status(StatusCode.ERROR, None if error is None else foreign.text_of(error)))
    if error is not None:
        span.record_exception(error)


def _outcome_of(error: BaseException | None) -> CallOutcome:
    if error is None:
        return CallOutcome.VALUE
    return next((outcome for kinds, outcome in _OUTCOMES if foreign.is_a(error, kinds)), CallOutcome.ERROR)


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _written(context: SpanContext) -> TraceContext:
    """The context as it travels."""
    state = context.trace_state
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return TraceContext(parent, state.to_header() if state else "")


def _read(context: TraceContext) -> SpanContext:
    """A context that has travelled, and was found valid then."""
    parent, state = context
    flags = TraceFlags(int(parent[53:55], 16))
    states = TraceState.from_header([state]) if state else TraceState()
    return SpanContext(int(parent[3:35], 16), int(parent[36:52], 16), True, flags, states)


def _remote(context: TraceContext | None) -> Context:
    """The parent of a span: explicitly none, if there is no context, as a thread may keep that of other code."""
    return _NOTHING if context is None else set_span_in_context(NonRecordingSpan(_read(context)), _NOTHING)
