"""Many messages: nothing grows."""

from __future__ import annotations

import pytest

from . import bodies
from .pair import MIB, Pair

# How much more there may be at the end. What is asked of the driver at set-up is not asked again.
ALLOWED = {"allocated": MIB, "device": 64 * MIB, "resident": 128 * MIB, "descriptors": 4}

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("pair", ["auto", "staging"], indirect=True)]


@pytest.mark.slow
@pytest.mark.time_limit(280)
def test_twenty_thousand_messages(pair: Pair) -> None:
    """Memory of both processes and of the device, descriptors and events are the same after them as after a tenth."""
    states = pair.run(bodies.churn, 20_000, 32, limit=150)
    for name, (before, after, opened) in zip(("w0", "w1"), states, strict=True):
        grown = {key: after[key] - before[key] for key in after}
        bad = {key: value for key, value in grown.items() if value > ALLOWED.get(key, 0)}
        assert not bad, f"{name} has grown by {bad}; opened since: {opened}"
