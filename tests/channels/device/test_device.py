"""The device channel by itself: its three ways, whatever comes first, and whatever fails."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiorpc.channels import Wire
from aiorpc.channels.accelerator import DeviceBuffer
from aiorpc.channels.device import DIRECT, IPC, STAGING
from aiorpc.channels.device.outbox import Inbox, Outbox, cut
from aiorpc.errors import ProtocolError, RpcError
from tests.channels.device.ends import (
    BOX,
    DEVICE_KINDS,
    UUIDS,
    DeviceEnds,
    DirectEnds,
    IpcEnds,
    NeighbourCuda,
    NeighbourInterprocess,
    StagingEnds,
)
from tests.channels.ends import KIB, MIB, Message
from tests.fakes.streams import Stream
from tests.tiers import examples

SIZES = [1, 64 * KIB - 1, 64 * KIB, MIB + 1, 2 * BOX + 5]
BOUND = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
Make = Callable[..., Any]


@pytest.fixture(params=DEVICE_KINDS, ids=lambda kind: kind.way)
def kind(request: pytest.FixtureRequest) -> type[DeviceEnds]:
    """Each way in turn."""
    made: type[DeviceEnds] = request.param
    return made


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes ends, and sees to it that they broke no rule."""
    made: list[DeviceEnds] = []

    def create(kind: type[DeviceEnds], *args: Any, **options: Any) -> DeviceEnds:
        made.append(kind(*args, **options))
        return made[-1]

    yield create
    for ends in made:
        ends.finish()


def send(ends: DeviceEnds, *sizes: int, way: int = 0, index: int = 0, target: str = "cuda:1", seed: int = 0) -> Message:
    """A message of buffers on one device for another, not posted."""
    data = [ends.pattern(seed + place, size) for place, size in enumerate(sizes)]
    return ends.send([ends.make_on(index, target, each, way) for each in data], way)


def post(ends: DeviceEnds, *sizes: int, **options: Any) -> Message:
    message = send(ends, *sizes, **options)
    ends.post(message)
    return message


def first_wire(message: Message) -> Wire:
    """What goes for its first buffer: number, target, size, chunks."""
    wire = message.wires[0]
    assert wire is not None
    return wire


def is_baseline(ends: DeviceEnds) -> bool:
    found = {name: count for name, count in ends.under_way().items() if count}
    assert found == {}
    return True


def warm(ends: DeviceEnds) -> None:
    """The box from device 0 to 1 is open."""
    post(ends, 1)
    ends.settle()


def lanes_but(ends: DeviceEnds, *names: str) -> list[str]:
    return [lane for lane in ends.lanes() if not lane.startswith(names)]


def settle_but(ends: DeviceEnds, *names: str) -> None:
    """Step until nothing waits but in those lanes."""
    for _ in range(10_000):
        lanes = lanes_but(ends, *names)
        if not lanes:
            return
        ends.step(lanes[0])
    raise AssertionError("no end")


def check_errors(message: Message, match: str) -> None:
    """Each buffer came to an RpcError that says so."""
    assert message.settled
    for (outcome,) in message.outcomes:
        assert isinstance(outcome, RpcError) and match in str(outcome), outcome


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index, target", [(0, "cuda:0"), (0, "cuda:1"), (1, "cuda:0"), (1, "cpu")])
@pytest.mark.parametrize("size", SIZES)
def test_what_arrives_is_what_was_there_at_send(
    kind: type[DeviceEnds], make: Make, size: int, index: int, target: str
) -> None:
    """The sender writes to it right after; the streams are as late as they can be. Cold, and once all is open."""
    ends = make(kind, seed=size + index)
    for _ in range(3):
        sent = [
            post(ends, size, way=way, index=index, target=target, seed=number) for number, way in enumerate((0, 1, 0))
        ]
        ends.settle(ends.random.choice)
        for message in sent:
            message.check()
            ((value,),) = message.outcomes
            assert target == "cpu" or (isinstance(value, DeviceBuffer) and value.target == target)
    assert ends.devices[0].ways[STAGING if target == "cpu" else ends.way].bytes_sent == 6 * size
    for message in sent:
        message.outcomes.clear()
    del message, value
    assert is_baseline(ends)


def test_each_way_is_the_one_that_is_taken(kind: type[DeviceEnds], make: Make) -> None:
    """What goes to a device goes the way that was settled, all of it; the host's by staging."""
    ends = make(kind)
    post(ends, 100, MIB + 1, 3 * BOX)
    post(ends, 200, target="cpu")
    ends.settle()
    ways = {name: traffic.bytes_sent for name, traffic in ends.devices[0].ways.items() if traffic.bytes_sent}
    size = 100 + MIB + 1 + 3 * BOX
    assert ways == ({STAGING: size + 200} if ends.way == STAGING else {ends.way: size, STAGING: 200})
    there = {name: traffic.bytes_received for name, traffic in ends.devices[1].ways.items() if traffic.bytes_received}
    assert there == ways
    assert ends.around[0].chosen[-1:] == (
        [] if ends.way == DIRECT else [(ends.way, "" if ends.way == IPC else "there are reasons")]
    )


@pytest.mark.parametrize("target", ["cuda:2", "cuda:77"])
def test_a_device_that_is_not_there_is_that_buffers_error(kind: type[DeviceEnds], make: Make, target: str) -> None:
    """The others arrive, and slots come back."""
    ends = make(kind)
    if ends.way == DIRECT:  # the sender makes the tensor there, and sends nothing
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            post(ends, 100, MIB, target=target)
        other = post(ends, 100)
        ends.settle()
    else:
        message = post(ends, 100, MIB, target=target)
        other = post(ends, 100)
        ends.settle()
        assert message.settled and all(isinstance(outcome, RpcError) for (outcome,) in message.outcomes)
    other.check()
    other.outcomes.clear()
    assert is_baseline(ends)


# --- order ------------------------------------------------------------------------------------------------------------


def all_in_slots(ends: DeviceEnds, message: Message) -> bool:
    """Whether all of its first buffer has been put into slots."""
    number, _, size, chunks = first_wire(message)
    return bool(sum(chunk[3] for chunk in chunks) + ends.around[0].followed[number] == size)


@pytest.mark.parametrize("seed", range(6))
def test_who_waits_gets_slots_first(make: Make, seed: int) -> None:
    """Chunks that follow name the transfers in the order in which they were sent; so do those that are sent at once."""
    ends = make(IpcEnds, seed)
    warm(ends)
    chance = random.Random(seed)
    sent: list[Message] = []
    for number in range(25):
        waiting = any(not all_in_slots(ends, message) for message in sent)
        sent.append(post(ends, chance.choice([1, 64 * KIB, 700 * KIB, BOX]), seed=number))
        assert not (waiting and first_wire(sent[-1])[3]), "it went past one that waits"
        for _ in range(chance.randrange(4)):
            if ends.lanes():
                ends.step(chance.choice(ends.lanes()))
    ends.settle(chance.choice)
    followed = [number for tag, number in ends.around[0].said if tag == "chunks"]
    assert followed == sorted(followed) and len(set(followed)) > 3
    for message in sent:
        message.check()


@pytest.mark.parametrize("seed", range(8))
def test_what_comes_before_the_message_that_names_it_waits(kind: type[DeviceEnds], make: Make, seed: int) -> None:
    """Chunks, pieces, and the word that nothing more comes."""
    ends = make(kind, seed)
    ends.holds = False
    ends.holding = True  # for the messages alone
    messages = []
    for number in range(4):
        message = send(ends, 100, MIB + 1, 2 * BOX, seed=number)
        ends.holding = True
        super(DeviceEnds, ends).post(message)
        ends.holding = False
        ends.calls_made += 1
        ends.numbers[id(message)] = ends.calls_made
        ends.devices[0].posted(message.taken, ends.calls_made)
        messages.append(message)
    ends.withdraw(messages[1])
    settle_but(ends, "held")
    ends.settle(random.Random(seed).choice)
    for message in messages:
        assert message.settled
        message.check()
        message.outcomes.clear()
    assert is_baseline(ends)


@pytest.mark.parametrize("steps", [0, 5, 12, 20, 60, 100, 200])
@pytest.mark.parametrize("seed", range(2))
def test_given_up_in_the_middle_nothing_is_left(kind: type[DeviceEnds], make: Make, steps: int, seed: int) -> None:
    """Of a long transfer, at any step; the word crosses chunks and pieces, which also come after it."""
    ends = make(kind, seed)
    chance = random.Random(steps + seed)
    message = post(ends, 4 * BOX, 5, index=0, target="cpu" if seed else "cuda:1")
    other = post(ends, 2 * BOX, seed=7)
    for _ in range(steps):
        if ends.lanes():
            ends.step(chance.choice(ends.lanes()))
    ends.withdraw(message)
    ends.settle(chance.choice)
    assert message.settled
    message.check()
    other.check()
    for each in (message, other):
        each.outcomes.clear()
    assert is_baseline(ends)
    later = post(ends, 2 * BOX)
    ends.settle()
    later.check()


# --- boxes ------------------------------------------------------------------------------------------------------------


def test_a_box_that_is_refused_is_gone_around(make: Make) -> None:
    """What waits for it goes by staging, and what comes later, too; the reason is told."""
    ends = make(IpcEnds)
    ends.fakes[1].fail("open")
    sent = [post(ends, size, seed=number) for number, size in enumerate([1, 64 * KIB, 3 * BOX])]
    prepared = send(ends, MIB)
    ends.settle()
    assert ends.around[0].chosen[-1][0] == STAGING and "told to fail" in ends.around[0].chosen[-1][1]
    ends.post(prepared)
    sent += [prepared, post(ends, 64 * KIB)]
    ends.settle()
    for message in sent:
        message.check()
        message.outcomes.clear()
    assert ends.devices[0].ways[IPC].sent == 0 and ends.devices[0].boxes == 0
    assert is_baseline(ends)


@pytest.mark.parametrize("forced", [False, True])
def test_an_offer_that_is_answered_after_the_patience_counts_as_refused(make: Make, forced: bool) -> None:
    """What waits goes by staging, or fails. The answer may still come: from then on the box is used."""
    ends = make(IpcEnds, forced=forced)
    message = post(ends, 3 * BOX)
    settle_but(ends, "thread 1")
    (timer,) = ends.around[0].timers
    timer()
    settle_but(ends, "thread 1")
    assert message.delivered
    ends.settle()
    if forced:
        check_errors(message, "no answer to an offer")
    else:
        message.check()
    later = post(ends, 64 * KIB)
    ends.settle()
    later.check()
    assert ends.devices[0].ways[IPC].bytes_sent == 64 * KIB
    assert ends.devices[0].boxes == ends.devices[1].opened == 1
    for each in (message, later):
        each.outcomes.clear()
    assert is_baseline(ends)


@pytest.mark.parametrize("end, name", [(0, "allocate"), (0, "export"), (0, "copy"), (1, "open"), (1, "copy")])
def test_forced_ipc_that_cannot_be_had_fails_with_the_reason(make: Make, end: int, name: str) -> None:
    """Nothing goes another way; what is for the host does."""
    ends = make(IpcEnds, forced=True)
    ends.fakes[end].fail(name)
    message = post(ends, 100, 3 * BOX)
    host = post(ends, 100, target="cpu")
    ends.settle()
    check_errors(message, "told to fail")
    host.check()
    later = post(ends, 5)
    ends.settle()
    check_errors(later, "told to fail")
    assert ends.devices[0].ways[STAGING].bytes_sent == 100
    for each in (message, later, host):
        each.outcomes.clear()
    assert is_baseline(ends)


@pytest.mark.parametrize("kind", [IpcEnds, StagingEnds], ids=lambda kind: kind.way)
def test_until_a_way_is_chosen_transfers_wait(kind: type[DeviceEnds], make: Make) -> None:
    """Posted or not; then they go, those to the host, too. A second choice changes nothing."""
    ends = make(kind, chosen=False)
    early = [post(ends, 100, 3 * BOX), post(ends, MIB, target="cpu")]
    prepared = send(ends, 64 * KIB, BOX)
    ends.settle()
    assert ends.around[0].said == [] and not any(message.settled for message in early)
    ends.choose()
    ends.post(prepared)
    ends.settle(ends.random.choice)
    for devices in ends.devices:
        devices.choose(STAGING if ends.way == IPC else IPC, "too late")
    late = post(ends, 100)
    ends.settle()
    for message in (*early, prepared, late):
        message.check()
        message.outcomes.clear()
    assert ends.devices[0].ways[ends.way].sent and not ends.devices[0].ways[IPC if ends.way == STAGING else DIRECT].sent
    assert is_baseline(ends)


def test_a_worker_that_leaves_closes_what_it_opened(make: Make) -> None:
    """The other one frees it and lets go of its own; what was lent does not matter any more, what arrived stays."""
    ends = make(IpcEnds)
    sent = [post(ends, MIB, way=way) for way in (0, 1, 0, 1)]
    ends.settle()
    assert [devices.opened for devices in ends.devices] == [devices.boxes for devices in ends.devices] == [1, 1]
    with ends.in_thread(0):
        ends.devices[0].let_go()
    ends.settle()
    assert [devices.opened for devices in ends.devices] == [devices.boxes for devices in ends.devices] == [0, 0]
    assert [fake.calls["free"] for fake in ends.fakes] == [1, 1]
    for message in sent:
        message.check()


@pytest.mark.parametrize("steps", [0, 5, 12, 25, 50])
def test_transfers_under_way_to_a_worker_that_leaves_come_to_an_end(make: Make, steps: int) -> None:
    """With their bytes or with an error: nobody waits for slots that never come back."""
    ends = make(IpcEnds, steps)
    chance = random.Random(steps)
    message = post(ends, 6 * BOX)
    back = post(ends, 6 * BOX, way=1)
    for _ in range(steps):
        if ends.lanes():
            ends.step(chance.choice(ends.lanes()))
    with ends.in_thread(0):
        ends.devices[0].let_go()
    ends.settle(chance.choice)
    for each in (message, back):
        assert each.settled, f"it waits for ever: {[devices.under_way for devices in ends.devices]}"
        each.given_up = True
        each.check()


# --- failures ---------------------------------------------------------------------------------------------------------

# Not `fresh` and `mark`, which the harness calls, too.
FAILING = ["empty", "move", "pinned", "wait"]
OF_BOXES = ["allocate", "export", "event", "export_event", "open", "open_event", "copy", "record", "interprocess.wait"]


REFUSALS = [(kind, name) for kind in DEVICE_KINDS for name in FAILING + (OF_BOXES if kind is IpcEnds else [])]


@pytest.mark.parametrize("kind, name", REFUSALS, ids=[f"{kind.way} {name}" for kind, name in REFUSALS])
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("steps", [0, 9, 25])
def test_what_a_device_refuses_is_that_buffers_trouble(
    kind: type[DeviceEnds], make: Make, name: str, end: int, steps: int
) -> None:
    """A call that fails once, at any step: one buffer or none fails, with an RpcError; all else goes on."""
    ends = make(kind, steps)
    ends.overwrites = False  # the test's own calls are not to fail
    chance = random.Random(steps)
    sent = [post(ends, BOX + 1, 100, seed=1), post(ends, MIB + 1, way=1, seed=4), post(ends, 64 * KIB, target="cpu")]
    for _ in range(steps):
        if ends.lanes():
            ends.step(chance.choice(ends.lanes()))
    ends.fakes[end].fail(name)
    ends.settle(chance.choice)
    ends.fakes[end].failures.clear()
    failed = 0
    for message in sent:
        assert message.settled, f"it never came: {message.wires}"
        for (outcome,) in message.outcomes:
            if isinstance(outcome, Exception):
                assert isinstance(outcome, RpcError) and not isinstance(outcome, ProtocolError), repr(outcome)
                failed += 1
        message.given_up = True
        message.check()
        message.outcomes.clear()
    del outcome
    assert failed <= 1
    assert is_baseline(ends)
    after = [post(ends, MIB + 1, BOX, 5, way=way) for way in (0, 1)]
    ends.settle(chance.choice)
    for message in after:
        message.check()


@pytest.mark.parametrize("name", ["empty", "move", "copy"])
@pytest.mark.parametrize("size", [1, MIB, 3 * BOX])
def test_a_send_that_fails_has_sent_nothing(kind: type[DeviceEnds], make: Make, name: str, size: int) -> None:
    """What the device said is raised; the buffers before it are withdrawn, and slots come back."""
    ends = make(kind)
    warm(ends)
    ends.settle()
    good, bad = ends.make_on(0, "cuda:1", ends.pattern(1, 100)), ends.make_on(0, "cuda:1", ends.pattern(2, size))
    before = ends.under_way()
    ends.overwrites = False

    class Buffers(list[DeviceBuffer]):
        """At the second of them the device fails."""

        def __iter__(self) -> Iterator[DeviceBuffer]:
            yield self[0]
            ends.fakes[0].fail(name)
            yield self[1]

    try:
        with pytest.raises(RuntimeError, match="told to"):
            ends.devices[0].send(Buffers([good, bad]), [])
        pending = ends.fakes[0].failures.get(name)
    except pytest.fail.Exception:  # nothing was raised
        if ends.fakes[0].failures.get(name):
            ends.fakes[0].failures.clear()
            pytest.skip("that way does not use it")
        raise
    assert not pending
    assert ends.under_way() == before
    message = post(ends, MIB, 3 * BOX)
    ends.settle()
    message.check()


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2, 7, 15, 50, 120])
@pytest.mark.parametrize("seed", range(2))
def test_closed_in_the_middle_nothing_is_left(kind: type[DeviceEnds], make: Make, steps: int, seed: int) -> None:
    """At any step, either end first: nothing arrives, nothing is under way, all memory is free or with the boxes."""
    ends = make(kind, seed)
    chance = random.Random(100 * seed + steps)
    sent = [post(ends, 3 * BOX, 100, way=way, seed=way) for way in (0, 1)]
    prepared = send(ends, MIB)
    for _ in range(steps):
        if ends.lanes():
            ends.step(chance.choice(ends.lanes()))
    for end in (seed, 1 - seed):
        ends.close(end)
        ends.settle(chance.choice)
    for devices in ends.devices:
        assert devices.under_way["sending"] == devices.under_way["receiving"] == 0
    ends.withdraw(prepared)
    for message in sent:
        for outcome in filter(None, message.outcomes):
            assert not isinstance(outcome[0], Exception) and ends.content(outcome[0]) in message.expected
            outcome.clear()
        outcome = []
    ends.dispose()
    assert not any(ends.bytes_in_use().values())


# --- nonsense ---------------------------------------------------------------------------------------------------------

TAGS = {"offer": 7, "opened": 1, "refused": 2, "chunks": 2, "got": 1, "slots": 1, "stop": 2, "closed": 1}


NO_MESSAGES: list[Any] = [
    *[None, 5, 0.5, "", "offer", b"offer", {}, [], [None], [[]], [{}], ["nothing"], ["piece", 1, 0], [5, 1, 1]],
    *[[tag] + [0] * count for tag, fields in TAGS.items() for count in range(9) if count != fields],
]


def refuse_each(ends: DeviceEnds, receiver: int, messages: list[Any]) -> None:
    """Each is a protocol error there."""
    for fields in messages:
        try:
            ends.devices[receiver].on_message(fields)
        except ProtocolError:
            continue
        pytest.fail(f"taken for a message: {fields!r}")


def test_messages_that_are_none_are_protocol_errors(make: Make) -> None:
    """Of any type, of an unknown kind, with too few or too many fields; what comes after arrives."""
    ends = make(IpcEnds)
    warm(ends)
    refuse_each(ends, 1, NO_MESSAGES)
    message = post(ends, MIB, way=0)
    ends.settle()
    message.check()


IMPOSSIBLE: list[Any] = [
    ["opened", 5],
    ["opened", "x"],
    ["opened", []],
    ["refused", 5, ""],
    ["refused", [], ""],
    ["slots", 5],
    ["slots", [5]],
    ["slots", [[0]]],
    ["slots", [[0, 3]]],
    ["slots", [[0, -1]]],
    ["slots", [[0, 10**6]]],
    ["slots", [[0, "x"]]],
    ["slots", [[5, 0]]],
    ["slots", [[0, 1.0]]],
    ["closed", 5],
    ["closed", [5]],
    ["closed", [[]]],
    ["got", []],
    ["got", {}],
    ["stop", [], "x"],
    ["stop", [], ""],
    ["chunks", [], []],
    ["chunks", 1, 5],
    ["chunks", 1, None],
    ["refused", 0, "after it was opened"],
    ["offer", [], "FAKE-A", 0, b"", [], [], b""],
]


def test_messages_that_cannot_be_are_protocol_errors(make: Make) -> None:
    """They are of the right form, and name what does not exist or was not lent; what comes after arrives."""
    ends = make(IpcEnds)
    warm(ends)
    refuse_each(ends, 0, IMPOSSIBLE)
    message = post(ends, MIB, 3 * BOX)
    ends.settle()
    message.check()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.sampled_from(["", "x", "cuda:0", "cuda:1", "cpu", *UUIDS])
    | st.binary(max_size=64),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)
FIELDS = PLAIN | st.sampled_from(sorted(TAGS)).flatmap(
    lambda tag: st.tuples(*[PLAIN] * TAGS[tag]).map(lambda rest: [tag, *rest])
)
CHUNKY = st.lists(st.lists(st.integers(-1, 30) | PLAIN, min_size=4, max_size=4), max_size=3)


@pytest.mark.parametrize("kind", [IpcEnds, StagingEnds], ids=lambda kind: kind.way)
@BOUND
@given(
    said=st.lists(FIELDS | CHUNKY.map(lambda chunks: ["chunks", 3, chunks]), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_any_plain_data_as_messages_is_a_protocol_error_at_worst(
    kind: type[DeviceEnds], said: list[Any], seed: int
) -> None:
    """While transfers are under way, some of them waiting; nothing else is raised, and both ends can be closed."""
    ends = kind(seed)
    ends.lenient = True
    try:
        chance = random.Random(seed)
        for number, fields in enumerate(said):
            post(ends, 100, 2 * BOX if number == 0 else 800 * KIB, way=number % 2)
            for _ in range(chance.randrange(10)):
                if ends.lanes():
                    with contextlib.suppress(ProtocolError):  # also when a message comes that the nonsense was about
                        ends.step(chance.choice(ends.lanes()))
            with contextlib.suppress(ProtocolError):
                ends.devices[number % 2].on_message(fields)
        while ends.lanes():
            with contextlib.suppress(ProtocolError):
                ends.settle(chance.choice)
        ends.close(0)
        ends.close(1)
        ends.settle()
    finally:
        ends.dispose()
        for fake in ends.fakes:
            fake.close()
    # A box that its reader says it has refused or closed is freed: who lies about that has it open still.
    lies = [each for fake in ends.fakes for each in fake.violations if not each.startswith("free: processes")]
    assert lies == []


# --- all at once ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_random_messages_both_ways_with_drops(kind: type[DeviceEnds], make: Make, seed: int) -> None:
    """300 of them: posted, withdrawn, given up, in any order; each comes to what it must, and nothing is left."""
    ends = make(kind, seed)
    chance = random.Random(seed)
    sizes = [1, 100, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 300 * KIB, MIB + 1]
    prepared: list[Message] = []
    sent: list[Message] = []
    for number in range(300):
        way = number % 2
        count = [2 * BOX + 1] if chance.random() < 0.02 else chance.choices(sizes, k=chance.randint(1, 3))
        data = [ends.make(ends.pattern(number + place, size), way) for place, size in enumerate(count)]
        prepared.append(ends.send(data, way))
        del data
        while len(prepared) > chance.randrange(4):
            message = prepared.pop(chance.randrange(len(prepared)))
            if chance.random() < 0.1:
                ends.withdraw(message)
            else:
                ends.post(message)
                sent.append(message)
        if sent and chance.random() < 0.1:
            ends.withdraw(chance.choice(sent))
        for _ in range(chance.randrange(12)):
            if ends.lanes():
                ends.step(chance.choice(ends.lanes()))
        for message in [message for message in sent if message.settled][:3]:
            sent.remove(message)
            message.check()
    for message in prepared:
        ends.post(message)
    ends.settle(chance.choice)
    for message in [*sent, *prepared]:
        assert message.settled, f"it never came: {message.wires}"
        message.check()
        message.outcomes.clear()
    sent.clear()
    prepared.clear()
    assert is_baseline(ends)
    assert [fake.violations for fake in ends.fakes] == [[], []]


# --- memory that is given out again ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DirectEnds, IpcEnds], ids=lambda kind: kind.way)
@pytest.mark.parametrize("seed", range(2))
def test_tensors_arrive_right_between_streams_that_come_and_go(kind: type[DeviceEnds], seed: int) -> None:
    """Each is used once, on the stream that has it, and dropped at once: its memory is given out again."""
    lag = (0.0, 0.001)
    sending = NeighbourCuda(seed=seed, uuids=UUIDS, lag=lag)
    receiving = sending if kind is DirectEnds else NeighbourCuda(seed=seed, uuids=UUIDS, lag=lag)
    ends = kind(seed, fakes=(sending, receiving))
    ends.overwrites = False
    used: list[tuple[bytes, torch.Tensor, Stream]] = []
    try:
        for number in range(100):
            data = ends.pattern(number, (3000, 64 * KIB)[number % 2])
            message = ends.send([ends.make_on(0, "cuda:1", data, elsewhere=number % 4 > 1)])
            ends.post(message)
            ends.settle()
            ((value,),) = message.outcomes
            assert isinstance(value, DeviceBuffer) and value.ready is not None
            stream = value.ready.stream
            with receiving.entered([stream]):
                used.append((data, receiving.tensor(value.carrier, 1).clone(), stream))
            message.outcomes.clear()
            del value
            while len(used) > 3:
                data, copy, stream = used.pop(0)
                with receiving.entered([stream]):
                    assert copy.cpu().numpy().tobytes() == data
        ends.dispose()
    finally:
        sending.close()
        receiving.close()
    assert [fake.violations for fake in (sending, receiving)] == [[], []]


# --- outboxes ---------------------------------------------------------------------------------------------------------


OUTBOX_SIZES = [4 * MIB, 6 * MIB, 8 * MIB, 32 * MIB, 62 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]


@pytest.fixture
def fake() -> Iterator[NeighbourCuda]:
    """Two devices. Nothing is left of what was allocated, and no rule was broken."""
    with NeighbourCuda(uuids=UUIDS, lag=(0.0, 0.0002)) as fake, fake.in_thread():
        yield fake
        assert fake.violations == []
        assert driver_of(fake).mapped == {}


@pytest.fixture
def box(fake: NeighbourCuda) -> Iterator[Outbox]:
    """The shortest there is."""
    box = Outbox(driver_of(fake), 0, 4 * MIB)
    yield box
    box.close()


def driver_of(fake: NeighbourCuda) -> NeighbourInterprocess:
    assert isinstance(fake.interprocess, NeighbourInterprocess)
    return fake.interprocess


def check_slots(size: int) -> None:
    slots = cut(size)
    assert [room for _, room in slots] == sorted(room for _, room in slots)
    end = 0
    for start, room in sorted(slots):
        assert start >= end, "slots overlap"
        assert room > 0 and start % (64 * KIB) == 0
        end = start + room
    assert end <= size
    assert end > size - 4 * 64 * KIB, "more than the rest of a division is not used"
    assert min(room for _, room in slots) == 64 * KIB
    assert sum(room > MIB // 2 for _, room in slots) >= 4


@pytest.mark.parametrize("size", OUTBOX_SIZES)
def test_slots_lie_inside_and_apart(size: int) -> None:
    """Sorted by their size, aligned, and all of the memory is used."""
    check_slots(size)


@pytest.mark.parametrize("slot", [-1, 1000, 3])
def test_a_slot_that_is_not_lent_cannot_be_given_back(box: Outbox, slot: int) -> None:
    """Nor one that does not exist; and not twice. What is lent does not change."""
    with pytest.raises(ValueError, match="slot"):
        box.give(slot)
    taken = box.take(1)
    assert taken is not None
    box.give(taken)
    with pytest.raises(ValueError, match="not lent"):
        box.give(taken)
    assert box.lent == 0
    everything = [box.take(1) for _ in box.slots]
    assert len(set(everything)) == len(box.slots) and box.take(1) is None


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1 << 32), operations=st.integers(1, 300))
def test_no_slot_is_lent_twice(seed: int, operations: int) -> None:
    """Takes and gives in any order: one owner each, and what was given back is to be had again."""
    chance = random.Random(seed)
    with NeighbourCuda(uuids=UUIDS, lag=(0.0, 0.0)) as fake, fake.in_thread():
        box = Outbox(driver_of(fake), 0, 4 * MIB)
        rooms = [room for _, room in box.slots]
        lent: set[int] = set()
        for _ in range(operations):
            if lent and chance.random() < 0.45:
                slot = chance.choice(sorted(lent))
                lent.remove(slot)
                box.give(slot)
                continue
            size = chance.choice([1, 64 * KIB, 64 * KIB + 1, MIB, MIB + 1, 100 * MIB])
            taken = box.take(size)
            wanted = min(size, rooms[-1])
            free = sorted(rooms[slot] for slot in range(len(rooms)) if slot not in lent and rooms[slot] >= wanted)
            assert (rooms[taken] if taken is not None else None) == (free[0] if free else None)
            if taken is not None:
                assert taken not in lent
                lent.add(taken)
            assert box.lent == len(lent)
        box.close()
        assert fake.violations == []


@pytest.mark.parametrize("name", ["allocate", "export", "event", "export_event"])
def test_a_box_that_cannot_be_made_leaves_nothing(fake: NeighbourCuda, name: str) -> None:
    """Whatever the driver refuses; the fixture looks for memory that is left. The next one can be made."""
    fake.fail(name)
    with pytest.raises(RuntimeError, match="told to fail"):
        Outbox(driver_of(fake), 0, 4 * MIB)
    Outbox(driver_of(fake), 0, 4 * MIB).close()


@pytest.mark.parametrize("name", ["open", "open_event"])
def test_a_box_that_cannot_be_opened_leaves_nothing(fake: NeighbourCuda, box: Outbox, name: str) -> None:
    """And may be opened later."""
    with NeighbourCuda(uuids=UUIDS, lag=(0.0, 0.0)) as other, other.in_thread():
        other.fail(name)
        with pytest.raises(RuntimeError, match="told to fail"):
            Inbox(driver_of(other), 0, box.handle, box.event_handles, box.slots)
        assert driver_of(other).mapped == {}
        inbox = Inbox(driver_of(other), 0, box.handle, box.event_handles, box.slots)
        inbox.close()
        inbox.close()
        assert other.violations == [] and driver_of(other).mapped == {}


@pytest.mark.parametrize("seed", range(3))
def test_copies_through_slots_that_are_lent_again_at_once_are_in_order(seed: int) -> None:
    """A slot goes back as soon as the reader has enqueued its copy; on any streams, and nobody on the host waits."""
    chance = random.Random(seed)
    with (
        NeighbourCuda(seed=seed, uuids=UUIDS, lag=(0.0, 0.001)) as sender,
        NeighbourCuda(seed=seed + 9, uuids=UUIDS[::-1], lag=(0.0, 0.001)) as reader,
        sender.in_thread(),
        reader.in_thread(),
    ):
        box = Outbox(driver_of(sender), 0, 4 * MIB)
        inbox = Inbox(driver_of(reader), 0, box.handle, box.event_handles, box.slots)
        received = []
        for number in range(120):
            stream, other = sender.fresh(0), reader.fresh(0)
            size = chance.choice([1, 100, 64 * KIB])
            with sender.entered([stream]):
                source = sender.carrier(sender.fake_tensor(torch.full((size,), number, dtype=torch.uint8), 0))
            slot = box.take(size)
            assert slot is not None
            assert box.put(slot, source, 0, stream) == size
            with reader.entered([other]):
                target = reader.empty(size, 0)
            inbox.get(slot, target.data_ptr(), size, other)
            box.give(slot)
            received.append((number, target, other))
        assert sender.calls["synchronize"] == reader.calls["synchronize"] == 0
        for number, target, other in received:
            with reader.entered([other]):
                assert set(reader.tensor(target, 0).cpu().tolist()) == {number}
        del received, target, source
        inbox.close()
        box.close()
        assert sender.violations == [] and reader.violations == []
