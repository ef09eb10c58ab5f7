"""``python -m aiorpc COMMAND ...``: what one does around workers. ``-h`` lists the commands."""

from __future__ import annotations

import argparse
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
    """Run a command; its exit status."""
    options = parser().parse_args(arguments)
    status: int = COMMANDS[options.command].run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
