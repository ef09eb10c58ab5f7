"""``python -m aiorpc.compat.torch script.py ...`` or ``-m module ...``: run a program of torch.distributed.rpc."""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
from types import ModuleType

from . import install
from .children import lead

_USAGE = "usage: python -m aiorpc.compat.torch (script.py | -m module) [argument ...]"


def main() -> None:
    """Run the program of the command line as the main program, with aiorpc in place."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    if arguments == ["-m"]:
        raise SystemExit(f"{_USAGE}\n-m needs the name of a module")
    lead(os.environ)
    install()
    # Not undone as by `runpy`: threads and exit handlers may outlive the program's last line.
    sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # what ``python -m`` calls
    else:
        sys.argv[:] = arguments
        _run_path(arguments[0])


def _run_path(path: str) -> None:
    if pkgutil.get_importer(path) is not None:  # a directory or an archive, with a ``__main__.py``
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # as above
        return
    absolute = os.path.abspath(path)  # absolute, as in Python: a program may change its directory
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(absolute)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        print(f"python -m aiorpc.compat.torch: cannot open {path!r}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    code = compile(source, absolute, "exec", dont_inherit=True)
    names = vars(sys.modules["__main__"])
    names["__file__"] = absolute
    exec(code, names)


if __name__ == "__main__":
    main()
