"""``python -m aiorpc COMMAND ...``: commands for the operation of workers. ``-h`` lists them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

#: The commands. Each is a module of `commands` with `add_arguments(parser)` and `run(options) -> int`. Only the module
#: of the command that is run is imported: some need torch, whose import takes a second.
COMMANDS = {
    "certificates": "make an authority and certificates of workers, for a test bed",
    "dashboard": "serve a page that shows the groups of this user on this host",
    "diagnose": "say what is wrong with a group",
    "probe": "say whether a worker lives or is ready, as the exit status",
    "ps": "list the groups and workers of this user on this host",
    "record": "write what a group does for some seconds on one time axis",
    "stacks": "print the stacks of all threads and tasks of a worker",
    "store": "serve a store where workers meet, which outlives all of them",
    "top": "show the workers of a group, their calls and their traffic, live in the terminal",
    "wait-graph": "draw who waits for whom in a group",
}


def module_of(command: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f".commands.{command.replace('-', '_')}", __package__)


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, and the arguments of the command that the first of these arguments names."""
    options = argparse.ArgumentParser(prog="python -m aiorpc", description="What one does around workers of aiorpc.")
    commands = options.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, summary in COMMANDS.items():
        module = module_of(name) if name in arguments[:1] else None
        of_command = commands.add_parser(name, help=summary, description=None if module is None else module.__doc__)
        if module is not None:
            module.add_arguments(of_command)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(arguments).parse_args(arguments)
    prefix = f"python -m aiorpc {options.command}"
    try:
        status: int = module_of(options.command).run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # of output; commands report their other errors
        print(f"{prefix}: cannot write its output: {error}", file=sys.stderr)
        _drop_output()
        return 1
    except KeyboardInterrupt:
        print(f"{prefix}: interrupted", file=sys.stderr)
        return 130
    return status


def _drop_output() -> None:
    """Drop unwritten output: Python would try to write it again at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
