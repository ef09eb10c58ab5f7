"""What Chrome's trace format asks of a file, so that Perfetto shows all of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]

FLOWS = "stf"


def track_of(event: Event) -> Track:
    return event["pid"], event["tid"]


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def span(event: Event) -> tuple[int, int]:
    """When a slice begins and ends, in nanoseconds."""
    return nanoseconds(event["ts"]), nanoseconds(event["ts"]) + nanoseconds(event["dur"])


def problems(trace: dict[str, Any]) -> list[str]:
    """What is wrong with a trace."""
    events: list[Event] = trace["traceEvents"]
    found = [f"{each} has no phase that is known here" for each in events if each.get("ph") not in ("M", "X", *FLOWS)]
    found += [f"{each} has no place" for each in events if type(each.get("pid")) is not int or "tid" not in each]
    if found:
        return found
    named = {("process", each["pid"]) for each in events if each["name"] == "process_name"}
    named |= {("thread", track_of(each)) for each in events if each["name"] == "thread_name"}
    tracks: dict[Track, list[Event]] = defaultdict(list)
    for each in events:
        if each["ph"] != "M":
            tracks[track_of(each)].append(each)
    for track, members in tracks.items():
        if ("process", track[0]) not in named or ("thread", track) not in named:
            found.append(f"track {track} has no name")
        times = [each["ts"] for each in members]
        if times != sorted(times) or min(times) < 0:
            found.append(f"the times of track {track} are not in order")
        found += nesting(track, [each for each in members if each["ph"] == "X"])
    return found + flows(tracks)


def nesting(track: Track, slices: list[Event]) -> list[str]:
    """Slices that overlap in part, or have no length."""
    found: list[str] = []
    around: list[tuple[int, int]] = []
    for each in slices:
        start, end = span(each)
        if end <= start:
            found.append(f"{each} has no length")
        while around and around[-1][1] <= start:
            around.pop()
        if around and end > around[-1][1]:
            found.append(f"{each} on track {track} overlaps with what began before")
        around.append((start, end))
    return found


def flows(tracks: dict[Track, list[Event]]) -> list[str]:
    """Arrows without a beginning or an end, or at no slice."""
    found: list[str] = []
    ways: dict[tuple[str, str, int], str] = defaultdict(str)
    for members in tracks.values():
        until = 0  # when the last slice ends that has begun
        for each in members:
            if each["ph"] == "X":
                until = max(until, span(each)[1])
            else:
                ways[each["cat"], each["name"], each["id"]] += each["ph"]
                if nanoseconds(each["ts"]) >= until:
                    found.append(f"{each} is at no slice")
    for way, phases in ways.items():
        if phases.count("s") != 1 or phases.count("f") != 1:
            found.append(f"the arrow {way} has {phases!r}")
    return found


def slices(trace: dict[str, Any], category: str, ending: str = "") -> list[Event]:
    """The slices of a category whose name, or function, ends so; in the order of their beginning."""
    of = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["cat"] == category]
    return [each for each in of if str(each["args"].get("function", each["name"])).endswith(ending)]


def arrow(trace: dict[str, Any], start: Event, name: str = "call") -> list[Event]:
    """The slices along the arrow that begins at this slice; the innermost ones."""
    events = trace["traceEvents"]
    first, last = span(start)
    numbers = [
        each["id"]
        for each in events
        if (each["ph"], each["name"]) == ("s", name)
        and track_of(each) == track_of(start)
        and first <= nanoseconds(each["ts"]) < last
    ]
    assert len(numbers) == 1, numbers
    stops = [each for each in events if each.get("id") == numbers[0] and each["name"] == name]
    stops.sort(key=lambda each: FLOWS.index(each["ph"]))
    return [_at(events, each) for each in stops]


def _at(events: list[Event], stop: Event) -> Event:
    around = [each for each in events if each["ph"] == "X" and track_of(each) == track_of(stop)]
    inside = [each for each in around if span(each)[0] <= nanoseconds(stop["ts"]) < span(each)[1]]
    return max(inside, key=lambda each: (span(each)[0], -span(each)[1]))


def process(trace: dict[str, Any], event: Event) -> str:
    """The name of the worker that a slice belongs to."""
    (name,) = (
        each["args"]["name"]
        for each in trace["traceEvents"]
        if each["name"] == "process_name" and each["pid"] == event["pid"]
    )
    return str(name).partition(" ")[0]
