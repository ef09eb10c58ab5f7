"""What is built on calls, with tensors on a device."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from . import features
from .pair import DEVICE_BUFFER, MIB, Pair, start_pair

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[Callable[..., Awaitable[Any]], tuple[int, ...]]] = {
    "many tensors in one call": (features.many_in_one_call, (60,)),
    "a tensor of a gigabyte": (features.a_long_one, (1024 * MIB,)),
    "to oneself": (features.to_oneself, (MIB,)),
    "between workers of one process": (features.between_workers_of_one_process, (MIB,)),
    "a group": (features.called_as_a_group, (MIB,)),
    "publication": (features.published, (MIB,)),
    "gradients": (features.gradients, (64,)),
    "a module": (features.remote_module, ()),
    "what is left early": (features.left_early, (MIB,)),
}


@pytest.mark.parametrize("pair", ["auto", "staging"], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_a_feature(pair: Pair, case: str) -> None:
    """As with tensors of the host; devices and numbers are right, also behind kernels that are still to run."""
    body, arguments = CASES[case]
    pair.run(body, *arguments, limit=90)


def test_a_queue() -> None:
    """Whoever puts needs a way to the owner, and whoever gets one back from who has put."""
    maps = {"w0": {0: 0}, "w1": {0: 0}}
    with start_pair(way="auto", options={"device_buffer": DEVICE_BUFFER}, maps=maps) as pair:
        pair.run(features.through_a_queue, MIB)
