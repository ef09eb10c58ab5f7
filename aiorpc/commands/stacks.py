"""Print the stacks of all threads and tasks of a worker's process, each with the call that it serves.

If the process does not answer, as a thread of it holds the interpreter lock or a signal has stopped it, they come from
py-spy, where it is installed and permitted, or from faulthandler.
"""

from __future__ import annotations

import argparse
import sys

from ..observability import outside, reader
from ..observability.reader import CannotLook


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", metavar="NAME", help="the worker")


def run(options: argparse.Namespace) -> int:
    """Print them. Returns 1 if none can be had, 2 if there is no such worker here."""
    try:
        reader.group_of(options.name)
    except CannotLook as error:
        print(f"python -m aiorpc stacks: {error}", file=sys.stderr)
        return 2
    try:
        print(outside.stacks(options.name))
    except CannotLook as error:
        print(error)
        return 1
    return 0
