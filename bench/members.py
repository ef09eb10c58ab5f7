"""Free groups of growing size on one machine: forming, a call to all, and what a quiet group takes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from .scaling import Curve
from .stage import Figures, Stage, progress
from .stats import BenchError, Row

#: Processes of a group; each has as many members.
PROCESSES = 4
SIZES, QUICK_SIZES = (16, 64, 128, 256), (16, 64)
#: For all 256 to know each other, and how many times as long as with 16 a call to all may take for each member.
FORMED_SECONDS, GROWTH = 15.0, 1.5
_REST = 1.0  # seconds of a group that does nothing, before its first call and while it is looked at
_MB = 1 << 20


CURVES: dict[str, Curve] = {
    "joined": Curve("all have joined", "s"),
    "known": Curve("all know each other", "s"),
    "spent": Curve("processor until they do, for each member", "ms"),
    "first": Curve("first call to all", "ms"),
    "p50": Curve("call to all, p50", "ms"),
    "each": Curve("call to all, for each member", "µs"),
    "worst": Curve("call to all, worst", "ms"),
    "lag": Curve("lag of a quiet loop, worst", "ms"),
    "processor": Curve("processor of a quiet group", "s/s"),
    "descriptors": Curve("descriptors for each member", ""),
    "connections": Curve("connections of each member", ""),
    "memory": Curve("memory that each member adds", "MB"),
    "left": Curve("all have left", "s"),
}


def members(stage: Stage) -> list[Row]:
    """Groups of each size, one after the other, each anew in every round."""
    sizes = SIZES if stage.plan.rounds >= stage.plan.cohort_rounds > 1 else QUICK_SIZES
    found: dict[int, list[Figures]] = {}
    for size in sizes:
        found[size] = []
        for _ in stage.rounds(stage.plan.cohort_rounds):
            progress(f"         {size} members")
            stage.pause()
            found[size].append(_one_group(size, stage.plan.seconds))
    return [_row(key, size, sizes, found[size]) for key in CURVES for size in sizes]


def _row(key: str, size: int, sizes: Sequence[int], rounds: Sequence[Figures]) -> Row:
    curve = CURVES[key]
    limit = FORMED_SECONDS if key == "known" and size == SIZES[-1] else None
    values = tuple(figures[key] for figures in rounds)
    return Row("members", curve.quantity, curve.unit, curve.better, values, size=size, limit=limit)


def _one_group(size: int, seconds: float) -> Figures:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        here = [stack.enter_context(_process(Path(folder) / f"log{number}")) for number in range(PROCESSES)]
        bare = _sum(_all(here, "idle", 0.0), "memory")
        place, share = f"file://{folder}/group", size // PROCESSES
        begin = time.monotonic()
        for number, each in enumerate(here):
            each.tell("join", place, [f"m{number * share + k}" for k in range(share)], size, begin)
        formed = [each.answer() for each in here]
        time.sleep(_REST)
        quiet = _all(here, "idle", _REST)
        called = here[0].ask("call_all", seconds)
        left = _all(here, "leave")
    return {
        **called,
        "joined": max(each["joined"] for each in formed),
        "known": max(each["known"] for each in formed),
        "spent": 1e3 * _sum(formed, "spent") / size,
        "each": 1e3 * called["p50"] / (size - 1),
        "lag": 1e3 * max(each["lag"] for each in quiet),
        "processor": _sum(quiet, "processor"),
        "descriptors": _sum(quiet, "descriptors") / size,
        "connections": _sum(quiet, "connections") / size,
        "memory": (_sum(quiet, "memory") - bare) / size / _MB,
        "left": max(each["left"] for each in left),
    }


def _sum(answers: Sequence[Figures], key: str) -> float:
    return sum(each[key] for each in answers)


def _all(processes: Sequence[_Process], command: str, *arguments: object) -> list[Figures]:
    """What all answer to a command that they get at once."""
    for each in processes:
        each.tell(command, *arguments)
    return [each.answer() for each in processes]


class _Process:
    """A process that runs `member_program`."""

    def __init__(self, popen: subprocess.Popen[str], log: Path) -> None:
        self._popen = popen
        self._log = log

    def tell(self, command: str, *arguments: object) -> None:
        """Send a command; `answer` waits for what comes back."""
        print(json.dumps([command, *arguments]), file=_open(self._popen.stdin), flush=True)

    def answer(self) -> Figures:
        """The next answer. BenchError if the process has ended instead."""
        line = _open(self._popen.stdout).readline()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace")
            raise BenchError(f"a process with members has ended: {said[-2000:]}")
        figures: Figures = json.loads(line)
        return figures

    def ask(self, command: str, *arguments: object) -> Figures:
        """The answer to a command."""
        self.tell(command, *arguments)
        return self.answer()


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "it was made with pipes"
    return pipe


@contextlib.contextmanager
def _process(log: Path) -> Iterator[_Process]:
    command = [sys.executable, "-m", "bench.member_program"]
    pipe = subprocess.PIPE
    with log.open("w") as errors, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as popen:
        process = _Process(popen, log)
        try:
            process.answer()
            yield process
            _open(popen.stdin).close()
        except BaseException:
            popen.kill()
            raise
