"""The main module, where others call it by the name that it is imported by: a script that runs is ``__main__``.

Python imports the file of a script a second time for whoever names it so, and what the script has in its globals is
not there. Others may well name it so: they import the functions that they call from it.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from .registered import MAIN_NAMES


def is_main(module: str) -> bool:
    """Whether that is a name of the main module, as far as that can be told without an import.

    A second copy of it that the program has imported itself is another module.
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
    if parent and parent not in sys.modules:  # to look into it would import it
        return False
    try:
        spec = find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return False
    origin = None if spec is None else spec.origin
    return origin is not None and os.path.realpath(origin) == os.path.realpath(file)


def unite(module: str) -> None:
    """See to it that an import of that name gives the main module, if it is a name of that."""
    if module not in sys.modules and is_main(module):
        sys.modules.setdefault(module, sys.modules["__main__"])
