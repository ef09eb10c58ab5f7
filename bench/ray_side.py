"""Runs Ray's side of a measurement in processes of its own, and leaves none of them, and no file, behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .stage import Figures, progress
from .stats import BenchError

LIMIT = 240.0  # seconds of one run, of which Ray takes some ten to start and to end, or more on a busy machine
END_SECONDS = 10.0
LAST_WORDS = 2_000  # characters of what a run said that failed
_ROOT = Path(__file__).resolve().parent.parent
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # as in the workers of the other sides
    "RAY_USAGE_STATS_ENABLED": "0",  # it would be sent to Ray's authors
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns of its default otherwise
}


def installed(what: str) -> bool:
    """Whether Ray is; where it is not, a line on stderr says that `what` is left out."""
    if importlib.util.find_spec("ray") is not None:
        return True
    progress(f"         Ray is not installed (pip install '.[bench]'): {what} is left out")
    return False


def run(measurement: str, *, environment: dict[str, str] | None = None, limit: float = LIMIT, **kwargs: Any) -> Figures:
    """Start Ray, take a measurement of `ray_program`, and end Ray. environment: variables beside those of this process.

    BenchError when it fails, or takes more than `limit` seconds, which includes the time that Ray takes to start.
    """
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray makes sockets in folders of it
    try:
        command = [sys.executable, "-m", "bench.ray_program", measurement, folder, json.dumps(kwargs)]
        figures: Figures = json.loads(_output(command, environment or {}, limit).splitlines()[-1])
        return figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _output(command: Sequence[str], environment: dict[str, str], limit: float) -> str:
    """What a program prints. It and all that it started have ended then."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command,
        env={**os.environ, **_ENVIRONMENT, **environment, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # by which those that it started are found
    ) as process:
        try:
            printed, said = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise BenchError(f"Ray's side took more than {limit:g} s") from None
        finally:
            _end_session(process.pid)
    if process.returncode != 0 or not printed.strip():
        raise BenchError(f"Ray's side failed (exit {process.returncode}):\n{said[-LAST_WORDS:]}")
    return printed


def _end_session(session: int) -> None:
    """Kill all processes of a session, and wait until they are gone."""
    until = time.monotonic() + END_SECONDS
    while (left := _members(session)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _members(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, _, of = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(path.parent.name))
    return found
