"""Draws a recording as SVG: `python docs/_ext/timeline.py step.json picture.svg`.

Without arguments it runs the program of docs/howto/record.md, and draws docs/_static/record.svg.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURE = ROOT / "docs" / "_static" / "record.svg"
WIDTH, LEFT, ROW, LETTER = 1000, 210, 20, 6.2
# Legible on white and on black, as in `architecture`.
INK, ARROW = "#71889f", "#c0632b"
COLORS = {
    "call": "#2f7fb8",
    "queued": "#c79a2b",
    "unsent": "#a8926a",
    "handler": "#3c9a5f",
    "answer": "#8a6fc0",
    "transfer": "#b8518a",
}
OTHER = "#7d8b99"

Event = dict[str, Any]
Place = tuple[int, int]


def text(x: float, y: float, words: str, *, size: int = 11, bold: bool = False, color: str = INK) -> str:
    """Words from a point on."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{weight}>{escape(words)}</text>'


def short(name: str) -> str:
    """A name without its module."""
    return name.rpartition(":")[2]


class Drawing:
    """The slices and arrows of one trace, track below track."""

    def __init__(self, trace: dict[str, Any]) -> None:
        events: list[Event] = trace["traceEvents"]
        self.names = {
            (each["name"], each["pid"], each["tid"]): each["args"].get("name", "")
            for each in events
            if each["ph"] == "M"
        }
        self.slices: dict[Place, list[Event]] = defaultdict(list)
        for each in events:
            if each["ph"] == "X":
                self.slices[each["pid"], each["tid"]].append(each)
        shown = [each for members in self.slices.values() for each in members]
        self.first = min((each["ts"] for each in shown), default=0.0)
        last = max((each["ts"] + each["dur"] for each in shown), default=1.0)
        self.scale = (WIDTH - LEFT - 10) / max(last - self.first, 1e-3)
        self.arrows: dict[tuple[str, int], list[Event]] = defaultdict(list)
        for each in events:
            if each["ph"] in "stf":
                self.arrows[each["name"], each["id"]].append(each)
        self.rows: dict[Place, int] = {}
        self.parts: list[str] = []

    def x(self, time: float) -> float:
        return LEFT + (time - self.first) * self.scale

    def draw(self) -> str:
        """The picture."""
        y, process = 10, None
        for place in sorted(self.slices):
            if place[0] != process:
                process = place[0]
                y += 22
                self.parts.append(text(6, y - 6, self.names["process_name", process, 0], size=13, bold=True))
            self.parts.append(text(16, y + 14, self.names["thread_name", *place][:32]))
            self.rows[place] = y
            y += ROW * self._track(self.slices[place], y) + 3
        self._arrows()
        y = self._axis(y + 8)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        return "\n".join([head + 'font-family="system-ui, sans-serif">', *self.parts, "</svg>"]) + "\n"

    def _track(self, slices: list[Event], y: int) -> int:
        """The slices of a track, each below what is around it; how many rows these are."""
        around: list[float] = []
        deepest = 1
        for each in slices:
            end = each["ts"] + each["dur"]
            around = [until for until in around if until > each["ts"]]
            top, left, width = y + ROW * len(around), self.x(each["ts"]), max(each["dur"] * self.scale, 0.7)
            color = COLORS.get(each["cat"], OTHER)
            said = escape(f"{each['name']}, {each['dur'] / 1000:.3f} ms {each['args']}")
            self.parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 3}" rx="2" fill="{color}">'
                f"<title>{said}</title></rect>"
            )
            room = int((width - 6) / LETTER)
            if room >= 4:
                self.parts.append(text(left + 3, top + 12, short(each["name"])[:room], color="#fff"))
            around.append(end)
            deepest = max(deepest, len(around))
        return deepest

    def _arrows(self) -> None:
        for stops in self.arrows.values():
            stops.sort(key=lambda each: "stf".index(each["ph"]))
            points = [(self.x(each["ts"]), self.rows[each["pid"], each["tid"]] + ROW / 2) for each in stops]
            for (x1, y1), (x2, y2) in itertools.pairwise(points):
                curve = f"M{x1:.1f} {y1:.1f}C{x1 + 12:.1f} {y1:.1f} {x2 - 12:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
                self.parts.append(f'<path d="{curve}" fill="none" stroke="{ARROW}" stroke-width="1" opacity="0.75"/>')
                self.parts.append(f'<circle cx="{x2:.1f}" cy="{y2:.1f}" r="2" fill="{ARROW}"/>')

    def _axis(self, y: int) -> int:
        """Milliseconds since the first slice."""
        total = (WIDTH - LEFT - 10) / self.scale / 1000
        step = next(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1e3, 1e4, 1e9) if total / each <= 12)
        for number in range(int(total / step) + 1):
            x = self.x(self.first + number * step * 1000)
            self.parts.append(f'<path d="M{x:.1f} 10V{y}" stroke="{INK}" stroke-width="0.5" opacity="0.3"/>')
            self.parts.append(text(x + 2, y + 10, f"{number * step:g} ms", size=10))
        return y + 18


def picture(trace: dict[str, Any]) -> str:
    """A trace as SVG. Events of torch's profiler that no range of the program has are left out."""
    ranges = ("user_annotation", *COLORS)
    events = [each for each in trace["traceEvents"] if each["ph"] != "X" or each["cat"] in ranges]
    return Drawing({**trace, "traceEvents": events}).draw()


def recorded() -> dict[str, Any]:
    """What the program of the guide records."""
    sys.path.insert(0, str(ROOT))
    from tests import pages

    found: list[dict[str, Any]] = []
    asyncio.run(pages.run("howto/record.md", lambda names: found.append(names["trace"])))
    return found[0]


if __name__ == "__main__":
    source, target = sys.argv[1:] or (None, PICTURE)
    Path(target).write_text(picture(json.loads(Path(source).read_bytes()) if source else recorded()), encoding="utf-8")
