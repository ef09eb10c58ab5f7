"""Calls are shown to observers: a beginning, an end with its outcome, and in between what the tables say."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import torch

import aiorpc as rpc
from aiorpc import Overloaded, PeerLost, RpcBackendOptions, RpcTimeout, RpcUsageError, Worker
from aiorpc.events import CallEvent, CallOutcome
from aiorpc.protocol.states import MADE, SERVED, CallState, CallStep
from aiorpc.testing import Faults, cluster
from tests.runtime.inside import act_as
from tests.runtime.waiting import LIMIT, until

Step = tuple[str, CallEvent, CallOutcome | None]


class Noted:
    """An observer that notes every step. Any thread."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def started(self, call: CallEvent) -> None:
        self.steps.append(("started", call, None))

    def queued(self, call: CallEvent) -> None:
        self.steps.append(("queued", call, None))

    def running(self, call: CallEvent) -> None:
        self.steps.append(("running", call, None))

    def ended(self, call: CallEvent, outcome: CallOutcome) -> None:
        self.steps.append(("ended", call, outcome))

    def of(self, function: str, side: str) -> list[Step]:
        """The steps of the calls of that function."""
        return [step for step in list(self.steps) if step[1].side == side and step[1].function.endswith(function)]

    def ends(self, function: str, side: str) -> list[CallOutcome | None]:
        """The outcomes of the calls of that function."""
        return [outcome for name, _, outcome in self.of(function, side) if name == "ended"]

    def check(self) -> None:
        """Each call has begun once, gone as its table says, and ended once at most."""
        calls: dict[tuple[str, str, str, int], list[Step]] = {}
        for step in list(self.steps):
            call = step[1]
            calls.setdefault((call.side, call.caller, call.worker, call.call_id), []).append(step)
        for (side, *_), steps in calls.items():
            table = MADE if side == "made" else SERVED
            if steps[0][1].own and steps[0][0] != "started":  # begun before anything was shown
                continue
            assert steps[0][0] == "started"
            state = CallState.STARTED
            for name, _, outcome in steps[1:]:
                event = {"queued": CallStep.WAITS, "running": CallStep.RUNS}.get(name)
                state = table.next(state, event or CallStep[str(outcome).upper()])


async def double(value: int) -> int:
    """Handler."""
    return 2 * value


def plain(value: int) -> int:
    """Handler in a thread."""
    return value


def fail() -> None:
    """Handler."""
    raise ValueError("wanted")


async def for_ever() -> None:
    """Handler."""
    await asyncio.Event().wait()


async def count() -> AsyncIterator[int]:
    """Handler."""
    for number in range(3):
        yield number


async def relay() -> int:
    """Handler that makes a call."""
    return await rpc.call("worker0", double, 4)


@rpc.functions.batched(max_size=2, max_wait=5.0)
def together(values: list[int]) -> list[int]:
    """Handler."""
    return values


async def test_a_call_is_shown_on_both_sides(pair: list[Worker]) -> None:
    """The same call, by its number, with sizes and times, from its beginning to its end."""
    here, there = Noted(), Noted()
    with pair[0].observe_calls(here), pair[1].observe_calls(there):
        assert await pair[0].call("worker1", double, 4) == 8
        assert await pair[0].call("worker1", plain, 4) == 4
        assert torch.equal(await pair[0].call("worker1", torch.neg, torch.ones(1000)), -torch.ones(1000))
    names = [name for name, _, _ in here.of("double", "made")]
    assert names[0] == "started" and names[-2:] == ["running", "ended"]
    assert [name for name, _, _ in there.of("double", "served") if name != "started"] == ["running", "ended"]
    assert [name for name, _, _ in there.of("plain", "served")] == ["queued", "running", "ended"]
    made, served = here.of("double", "made")[-1][1], there.of("double", "served")[-1][1]
    assert (made.caller, made.worker, made.call_id) == ("worker0", "worker1", served.call_id)
    assert made.started <= served.started <= served.time <= made.time
    assert made.request_bytes == served.request_bytes > 0 and made.answer_bytes == served.answer_bytes > 0
    tensor = here.of("neg", "made")[-1][1]
    assert tensor.request_bytes > 4000 and tensor.answer_bytes > 4000 and tensor.kind == "call"
    assert made.deadline is not None and not made.own and made.parent is made.part_of is None
    here.check()
    there.check()


async def test_nothing_is_shown_after_the_end(pair: list[Worker]) -> None:
    """An observer that was closed, twice, hears no more; another one does."""
    first, second = Noted(), Noted()
    observation = pair[0].observe_calls(first)
    pair[0].observe_calls(second)
    observation.close()
    observation.close()
    await pair[0].call("worker1", double, 4)
    assert not first.steps and second.ends("double", "made") == ["value"]


async def test_outcomes(pair: list[Worker]) -> None:
    """Each way in which a call ends has its name, on both sides."""
    here, there = Noted(), Noted()
    pair[0].observe_calls(here)
    pair[1].observe_calls(there)
    with pytest.raises(ValueError, match="wanted"):
        await pair[0].call("worker1", fail)
    assert here.ends("fail", "made") == there.ends("fail", "served") == ["error"]
    with pytest.raises(RpcTimeout):
        await pair[0].peer("worker1", timeout=0.05).call(for_ever)
    await until(lambda: there.ends("for_ever", "served") == ["timeout"])
    call = pair[0].call("worker1", for_ever)
    await until(lambda: len([1 for name, _, _ in there.of("for_ever", "served") if name == "running"]) == 2)
    call.cancel()
    await until(lambda: there.ends("for_ever", "served") == ["timeout", "cancelled"])
    assert here.ends("for_ever", "made") == ["timeout", "cancelled"]
    with pytest.raises(RpcUsageError):
        await pair[0].call("worker1", count)  # a generator function
    assert here.ends("count", "made") == there.ends("count", "served") == ["refused"]
    call = pair[0].call("worker1", for_ever)
    await until(lambda: len([1 for name, _, _ in there.of("for_ever", "served") if name == "running"]) == 3)
    with Faults(pair[0]) as faults:
        await faults.kill("worker1")
        with pytest.raises(PeerLost):
            await call
    assert here.ends("for_ever", "made")[-1] == there.ends("for_ever", "served")[-1] == "lost"
    here.check()
    there.check()


async def test_a_call_that_cannot_be_sent_is_refused(pair: list[Worker]) -> None:
    """It ends here, and has never been handed to a connection."""
    here = Noted()
    with Faults(pair[0]) as faults, pair[0].observe_calls(here):
        faults.fail("call")
        with pytest.raises(rpc.RpcError):
            await pair[0].call("worker1", double, 4)
    assert here.ends("double", "made") == ["refused"]


async def test_overload_is_a_refusal_where_it_is_served() -> None:
    """The one that is too many is begun and ended, and not run."""
    async with cluster(2, options=RpcBackendOptions(max_queued_calls=1)) as workers:
        noted = Noted()
        workers[1].observe_calls(noted)
        calls = [workers[0].call("worker1", for_ever) for _ in range(2)]
        with pytest.raises(Overloaded):
            await calls[1]
        assert noted.ends("for_ever", "served") == ["refused"]
        calls[0].cancel()
        await until(lambda: len(noted.ends("for_ever", "served")) == 2)
        noted.check()


async def test_kinds(pair: list[Worker]) -> None:
    """A stream, the creation of a value and its fetch say what they are."""
    here, there = Noted(), Noted()
    with pair[0].observe_calls(here), pair[1].observe_calls(there):
        assert [item async for item in pair[0].stream("worker1", count)] == [0, 1, 2]
        ref = pair[0].remote("worker1", double, 4)
        assert await ref == 8
        await until(lambda: there.ends("double", "served") and there.ends("to_here", "served"))
    for noted, side in ((here, "made"), (there, "served")):
        kinds = {call.function.split(":")[-1]: call.kind for name, call, _ in noted.steps if name == "ended"}
        assert (kinds["count"], kinds["double"], kinds["to_here"]) == ("stream", "remote", "fetch"), side
    here.check()
    there.check()


async def test_what_a_call_is_part_of(pair: list[Worker]) -> None:
    """Calls of a group, of one batch, of a queue, in a context and in a handler name what they belong to."""
    here, there = Noted(), Noted()
    pair[0].observe_calls(here)
    pair[1].observe_calls(there)
    await pair[0].group(["worker0", "worker1"]).call(double, 1)
    groups = {call.part_of for name, call, _ in here.of("double", "made") if name == "ended"}
    assert len(groups) == 1 and next(iter(groups)) is not None and next(iter(groups))[0] == "group"  # type: ignore[index]
    await asyncio.gather(*(pair[0].call("worker1", together, number) for number in range(2)))
    batches = Counter(call.part_of for name, call, _ in there.of("together", "served") if name == "ended")
    assert list(batches.values()) == [2]
    assert await pair[0].call("worker1", relay) == 8
    nested = [call for name, call, _ in there.of("double", "made") if name == "ended"]
    outer = [call for name, call, _ in there.of("relay", "served") if name == "ended"]
    assert nested[0].parent == ("worker0", outer[0].call_id)
    owned = pair[1].Queue("jobs")
    await owned.put(1)
    assert await pair[0].queue("jobs", owner="worker1").get() == 1
    assert {call.part_of for _, call, _ in here.of("take_items", "made")} == {("queue", "jobs")}
    await pair[1].publish("weights", torch.ones(4))
    async with pair[0].subscribe("weights") as weights:
        await anext(weights)
    assert {call.part_of for _, call, _ in here.of(":wanted", "made")} == {("published", "weights")}
    here.check()
    there.check()


async def test_a_backward_pass_names_its_context(pair: list[Worker]) -> None:
    """The calls of the program in a context, and those of the pass through it."""
    here = Noted()
    tensor = torch.ones(4, requires_grad=True)
    with pair[0].observe_calls(here):
        act_as(pair[0])
        async with rpc.autograd.context() as context:
            total = (await pair[0].call("worker1", torch.neg, tensor)).sum()
            await context.backward([total])
    passes = {call.part_of for _, call, _ in here.steps if call.side == "made" and "autograd" in call.function}
    program = {call.part_of for _, call, _ in here.of("neg", "made")}
    assert len(program) == 1 and passes == program
    assert [kind for kind, _ in program if kind == "context"]  # type: ignore[misc]  # it is not None


async def test_tries_are_calls_of_one(pair: list[Worker]) -> None:
    """Each try of a call with retries begins and ends, and all name the same call."""
    here = Noted()
    with Faults(pair[0]) as faults, pair[0].observe_calls(here):
        faults.fail("call", times=2, error=PeerLost("gone, on purpose"))
        assert await pair[0].peer("worker1", retries=3, backoff=0.01).call(double, 4) == 8
    ends = [step for step in here.of("double", "made") if step[0] == "ended"]
    assert [outcome for _, _, outcome in ends] == ["lost", "lost", "value"]
    assert len({call.part_of for _, call, _ in ends}) == 1 and len({call.call_id for _, call, _ in ends}) == 3


async def test_what_an_observer_raises_is_logged_alone(pair: list[Worker], caplog: pytest.LogCaptureFixture) -> None:
    """The call goes on as without it, and other observers are shown it."""

    class Broken(Noted):
        def started(self, call: CallEvent) -> None:
            raise RuntimeError("the observer's own")

        running = queued = started

        def ended(self, call: CallEvent, outcome: CallOutcome) -> None:
            raise RuntimeError("the observer's own")

    noted = Noted()
    with pair[0].observe_calls(Broken()), pair[1].observe_calls(Broken()), pair[0].observe_calls(noted):
        assert await pair[0].call("worker1", plain, 4) == 4
    assert noted.ends("plain", "made") == ["value"]
    assert "the observer's own" in caplog.text


async def test_what_is_no_observer(pair: list[Worker]) -> None:
    """It is refused with what it lacks."""
    with pytest.raises(RpcUsageError, match="ended"):
        pair[0].observe_calls(object())  # type: ignore[arg-type]


async def test_calls_of_many_threads_end_once(pair: list[Worker]) -> None:
    """Cancelled, answered and out of time at once: each call has one beginning and one end, and is counted once."""
    noted = Noted()
    before = pair[0].statistics()
    with pair[0].observe_calls(noted):

        def calls(number: int) -> None:
            peer = pair[0].peer("worker1", timeout=0.05 if number % 2 else 30.0)
            for _ in range(100):
                call = peer.call(double, number)
                if number % 3 == 0:
                    call.cancel()
                call.exception() if call.done() else None
                time.sleep(0)
                call._mark_seen()

        threads = [threading.Thread(target=calls, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, LIMIT)
        await until(lambda: len(noted.ends("double", "made")) == 600)
    noted.check()
    assert pair[0].statistics().calls_made - before.calls_made == 600
    assert pair[0].statistics().calls_pending == 0
