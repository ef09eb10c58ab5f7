"""Write what all workers of a group do for some seconds on one time axis, as a file that Perfetto opens.

A worker on this host, or the one that is named, records for it: it asks the others, and aligns their clocks.
"""

from __future__ import annotations

import argparse
import sys

from ..observability import reader

_MOST_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", nargs="?", help="a worker of the group; needed only if there are several groups here")
    parser.add_argument("--seconds", type=_seconds, default=10.0, help="how long (10)")
    parser.add_argument("-o", "--output", default="step.json", help="the file (step.json)")
    parser.add_argument("--profile", action="store_true", help="run torch's profiler in each worker meanwhile")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"seconds must be more than 0, and {_MOST_SECONDS:g} at most, not {text}")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Record, and write the file. Returns 1 if there is no group, or if it cannot be recorded."""
    try:
        with open(options.output, "ab"):  # before anything is recorded
            pass
    except OSError as error:
        print(f"python -m aiorpc record: cannot write {options.output}: {error.strerror}", file=sys.stderr)
        return 1
    try:
        trace = reader.record(options.name, options.seconds, profile=options.profile)
    except reader.CannotLook as error:
        print(f"python -m aiorpc record: {error}", file=sys.stderr)
        return 1
    with open(options.output, "wb") as file:
        file.write(trace)
    print(f"{options.output}: {len(trace)} bytes; open it with https://ui.perfetto.dev, which reads it in the browser")
    return 0
