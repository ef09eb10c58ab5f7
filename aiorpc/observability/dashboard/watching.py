"""Looks at the groups of this user on this host again and again, and remembers what was seen for a while."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from .. import reader
from ..comparing import compare
from ..reader import SeenGroup
from ..report import Look
from .showing import Point, Shown, point, show

#: Seconds between two looks while a page is open, and while none is.
OFTEN, SELDOM = 1.0, 5.0
#: Seconds for which curves, events and groups that have gone are kept.
KEPT = 600.0
_MOST_EVENTS = 500
#: What stood still over so many looks, and the present one, may be in trouble.
_LOOKS = 2
#: Members tell of the same event within so many seconds of each other.
_SAME = 5.0


class Event(msgspec.Struct):
    """News of a group. time: since the epoch. seen_by: the first member that told of it. turn: of the look that found
    it."""

    time: float
    what: str
    worker: str
    text: str
    seen_by: str
    turn: int


class GroupMessage(msgspec.Struct):
    """A group, for the page. key: of this group as long as the server runs. gone: since when there is no member of it;
    0.0 while there is. points, events: those that the page does not have."""

    key: int
    gone: float
    shown: Shown
    points: list[Point]
    events: list[Event]


class PageMessage(msgspec.Struct):
    """What the page gets after a look. whole: whether it has all that is kept, in place of what the page has. trouble:
    why there is nothing new, as a sentence."""

    time: float
    whole: bool
    trouble: str
    groups: list[GroupMessage]


@dataclass
class Watched:
    """A group that is watched. marks: of its members. looks: the last ones. points: with the number of their look."""

    key: int
    marks: set[str]
    shown: Shown
    gone: float = 0.0
    looks: deque[SeenGroup] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    points: deque[tuple[int, Point]] = field(default_factory=deque)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))


def _look() -> list[SeenGroup]:
    return reader.groups(question=Look(tally=True))


class Watcher:
    """Watches all groups. On one loop, but for the looks themselves, which block and run in a thread."""

    def __init__(self, name: str | None = None, look: Callable[[], list[SeenGroup]] = _look) -> None:
        """name: of a worker of the groups that are watched; None for all groups. look: what there is to see now."""
        self._name = name
        self._look = look
        self._groups: list[Watched] = []
        self._keys = 0
        self._turn = 0
        self._trouble = ""
        self._readers = 0
        self._looked = asyncio.Event()  # another one for each look
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Look until it is cancelled. A look that fails is told on the page."""
        while True:
            began = time.monotonic()
            try:
                self.note(await asyncio.to_thread(self._look), time.time())
                self._trouble = ""
            except Exception as error:  # whatever is wrong with the host, the page says so and goes on
                self._trouble = f"no look at the workers was possible: {type(error).__name__}: {error}"
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            await self._pause(began)

    async def _pause(self, began: float) -> None:
        """Wait until the next look is due: soon, if a page is open or is opened meanwhile."""
        self._wanted.clear()
        await asyncio.sleep(max(0.05, began + OFTEN - time.monotonic()))  # rates of shorter times jump
        if not self._readers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SELDOM - OFTEN):
                    await self._wanted.wait()

    # --- noting -------------------------------------------------------------------------------------------------------

    def note(self, groups: list[SeenGroup], now: float) -> None:
        """Note a look. now: seconds since the epoch."""
        self._turn += 1
        living = [self._note_group(group, now) for group in groups if self._name is None or self._name in group.names]
        for watched in self._groups:
            if watched not in living and not watched.gone:
                watched.gone = now
                watched.looks.clear()
        self._groups = [each for each in self._groups if not each.gone or each.gone > now - KEPT]

    def _note_group(self, group: SeenGroup, now: float) -> Watched:
        marks = _marks(group)
        watched = next((each for each in self._groups if each.marks & marks), None)
        before = [] if watched is None or watched.gone else list(watched.looks)
        seen = compare({report.mark: report for look in before[-1:] for report in look.reports}, group)
        shown = show([*before, group], seen)
        if watched is None:
            self._keys += 1
            watched = Watched(self._keys, marks, shown)
            self._groups.append(watched)
        if not group.reports and watched.shown.title:  # none answers: what is known of it stays
            shown.title, shown.dynamic = watched.shown.title, watched.shown.dynamic
        watched.shown, watched.marks, watched.gone = shown, marks, 0.0
        watched.looks.append(group)
        if seen.seconds:
            watched.points.append((self._turn, point(now, shown, seen)))
        while watched.points and watched.points[0][1].time < now - KEPT:
            watched.points.popleft()
        self._note_events(watched, group, now)
        return watched

    def _note_events(self, watched: Watched, group: SeenGroup, now: float) -> None:
        """Members see the same event a moment apart: it is noted once."""
        found = [(event, report.name) for report in group.reports for event in report.events]
        for event, name in sorted(found, key=lambda each: each[0].time):
            known = any(
                (each.what, each.worker) == (event.what, event.worker) and abs(each.time - event.time) < _SAME
                for each in watched.events
            )
            if not known and event.time > now - KEPT:
                watched.events.append(Event(event.time, event.what, event.worker, event.text, name, self._turn))

    # --- telling ------------------------------------------------------------------------------------------------------

    def message(self, after: int = 0) -> tuple[int, bytes]:
        """What a page does not have yet, as JSON, and the number of the look. after: the number that it has; 0 for
        none."""
        groups = [
            GroupMessage(
                each.key,
                each.gone,
                each.shown,
                [point for turn, point in each.points if turn > after],
                [event for event in each.events if event.turn > after],
            )
            for each in self._groups
        ]
        return self._turn, msgspec.json.encode(PageMessage(time.time(), not after, self._trouble, groups))

    def enter(self) -> None:
        """A page was opened."""
        self._readers += 1
        self._wanted.set()

    def leave(self) -> None:
        """A page was closed."""
        self._readers -= 1

    async def next(self) -> None:
        """Wait for the next look."""
        await self._looked.wait()


def _marks(group: SeenGroup) -> set[str]:
    """What the members of a group are known by, also those that do not answer."""
    marks = {f"{each.pid} {each.name}" for each in group.unseen}
    for report in group.reports:
        marks.add(f"{report.pid} {report.name}")
        marks.add(report.mark)
        marks.update(member.mark for member in report.members if member.mark)
    return marks
