"""``python -m aiorpc COMMAND ...``: commands for the operation of workers. ``-h`` lists them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .commands import certificates, store

#: Modules with `SUMMARY`, `add_arguments(parser)` and `run(options) -> int`, by the name of the command.
COMMANDS = {"certificates": certificates, "store": store}


def parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    options = argparse.ArgumentParser(prog="python -m aiorpc", description="What one does around workers of aiorpc.")
    commands = options.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.SUMMARY, description=module.__doc__))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status."""
    options = parser().parse_args(arguments)
    prefix = f"python -m aiorpc {options.command}"
    try:
        status: int = COMMANDS[options.command].run(options)
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
