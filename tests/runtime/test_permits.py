"""Permits: no name leads out of what a rule allows, however it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorpc import NotAllowed, RpcUsageError, exposed
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.rights import Rights
from aiorpc.runtime.calls import functions
from aiorpc.runtime.calls.permits import Permits, permits_of
from tests.runtime import served
from tests.tiers import examples

HERE = served.__name__
CALLEE = WorkerRecord("callee", 1, "2", "h", "h", 1, "", "", "", 0, "actor")
CALLER = WorkerRecord("caller", 0, "1", "h", "h", 1, "", "", "", 0, "actor")

# What is defined there and public, by each name that leads to it, and nothing that is only imported there.
PUBLIC = {
    *("Base", "Box", "Marked", "Net", "Other", "acount", "aadd", "add", "add_each", "add_later", "call_back", "count"),
    *("give_box", "marked", "marked_batch", "marked_later", "scripted", "table"),
    *(
        "Base.inherited",
        "Box.inherited",
        "Box.get",
        "Box.put",
        "Marked.get",
        "Marked.static",
        "Net.forward",
        "Other.get",
    ),
}
MARKED = {"marked", "marked_batch", "marked_later", "Marked", "Marked.get", "Marked.static"}


def permits(allow: Any) -> Permits:
    """Of a caller where so much is served."""
    made = permits_of(Rights(allow), CALLEE, CALLER)
    assert made is not None
    return made


def found_by(asked: Permits, name: str) -> Any:
    """What a name leads to; None if it is refused."""
    try:
        return asked.find(name).function
    except (NotAllowed, RpcUsageError):
        return None


def names_below(value: object, depth: int) -> Iterator[str]:
    """All names that `dir` knows, to a depth."""
    for name in dir(value):
        yield name
        try:
            below = getattr(value, name)
        except AttributeError:  # a type's `__abstractmethods__`, say
            continue
        if depth > 1:
            yield from (f"{name}.{other}" for other in names_below(below, depth - 1))


@pytest.mark.parametrize(("rule", "leads_to"), [(f"{HERE}:*", PUBLIC), (exposed, MARKED)], ids=["pattern", "mark"])
def test_every_way_that_there_is_ends_inside(rule: Any, leads_to: set[str]) -> None:
    """All attributes of all that a served module has: found are exactly its own public functions, classes, methods."""
    asked = permits(rule)
    ways = set(names_below(served, 2))
    assert len(ways) > 2000
    found = {way: found_by(asked, f"{HERE}:{way}") for way in ways}
    assert {way for way, function in found.items() if function is not None} == leads_to


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:co_lnotab is deprecated:DeprecationWarning")  # of code, from Python 3.12 on
def test_longer_ways_end_inside_as_well() -> None:
    """One step more, below the classes and functions of the module."""
    asked = permits(f"{HERE}:*")
    for name in sorted(name for name in PUBLIC if "." not in name):
        for way in names_below(getattr(served, name), 2):
            if f"{name}.{way}" not in PUBLIC:
                assert found_by(asked, f"{HERE}:{name}.{way}") is None, way


PARTS = st.sampled_from(
    [
        "os",
        "torch",
        "rpc",
        "mkdir",
        "add",
        "Box",
        "get",
        "__class__",
        "__globals__",
        "__init__",
        "system",
        "",
        "*",
        "a b",
    ]
)


@settings(max_examples=examples(300))
@given(
    st.sampled_from([HERE, "os", "", ".", "builtins", "__main__", "aiorpc", "tests.runtime", f"{HERE}.os", "torch"]),
    st.lists(PARTS | st.text(max_size=3), min_size=1, max_size=5),
    st.sampled_from([":", "", "::"]),
)
def test_any_name_is_found_inside_or_refused(module: str, parts: list[str], colon: str) -> None:
    """Nothing else comes out, whatever it is."""
    try:
        function = permits(f"{HERE}:*").find(f"{module}{colon}{'.'.join(parts)}").function
    except (NotAllowed, RpcUsageError):
        return
    assert functions.name_of(function) in {f"{HERE}:{name}" for name in PUBLIC}


def test_who_may_have_everything_is_not_asked() -> None:
    """There are no permits then, which is what costs nothing."""
    assert permits_of(Rights({"actor": "*"}), CALLEE, CALLER) is None
    assert permits_of(Rights(None), CALLEE, CALLER) is None
    assert permits_of(Rights({"actor": "*:*"}), CALLEE, CALLER) is not None


def test_a_worker_needs_no_rule_for_what_has_a_name_here() -> None:
    """That is its own; for functions it is held to its rules. Another one in the same role needs a rule."""
    own = permits_of(Rights([]), CALLEE, CALLEE)
    assert own is not None
    own.check_resource("queue", "q", "get")
    with pytest.raises(NotAllowed):
        own.find(f"{HERE}:add")
    with pytest.raises(NotAllowed, match="'caller' may not do queue/q:get or queue/q:put on worker 'callee'"):
        permits([]).check_resource("queue", "q", "get", "put")
    permits("queue/q:put").check_resource("queue", "q", "get", "put")


def test_a_refusal_is_short_and_can_be_written() -> None:
    """Also where a caller has sent a name that is long or no text."""
    error = permits([]).refusal("\udc80" * 100_000)
    assert len(str(error)) < 1000
    str(error).encode()
