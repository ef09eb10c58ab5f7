"""Workers in this process, as the tests of the runtime have them."""

from __future__ import annotations

from tests.runtime.conftest import pair, trio

__all__ = ["pair", "trio"]
