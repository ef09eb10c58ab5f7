"""The notes of all workers as one trace: Chrome's JSON format, which Perfetto opens.

Each worker is a process of the trace. Its tracks hold slices that nest:

    calls          the calls that it has made, from the call to its answer; inside, how long it waited to be sent, and
                   how long the call and its answer were on their way
    queued         the calls that it serves, from their arrival until their handler begins
    handlers       those on the loop, where several run at a time
    a thread       the handlers that ran in it, copies into channels, and the events of torch's profiler
    transfers      buffers that came after their message, from the message to the last buffer
    a device       its events of torch's profiler

Where slices of one kind overlap they stand on several tracks of the same name. An arrow leads from a call to where it
was queued, to its handler, and to its answer; another one from a handler to each call that it has made.

Times are nanoseconds since all workers were recorded, by the clock of the worker that has recorded.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from .._version import __version__
from ..protocol.identity import WorkerRecord
from . import recording
from .notes import Note, RangeNote, StepNote, Summary, TransferNote

#: Calls that are not shown: those of the recording, and of membership, some of which last as long as the group.
_UNSHOWN = (f"{recording.__name__}:", "aiorpc.runtime.group.")
#: Nanoseconds by which slices of two clocks may overlap on a thread, and are cut.
_BLUR = 100_000
#: How many handlers on one thread are looked through for that of an event of torch's profiler.
_LOOK_BACK = 64
#: The outcomes of calls that have got an answer.
_ANSWERED = ("value", "error")
_CALLS, _QUEUED, _HANDLERS, _THREAD, _TRANSFERS, _DEVICE = range(6)
_TITLES = ("calls", "queued", "handlers", "thread", "transfers", "device")


class SliceEvent(Struct, gc=False):
    """A slice in the file. Times in microseconds, here and below."""

    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, Any]
    ph: str = "X"


class ArrowEvent(Struct, gc=False):
    """A stop of an arrow in the file, at the innermost slice that is there then."""

    ph: str
    name: str
    id: int
    pid: int
    tid: int
    ts: float
    cat: str = "arrow"
    bp: str = "e"


class NameEvent(Struct, gc=False):
    """The name of a process or track in the file, or its place among the others."""

    name: str
    pid: int
    tid: int
    args: dict[str, Any]
    ph: str = "M"
    ts: float = 0.0


Event = SliceEvent | ArrowEvent


@dataclass(frozen=True)
class Clock:
    """How the clock of a worker relates to that of the one that records. Times in seconds.

    first, last: two moments by its clock, and how much it was ahead then. error: of these, at most. shared: whether
    both are one clock of the same host. measured: how much it was ahead, as the round trips say.
    """

    first: tuple[float, float]
    last: tuple[float, float]
    error: float
    shared: bool
    measured: float

    @classmethod
    def of(cls, samples: Sequence[tuple[float, float, float]], *, same: bool) -> Clock | None:
        """From one or two samples of our time, how much the other is ahead, and the error of that. None without any.

        same: whether both are on one boot of one host. A container may have a clock of its own nevertheless.
        """
        if not samples:
            return None
        first, last = samples[0], samples[-1]
        error, measured = max(each[2] for each in samples), last[1]
        if same and all(abs(each[1]) <= each[2] for each in samples):
            return cls((first[0], 0.0), (last[0], 0.0), error, True, measured)
        return cls((first[0] + first[1], first[1]), (last[0] + last[1], last[1]), error, False, measured)

    def ours(self, theirs: float) -> float:
        """That moment by our clock. Between the samples the other clock runs evenly."""
        (since, ahead), (until, later) = self.first, self.last
        if until <= since:
            return theirs - ahead
        return theirs - ahead - (later - ahead) * (theirs - since) / (until - since)


@dataclass(frozen=True)
class WorkerRecording:
    """What there is of one worker. clock, summary: None if it has not told them. trouble: what is missing, and why."""

    record: WorkerRecord
    clock: Clock | None
    notes: Sequence[Note]
    summary: Summary | None
    trouble: str

    @property
    def told(self) -> str:
        """The trouble, with that of its profiler, and what it has dropped."""
        parts = [self.trouble]
        if self.summary is not None:
            parts.append(self.summary.profiled)
            if self.summary.dropped:
                parts.append(f"it had no room for {self.summary.dropped} more events")
        return "; ".join(filter(None, parts))


def as_json(by: str, recorded: Sequence[WorkerRecording]) -> bytes:
    """The trace as the bytes of a file. by: the worker that has recorded. Takes long: not on a loop."""
    placed = [(each, each.clock) for each in recorded]
    began = [clock.ours(each.summary.began) for each, clock in placed if clock is not None and each.summary is not None]
    zero = max(began, default=0.0)  # before, something may be missing
    workers = [_Worker(each, clock, zero) for each, clock in placed if clock is not None and each.summary is not None]
    _share_ranges(workers)
    tracks = itertools.count(max((_process(each.record) for each in recorded), default=0) + 1)
    for worker in workers:
        worker.lay_out(tracks)
    events: list[Event] = [*_arrows(workers)]  # it adds the answers to the calls
    for worker in workers:
        events += worker.events()
    # At one time: first what is around, then what is inside, then the arrows.
    events.sort(key=lambda each: (each.ts, -each.dur if isinstance(each, SliceEvent) else 1.0))
    names = [event for each in recorded for event in _about(each)]
    names += [event for worker in workers for event in worker.names()]
    other = {"aiorpc": __version__, "recorded_by": by, "workers": {each.record.name: _said(each) for each in recorded}}
    return msgspec.json.encode({"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": other})


def _said(recorded: WorkerRecording) -> dict[str, Any]:
    """What the file says of one worker."""
    clock, summary, record = recorded.clock, recorded.summary, recorded.record
    said: dict[str, Any] = {"pid": record.pid, "host": record.hostname, "events": len(recorded.notes)}
    if clock is not None:
        said["clock"] = "shared" if clock.shared else "round trips"
        said["clock_error_us"] = round(clock.error * 1e6, 3)
        said["clock_ahead_us"] = round(clock.measured * 1e6, 3)
    if summary is not None:
        said["dropped"] = summary.dropped
        if summary.profile_error:
            said["profiler_error_us"] = round(summary.profile_error * 1e6, 3)
    if recorded.told:
        said["trouble"] = recorded.told
    return said


def _process(record: WorkerRecord) -> int:
    """Its number as a process of the trace, which must not be 0."""
    return record.id + 1


def _about(recorded: WorkerRecording) -> Iterator[NameEvent]:
    record, clock = recorded.record, recorded.clock
    labels = [] if clock is None else [f"clock \N{PLUS-MINUS SIGN}{clock.error * 1e6:.0f} \N{MICRO SIGN}s"]
    labels += filter(None, [recorded.told])
    name = f"{record.name} (pid {record.pid} on {record.hostname})"
    for kind, args in (
        ("process_name", {"name": name}),
        ("process_labels", {"labels": ", ".join(labels)}),
        ("process_sort_index", {"sort_index": record.id}),
    ):
        yield NameEvent(kind, _process(record), 0, args)


@dataclass(slots=True)
class _Call:
    """A call as one side has noted it, by the clock of its worker. Times are None where they were not noted."""

    step: StepNote
    queued: float | None = None
    running: float | None = None
    thread: int = 0
    ended: float | None = None
    ended_by: int = 0
    outcome: str = ""

    def take(self, step: StepNote) -> None:
        if step.step == "queued" and self.queued is None:
            self.queued = step.time
        elif step.step == "running" and self.running is None:
            self.running, self.thread = step.time, step.thread
        elif step.step == "ended":
            self.ended, self.ended_by, self.outcome = step.time, step.thread, step.outcome
        self.step = step  # the later steps know more


@dataclass(slots=True)
class _Slice:
    """A slice before it has its track; times in nanoseconds."""

    name: str
    category: str
    start: int
    end: int
    args: dict[str, Any] = field(default_factory=dict)
    inside: Sequence[_Slice] = ()
    track: int = 0


class _Pair(NamedTuple):
    queued: _Slice
    handler: _Slice | None


_Key = tuple[str, str, int]  # of a call: its caller, the worker that serves it, its number


class _Worker:
    """One worker on the axis. made, served: its calls as noted, and calls, pairs: their slices."""

    def __init__(self, recorded: WorkerRecording, clock: Clock, zero: float) -> None:
        assert recorded.summary is not None, "others are not on the axis"
        self.record = recorded.record
        self.summary: Summary = recorded.summary
        self.made: dict[_Key, _Call] = {}
        self.served: dict[_Key, _Call] = {}
        self.transfers: list[TransferNote] = []
        self.ranges: list[RangeNote] = []
        self.calls: dict[_Key, _Slice] = {}
        self.pairs: dict[_Key, _Pair] = {}
        self._laid: list[tuple[int, str, list[_Slice]]] = []
        self._clock = clock
        self._zero = zero
        self._began = max(0, self._ns(self.summary.began))
        self._ended = max(self._began + 1, self._ns(self.summary.ended))
        # From here on threads have the system's numbers, if they still run.
        self._threads = {system: name for name, system in self.summary.threads.values()}
        numbers = {ours: system for ours, (_, system) in self.summary.threads.items()}
        self._loop = numbers.get(self.summary.loop, self.summary.loop)
        for note in recorded.notes:
            if not isinstance(note, RangeNote):
                note.thread = numbers.get(note.thread, note.thread)
            if isinstance(note, StepNote):
                calls = self.made if note.side == "made" else self.served
                key = note.caller, note.worker, note.call_id
                if key not in calls:
                    calls[key] = _Call(note)
                calls[key].take(note)
            elif isinstance(note, TransferNote):
                if self._is_seen(note.ended):
                    self.transfers.append(note)
            elif self._is_seen(note.started + note.seconds):
                self.ranges.append(note)
        for calls in (self.made, self.served):
            for key in [key for key, call in calls.items() if _is_unshown(call) or not self._is_seen(call.ended)]:
                del calls[key]

    def _is_seen(self, end: float | None) -> bool:
        """Whether what ended then, or has not ended, is on the axis."""
        return end is None or self._ns(end) > self._began

    def _ns(self, time: float) -> int:
        return round((self._clock.ours(time) - self._zero) * 1e9)

    def slice(self, name: str, category: str, start: float, end: float | None, **args: Any) -> _Slice:
        """A slice between two moments of this worker's clock, as far as it was recorded. end: None if it went on."""
        first = min(max(self._ns(start), self._began), self._ended - 1)
        last = self._ended if end is None else min(self._ns(end), self._ended)
        if end is None:
            args["unfinished"] = True
        return _Slice(name, category, first, max(first + 1, last), args)

    # --- slices and tracks --------------------------------------------------------------------------------------------

    def lay_out(self, numbers: Iterator[int]) -> None:
        """Make all slices, and give each its track. numbers: of tracks, in the whole trace."""
        for key, call in self.made.items():
            self.calls[key] = self._made(call)
        threads: dict[int, list[_Slice]] = {}
        handlers: list[_Slice] = []
        for key, call in self.served.items():
            pair = self.pairs[key] = self._served(call)
            if pair.handler is None:
                continue
            in_thread = call.thread == call.ended_by and call.thread != self._loop
            if in_thread:
                threads.setdefault(call.thread, []).append(pair.handler)
            else:
                handlers.append(pair.handler)
        coming: list[_Slice] = []
        for transfer in self.transfers:
            shown = self._transfer(transfer)
            if transfer.side == "sent":
                threads.setdefault(transfer.thread, []).append(shown)
            else:
                coming.append(shown)
        devices: dict[str, list[_Slice]] = {}
        for event in self.ranges:
            seen = self.slice(event.name, event.category, event.started, event.started + event.seconds)
            if event.thread:
                threads.setdefault(event.thread, []).append(seen)
            else:
                devices.setdefault(event.track, []).append(seen)
        laid = self._laid
        for thread, slices in sorted(threads.items()):
            name = self._threads.get(thread, "a thread that has ended")
            nested, others = _nest(slices)
            handlers += others
            laid.append((_THREAD, f"{name} ({thread})", nested))
        for place, slices in devices.items():
            laid += [(_DEVICE, place, lane) for lane in _lanes(slices)]
        laid += [(_CALLS, "", lane) for lane in _lanes(self.calls.values())]
        laid += [(_QUEUED, "", lane) for lane in _lanes(pair.queued for pair in self.pairs.values())]
        laid += [(_HANDLERS, "", lane) for lane in _lanes(handlers)]
        laid += [(_TRANSFERS, "", lane) for lane in _lanes(coming)]
        laid.sort(key=lambda each: each[0])
        for _, _, slices in laid:
            number = next(numbers)
            for each in slices:
                each.track = number

    def _made(self, call: _Call) -> _Slice:
        step = call.step
        args: dict[str, Any] = {"to": step.worker, "bytes": step.request_bytes, "answer_bytes": step.answer_bytes}
        shown = self.slice(step.function, "call", step.started, call.ended, **args, **_more(call))
        if call.queued is not None:
            waits = self.slice("unsent", "unsent", call.queued, call.running or call.ended)
            shown.inside = (_within(waits, shown),)
        return shown

    def _served(self, call: _Call) -> _Pair:
        step = call.step
        args = {"from": step.caller, "function": step.function, "bytes": step.request_bytes}
        begins = call.running if call.running is not None else call.ended
        queued = self.slice("queued", "queued", step.started, begins, **args, call=step.call_id)
        if call.running is None:
            return _Pair(queued, None)
        args["answer_bytes"] = step.answer_bytes
        return _Pair(queued, self.slice(step.function, "handler", call.running, call.ended, **args, **_more(call)))

    def _transfer(self, transfer: TransferNote) -> _Slice:
        verb = "transfer" if transfer.side == "received" else "copy" if transfer.copied else "hand over"
        args = {"bytes": transfer.size, "channel": transfer.channels, "call": transfer.call_id}
        args["from" if transfer.side == "received" else "to"] = transfer.worker
        name = f"{verb} by {transfer.channels}"
        return self.slice(name, "transfer", transfer.started, transfer.ended, **args)

    def names(self) -> Iterator[NameEvent]:
        """The names of its tracks."""
        for kind, title, slices in self._laid:
            track = slices[0].track
            for name, args in (
                ("thread_name", {"name": title or _TITLES[kind]}),
                ("thread_sort_index", {"sort_index": track}),
            ):
                yield NameEvent(name, _process(self.record), track, args)

    def events(self) -> Iterator[SliceEvent]:
        """Its slices."""
        pid = _process(self.record)
        for _, _, slices in self._laid:
            for outer in slices:
                for each in (outer, *outer.inside):
                    length = each.end - each.start
                    yield SliceEvent(
                        each.name, each.category, pid, outer.track, each.start / 1e3, length / 1e3, each.args
                    )


def _is_unshown(call: _Call) -> bool:
    """Whether it is one of those, or it is not known what it called."""
    return call.step.function.startswith(_UNSHOWN) or (call.step.function == "?" and call.ended is None)


def _more(call: _Call) -> dict[str, Any]:
    step = call.step
    more: dict[str, Any] = {"call": step.call_id, "kind": step.kind}
    if call.outcome:
        more["outcome"] = call.outcome
    if step.own:
        more["own"] = True
    if step.part_of is not None:
        more["part_of"] = list(step.part_of)
    return more


def _within(inner: _Slice, outer: _Slice) -> _Slice:
    """Cut a slice to another one around it."""
    inner.start = min(max(inner.start, outer.start), outer.end - 1)
    inner.end = min(max(inner.end, inner.start + 1), outer.end)
    return inner


def _lanes(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """As few tracks as there are slices at a time: on each of them they follow each other."""
    lanes: list[list[_Slice]] = []
    busy: list[tuple[int, int]] = []  # until when, and the number
    free: list[int] = []
    for each in sorted(slices, key=lambda each: each.start):
        while busy and busy[0][0] <= each.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            number = heapq.heappop(free)
        else:
            number = len(lanes)
            lanes.append([])
        lanes[number].append(each)
        heapq.heappush(busy, (each.end, number))
    return lanes


def _nest(slices: Iterable[_Slice]) -> tuple[list[_Slice], list[_Slice]]:
    """Those that nest on one track, and the others. A little too much of a slice, as of another clock, is cut off."""
    nested: list[_Slice] = []
    others: list[_Slice] = []
    around: list[_Slice] = []
    for each in sorted(slices, key=lambda each: (each.start, -each.end)):
        while around and around[-1].end <= each.start:
            around.pop()
        if around and each.end > around[-1].end:
            if each.end - around[-1].end > _BLUR:
                others.append(each)
                continue
            each.end = around[-1].end
        nested.append(each)
        around.append(each)
    return nested, others


# --- what belongs to several workers ----------------------------------------------------------------------------------


def _share_ranges(workers: Sequence[_Worker]) -> None:
    """One profiler sees all threads of a process: give its events to the workers whose handlers they were in."""
    processes: dict[tuple[str, int], list[_Worker]] = {}
    for worker in workers:
        processes.setdefault((worker.record.host, worker.record.pid), []).append(worker)
    for members in processes.values():
        ranges = [(worker, each) for worker in members for each in worker.ranges]
        if len(members) < 2 or not ranges:
            continue
        looks = [(worker, _handler_at(worker)) for worker in members]
        for worker in members:
            worker.ranges = []
        for owner, each in ranges:
            of = [(since, worker) for worker, look in looks if (since := look(each)) is not None]
            latest = max(of, key=lambda one: one[0], default=(0.0, owner))
            latest[1].ranges.append(each)


def _handler_at(worker: _Worker) -> Callable[[RangeNote], float | None]:
    """A function that tells when the handler began in which an event was, if it was in one of this worker."""
    threads: dict[int, list[tuple[float, float]]] = {}
    for call in worker.served.values():
        if call.running is not None:
            threads.setdefault(call.thread, []).append((call.running, call.ended or float("inf")))
    for each in threads.values():
        each.sort()

    def look(event: RangeNote) -> float | None:
        spans = threads.get(event.thread, [])
        place = bisect_right(spans, (event.started, float("inf")))
        near = reversed(spans[max(0, place - _LOOK_BACK) : place])
        return next((since for since, until in near if event.started < until), None)

    return look


def _arrows(workers: Sequence[_Worker]) -> list[ArrowEvent]:
    """From each call to its handler and its answer, and from handlers to the calls that they have made."""
    serving: dict[_Key, tuple[_Worker, _Pair]] = {}
    for worker in workers:
        serving |= {key: (worker, pair) for key, pair in worker.pairs.items()}
    numbers = itertools.count(1)
    arrows: list[ArrowEvent] = []
    for worker in workers:
        for key, call in worker.calls.items():
            found = serving.get(key)
            if found is not None:
                arrows += _path(next(numbers), (worker, call), *found)
            parent = worker.made[key].step.parent
            pair = None if parent is None else worker.pairs.get((parent[0], worker.record.name, parent[1]))
            if pair is not None and pair.handler is not None and pair.handler.start <= call.start < pair.handler.end:
                number = next(numbers)
                arrows.append(_arrow("s", "calls", number, worker, pair.handler, call.start))
                arrows.append(_arrow("f", "calls", number, worker, call, call.start))
    return arrows


def _path(number: int, made: tuple[_Worker, _Slice], other: _Worker, pair: _Pair) -> Iterator[ArrowEvent]:
    """The arrow of one call. made: where it was made, and its slice there, which gets the times on the way.

    Perfetto draws an arrow from the end of a slice to the beginning of the next one.
    """
    worker, call = made
    sent = max((each.end for each in call.inside), default=call.start)
    request = _within(_Slice("request", "request", sent, pair.queued.start), call)
    inside = [*call.inside, request] if request.start >= sent else [*call.inside]  # else it was never sent
    stops = [(worker, call, request.start), (other, pair.queued, pair.queued.start)]
    if pair.handler is not None:
        stops.append((other, pair.handler, pair.handler.start))
        if call.args.get("outcome") in _ANSWERED and not pair.handler.args.get("unfinished"):
            answer = _within(_Slice("answer", "answer", pair.handler.end, call.end), call)
            if answer.start >= inside[-1].end:  # else the clocks do not agree
                inside.append(answer)
            stops.append((worker, call, answer.start))
    call.inside = inside
    for place, (at, shown, time) in enumerate(stops):
        phase = "s" if place == 0 else "f" if place == len(stops) - 1 else "t"
        yield _arrow(phase, "call", number, at, shown, time)


def _arrow(phase: str, name: str, number: int, worker: _Worker, at: _Slice, time: int) -> ArrowEvent:
    return ArrowEvent(phase, name, number, _process(worker.record), at.track, time / 1e3)
