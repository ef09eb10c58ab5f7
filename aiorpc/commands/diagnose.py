"""Look at a group for a second, and say what is wrong with it.

The exit status is 0 if nothing was found, 1 if something was, 2 if nothing can be looked at.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from ..observability import diagnosis, outside, reader
from ..observability.diagnosis import Limits
from ..observability.reader import CannotLook


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="a worker of the group; the only group if left out")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--waiting",
        metavar="SECONDS",
        type=float,
        default=Limits.waiting,
        help="for which items may lie in a queue, readers lack a version and calls be queued (%(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    """Print what was found. Returns the exit status."""
    try:
        looks = reader.looks(partial(reader.group_of, options.name))
    except CannotLook as error:
        print(f"python -m aiorpc diagnose: {error}", file=sys.stderr)
        return 2
    group = looks[-1]
    outside.add_places(group)
    found = diagnosis.findings(looks, Limits(waiting=options.waiting))
    print(diagnosis.as_json(found, group).decode() if options.json else diagnosis.as_text(found, group))
    if found:
        return 1
    return 0 if group.reports else 2
