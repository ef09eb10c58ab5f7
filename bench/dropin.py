"""One old program, unmodified: on torch's own RPC, and on aiorpc by ``python -m aiorpc.compat.torch``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from .sides import SIDES, SideName
from .stage import Figures, Stage, column
from .stats import BenchError, Row

PROGRAM = Path(__file__).with_name("dropin_program.py")
RUN_SECONDS = 120.0
TARGET, NEVER_SLOWER = 2.0, 1.0

_COMMANDS: dict[SideName, list[str]] = {"aiorpc": ["-m", "aiorpc.compat.torch"], "torch": []}
_LOOPS: dict[str, tuple[str, float, str]] = {
    "calls": ("small calls, steps/s", TARGET, "7 calls, 6 of them operators, which torch runs without Python"),
    "episodes": ("steps of episodes/s", TARGET, "the server calls back at every step"),
    "training": ("training steps/s", TARGET, "layer of 16, batch 8, DistributedOptimizer"),
    "transfers": ("16 MB echoed, steps/s", NEVER_SLOWER, "a tensor there and back"),
}


def dropin(stage: Stage) -> list[Row]:
    """Whole programs in turn; each measures its own loops."""
    stage.pause()
    results = stage.alternate_anew(
        {side: partial(run, stage.side(side), stage.plan.seconds) for side in SIDES}, stage.plan.program_rounds
    )
    return [_row(loop, results) for loop in _LOOPS]


def run(
    side: SideName,
    seconds: float,
    program: Path = PROGRAM,
    limit: float = RUN_SECONDS,
    variables: Mapping[str, str] = os.environ,
) -> Figures:
    """Start the program, wait for its end, and read what it printed; BenchError where it failed or took too long."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *_COMMANDS[side], str(program)]
        command += ["--meeting", f"{folder}/meeting", "--seconds", str(seconds)]
        code, out, err = _finished(command, environment(variables), limit)
    if code != 0:
        raise BenchError(f"dropin on {side} ended with {code}:\n{err}")
    figures: Figures = json.loads(out.splitlines()[-1])
    return figures


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The program's: this checkout's aiorpc can be imported."""
    root = str(PROGRAM.parents[1])
    path = [part for part in given.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    return {**given, "PYTHONPATH": os.pathsep.join([root, *path])}


def _finished(command: list[str], variables: dict[str, str], limit: float) -> tuple[int, str, str]:
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the processes that it spawned are in its session
        _, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BenchError(f"{' '.join(command)} took more than {limit:g} s:\n{err}") from None
        raise
    return process.returncode, out, err


def _row(loop: str, results: dict[str, list[Figures]]) -> Row:
    quantity, target, note = _LOOPS[loop]
    ours, theirs = (column(results[side], loop) for side in SIDES)
    return Row("dropin", quantity, "1/s", "higher", ours, theirs, target, note)
