"""Runs tests, each in processes of its own that are forked from this one, which has imported everything.

    this process -- fork --> leader of one test (a session of its own) -- fork or spawn --> its ranks

The leader runs the test as unittest would and writes the outcome to a file. What is left of the test when the leader
has ended, or when its time is over, is killed with the session.

The verdict is PyTorch's, with one exception: PyTorch looks at the exit code of rank 0 alone, here a crash of any rank
fails the test.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from . import suites
from .suites import Case

PASS, FAIL, SKIP = "pass", "fail", "skip"
# Seconds beyond the limit of a test in which its leader collects the stacks of the ranks and ends.
GRACE = 25.0
LOOK = 0.02
MAX_DETAIL = 6000
# torch ends a rank so when its test cannot run here: too few devices, no such backend and so on.
_SKIP_CODES = range(72, 90)
_ERROR = re.compile(r"[\w.]*(Error|Exception|Lost|Timeout|Closed|Interrupt)\b.*:")


class Outcome(NamedTuple):
    """How a test went. detail: the error or the reason for skipping; seconds: of the test alone."""

    id: str
    result: str
    detail: str
    seconds: float

    @property
    def summary(self) -> str:
        """The line of the detail that says most, shortened: the last that begins with an error."""
        lines = [line.strip() for line in self.detail.splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line) and not line.startswith("RuntimeError: Process ")]
        return (errors or lines or [""])[-1][:150]


class _Verdict(unittest.TestResult):
    """What unittest says of the one test."""

    def __init__(self) -> None:
        super().__init__()
        self.result = PASS
        self.detail = ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.result, self.detail = SKIP, reason

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.result, self.detail = FAIL, "".join(traceback.format_exception(*err))

    addError = addFailure


@dataclass
class _Job:
    case: Case
    pid: int
    started: float
    file: Path


@dataclass(frozen=True)
class Runner:
    """After `suites.load`. timeout: seconds for one test. scratch: a directory for temporary files."""

    logs: Path
    scratch: Path
    timeout: float = 60.0
    start: str = "fork"

    def run(self, cases: Iterable[Case], jobs: int) -> Iterator[Outcome]:
        """Run them, so many at a time; outcomes come as tests end."""
        os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(self.timeout))
        os.environ[suites.START] = self.start
        self.logs.mkdir(parents=True, exist_ok=True)
        gc.collect()
        gc.freeze()  # what is shared with the children is not touched by their collectors
        waiting = list(cases)[::-1]
        running: list[_Job] = []
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(self._begin(waiting.pop()))
                time.sleep(LOOK)
                for job in list(running):
                    outcome = self._look(job)
                    if outcome is not None:
                        running.remove(job)
                        yield outcome
        finally:
            for job in running:
                _kill(job)
                os.waitpid(job.pid, 0)

    def run_twice(self, cases: Iterable[Case], jobs: int, retry: Callable[[Outcome], bool]) -> Iterator[Outcome]:
        """The same; those that fail run once more, alone, if `retry` says so, and only the second outcome counts."""
        known = {case.id: case for case in cases}
        again = []
        for outcome in self.run(known.values(), jobs):
            if outcome.result == FAIL and retry(outcome):
                again.append(outcome.id)
            else:
                yield outcome
        for outcome in self.run([known[each] for each in again], 1) if again else ():
            yield outcome

    def _begin(self, case: Case) -> _Job:
        job = _Job(case, 0, time.monotonic(), self.scratch / f"{case.id}.json")
        job.file.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._lead(job)
            finally:
                os._exit(70)
        return replace(job, pid=pid)

    def _lead(self, job: _Job) -> None:
        """In the forked child: run the test, write its outcome, leave without another word."""
        os.setsid()
        descriptor = os.open(self.logs / f"{job.case.id}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        verdict = _Verdict()
        codes: list[int | None] = []
        started = time.monotonic()
        try:
            test = suites.make(job.case)
            test.run(verdict)
            codes = getattr(test, "exit_codes", [])
        except BaseException as error:
            verdict.result, verdict.detail = FAIL, f"the test could not be run: {type(error).__name__}: {error}"
        result, detail = _judge(verdict, codes)
        outcome = Outcome(job.case.id, result, detail[-MAX_DETAIL:], round(time.monotonic() - started, 3))
        written = job.file.with_suffix(".tmp")
        written.write_text(json.dumps(outcome))
        written.rename(job.file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _look(self, job: _Job) -> Outcome | None:
        pid, _ = os.waitpid(job.pid, os.WNOHANG)
        elapsed = time.monotonic() - job.started
        if not pid and elapsed < self.timeout + GRACE:
            return None
        _kill(job)
        if not pid:
            os.waitpid(job.pid, 0)
        if job.file.exists():
            return Outcome(*json.loads(job.file.read_text()))
        said = "crashed" if pid else "did not end in time"
        return Outcome(job.case.id, FAIL, f"the process that leads the test {said}", round(elapsed, 3))


def _judge(verdict: _Verdict, codes: list[int | None]) -> tuple[str, str]:
    odd = {rank: code for rank, code in enumerate(codes) if code and code not in _SKIP_CODES}
    if verdict.result == PASS and odd:
        return FAIL, "; ".join(f"rank {rank} ended with exit code {code}" for rank, code in odd.items())
    return verdict.result, verdict.detail


def _kill(job: _Job) -> None:
    """What is left of that test: its session is its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
