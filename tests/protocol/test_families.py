"""Messages of families that are none."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest

from aiorpc.errors import ProtocolError
from aiorpc.protocol.families import Family


class Said(NamedTuple):
    number: int


FAMILY: Family[Said] = Family("tests", {"said": Said})


@pytest.mark.parametrize("within", [lambda deep: deep, lambda deep: ["said", deep], lambda deep: [deep, 1]])
def test_lists_in_lists_are_no_message(within: Any) -> None:
    """As deep as msgpack takes them, which is deeper than they can be shown."""
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit() + 10):
        deep = [deep]
    with pytest.raises(ProtocolError, match="a message about tests is malformed"):
        FAMILY.read(within(deep))
