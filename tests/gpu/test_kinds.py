"""Tensors of all kinds, and what is refused."""

from __future__ import annotations

import pytest

from . import bodies
from .pair import Pair

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("pair", ["auto"], indirect=True)]


@pytest.mark.parametrize("name", bodies.KINDS)
def test_a_tensor_goes_there_and_back(pair: Pair, name: str) -> None:
    """It is the same in all that makes it up."""
    pair.run(bodies.there_and_back, name)


def test_a_tensor_without_a_map_is_refused_where_it_is_sent(pair: Pair) -> None:
    """The text names the device and the worker."""
    message = pair.run(bodies.refused_without_a_map)
    assert "cuda:0" in message
    assert "w0" in message
