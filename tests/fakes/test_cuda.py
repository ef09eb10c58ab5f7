"""The fake devices themselves, within one process: what they do, and that they catch what breaks a rule."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from .cuda import POISON, POOL_STREAMS, FakeCuda, FakeInterprocess, FakeTensor, Stream

SEEDS = range(6)
Program = Callable[[torch.Tensor, torch.Tensor], Any]
PROGRAMS: dict[str, Program] = {
    "sum": lambda a, b: a + b * 2 - 1,
    "matrix product": lambda a, b: (a @ b.t()).relu().sum(dim=0),
    "in place": lambda a, b: a.clone().add_(b).mul_(3).clamp_(min=0),
    "views": lambda a, b: a.t()[1:, 0].reshape(-1) + b[0, :-1],
    "assignment": lambda a, b: _assigned(a, b),
    "joined": lambda a, b: torch.cat([a, b]).sort(dim=1).values,
    "several": lambda a, b: (a + b).max(dim=1),
    "types": lambda a, b: (a > b).to(torch.int64) + b.half().float().long(),
    "scalars": lambda a, b: a * torch.tensor(2.0) + b.sum(),
    "layout": lambda a, b: a.t().contiguous() + b.t().clone(),
    "depends on values": lambda a, b: (a[a > 1], b.nonzero(), torch.nonzero(a > 2)),
    "filled": lambda a, b: [torch.zeros_like(a), b.new_ones(3), torch.full_like(a, 4)],
    "linear": lambda a, b: torch.nn.functional.linear(a, b, torch.nn.functional.softmax(b, dim=0)[:, 0]),
    "many": lambda a, b: torch._foreach_add([a, b], 1.0),
    "complex": lambda a, b: torch.complex(a, b).conj() * 2j,
}


def _assigned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a[0] = 7
    a[1, 1:] = b[0, 1:]
    a[..., 0] = 5
    return a


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """Two devices; a test that ends well has broken no rule."""
    with FakeCuda() as fake:
        yield fake


@pytest.fixture
def prompt() -> Iterator[FakeCuda]:
    """Without lag, for tests that time nothing."""
    with FakeCuda(lag=(0.0, 0.0)) as fake:
        yield fake


def driver_of(fake: FakeCuda) -> FakeInterprocess:
    assert fake.interprocess is not None
    return fake.interprocess


def hold(fake: FakeCuda, stream: Stream) -> threading.Event:
    """Hold up a stream until the event is set."""
    gate = threading.Event()
    fake.machine.enqueue(stream, "gate", ready=gate.is_set)
    return gate


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_it_is_a_tensor_on_a_device(prompt: FakeCuda) -> None:
    """It says where it lies as a real one does, and the accelerator knows it."""
    tensor = prompt.fake_tensor(torch.arange(6.0).view(2, 3), 1)
    assert tensor.device == torch.device("cuda:1")
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert type(tensor) is FakeTensor
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.nbytes) == ((2, 3), (3, 1), torch.float32, 24)
    assert tensor.data_ptr() == prompt.carrier(tensor).data_ptr()
    assert prompt.holds(tensor)
    assert not prompt.holds(torch.zeros(1))
    with FakeCuda() as stranger:
        assert not stranger.holds(tensor)


@pytest.mark.parametrize("name", PROGRAMS)
def test_arithmetic_is_that_of_the_processor(fake: FakeCuda, name: str) -> None:
    """However late the device is."""
    a, b = torch.arange(12.0).view(3, 4), torch.arange(12.0).flip(0).view(3, 4)
    expected = PROGRAMS[name](a, b)
    found = PROGRAMS[name](fake.fake_tensor(a), fake.fake_tensor(b))
    several = expected if isinstance(expected, list | tuple) else [expected]
    for one, other in zip(several, found if isinstance(found, list | tuple) else [found], strict=True):
        assert type(other) is FakeTensor
        assert other.dtype == one.dtype
        assert torch.equal(other.cpu(), one)
    assert fake.violations == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_on_several_streams_is_right_if_it_waits(seed: int) -> None:
    """Random arithmetic on random streams, each step after the one before: as on the processor."""
    choices = random.Random(seed)
    with FakeCuda(seed=seed, lag=(0.0, 0.001)) as fake:
        expected = torch.arange(64.0)
        found: torch.Tensor = fake.fake_tensor(expected)
        stream = fake.current(0)
        for _ in range(40):
            before, stream = stream, fake.fresh(0)
            fake.wait(fake.mark(before), stream)
            fake.keep(fake.carrier(found), stream)
            number = choices.randint(1, 9)
            with fake.entered([stream]):
                found = found + number if choices.random() < 0.5 else found.add_(number)
            expected += number
        with fake.entered([stream]):
            assert torch.equal(found.cpu(), expected)
        assert fake.violations == []


def test_a_value_for_the_host_waits_for_its_stream_alone(prompt: FakeCuda) -> None:
    """What the current stream was given is done then; another stream may be held up for long."""
    tensor = prompt.fake_tensor(torch.ones(3))
    other = prompt.fresh(0)
    gate = hold(prompt, other)
    assert tensor.sum().item() == 3
    assert tensor.tolist() == [1, 1, 1]
    assert (float(tensor[0]), bool(tensor[1] > 0), torch.equal(tensor, tensor)) == (1.0, True, True)
    assert not prompt.waiters
    gate.set()
    prompt.synchronize(prompt.mark(other))
    assert prompt.waiters == {threading.get_ident()}


def test_a_copy_to_the_host_that_does_not_block_is_not_there_yet(prompt: FakeCuda) -> None:
    """It is poison until the stream has come so far."""
    tensor = prompt.fake_tensor(torch.ones(3))
    gate = hold(prompt, prompt.current(0))
    copied = tensor.to("cpu", non_blocking=True)
    assert not torch.equal(copied, torch.ones(3))
    mark = prompt.mark(prompt.current(0))
    gate.set()
    prompt.synchronize(mark)
    assert torch.equal(copied, torch.ones(3))


def test_a_tensor_goes_to_another_device(fake: FakeCuda) -> None:
    """In order with the current streams of both."""
    tensor = fake.fake_tensor(torch.arange(5.0))
    moved = (tensor * 2).to("cuda:1")
    assert moved.device == torch.device("cuda:1")
    assert torch.equal((moved + 1).cpu(), torch.arange(5.0) * 2 + 1)
    with pytest.raises(RuntimeError, match="on the same device"):
        tensor + moved
    with pytest.raises(RuntimeError, match="on the same device"):
        tensor + torch.ones(5)


def test_gradients_are_asked_for_by_the_same_tensors(prompt: FakeCuda) -> None:
    """`requires_grad` and Parameter survive the way to the carrier and back."""
    plain = prompt.fake_tensor(torch.ones(2))
    assert not prompt.carrier(plain).requires_grad
    needy = prompt.fake_tensor(torch.ones(2, requires_grad=True))
    assert needy.requires_grad
    assert not needy.detach().requires_grad
    assert prompt.carrier(needy).requires_grad
    assert prompt.tensor(prompt.carrier(needy), 0).requires_grad
    for wanted in (True, False):
        parameter = torch.nn.Parameter(plain, requires_grad=wanted)
        carrier = prompt.carrier(parameter)
        assert type(carrier) is torch.nn.Parameter
        again = prompt.tensor(carrier, 0)
        assert again.requires_grad is wanted
        assert type(again) is FakeTensor
        assert isinstance(again, torch.nn.Parameter)
    assert (needy * 2).tolist() == [2, 2]  # without autograd


def test_pending_bits_are_of_the_carrier(prompt: FakeCuda) -> None:
    """A conjugate shares its memory, and says so."""
    tensor = prompt.fake_tensor(torch.tensor([1 + 2j]))
    conjugate = tensor.conj()
    assert conjugate.is_conj()
    assert prompt.carrier(conjugate).is_conj()
    assert prompt.carrier(conjugate).untyped_storage().data_ptr() == tensor.data_ptr()
    assert conjugate.cpu().tolist() == [1 - 2j]


def test_what_a_device_cannot_is_refused(prompt: FakeCuda) -> None:
    """As by torch; what would go past the channels, too."""
    tensor = prompt.fake_tensor(torch.ones(2, 3))
    with pytest.raises(TypeError, match="numpy"):
        tensor.numpy()
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(tensor)
    with pytest.raises(TypeError, match="carrier"):
        tensor.untyped_storage()
    with pytest.raises(NotImplementedError):
        tensor.t_()
    with pytest.raises(RuntimeError, match="size of tensor"):
        tensor + prompt.fake_tensor(torch.ones(5))
    assert torch.equal(copy.deepcopy(tensor).cpu(), torch.ones(2, 3))
    prompt.tensor(torch.ones(2), 0)
    prompt.keep(torch.ones(2), prompt.current(0))
    assert len(prompt.violations) == 2


# --- streams ----------------------------------------------------------------------------------------------------------


def consumed(seed: int, waits: bool) -> tuple[list[int], list[str]]:
    """What a stream reads of what another one has written twenty times, with and without a wait."""
    with FakeCuda(seed=seed, lag=(0.0, 0.002)) as fake:
        found = []
        for number in range(20):
            writer, reader = fake.fresh(0), fake.fresh(0)
            with fake.entered([writer]):
                written = fake.fake_tensor(torch.zeros(1)) + number
            if waits:
                fake.wait(fake.mark(writer), reader)
            fake.keep(fake.carrier(written), reader)
            with fake.entered([reader]):
                found.append((reader, written + 0))
        values = []
        for reader, value in found:
            with fake.entered([reader]):
                values.append(int(value))
        return values, fake.violations


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_that_is_missing_is_seen(seed: int) -> None:
    """Another stream reads before it is written; if it waits, never."""
    assert consumed(seed, waits=True) == (list(range(20)), [])
    assert consumed(seed, waits=False)[0] != list(range(20))


def test_current_streams_belong_to_the_thread(prompt: FakeCuda) -> None:
    """They are what they were when the block ends, also after an error, and within another."""
    default, one, two, third = prompt.current(0), prompt.fresh(0), prompt.fresh(1), prompt.fresh(0)
    seen: list[Stream] = []
    with prompt.entered([one, two]):
        assert (prompt.current(0), prompt.current(1)) == (one, two)
        thread = threading.Thread(target=lambda: seen.append(prompt.current(0)))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), prompt.entered([third]):
            assert (prompt.current(0), prompt.current(1)) == (third, two)
            raise ZeroDivisionError
        assert prompt.current(0) is one
    assert prompt.current(0) is default
    assert seen == [default]


def test_fresh_streams_come_in_turn(prompt: FakeCuda) -> None:
    """Never the default one, and the first again after all."""
    streams = [prompt.fresh(0) for _ in range(2 * POOL_STREAMS)]
    assert len(set(streams)) == POOL_STREAMS
    assert streams[:POOL_STREAMS] == streams[POOL_STREAMS:]
    assert prompt.current(0) not in streams


def test_fair_is_the_order_in_which_it_was_given() -> None:
    """Among all streams."""
    with FakeCuda(lag=(0.0, 0.0), policy="fair") as fake:
        done: list[int] = []
        gate = hold(fake, fake.current(0))
        for number in range(20):
            fake.machine.enqueue(fake.fresh(0), "number", partial(done.append, number))
        gate.set()
    assert done == list(range(20))
    with pytest.raises(ValueError, match="policy"):
        FakeCuda(policy="none")


def test_what_fails_on_the_device_is_a_violation(prompt: FakeCuda) -> None:
    """The stream goes on."""
    prompt.machine.enqueue(prompt.current(0), "division", lambda: [None][2])
    prompt.synchronize(prompt.mark(prompt.current(0)))
    assert len(prompt.violations) == 1
    assert prompt.violations[0].startswith("division on <default stream of device 0>: IndexError")


def test_close_does_not_wait_for_ever() -> None:
    """Streams that are held up are left; nothing is enqueued afterwards."""
    fake = FakeCuda(lag=(0.0, 0.0))
    hold(fake, fake.current(0))
    fake.close(timeout=0.05)
    fake.close()
    with pytest.raises(RuntimeError, match="closed"):
        fake.mark(fake.current(0))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_comes_back_to_its_stream(prompt: FakeCuda) -> None:
    """At once, what came back last first, full of poison; not to another stream."""
    first, second = prompt.empty(1000, 0), prompt.empty(1000, 0)
    addresses = first.data_ptr(), second.data_ptr()
    assert bytes(first.tolist()) == bytes([POISON]) * 1000
    assert prompt.in_use(0) == 2000
    first.zero_()
    del first
    del second
    assert prompt.in_use(0) == 0
    with prompt.entered([prompt.fresh(0)]):
        assert prompt.empty(1000, 0).data_ptr() not in addresses
    third, fourth = prompt.empty(1000, 0), prompt.empty(1000, 0)
    assert (fourth.data_ptr(), third.data_ptr()) == addresses
    assert bytes(prompt.tensor(fourth, 0).tolist()) == bytes([POISON]) * 1000


def test_views_keep_the_memory(prompt: FakeCuda) -> None:
    """The last one gives it back."""
    tensor = prompt.fake_tensor(torch.arange(6.0).view(2, 3))
    view: torch.Tensor | None = tensor.t()[1]
    del tensor
    assert prompt.in_use(0) == 24
    assert view is not None
    assert view.tolist() == [1, 4]
    view = None
    assert prompt.in_use(0) == 0


def used_elsewhere(seed: int, keeps: bool) -> tuple[bool, list[str]]:
    """Whether another stream read what it should, of memory that is let go of right after."""
    with FakeCuda(seed=seed, lag=(0.0, 0.002)) as fake:
        right = True
        for number in range(20):
            written: torch.Tensor | None = fake.fake_tensor(torch.full((100,), number))
            assert written is not None
            reader = fake.fresh(0)
            fake.wait(fake.mark(fake.current(0)), reader)
            if keeps:
                fake.keep(fake.carrier(written), reader)
            with fake.entered([reader]):
                copied = written.clone()
                written = None
                right &= bool((copied == number).all())
        return right, fake.violations


@pytest.mark.parametrize("seed", SEEDS)
def test_a_keep_that_is_missing_is_caught(seed: int) -> None:
    """The other stream reads poison, and that it uses memory that was freed is a violation; if it is kept, neither."""
    assert used_elsewhere(seed, keeps=True) == (True, [])
    right, violations = used_elsewhere(seed, keeps=False)
    assert not right
    assert "`keep` was left out" in violations[0]


def test_kept_memory_waits_for_the_stream_that_uses_it(prompt: FakeCuda) -> None:
    """It is not given out again before, and the stream it belongs to is not held up."""
    carrier = prompt.empty(1000, 0)
    address = carrier.data_ptr()
    user = prompt.fresh(0)
    gate = hold(prompt, user)
    prompt.keep(carrier, user)
    del carrier
    other = prompt.empty(1000, 0)
    assert other.data_ptr() != address
    prompt.synchronize(prompt.mark(prompt.current(0)))
    gate.set()
    prompt.synchronize(prompt.mark(user))
    assert prompt.empty(1000, 0).data_ptr() == address


def test_move_keeps_what_it_copies(fake: FakeCuda) -> None:
    """Between devices and pinned memory, in any direction, on the stream that is named."""
    stream = fake.fresh(0)
    for number in range(1, 20):
        source, target = fake.empty(64, 0), fake.pinned(64)
        fake.tensor(source, 0).fill_(number)
        fake.wait(fake.mark(fake.current(0)), stream)
        fake.move(target, source, stream)
        there = fake.empty(64, 0)
        fake.wait(fake.mark(fake.current(0)), stream)  # the memory may be poisoned still
        fake.move(there, target, stream)
        del source, target
        result = torch.zeros(64, dtype=torch.uint8)
        fake.move(result, there, stream)
        del there
        assert result.tolist() == [number] * 64
    with pytest.raises(RuntimeError, match="bytes"):
        fake.move(torch.zeros(3), torch.zeros(4), stream)
    assert fake.violations == []


def test_pinned_memory_is_not_there_before_the_copy_is(prompt: FakeCuda) -> None:
    """A copy to it does not hold up the host; one to ordinary memory does."""
    stream = prompt.current(0)
    source, target = prompt.fake_tensor(torch.full((8,), 3, dtype=torch.uint8)), prompt.pinned(8)
    gate = hold(prompt, stream)
    prompt.move(target, prompt.carrier(source), stream)
    assert target.tolist() == [POISON] * 8
    mark = prompt.mark(stream)
    assert not prompt.waiters
    gate.set()
    prompt.synchronize(mark)
    assert target.tolist() == [3] * 8
    prompt.waiters.clear()
    ordinary = torch.zeros(8, dtype=torch.uint8)
    prompt.move(ordinary, prompt.carrier(source), stream)
    assert ordinary.tolist() == [3] * 8
    assert prompt.waiters == {threading.get_ident()}


def test_memory_runs_out(prompt: FakeCuda) -> None:
    """With torch's error; pieces that are free are joined before."""
    with FakeCuda(lag=(0.0, 0.0), memory=1 << 20) as small:
        pieces = [small.empty(1 << 16, 0) for _ in range(16)]
        with pytest.raises(torch.OutOfMemoryError):
            small.empty(1, 0)
        with pytest.raises(torch.OutOfMemoryError):
            small.fake_tensor(torch.ones(1))
        assert small.empty(1, 1).numel() == 1
        pieces.clear()
        assert small.empty(1 << 20, 0).numel() == 1 << 20


# --- between processes, as far as one can see -------------------------------------------------------------------------


def test_a_copy_is_between_ranges_that_were_given_out(prompt: FakeCuda) -> None:
    """Whole ones, that live and that the device reaches."""
    driver = driver_of(prompt)
    stream = prompt.current(0)
    shared, carrier, host = driver.allocate(0, 64), prompt.empty(64, 0), prompt.pinned(64)
    ours = carrier.data_ptr()
    driver.copy(shared, ours, 64, stream)
    driver.copy(host.data_ptr(), shared, 64, stream)
    wrong = [(shared, ours, 65), (ours + 1, shared, 64), (shared + 60, ours, 8), (shared, id(prompt), 8)]
    for target, source, size in wrong:
        with pytest.raises(RuntimeError):
            driver.copy(target, source, size, stream)
    assert len(prompt.violations) == 4
    del carrier
    with pytest.raises(RuntimeError, match="not of one tensor's memory"):
        driver.copy(shared, ours, 64, stream)
    driver.free(0, shared)
    with pytest.raises(RuntimeError, match="nothing was given out"):
        driver.copy(shared, prompt.empty(64, 0).data_ptr(), 64, stream)


@pytest.mark.parametrize("access", [False, True])
def test_a_device_reaches_another_if_it_has_access(access: bool) -> None:
    """As `reaches` says."""
    with FakeCuda(peer_access=access) as fake:
        driver = driver_of(fake)
        carrier = fake.empty(64, 1)
        shared = driver.allocate(0, 64)
        assert driver.reaches(0, driver.uuid(1)) is access
        assert driver.reaches(0, driver.uuid(0))
        assert not driver.reaches(0, "another one")
        try:
            driver.copy(shared, carrier.data_ptr(), 64, fake.current(0))
        except RuntimeError:
            assert not access
        assert len(fake.violations) == (not access)


def test_a_copy_waits_its_turn(fake: FakeCuda) -> None:
    """In the stream it was given to; `free` waits for it."""
    driver = driver_of(fake)
    shared = driver.allocate(0, 64)
    stream = fake.fresh(0)
    with fake.entered([stream]):
        source = fake.fake_tensor(torch.arange(64, dtype=torch.uint8))
        target = fake.empty(64, 0)
        driver.copy(shared, fake.carrier(source).data_ptr(), 64, stream)
        driver.copy(target.data_ptr(), shared, 64, stream)
        driver.free(0, shared)
        assert fake.tensor(target, 0).tolist() == list(range(64))
    assert fake.violations == []


def test_memory_is_given_back_once_and_by_its_device(prompt: FakeCuda) -> None:
    """And as what it is; only what was allocated can be exported."""
    driver = driver_of(prompt)
    shared = driver.allocate(0, 64)
    attempts: list[Callable[[], Any]] = [
        lambda: driver.free(1, shared),
        lambda: driver.close(0, shared),
        lambda: driver.free(0, shared + 8),
        lambda: driver.export(1, shared),
        lambda: driver.export(0, prompt.empty(64, 0).data_ptr()),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError):
            attempt()
    assert len(prompt.violations) == len(attempts)
    driver.free(0, shared)
    with pytest.raises(RuntimeError):
        driver.free(0, shared)


def test_an_event_is_recorded_on_its_own_device(prompt: FakeCuda) -> None:
    """Streams of any device may wait for it."""
    driver = driver_of(prompt)
    event = driver.event(0)
    with pytest.raises(RuntimeError, match="another device"):
        driver.record(event, prompt.current(1))
    assert len(prompt.violations) == 1
    gate = hold(prompt, prompt.current(0))
    assert driver.query(event)
    driver.record(event, prompt.current(0))
    assert not driver.query(event)
    driver.wait(event, prompt.current(1))
    mark = prompt.mark(prompt.current(1))
    gate.set()
    prompt.synchronize(mark)
    assert driver.query(event)


def test_there_are_more_events_than_a_page_holds(prompt: FakeCuda) -> None:
    """Each with a handle of its own."""
    driver = driver_of(prompt)
    assert len({driver.export_event(driver.event(0)) for _ in range(3000)}) == 3000


@pytest.mark.parametrize("name", ["allocate", "export", "event", "open", "open_event", "copy", "record", "move"])
def test_a_failure_is_injected(prompt: FakeCuda, name: str) -> None:
    """As often as it was asked for, without being a violation; each call is counted."""
    prompt.fail(name, times=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="told to fail"):
            _call(prompt, name)
    assert prompt.calls[name] == 2
    assert prompt.violations == []
    if not name.startswith("open"):
        _call(prompt, name)


def _call(fake: FakeCuda, name: str) -> None:
    """Call it rightly, but for what has to be opened in another process."""
    driver = driver_of(fake)
    stream = fake.current(0)
    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "allocate": lambda: (0, 64),
        "export": lambda: (0, driver.allocate(0, 64)),
        "event": lambda: (0,),
        "open": lambda: (0, bytes(64)),
        "open_event": lambda: (0, bytes(64)),
        "copy": lambda: (driver.allocate(0, 64), driver.allocate(0, 64), 64, stream),
        "record": lambda: (driver.event(0), stream),
        "move": lambda: (fake.empty(64, 0), fake.pinned(64), stream),
    }
    getattr(fake if name == "move" else driver, name)(*arguments[name]())


def test_a_device_without_memory(prompt: FakeCuda) -> None:
    """Raises what torch raises."""
    prompt.fail("empty")
    with pytest.raises(torch.OutOfMemoryError):
        prompt.empty(1, 0)
    assert prompt.empty(0, 0).numel() == 0
    with pytest.raises(RuntimeError, match="ordinal"):
        prompt.empty(1, 2)


def test_a_driver_that_refuses() -> None:
    """Says why, and fails at every call; or is not there at all."""
    with FakeCuda(ipc=False) as fake:
        assert driver_of(fake).obstacle(0)
        with pytest.raises(RuntimeError, match="told to refuse"):
            driver_of(fake).allocate(0, 64)
        assert fake.violations == []
    with FakeCuda(ipc=None) as fake:
        assert fake.interprocess is None
    with FakeCuda() as fake:
        assert driver_of(fake).obstacle(1) == ""
