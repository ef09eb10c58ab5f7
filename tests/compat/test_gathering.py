"""What another member may say of an `_all_gather`, before and while this worker takes part in it."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import aiorpc
from aiorpc.runtime.calls.current import current_call
from tests.settling import wait_until

OBJECT = pickle.dumps("an object")
Say = Callable[..., Any]


@pytest.fixture
def say(alone: Any) -> Say:
    """Runs a handler as for a call of a member of that name: ``say("other", "_gather_to_leader", ...)``."""

    def run(name: str, handler: str, *args: Any, member: int = 1) -> Any:
        node = alone.api._node_of(alone.api._get_current_rpc_agent())
        call = SimpleNamespace(caller=aiorpc.WorkerInfo(name, member), caller_id=member, node=node)
        token = current_call.set(call)  # type: ignore[arg-type]  # what handlers read of it
        try:
            said = getattr(alone.api, handler)(*args)
            return asyncio.run(said) if asyncio.iscoroutine(said) else said
        finally:
            current_call.reset(token)

    return run


def begin(alone: Any, names: set[str], timeout: float = 20) -> tuple[threading.Thread, list[Any]]:
    """A thread that gathers, and what that gives it; returns once it has begun, or is over."""
    api, given = alone.api, list[Any]()
    before = dict(api._all_gather_sequence_id)

    def gather() -> None:
        try:
            given.append(api._all_gather("mine", names, timeout))
        except Exception as error:
            given.append(error)

    thread = threading.Thread(target=gather)
    thread.start()
    wait_until(lambda: bool(given) or api._all_gather_sequence_id != before)
    return thread, given


def numbered(alone: Any, joined: str) -> str:
    """The id of the next gathering of those names."""
    return f"{joined}{alone.api._all_gather_sequence_id.get(joined, 0)}"


def test_an_object_is_taken_from_a_worker_that_takes_part(alone: Any, say: Say) -> None:
    """What others say of who is expected counts for nothing, whether they come early or not."""
    coming = numbered(alone, "meother")
    with pytest.raises(AssertionError, match="evil is not expected"):
        say("evil", "_gather_to_leader", coming, "evil", OBJECT, ["evil"])
    with pytest.raises(AssertionError, match="evil speaks for other"):
        say("evil", "_gather_to_leader", coming, "other", OBJECT, ["other"])
    thread, given = begin(alone, {"me", "other"})
    with pytest.raises(AssertionError, match="evil is not expected"):
        say("evil", "_gather_to_leader", coming, "evil", OBJECT, ["evil"])
    assert not given
    say("other", "_gather_to_leader", coming, "other", OBJECT)
    thread.join()
    # There is nobody of that name who could be told; the leader has it all the same.
    assert isinstance(given[0], Exception) and "evil" not in str(given[0])


def test_an_end_is_taken_from_the_leader(alone: Any, say: Say) -> None:
    """Neither a follower nor a worker that takes no part can say what all have given, early or not."""
    forged = {"a": OBJECT, "me": OBJECT}
    coming = numbered(alone, "ameother")
    for liar in ("evil", "other"):
        with pytest.raises(AssertionError, match="is not"):
            say(liar, "_broadcast_to_followers", coming, forged)
    with pytest.raises(AssertionError, match="is not"):
        say("a", "_broadcast_to_followers", "aother0", forged)
    states = alone.api._begin({"a", "me", "other"}, "me")[1]
    for liar in ("evil", "other"):
        with pytest.raises(AssertionError, match="is not the leader"):
            say(liar, "_broadcast_to_followers", coming, forged)
    with pytest.raises(AssertionError, match="take no part"):
        say("a", "_broadcast_to_followers", coming, {"evil": OBJECT})
    assert not states.proceed_signal.is_set()
    say("a", "_broadcast_to_followers", coming, forged)
    assert states.proceed_signal.is_set()
    assert states.gathered_objects == forged
    del alone.api._all_gather_sequence_id_to_states[coming]


def test_what_comes_early_is_bounded_for_each_member(alone: Any, say: Say) -> None:
    """In number and in bytes."""
    api, node = alone.api, alone.api._node_of(alone.api._get_current_rpc_agent())
    for number in range(256):
        say("other", "_gather_to_leader", f"meother{number + 9000}", "other", OBJECT)
    with pytest.raises(aiorpc.Overloaded, match="'other' has come to 256 of _all_gather to which this one has not"):
        say("other", "_gather_to_leader", "meother8000", "other", OBJECT)
    large = bytes(node.engine.options.max_queued_bytes // 2)
    say("z", "_gather_to_leader", "mez9000", "z", large, member=2)
    with pytest.raises(aiorpc.Overloaded, match="max_queued_bytes"):
        say("z", "_gather_to_leader", "mez9001", "z", large, member=2)
    assert len(api._arrivals) == 257
