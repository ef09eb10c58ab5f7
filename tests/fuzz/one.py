"""One target in a process of its own: with atheris, which follows the coverage, or without it by broken copies.

`python -m tests.fuzz.one TARGET FOLDER RUNS SECONDS SEED`: FOLDER has the inputs to begin with and gets those that
reach something new; 0 is no limit. What is said goes to stdout: lines of JSON with `runs`, `seconds`, `coverage`,
`corpus` and `memory` (MB). A finding ends the process with a traceback, an input in `FOLDER/finding`, and status 77.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import random
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

GROWTH = 300  # MB more than after the first inputs, which is what the corpus and the coverage may take
HANG = 30  # seconds for one input
FOUND = 77
PAUSE = 2.0  # seconds between two lines


def memory() -> int:
    """MB of this process that are resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


class One:
    """A run. Inputs come to `taste`, which ends the process at a finding."""

    def __init__(self, target: Any, folder: Path, look_out: Any, stack: ExitStack) -> None:
        self.runs = 0
        self.taken = 0
        self._target = target
        self._folder = folder
        self._look_out = look_out
        self._taste = stack.enter_context(target.open())
        self._began = self._said = time.monotonic()
        self._first = 0

    def taste(self, data: bytes) -> None:
        """One input."""
        self.runs += 1
        self._look_out.armed = True
        try:
            self.taken += self._target.taste(self._taste, data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._look_out.armed = False
            self._found(data, error)
        finally:
            self._look_out.armed = False
        if self._look_out.seen:
            self._found(data, RuntimeError(f"it does what no input may cause: {self._look_out.seen}"))
        if self.runs % 512 == 0:
            self._look(data)

    def _look(self, data: bytes) -> None:
        now = memory()
        if self.runs < 5000:
            self._first = now
        elif now > self._first + GROWTH:
            self._found(data, MemoryError(f"from {self._first} to {now} MB"))
        if time.monotonic() > self._said + PAUSE:
            self._said = time.monotonic()
            self.say()

    def say(self) -> None:
        """Where it stands."""
        line = {
            "runs": self.runs,
            "taken": self.taken,
            "seconds": round(time.monotonic() - self._began, 1),
            "memory": memory(),
        }
        print(json.dumps(line), flush=True)

    def _found(self, data: bytes, error: BaseException) -> NoReturn:
        (self._folder / "finding").write_bytes(data)
        traceback.print_exception(error)
        self.say()
        print(json.dumps({"finding": data.hex(), "error": f"{type(error).__name__}: {error}"[:500]}), flush=True)
        os._exit(FOUND)


def without_coverage(one: One, inputs: list[bytes], runs: int, seconds: float, seed: int) -> None:
    """Broken copies of the inputs there are, until the runs or the seconds are over."""
    from tests.fuzz.mutations import mutate

    chance = random.Random(seed)
    end = time.monotonic() + seconds if seconds else float("inf")
    for data in inputs:
        one.taste(data)
    while (not runs or one.runs < runs) and time.monotonic() < end:
        one.taste(mutate(chance.choice(inputs), chance, inputs))


def main() -> None:
    """See the module."""
    name, folder, runs, seconds, seed = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
    logging.getLogger("aiorpc").addHandler(logging.NullHandler())
    logging.getLogger("aiorpc").propagate = False
    try:
        import atheris  # type: ignore[import-untyped]  # it has no types
    except ImportError:
        atheris = None
    import torch

    torch.set_num_threads(1)
    if atheris is not None:
        with atheris.instrument_imports(include=["aiorpc"], enable_loader_override=False):
            from tests.fuzz import targets
    else:
        from tests.fuzz import targets
    from tests.fuzz.trap import LookOut

    target = targets.TARGETS[name]
    inputs = [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]
    with ExitStack() as stack:
        one = One(target, folder, LookOut(pickles=not target.proved), stack)
        if atheris is None:
            without_coverage(one, inputs, runs, seconds, seed)
            one.say()
            return
        # libFuzzer ends the process by itself.
        atexit.register(stack.pop_all().close)
        atexit.register(one.say)
        arguments = [
            sys.argv[0],
            str(folder),
            f"-seed={seed}",
            f"-artifact_prefix={folder}/",
            f"-max_len={target.longest}",
        ]
        arguments += [f"-runs={runs}"] if runs else []
        arguments += [f"-max_total_time={seconds}"] if seconds else []
        arguments += [
            "-rss_limit_mb=0",
            "-print_final_stats=1",
            "-len_control=20",
            "-detect_leaks=0",
            f"-timeout={HANG}",
        ]
        atheris.Setup(arguments, one.taste)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
