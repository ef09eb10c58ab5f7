"""Programs as a user starts them: in a session of their own, with a time limit, and nothing left when they end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GRACE = 20.0  # seconds: helpers of multiprocessing end a moment after the program
POLL = 0.02

#: Runs a program's ``run`` for each of the settings on its command line, and prints the results as JSON; then its
#: ``main``, if it is given a command line for that. One process for all: most of what each takes is to import torch.
RUN_ALL = """
import importlib, json, sys
program = importlib.import_module(sys.argv[1])
results = [program.run(program.Settings(**settings)) for settings in json.loads(sys.argv[2])]
print(json.dumps(results), flush=True)
if len(sys.argv) > 3:
    sys.exit(program.main(sys.argv[3:]))
"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    code: int
    out: str
    err: str


@dataclass
class Program:
    """A running program and everything it started."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def wait_for_line(self, start: str) -> str:
        """Read the output up to a line that starts like this; fails when the output ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"no line that starts with {start!r} in {''.join(self.lines)!r}")

    def finish(self, timeout: float) -> Outcome:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        out, err = self.process.communicate(timeout=timeout)
        return Outcome(self.process.returncode, "".join(self.lines) + out, err)

    def members(self) -> dict[int, str]:
        """Process id and command of each living process of the program's session."""
        return dict(_session(self.process.pid))


@contextlib.contextmanager
def started(command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    """Start a program; at the end of the block it must be gone with all its processes."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=_environment(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    program = Program(process)
    try:
        yield program
        left = _wait_until_gone(program)
        assert not left, f"left behind: {left}"
    finally:
        for pid in [*program.members(), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def run_program(command: Sequence[str], cwd: Path, *, timeout: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a program to its end."""
    with started(command, cwd, env) as program:
        return program.finish(timeout)


@dataclass(frozen=True)
class Ran:
    """What a program's runs returned, and what its ``main`` said and left in the folder."""

    results: list[dict[str, Any]]
    outcome: Outcome
    folder: Path


def run_all(module: str, settings: Sequence[dict[str, Any]], cwd: Path, *options: str, timeout: float) -> Ran:
    """``module.run`` for each of the settings and, if there are options, ``module.main`` with them; in one program."""
    outcome = run_program(["-c", RUN_ALL, module, json.dumps(list(settings)), *options], cwd, timeout=timeout)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if line.startswith("[{"))
    return Ran(json.loads(lines[end]), replace(outcome, out="".join(lines[end + 1 :])), cwd)


def matches(text: str, patterns: Sequence[str]) -> bool:
    """Whether there is a line for each pattern, and no other."""
    lines = text.splitlines()
    return len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines))


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def usage_error(
    main: Callable[[Sequence[str]], int], options: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """What a program says of a command line that it does not run."""
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    return capsys.readouterr().err


def torchrun(workers: int, *command: str) -> list[str]:
    """The command line of a program under torchrun, on this machine alone."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), *command]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    # A launcher's variables of the test run itself must not look like the program's own.
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**ours, "PYTHONPATH": path, "COLUMNS": "120", **more}


def _wait_until_gone(program: Program) -> dict[int, str]:
    deadline = time.monotonic() + GRACE
    while (left := program.members()) and time.monotonic() < deadline:
        time.sleep(POLL)
    return left


def _session(session: int) -> Iterator[tuple[int, str]]:
    """Living processes of a session, from /proc; none on systems without it."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended
        if int(sid) == session and state not in "ZX":
            yield int(entry.name), command
