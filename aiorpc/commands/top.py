"""Show the workers of a group, their calls by function and worker, and what they send: live in the terminal.

It joins no group and opens no port. Workers count calls by function only while it runs.
"""

from __future__ import annotations

import argparse
import sys

_LEAST, _MOST = 0.2, 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", nargs="?", help="a worker of the group that is meant; all groups without one")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (1)")


def run(options: argparse.Namespace) -> int:
    """Show it until the user ends it. Returns 1 if it cannot be shown here."""
    if not _LEAST <= options.interval <= _MOST:
        return _say(f"--interval takes {_LEAST:g} to {_MOST:g} seconds")
    if sys.stdin is None or sys.stdout is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _say("it needs a terminal to show things in; `python -m aiorpc ps` prints a list")
    try:
        from ..observability.top import Top
    except ImportError as error:
        return _say(f"it needs textual ({error}): pip install 'aiorpc-torch[top]'")
    Top(options.name, options.interval).run()
    return 0


def _say(text: str) -> int:
    print(f"python -m aiorpc top: {text}", file=sys.stderr)
    return 1
