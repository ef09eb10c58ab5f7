"""What every channel keeps: the contract of `aiorpc.channels`, checked on each of them by the same tests."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiorpc.channels import Wire
from aiorpc.errors import ProtocolError
from tests.channels.device.ends import DEVICE_KINDS
from tests.channels.ends import KINDS, MIB, BulkEnds, Choose, Ends, Message, SharedEnds
from tests.tiers import examples

BOUND = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)


@pytest.fixture(params=(*KINDS, *DEVICE_KINDS), ids=lambda kind: f"{kind.name} {kind.way}".strip())
def kind(request: pytest.FixtureRequest) -> type[Ends]:
    """Each channel in turn."""
    made: type[Ends] = request.param
    return made


@pytest.fixture
def ends(kind: type[Ends]) -> Iterator[Ends]:
    """Two ends of it, joined."""
    pair = kind()
    yield pair
    pair.finish()


def by_turns(seed: int) -> Choose:
    """Any lane, by chance."""
    return random.Random(seed).choice


def messages_last(waiting: Sequence[str]) -> str:
    """All that can happen before the messages come, happens."""
    return max(waiting, key=lambda lane: (not lane.startswith("messages"), lane))


def messages_first(waiting: Sequence[str]) -> str:
    """The messages overtake everything else."""
    return max(waiting, key=lambda lane: (lane.startswith("messages"), lane))


ORDERS = {"messages first": messages_first, "messages last": messages_last, "by turns": by_turns(5)}


def is_baseline(ends: Ends) -> bool:
    return not any(ends.under_way().values())


def send(ends: Ends, *sizes: int, seed: int = 0, way: int = 0) -> Message:
    """A message of buffers of these sizes, posted."""
    message = ends.send([ends.make(ends.pattern(seed + number, size), way) for number, size in enumerate(sizes)], way)
    ends.post(message)
    return message


# --- arrives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_buffers_of_all_sizes_arrive_equal(ends: Ends, order: str) -> None:
    """Alone and together with all others, both ways, whatever comes first."""
    for way in (0, 1):
        sent = [send(ends, size, seed=number, way=way) for number, size in enumerate(ends.taken)]
        sent.append(send(ends, *ends.taken, seed=50, way=way))
        ends.settle(ORDERS[order])
        for message in sent:
            assert all(wire is not None for wire in message.wires) and message.settled
            message.check()
            message.outcomes.clear()
    assert is_baseline(ends)


def test_buffers_arrive_while_others_are_under_way(ends: Ends) -> None:
    """Messages are sent and arrive one by one, with others before and behind them."""
    waiting: deque[Message] = deque()
    for turn in range(60):
        waiting.append(send(ends, ends.taken[turn % len(ends.taken)], seed=turn, way=turn % 2))
        for lane in by_turns_of(ends, turn):
            ends.step(lane)
        while waiting and waiting[0].settled:
            waiting.popleft().check()
    ends.settle()
    while waiting:
        waiting.popleft().check()
    assert is_baseline(ends)


def by_turns_of(ends: Ends, seed: int) -> list[str]:
    """Some lanes to step, each once."""
    return [lane for lane in ends.lanes() if random.Random(seed).random() < 0.7]


def test_a_message_without_buffers_is_nothing(ends: Ends) -> None:
    """Nothing is taken, nothing arrives."""
    message = ends.send([])
    ends.post(message)
    ends.settle()
    assert message.wires == [] and message.outcomes == [] and is_baseline(ends)


def test_what_is_not_taken_stays_with_its_sender(ends: Ends) -> None:
    """None in its place, in the right places; it is not kept, and what is taken beside it arrives."""
    for refused in ends.refused:
        short = ends.make(ends.pattern(0, refused))
        kept = ends.reference(short)
        message = ends.send([short, ends.make(ends.pattern(1, ends.taken[0])), ends.part(short, 0)])
        del short
        assert kept() is None and message.riders == []
        assert [wire is None for wire in message.wires] == [True, False, True]
        ends.post(message)
        ends.settle()
        message.check()
        message.outcomes.clear()
        assert is_baseline(ends)


@pytest.mark.parametrize("order", ORDERS)
def test_the_sender_may_drop_what_it_sent(ends: Ends, order: str) -> None:
    """It is borrowed until it was read, arrives whole, and nothing keeps it afterwards."""
    data = [ends.make(ends.pattern(seed, size)) for seed, size in enumerate(ends.taken)]
    kept = [ends.reference(buffer) for buffer in data]
    message = ends.send(data)
    del data
    ends.post(message)
    ends.settle(ORDERS[order])
    message.check()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_what_arrives_is_writable_and_private(ends: Ends) -> None:
    """Nobody sees what a receiver writes: not the sender, not who got the same or another buffer, nor later ones."""
    source = ends.make(ends.pattern(7, ends.taken[-1]))
    sent = [ends.send([source, ends.part(source, ends.taken[0])]) for _ in range(3)]
    for message in sent:
        ends.post(message)
    ends.settle(by_turns(1))
    arrived = [buffer for message in sent for buffer in message.buffers()]
    for value, buffer in enumerate(arrived):
        ends.fill(buffer, value + 1)
    assert all(set(ends.content(buffer)) == {value + 1} for value, buffer in enumerate(arrived))
    assert ends.content(source) == ends.pattern(7, ends.taken[-1])
    ends.fill(source, 0)
    later = send(ends, *ends.taken)
    ends.settle()
    later.check()
    assert all(set(ends.content(buffer)) == {value + 1} for value, buffer in enumerate(arrived))


def test_what_arrived_outlives_both_ends(ends: Ends) -> None:
    """Closed, and what they stand on gone: the bytes stay, and may be written."""
    message = send(ends, *ends.taken)
    ends.settle()
    ends.dispose()
    message.check()
    for buffer in message.buffers():
        ends.fill(buffer, ord("x"))
        assert set(ends.content(buffer)) == {ord("x")}


def test_traffic_counts_each_buffer_once(ends: Ends) -> None:
    """What one end has sent, the other has received: so many buffers of so many bytes, and none of those refused."""
    send(ends, *ends.taken, *ends.refused[:1])
    send(ends, ends.taken[0])
    ends.settle(by_turns(3))
    sent, received = ends.channels[0].traffic, ends.channels[1].traffic
    size = sum(ends.taken) + ends.taken[0]
    assert (sent.sent, sent.bytes_sent) == (len(ends.taken) + 1, size)
    assert (received.received, received.bytes_received) == (len(ends.taken) + 1, size)
    assert (sent.received, received.sent) == (0, 0)
    assert ends.channels[0].name == ends.channels[1].name == ends.name


def test_wires_are_plain_data(ends: Ends) -> None:
    """Lists of what msgpack can say, with lists for tuples; different ones for buffers under way at once."""
    wires = send(ends, *ends.taken).wires + send(ends, *ends.taken, way=1).wires[:0]
    assert all(type(wire) is list and wire for wire in wires)
    assert len({str(wire) for wire in wires}) == len(wires)


# --- given up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [*range(12), 1000])
def test_withdrawn_before_its_message_was_sent_nothing_is_left(ends: Ends, steps: int) -> None:
    """At any point of the transfer: nothing ever arrives, and both ends are as they were."""
    data = [ends.make(ends.pattern(seed, size)) for seed, size in enumerate(ends.taken)]
    kept = [ends.reference(buffer) for buffer in data]
    message = ends.send(data)
    del data
    step_some(ends, steps)
    ends.withdraw(message)
    message.riders = []
    ends.settle()
    assert not message.outcomes and is_baseline(ends)
    assert [ref() for ref in kept] == [None] * len(kept)
    after = send(ends, *ends.taken, seed=9)
    ends.settle()
    after.check()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [*range(12), 1000])
def test_given_up_after_its_message_was_sent_each_buffer_is_settled_once(ends: Ends, steps: int, order: str) -> None:
    """At any point of the transfer, and whether the message comes first or last: with its bytes or with an error."""
    message = send(ends, *ends.taken)
    step_some(ends, steps)
    ends.withdraw(message)
    other = send(ends, ends.taken[-1], seed=3)
    ends.settle(ORDERS[order])
    assert message.settled
    message.check()
    other.check()
    message.outcomes.clear()
    other.outcomes.clear()
    assert is_baseline(ends)


def step_some(ends: Ends, steps: int) -> None:
    """The first lanes, so often, as long as something waits."""
    for _ in range(steps):
        waiting = ends.lanes()
        if not waiting:
            return
        ends.step(messages_last(waiting))


def test_giving_up_one_message_leaves_the_others(ends: Ends) -> None:
    """Before, behind, and the other way."""
    sent = [send(ends, *ends.taken, seed=10 * number, way=number % 2) for number in range(6)]
    step_some(ends, 3)
    ends.withdraw(sent[2])
    ends.withdraw(sent[3])
    ends.settle(by_turns(8))
    for number, message in enumerate(sent):
        message.check()
        assert number in (2, 3) or len(message.buffers()) == len(ends.taken)


# --- what is wrong ----------------------------------------------------------------------------------------------------


def wrong_wires(good: list[Wire], chance: random.Random) -> list[list[Any]]:
    """Variations of wires that were right."""
    wrong: list[list[Any]] = []
    for wire in good:
        for place in range(len(wire)):
            value: Any
            for value in (-1, 1 << 40, 1 << 63, "x", None, [], {}, 0.5, b"", chance.randrange(1 << 20)):
                wrong.append([*wire[:place], value, *wire[place + 1 :]])
        wrong += [wire[:-1], [*wire, 0], [], [*wire, *wire], [wire]]
    return wrong


def receive(ends: Ends, wires: list[Any], riders: list[Any]) -> list[Any]:
    """What end 1 makes of it; outcomes by `arrived` go to the end."""
    outcomes: list[Any] = []
    outcomes += ends.receive(1, wires, riders, lambda index, outcome: outcomes.append(outcome))
    return outcomes


def test_wires_that_nobody_gave_are_refused(ends: Ends) -> None:
    """Nearly right ones: a ProtocolError, or at most a message that never comes; nothing else is raised."""
    message = ends.send([ends.make(ends.pattern(seed, ends.taken[0])) for seed in (1, 2)])
    refused = 0
    for wire in wrong_wires(message.taken, random.Random(4)):
        try:
            receive(ends, [wire], list(message.riders))
        except ProtocolError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("wire", [None, 5, "ab", b"abc", {}, [], [None], [[]], [{}, 1], [-1, 4096], [[], 4096]])
def test_wires_that_are_none_are_protocol_errors(ends: Ends, wire: Any) -> None:
    """Of any type, alone and behind a good one; what the good one holds does not disturb what follows."""
    with pytest.raises(ProtocolError):
        receive(ends, [wire], [])
    good = ends.send([ends.make(ends.pattern(1, ends.taken[0]))])
    with pytest.raises(ProtocolError):
        receive(ends, [*good.taken, wire], [bytearray(rider) for rider in good.riders])
    later = send(ends, *ends.taken, seed=20)
    ends.settle()
    later.check()


@BOUND
@given(wires=st.lists(PLAIN | st.lists(PLAIN, max_size=8), min_size=1, max_size=3))
def test_any_plain_data_as_wires_is_a_protocol_error_at_worst(kind: type[Ends], wires: list[Any]) -> None:
    """And the next message arrives."""
    ends = cold(kind)
    try:
        with contextlib.suppress(ProtocolError):
            receive(ends, wires, [bytearray(5)])
        check_goes_on(ends)
    finally:
        ends.finish()


WORDS = st.sampled_from(["offer", "mapped", "refused", "warm"])
NUMBERS = st.lists(PLAIN | st.integers(0, 3) | st.lists(st.lists(st.integers(0, 4096), max_size=4)), max_size=5)


@BOUND
@given(fields=PLAIN | st.lists(PLAIN, max_size=6) | st.builds(lambda word, rest: [word, *rest], WORDS, NUMBERS))
def test_any_plain_data_as_a_message_is_a_protocol_error_at_worst(kind: type[Ends], fields: Any) -> None:
    """Also when it begins as real ones do; and the next buffers arrive."""
    ends = cold(kind)
    try:
        with contextlib.suppress(ProtocolError):
            ends.channels[1].on_message(fields)
        ends.settle()
        check_goes_on(ends)
    finally:
        ends.finish()


def cold(kind: type[Ends]) -> Ends:
    """Two ends that are quickly made."""
    return SharedEnds(limit=MIB, warm=MIB // 2) if kind is SharedEnds else kind()


def check_goes_on(ends: Ends) -> None:
    message = send(ends, ends.taken[0])
    ends.settle()
    assert message.taken
    message.check()


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13])
def test_after_close_nothing_arrives_and_nothing_is_taken(ends: Ends, steps: int, order: str) -> None:
    """Wherever the transfers are; closing again is nothing. (The harness fails for an `arrived` after `close`.)"""
    sent = [send(ends, *ends.taken, seed=number, way=number % 2) for number in range(4)]
    for _ in range(steps):
        if ends.lanes():
            ends.step(ORDERS[order](ends.lanes()))
    for end in (1, 0, 1, 0):
        ends.close(end)
    before = [[len(outcome) for outcome in message.outcomes] for message in sent]
    ends.settle(ORDERS[order])
    assert [[len(outcome) for outcome in message.outcomes] for message in sent] == before
    for message in sent:
        for outcome in filter(None, message.outcomes):
            assert not isinstance(outcome[0], Exception) and ends.content(outcome[0]) in message.expected
        if message.posted:
            ends.channels[message.way].withdraw(message.taken, named=True)
    if not ends.takes_when_closed:
        assert ends.send([ends.make(ends.pattern(0, size)) for size in ends.taken]).taken == []
        assert ends.lanes() == []


def test_one_end_closes_alone(ends: Ends) -> None:
    """The other one still may send, which comes to nothing, and be closed."""
    message = send(ends, *ends.taken)
    ends.close(1)
    send(ends, *ends.taken)
    ends.settle(by_turns(2))
    assert not message.outcomes
    ends.withdraw(message)
    ends.close(0)
    ends.settle()


# --- all at once ------------------------------------------------------------------------------------------------------


class Program:
    """Operations by chance, and an exact account of what every message must come to."""

    def __init__(self, ends: Ends, chance: random.Random) -> None:
        self.ends = ends
        self.chance = chance
        self.prepared: list[Message] = []
        self.posted: list[Message] = []
        self.dropped: list[Message] = []
        self.written: list[tuple[Any, int]] = []
        self.seed = 0

    def send(self) -> None:
        sizes = self.chance.choices(self.ends.taken + self.ends.refused, k=self.chance.randint(1, 3))
        self.seed += 10
        way = self.chance.randrange(2)
        data = [self.ends.make(self.ends.pattern(self.seed + number, size), way) for number, size in enumerate(sizes)]
        self.prepared.append(self.ends.send(data, way))

    def post(self) -> None:
        if self.prepared:
            message = self.prepared.pop(self.chance.randrange(len(self.prepared)))
            self.ends.post(message)
            self.posted.append(message)

    def withdraw(self) -> None:
        if self.prepared:
            message = self.prepared.pop(self.chance.randrange(len(self.prepared)))
            self.ends.withdraw(message)
            self.dropped.append(message)

    def give_up(self) -> None:
        unsettled = [message for message in self.posted if not message.given_up]
        if unsettled:
            self.ends.withdraw(self.chance.choice(unsettled))

    def step(self) -> None:
        for _ in range(self.chance.randint(1, 12)):
            waiting = self.ends.lanes()
            if waiting:
                self.ends.step(self.chance.choice(waiting))

    def take(self) -> None:
        """A receiver looks at a message that is all there, and drops it, or writes to it and keeps it."""
        for message in [message for message in self.posted if message.settled][:1]:
            self.posted.remove(message)
            message.check()
            if self.chance.random() < 0.3:
                for buffer in message.buffers():
                    value = self.chance.randrange(256)
                    self.ends.fill(buffer, value)
                    self.written.append((buffer, value))

    def run(self, operations: list[str]) -> None:
        for operation in operations:
            getattr(self, operation)()

    def finish(self) -> None:
        """Everything that was posted comes to its end; what was withdrawn never comes."""
        while self.prepared:
            self.post()
        self.ends.settle(self.chance.choice)
        for message in self.posted:
            assert message.settled, f"it never came: {message.wires}"
            message.check()
        assert not any(message.outcomes for message in self.dropped)
        for buffer, value in self.written:
            assert set(self.ends.content(buffer)) <= {value}
        self.posted.clear()
        self.written.clear()


OPERATIONS = st.lists(
    st.sampled_from(["send", "send", "post", "post", "withdraw", "give_up", "step", "step", "take"]), max_size=60
)


@BOUND
@given(operations=OPERATIONS, seed=st.integers(0, 1 << 32))
def test_programs_of_all_operations_leave_nothing_unsettled(kind: type[Ends], operations: list[str], seed: int) -> None:
    """Sent, posted, withdrawn, given up, delivered in any order: each message comes to what it must, and no trace."""
    chance = random.Random(seed)
    ends = SharedEnds(seed, limit=8 * MIB, warm=6 * MIB) if kind is SharedEnds else kind(seed)
    try:
        program = Program(ends, chance)
        program.run(operations)
        program.finish()
        assert is_baseline(ends)
    finally:
        ends.finish()


@BOUND
@given(operations=OPERATIONS, seed=st.integers(0, 1 << 32))
def test_programs_cut_off_anywhere_keep_what_arrived(kind: type[Ends], operations: list[str], seed: int) -> None:
    """One end closes in the middle, then the other: nothing more arrives, and what is held stays as it is."""
    chance = random.Random(seed)
    ends = SharedEnds(seed, limit=8 * MIB, warm=6 * MIB) if kind is SharedEnds else kind(seed)
    try:
        program = Program(ends, chance)
        program.run(operations)
        ends.close(chance.randrange(2))
        ends.settle(chance.choice)
        ends.dispose()
        ends.settle(chance.choice)
        for buffer, value in program.written:
            assert set(ends.content(buffer)) <= {value}
        for message in program.posted:
            for outcome in filter(None, message.outcomes):
                assert isinstance(outcome[0], Exception) or ends.content(outcome[0]) in message.expected
    finally:
        ends.finish()


# --- any thread -------------------------------------------------------------------------------------------------------

THREADS, TURNS = 3, 40


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_any_thread_sends_and_withdraws(kind: type[Ends], quick_switches: None) -> None:
    """While the loop delivers: all that was posted arrives, what was withdrawn does not, and nothing is left."""
    ends = SharedEnds(limit=128 * MIB, warm=64 * MIB) if kind is SharedEnds else kind()
    try:
        done: deque[Message] = deque()
        failures: list[BaseException] = []
        threads = [threading.Thread(target=work, args=(ends, number, done, failures)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        posted = pump(ends, threads, done)
        for thread in threads:
            thread.join()
        assert failures == [] and len(posted) >= THREADS * TURNS // 2
        ends.settle()
        for message in posted:
            message.check()
        posted.clear()
        del message
        assert is_baseline(ends)
    finally:
        ends.finish()


def work(ends: Ends, number: int, done: deque[Message], failures: list[BaseException]) -> None:
    """In a thread: send, and withdraw each third message."""
    try:
        size = min(ends.taken[-1], 200_000)
        for turn in range(TURNS):
            message = ends.send([ends.make(ends.pattern(100 * number + turn, size))])
            if turn % 3 == 2:
                ends.withdraw(message)
            else:
                done.append(message)
    except BaseException as error:
        failures.append(error)


def pump(ends: Ends, threads: list[threading.Thread], done: deque[Message]) -> list[Message]:
    """On the loop: post what the threads made, and deliver, until all have ended."""
    posted: list[Message] = []
    alive = True
    while alive:
        alive = any(thread.is_alive() for thread in threads)  # before the last look at what they have left
        while done:
            message = done.popleft()
            ends.post(message)
            posted.append(message)
        for lane in ends.lanes():
            ends.step(lane)
        for message in posted:
            message.outcomes[:] = message.outcomes  # the loop has other things to do, too
    return posted


def test_bulk_is_in_the_suite_with_real_bytes() -> None:
    """Chunks pass through a decoder, in pieces: a transfer takes several steps, and its last one completes it."""
    ends = BulkEnds(seed=2)
    message = send(ends, 10 * BulkEnds.CHUNK)
    steps = 0
    while lanes := [lane for lane in ends.lanes() if lane.startswith("chunks")]:
        ends.step(lanes[0])
        steps += 1
    assert steps >= 10 and ends.bulks[1].receiving == 1 and not message.delivered
    ends.settle()
    message.check()
    ends.dispose()
