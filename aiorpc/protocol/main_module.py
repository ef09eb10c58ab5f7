"""The main module under its import name: a script that runs is ``__main__``.

Python imports the file of a script a second time under its import name, without the script's globals. Other workers may
use that name, because they import the functions that they call from it.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from .registered import MAIN_NAMES


def is_main(module: str) -> bool:
    """Whether that is a name of the main module. Nothing is imported to find out.

    A second copy that the program has imported itself is another module.
    """
    if module in MAIN_NAMES:
        return True
    main = sys.modules.get("__main__")
    if module in sys.modules:
        return main is not None and sys.modules[module] is main
    file = getattr(main, "__file__", None)
    parent, _, last = module.rpartition(".")
    if not isinstance(file, str) or last != os.path.splitext(os.path.basename(file))[0]:
        return False
    if parent and parent not in sys.modules:  # `find_spec` would import it
        return False
    try:
        spec = find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return False
    origin = None if spec is None else spec.origin
    return origin is not None and os.path.realpath(origin) == os.path.realpath(file)


def unite(module: str) -> None:
    """Make an import of that name give the main module, if it is a name of it."""
    if module not in sys.modules and is_main(module):
        sys.modules.setdefault(module, sys.modules["__main__"])
