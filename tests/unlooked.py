"""What the log says of failures that nobody looked at."""

from __future__ import annotations

import gc

import pytest


def unlooked_at(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Its lines by now. They come as the Futures go, also those that stand in cycles."""
    gc.collect()
    return [record.getMessage() for record in caplog.records if "nobody looked" in record.getMessage()]
