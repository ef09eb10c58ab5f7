"""Torch's profiler of this process while one of its workers is recorded.

It sees the operators and the ranges of `torch.profiler.record_function` of all threads, and what runs on devices. It
begins, stops and is read in one thread. A process has one profiler at a time. If the program runs its own, this one
does not begin; if the program begins its own meanwhile, that one takes over. Either is told, and the program's profiler
is not disturbed.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from .. import foreign
from ..threads import daemon, run_in_thread
from .notes import NAME_LIMIT, RangeNote

_ANCHOR = "aiorpc: the clock of the recording"
_ANCHORS = 8
# Seconds for the profiler to begin and to stop; the first begin in a process takes about one.
_PATIENCE = 60.0
#: Not on the axis: the profiler itself, and Python's own events.
_LEFT_OUT = frozenset(("Trace", "overhead"))


class Profiling:
    """One run of the profiler. `start` and `ranges` on a loop, `stop` from any thread.

    trouble: why there is nothing of it; empty if nothing went wrong. error: seconds by which its events may be off.
    """

    def __init__(self, worker: str, seconds: float) -> None:
        """seconds: it stops by itself after these."""
        self.trouble: str = ""
        self.error: float = 0.0
        self._worker = worker
        self._seconds = seconds
        self._ranges: list[RangeNote] = []
        self._wanted = True
        self._begun, self._stop, self._over = threading.Event(), threading.Event(), threading.Event()

    async def start(self) -> None:
        """Run the profiler; returns when it does, or when it has told its trouble."""
        daemon(self._run, name=f"aiorpc-{self._worker}-profiler").start()
        await run_in_thread(lambda: self._begun.wait(_PATIENCE), f"aiorpc-{self._worker}-profiler-wait")

    def stop(self) -> None:
        """End it; nothing of it is wanted. Idempotent."""
        self._wanted = False
        self._stop.set()

    async def ranges(self) -> list[RangeNote]:
        """End it; what it has seen."""
        self._stop.set()
        over = await run_in_thread(lambda: self._over.wait(_PATIENCE), f"aiorpc-{self._worker}-profiler-wait")
        if not over:
            self.trouble = f"torch's profiler has not stopped within {_PATIENCE:g} s"
        return self._ranges

    def _run(self) -> None:
        try:
            if torch.autograd.profiler._is_profiler_enabled:
                raise RuntimeError("the program runs it itself")
            # Not public: a torch that has it elsewhere is told as a trouble, and aiorpc can be imported with it.
            from torch._C._profiler import _ExperimentalConfig

            profiler = torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
            profiler.start()
            anchors = [_anchor() for _ in range(_ANCHORS)]
            self._begun.set()
            self._stop.wait(self._seconds)
            profiler.stop()
            # A file of an empty result cannot be written: torch crashes (2.13).
            if not profiler.events():
                raise RuntimeError("the program has begun its own meanwhile, which has taken over")
            if self._wanted:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "trace.json"
                    profiler.export_chrome_trace(str(path))
                    self._read(msgspec.json.decode(path.read_bytes()), anchors)
        except Exception as error:
            self.trouble = f"torch's profiler: {foreign.text_of(error)}"[:NAME_LIMIT]
        finally:
            self._begun.set()
            self._over.set()

    def _read(self, trace: dict[str, Any], anchors: list[tuple[float, float]]) -> None:
        """Take the events of the profiler's own file. anchors: when `_anchor` ran, by our clock."""
        events = [each for each in trace["traceEvents"] if each.get("ph") == "X" and each.get("cat") not in _LEFT_OUT]
        seen = sorted((each for each in events if each["name"] == _ANCHOR), key=lambda each: float(each["ts"]))
        if len(seen) != len(anchors):
            raise RuntimeError("it has not seen what gives its clock")
        width, offset = min(
            (after - before, (before + after) / 2 - (each["ts"] + each["dur"] / 2) / 1e6)
            for (before, after), each in zip(anchors, seen, strict=True)
        )
        self.error = width / 2
        self._ranges = [_range(each, offset) for each in events if each["name"] != _ANCHOR]


def _anchor() -> tuple[float, float]:
    before = time.monotonic()
    with torch.profiler.record_function(_ANCHOR):
        pass
    return before, time.monotonic()


def _range(event: dict[str, Any], offset: float) -> RangeNote:
    args = event.get("args") or {}
    device, stream = args.get("device"), args.get("stream")
    thread = event["tid"] if device is None and isinstance(event["tid"], int) and event["tid"] >= 0 else 0
    track = "" if thread else f"device {device} stream {stream}" if device is not None else str(event["tid"])
    return RangeNote(
        str(event["name"])[:NAME_LIMIT],
        str(event.get("cat", ""))[:NAME_LIMIT],
        event["ts"] / 1e6 + offset,
        max(0.0, event["dur"] / 1e6),
        thread,
        track[:NAME_LIMIT],
    )
