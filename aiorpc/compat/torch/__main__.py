"""``python -m aiorpc.compat.torch script.py ...`` or ``-m module ...``: run a program of torch.distributed.rpc."""

from __future__ import annotations

import os
import runpy
import sys

from . import install
from .children import lead

_USAGE = "usage: python -m aiorpc.compat.torch (script.py | -m module) [argument ...]"


def main() -> None:
    """Run what the command line names as the main program, with aiorpc in place."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    if arguments == ["-m"]:
        raise SystemExit(f"{_USAGE}\n-m needs the name of a module")
    lead(os.environ)
    install()
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
