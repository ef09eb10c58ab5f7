"""Workers in this process, as the tests of the runtime have them."""

from __future__ import annotations

from importlib.util import find_spec

from tests.runtime.conftest import pair, trio

__all__ = ["pair", "trio"]

# Only `make testpage` installs what drives a browser; there, no test at all is a failure.
collect_ignore = [] if find_spec("playwright") else ["test_page.py"]
