"""Which texts are a trace context of W3C, and what becomes of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc.protocol.trace_context import MOST_CHARACTERS, MOST_MEMBERS, TraceContext, valid

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("state", ["", "a=1", "a=1,b=2", "a=1 , b= 2", "tenant@vendor=x", "0a_-*/@=~!", "a=1,,b=2"])
def test_what_is_valid_goes_on_as_it_is(state: str) -> None:
    """Byte for byte: an intermediary changes nothing."""
    assert valid(TraceContext(PARENT, state)) == (PARENT, state)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}-",
        f"{PARENT}\n",
        f" {PARENT}",
        f"ff-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01x",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00_{TRACE}_{SPAN}_01",
        "\u0660\u0660" + PARENT[2:],
    ],
)
def test_what_is_no_parent_is_no_context(parent: str) -> None:
    """Its state goes with it."""
    assert valid(TraceContext(parent, "a=1")) is None
    assert TraceContext.from_headers({"traceparent": parent}) is None


@pytest.mark.parametrize("more", ["", "-", "-what comes then"])
def test_a_later_version_goes_on_as_this_one(more: str) -> None:
    """With the fields that this version has."""
    assert valid(TraceContext(f"cc-{TRACE}-{SPAN}-01{more}")) == (PARENT, "")


@pytest.mark.parametrize(
    "state",
    [
        "a",
        "=1",
        "a=",
        "A=1",
        "a=1,a=2",
        "a=1=2",
        "a=\x7f",
        "a=é",
        "a=1\n",
        f"{'k' * 257}=1",
        f"a={'v' * 257}",
        ",".join(f"k{number}=1" for number in range(MOST_MEMBERS + 1)),
        ",".join(f"k{number}={'v' * 100}" for number in range(MOST_CHARACTERS // 100)),
    ],
)
def test_what_is_no_state_is_left_out(state: str) -> None:
    """The parent goes on."""
    assert valid(TraceContext(PARENT, state)) == (PARENT, "")


def test_headers_come_back() -> None:
    """As a propagator has them."""
    for context in (TraceContext(PARENT), TraceContext(PARENT, "a=1")):
        assert TraceContext.from_headers(context.headers()) == context
    assert TraceContext.from_headers({}) is None


@given(st.text(max_size=60), st.text(max_size=40))
def test_whatever_comes_is_valid_or_ignored(parent: str, state: str) -> None:
    """What goes on is valid by itself."""
    for context in (TraceContext(parent, state), TraceContext(PARENT, state)):
        known = valid(context)
        assert known is None or valid(known) == known
