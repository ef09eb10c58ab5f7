"""Leaving: graceful by default, always bounded, at any time, as often as anybody likes, and without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiorpc as rpc
from tests.examples.programs import run_program
from tests.limits import busy
from tests.ports import free_port

from . import bodies
from .workers import Link, Place, group, meeting_file, places, private_directory, processes, wait_for, wait_for_async
from .zygote import Program, Zygote, zygote

QUICK = 3.0  # seconds for what takes milliseconds on an idle machine


async def test_workers_that_enter_shutdown_at_once_go_on_serving() -> None:
    """As torch programs expect: calls, nested calls, streams and references work while the others are in shutdown()."""
    async with group(3) as (worker, children):
        for name in ("w1", "w2"):
            await in_shutdown(name)
        assert await rpc.call("w1", bodies.add, 1, 2) == 3
        assert await rpc.call("w1", nested_add, "w2", 3, 4) == 7
        ref = rpc.remote("w2", bodies.Counter, 1)
        assert await ref.rpc_async().add(1) == 2
        assert [item async for item in rpc.stream("w1", numbers, 40)] == list(range(40))
        del ref
        await worker.shutdown()
        assert [await child.ahear() for child in children] == [[], []]


@pytest.mark.long
async def test_a_death_ends_nobody_who_is_needed() -> None:
    """One of three servers is killed: seconds later the others still serve the one that works, and leave with it."""
    async with group(4, ended=("w3",)) as (worker, children):
        for name in ("w1", "w2", "w3"):
            await in_shutdown(name)
        children["w3"].kill()
        killed = time.monotonic()
        while time.monotonic() - killed < 7.0:  # once a loss ended them after five
            for name in ("w1", "w2"):
                assert await rpc.call(name, bodies.add, 1, 2) == 3
            await asyncio.sleep(0.2)
        assert [info.name for info in (await worker.shutdown()).lost] == ["w3"]
        assert [await children[name].ahear() for name in ("w1", "w2")] == [["w3"], ["w3"]]


async def in_shutdown(name: str) -> None:
    """Wait until a worker has called shutdown()."""
    await wait_for_async(lambda: rpc.rpc_sync(name, is_leaving))


def is_leaving() -> bool:
    """Whether this worker is in shutdown()."""
    return rpc.current().state.value == "leaving"


def nested_add(to: str, a: int, b: int) -> int:
    """Add on a third worker."""
    return int(rpc.rpc_sync(to, bodies.add, args=(a, b)))


def numbers(n: int) -> Any:
    """A stream that ends."""
    yield from range(n)


async def test_shutdown_waits_for_calls_under_way() -> None:
    """What was started before shutdown() is finished by it, on both sides, also calls that handlers make."""
    async with group(3) as (worker, _):
        slow = rpc.call("w1", slow_add, 1, 2)
        chained = rpc.call("w1", nested_slow, "w2")
        report = await worker.shutdown()
        assert not report.timed_out
        assert slow.done() and chained.done()
        assert (slow.value(), chained.value()) == (3, 5)


def slow_add(a: int, b: int) -> int:
    """Takes its time."""
    time.sleep(0.4)
    return a + b


def nested_slow(to: str) -> int:
    """Works, calls a third worker, works on."""
    time.sleep(0.1)
    value = rpc.rpc_sync(to, slow_add, args=(2, 3))
    time.sleep(0.1)
    return int(value)


async def test_shutdown_is_quick_once_all_have_entered() -> None:
    """With nothing under way it takes no fixed pause."""
    async with group(4) as (worker, children):
        await rpc.call("w1", bodies.add, 1, 2)
        started_at = time.monotonic()
        assert await worker.shutdown() == rpc.types.ShutdownReport()
        assert time.monotonic() - started_at < QUICK * busy()
        for child in children:
            assert await child.ahear(QUICK * busy()) == []


async def test_shutdown_with_a_timeout_does_not_wait_for_the_work_of_others() -> None:
    """It returns in time and says so, and the worker that went on working can still leave."""
    async with group(2, work_until_told) as (worker, children):
        assert await children["w1"].ahear() == "working"
        started_at = time.monotonic()
        report = await worker.shutdown(timeout=0.5)
        assert report.timed_out
        assert 0.4 < time.monotonic() - started_at < 0.5 + QUICK * busy()
        children["w1"].tell("stop")
        error, seconds = await children["w1"].ahear()
        assert error == "PeerLeft"
        assert seconds < QUICK * busy()


def work_until_told(place: Place, link: Link) -> tuple[str, float]:
    """Body: stay out of shutdown until told; what a call to w0 raises then, and how long shutdown() took."""
    place.init_rpc()
    link.tell("working")
    link.hear()
    error = ""
    try:
        rpc.rpc_sync("w0", bodies.add, args=(1, 2))
    except rpc.RpcError as caught:
        error = type(caught).__name__
    started_at = time.monotonic()
    rpc.shutdown()
    return error, time.monotonic() - started_at


async def test_member_that_leaves_ungracefully_keeps_nobody_waiting() -> None:
    """The others are in shutdown() already and wait for it; its goodbye lets them go."""
    async with group(3, leave_as_told) as (worker, children):
        children["w1"].tell(True)
        leaving = asyncio.ensure_future(worker.shutdown())
        await asyncio.wait([leaving], timeout=0.3)
        assert not leaving.done()
        children["w2"].tell(False)
        report = await asyncio.wait_for(leaving, QUICK * busy())
        assert report.lost == ()
        assert await children["w1"].ahear(QUICK * busy()) == ()


def leave_as_told(place: Place, link: Link) -> Any:
    """Body: shut down, gracefully or not as told; returns who was lost."""
    place.init_rpc()
    return rpc.shutdown(graceful=link.hear()).lost


async def test_async_with_leaves_at_once_when_its_block_fails() -> None:
    """An error in the block is not held up by a graceful shutdown; the others see a goodbye."""
    with processes() as children, meeting_file() as init_method:
        child = children.start(places(2, init_method)[1], wait_for_goodbye)
        with pytest.raises(ZeroDivisionError):
            async with rpc.init("w0", rank=0, world_size=2, init_method=init_method) as worker:
                assert await child.ahear() == "calling"
                await wait_for_async(lambda: any(call.direction == "served" for call in worker.pending_calls()))
                raise ZeroDivisionError
        assert await child.ahear(QUICK * busy()) == "PeerLeft"
        children.check_ended()


def wait_for_goodbye(place: Place, link: Link) -> str:
    """Body: call w0 for ever; what that ends with."""
    place.init_rpc()
    call = rpc.rpc_async("w0", bodies.ablock)
    link.tell("calling")
    try:
        call.wait()
    except rpc.RpcError as error:
        return type(error).__name__
    finally:
        rpc.shutdown()
    return "answered"


def again_and_again(place: Place, link: Link) -> Any:
    """Body: shutdown() any number of times, from any thread, with and without a worker."""
    assert rpc.shutdown() == rpc.types.ShutdownReport()
    place.init_rpc()
    reports: list[Any] = []
    threads = [threading.Thread(target=lambda: reports.append(rpc.shutdown())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    reports.append(rpc.shutdown())
    with pytest.raises(rpc.errors.NotInitialized):
        rpc.rpc_sync("w0", bodies.add, args=(1, 2))
    return [(report.lost, report.timed_out) for report in reports]


def test_shutdown_is_idempotent() -> None:
    """Before init, twice, and from several threads at once it does no harm."""
    with processes() as children, meeting_file() as init_method:
        for place in places(2, init_method):
            children.start(place, again_and_again)
        for child in children:
            assert child.hear() == [((), False)] * 5
        children.check_ended()


def fail_then_join(place: Place, link: Link) -> Any:
    """Body: an init that cannot succeed, a shutdown, and a second try that can."""
    before = bodies.descriptor_count(), threading.active_count()
    for _ in range(2):
        with pytest.raises(rpc.errors.RendezvousError):
            Place(place.name, 0, 2, place.init_method + place.name).init_rpc(rpc_timeout=0.3)
        assert rpc.shutdown() == rpc.types.ShutdownReport()
        with pytest.raises(rpc.errors.NotInitialized):
            rpc.rpc_sync("w0", bodies.add, args=(1, 2))
    after = bodies.descriptor_count(), threading.active_count()
    place.init_rpc()
    result = rpc.rpc_sync("w0", bodies.add, args=(1, 2))
    rpc.shutdown()
    return after[0] - before[0], after[1] - before[1], result


def test_shutdown_after_a_failed_init_and_init_again() -> None:
    """A failed init leaves nothing; shutdown() after it returns, and the next init works."""
    with processes() as children, meeting_file() as init_method:
        for place in places(2, init_method):
            children.start(place, fail_then_join)
        for child in children:
            descriptors, threads, result = child.hear()
            assert (threads, result) == (0, 3)
            assert descriptors <= 2  # what a first loop and a first store keep for the life of the process
        children.check_ended()


def several_lives(place: Place, link: Link, rounds: int) -> Any:
    """Body: init and shutdown some times in one process; descriptors, threads and results of each life."""
    found: list[Any] = []
    threads = threading.active_count()
    for life in range(rounds):
        place.init_rpc()
        others = [f"w{rank}" for rank in range(place.world_size or 0)]
        results = [rpc.rpc_sync(other, bodies.add, args=(life, 1)) for other in others]
        report = rpc.shutdown()
        assert report.lost == () and not report.timed_out
        with contextlib.suppress(AssertionError):  # the last thread of a life may be on its way out
            wait_for(lambda: held() == found[0][:2] if found else threading.active_count() == threads, 5)
        found.append((*held(), results))
    return found


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return bodies.descriptor_count(), threading.active_count()


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_init_again_after_shutdown_in_the_same_process(scheme: str) -> None:
    """The same group meets at the same place several times, and nothing grows."""
    with processes() as children, meeting_file() as init_method:
        method = init_method if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
        for place in places(3, method):
            children.start(place, several_lives, 4)
        for child in children:
            lives = child.hear(40)
            assert [results for _, _, results in lives] == [[life + 1] * 3 for life in range(4)]
            assert lives[-1][:2] == lives[0][:2]
        children.check_ended()


async def test_sockets_of_a_killed_group_are_removed_by_a_later_worker(tmp_path: Path) -> None:
    """Nobody is left to clean up after a group that is killed as a whole; the next worker of the user does."""
    directory = private_directory()
    before = set(directory.iterdir())
    with processes() as children, meeting_file() as init_method:
        for place in places(2, init_method):
            children.start(place, bodies_ready)
        for child in children:
            assert await child.ahear() == "ready"
        for child in children:
            child.kill()
        for child in children:
            await asyncio.to_thread(child.join)
        left = {path.suffix for path in set(directory.iterdir()) - before}
        assert left - {".key"} == {".sock", ".beat"}  # the user's key stays
        async with rpc.init("later", rank=0, world_size=1, init_method=f"file://{tmp_path}/store"):
            own = {path.stem for path in set(directory.glob("*.sock")) - before}
            assert len(own) == 2  # where it takes connections, and where it can be looked at
    assert {path for path in directory.iterdir() if path.suffix in (".sock", ".beat")} <= before


def bodies_ready(place: Place, link: Link) -> None:
    """Body: join, say so, and stay."""
    place.init_rpc()
    rpc.rpc_sync("w0", bodies.add, args=(1, 2))
    link.tell("ready")
    link.hear(60)


# --- whole programs ---------------------------------------------------------------------------------------------------

CLEAN = """
import multiprocessing, os, sys, threading
import aiorpc as rpc

def add(a, b):
    return a + b

def main(rank, path):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2,
                 rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{path}"))
    assert rpc.rpc_sync(f"w{1 - rank}", add, args=(1, rank)) == 1 + rank
    assert rpc.remote(f"w{1 - rank}", add, args=(1, 1)).to_here() == 2
    rpc.shutdown()
    assert threading.active_count() == 1, threading.enumerate()

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=main, args=(1, sys.argv[1]))
    child.start()
    main(0, sys.argv[1])
    child.join(20)
    sys.exit(child.exitcode)
"""


@pytest.mark.long
@pytest.mark.slow
def test_clean_run_prints_nothing(tmp_path: Path) -> None:
    """No line on stdout or stderr, with warnings and development mode on; no thread is left."""
    (tmp_path / "clean.py").write_text(CLEAN)
    arguments = ["-X", "dev", "-W", "default", "clean.py", str(tmp_path / "store")]
    done = run_program(arguments, tmp_path, timeout=60 * busy())
    noise = [line for line in done.err.splitlines() if "torch" not in line and "multi-threaded" not in line]
    assert (done.code, done.out, noise) == (0, "", [])


AGAIN = """
import multiprocessing, sys, time, warnings
import aiorpc as rpc

warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads

def join(name, rank, world_size, path):
    options = rpc.RpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)

def leave(path):
    join("child", 1, 2, path)
    rpc.rpc_sync("parent", abs, args=(-1,))

if __name__ == "__main__":
    path = sys.argv[1]
    join("before", 0, 1, path + "-before")
    rpc.shutdown()
    child = multiprocessing.get_context("fork").Process(target=leave, args=(path,))
    child.start()
    join("parent", 0, 2, path)
    try:
        rpc.rpc_sync("child", time.sleep, args=(60,))
    except (rpc.PeerLeft, rpc.PeerLost) as error:
        print(type(error).__name__)
    child.join(20)
    print(rpc.shutdown().lost)
"""


@pytest.mark.skipif(sys.version_info < (3, 13), reason="multiprocessing's children run nothing at exit until 3.13")
def test_a_forked_child_says_goodbye_at_exit_though_its_parent_was_a_worker(tmp_path: Path) -> None:
    """multiprocessing takes from it what its parent has registered, and so it has to register that itself."""
    (tmp_path / "again.py").write_text(AGAIN)
    done = run_program(["again.py", str(tmp_path / "store")], tmp_path, timeout=60 * busy())
    assert (done.code, done.out, done.err) == (0, "PeerLeft\n()\n", "")


COMPUTES = """
import atexit, logging, sys, threading, torch, aiorpc as rpc
logging.getLogger("aiorpc").setLevel(logging.ERROR)  # it says that a handler runs still
torch.set_num_threads(1)
begun = threading.Event()
def compute():
    value = torch.ones(100, 100)
    while True:
        value = torch.mm(value, value)
        begun.set()
def call():
    try:
        print(rpc.rpc_sync("w0", len, ("abc",)))
    except (rpc.WorkerClosed, rpc.errors.NotInitialized) as error:
        print(error)
atexit.register(call)
rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
atexit.register(call)
pending = [rpc.rpc_async("w0", compute, timeout=0) for _ in range(2)]
assert begun.wait(30)
if sys.argv[2] == "after a shutdown":
    rpc.shutdown(timeout=0.1)
    [call.exception() for call in pending]
sys.exit(7)
"""


@pytest.mark.parametrize("when", ["without a shutdown", "after a shutdown"])
def test_a_process_exits_with_its_own_status_while_handlers_compute(when: str, tmp_path: Path) -> None:
    """They run on in threads that the interpreter would end in the midst of torch, which aborts the process."""
    (tmp_path / "computes.py").write_text(COMPUTES)
    done = run_program(["computes.py", f"file://{tmp_path}/store", when], tmp_path, timeout=60 * busy())
    assert (done.code, done.err) == (7, "")
    if when == "without a shutdown":
        answer, refusal = done.out.splitlines()
        # Python 3.12 starts no thread any more when `atexit` is at work, and those that there are compute.
        assert answer == "3" or ((3, 12) <= sys.version_info < (3, 13) and "as the interpreter ends" in answer)
        assert "worker 'w0' has left, as its process exits" in refusal


EXITS_SLOWLY = """
import atexit, sys, aiorpc as rpc
def linger():
    print("left", flush=True)
    sys.stdin.read()
atexit.register(linger)  # it runs after the worker has said goodbye
options = rpc.RpcBackendOptions(init_method=sys.argv[1], transports=("tcp",))
rpc.init_rpc("w2", rank=2, world_size=3, rpc_backend_options=options)
"""


async def test_a_call_that_comes_while_a_process_exits_ends_as_if_it_had_heard_the_goodbye(tmp_path: Path) -> None:
    """By whoever connects only then: its listener takes connections until the process has ended."""
    (tmp_path / "exits.py").write_text(EXITS_SLOWLY)
    options = rpc.RpcBackendOptions(transports=("tcp",))
    with meeting_file() as where:
        arguments = [str(tmp_path / "exits.py"), where]
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe)
        assert program.stdin is not None and program.stdout is not None
        try:
            workers = [rpc.init(f"w{n}", rank=n, world_size=3, init_method=where, options=options) for n in range(2)]
            await asyncio.gather(*(each.start() for each in workers))
            assert await asyncio.wait_for(program.stdout.readline(), 60 * busy()) == b"left\n"
            for each in workers:
                with pytest.raises(rpc.PeerLeft, match=r"w2 .* has shut down"):
                    await each.call("w2", abs, -3)
            program.stdin.close()
            assert await asyncio.wait_for(program.wait(), 60 * busy()) == 0
            await asyncio.gather(*(each.shutdown() for each in workers))
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()


WAITS_LATE = """
import atexit, sys
def last():
    for wait in (pending.wait, lambda: next(iter(versions))):
        try:
            print(wait())
        except rpc.WorkerClosed as error:
            print(error)
atexit.register(last)  # before all of aiorpc's own, so it runs behind that
import aiorpc as rpc
from tests.processes import bodies
rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
rpc.rpc_sync("w0", bodies.add, (1, 2))  # so there is a connection, and a goodbye on it
pending = rpc.rpc_async("w0", bodies.ablock, (1000.0,), timeout=0)
versions = rpc.subscribe("never", timeout=0)
"""


async def test_what_waits_at_the_very_end_of_a_process_is_told(tmp_path: Path) -> None:
    """Finalizers may run when the loop has ended, and would wait for ever for what nobody brings any more."""
    (tmp_path / "waits.py").write_text(WAITS_LATE)
    with meeting_file() as where:
        program = asyncio.create_task(
            asyncio.to_thread(run_program, ["waits.py", where], tmp_path, timeout=60 * busy())
        )
        async with rpc.init("w0", rank=0, world_size=2, init_method=where) as worker:
            done = await program
        assert (await worker.shutdown()).lost == ()
    assert (done.code, done.err) == (0, "")
    assert [line[: line.index(",")] for line in done.out.splitlines()] == ["worker 'w1' has left"] * 2


EXIT = """
import sys, time, aiorpc as rpc
from tests.processes import bodies
rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
pending = rpc.rpc_async("w1", bodies.block)
while sum(not call.function.startswith("aiorpc") for call in rpc.current().pending_calls()) < 2:
    time.sleep(0.01)
print("ready", flush=True)
exec(sys.argv[2])
"""


@pytest.fixture(scope="module")
def prepared(_own_temporary_directory: None) -> Iterator[Zygote]:
    """An interpreter to fork programs from."""
    with zygote() as made:
        yield made


def end_of_peer(place: Place, link: Link) -> Any:
    """Body: how a call to w0 ends, how long shutdown() takes then, who was lost."""
    place.init_rpc()
    try:
        rpc.rpc_sync("w0", bodies.ablock)
        error = "answered"
    except rpc.RpcError as caught:
        error = type(caught).__name__
    started_at = time.monotonic()
    report = rpc.shutdown()
    return error, time.monotonic() - started_at, [info.name for info in report.lost]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "signal_number"),
    [
        ("pass", None),
        ("rpc.rpc_sync('w1', bodies.block)", signal.SIGINT),
        ("rpc.shutdown()", signal.SIGINT),
    ],
    ids=["end of the script", "Ctrl-C in rpc_sync", "Ctrl-C in shutdown"],
)
def test_program_that_ends_without_a_shutdown(
    ending: str, signal_number: int | None, prepared: Zygote, tmp_path: Path
) -> None:
    """It ends at once, quiet but for its own KeyboardInterrupt; its peer sees a goodbye and leaves in good order."""
    with processes() as children, meeting_file() as init_method:
        child = children.start(places(2, init_method)[1], end_of_peer)
        with prepared.run(EXIT, [init_method, ending], tmp_path) as program:
            program.wait_for_line("ready")
            if signal_number is not None:
                time.sleep(0.3)  # until it blocks; a condition would have to look into the program's stack
                os.kill(program.pid, signal_number)
            begun = time.monotonic()
            program.finish(20)
            assert time.monotonic() - begun < 8 * busy()
        if signal_number is None:
            assert (program.code, program.err) == (0, "")
        else:
            check_interrupted(program)
        error, seconds, lost = child.hear()
        assert (error, lost) == ("PeerLeft", [])
        assert seconds < 8 * busy()
        children.check_ended()


FORK = """
import os, sys, warnings, aiorpc as rpc

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads

def join(name, method):
    options = rpc.RpcBackendOptions(init_method=method, transports=("unix",), rpc_timeout=20)
    rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options)

def files():
    return sorted(os.listdir(os.path.dirname(rpc.current()._node.engine.record.unix_path)))

join("parent", sys.argv[1])
before = files()
child = os.fork()
if child == 0:
    join("child", sys.argv[2])
    print("child", rpc.rpc_sync("child", abs, args=(-3,)), flush=True)
    sys.exit()  # an ordinary end, with all that is done at exit
assert os.waitpid(child, 0)[1] == 0
print("parent", rpc.rpc_sync("parent", abs, args=(-3,)), set(before) <= set(files()), flush=True)
rpc.shutdown()
"""


@pytest.mark.slow
def test_forked_child_may_have_a_worker_of_its_own_and_ends_alone(prepared: Zygote, tmp_path: Path) -> None:
    """init_rpc works in the child of a worker's process, and its end takes nothing away from the parent."""
    methods = [f"file://{tmp_path}/{name}" for name in ("parent", "child")]
    with prepared.run(FORK, methods, tmp_path) as program:
        program.finish(20)
    assert (program.code, program.err) == (0, "")
    assert program.out.splitlines() == ["child 3", "parent 3 True"]


def check_interrupted(program: Program) -> None:
    """It ended by Ctrl-C, and said nothing beside that."""
    assert program.code == -signal.SIGINT
    assert program.err.startswith("Traceback") and program.err.endswith("KeyboardInterrupt\n"), program.err
    assert program.err.count("Traceback") == 1, program.err


@pytest.mark.slow
def test_ctrl_c_while_joining(prepared: Zygote, tmp_path: Path) -> None:
    """A program that waits for others who do not come can be interrupted."""
    code = "import aiorpc as rpc; print('ready', flush=True); rpc.init_rpc('a', rank=0, world_size=2)"
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with prepared.run(code, [], tmp_path, env) as program:
        program.wait_for_line("ready")
        time.sleep(0.3)  # as above
        os.kill(program.pid, signal.SIGINT)
        program.finish(10)
    check_interrupted(program)


FAILING = """
import os, sys, time, aiorpc as rpc

options = rpc.RpcBackendOptions(init_method=sys.argv[1], rpc_timeout=60)
rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
raise KeyError("no such row")
"""


async def test_a_script_that_ends_with_an_error_says_which_one(prepared: Zygote, tmp_path: Path) -> None:
    """To the calls that wait for it, though it has not shut down."""
    method, go = f"file://{tmp_path / 'store'}", tmp_path / "go"
    with prepared.run(FAILING, [method, str(go)], tmp_path) as program:
        async with rpc.init("w0", rank=0, world_size=2, init_method=method) as worker:
            call = worker.peer("w1", timeout=0).call(bodies.ablock)
            await wait_for_async(lambda: worker._node.peers.find("w1").connection is not None)
            go.touch()
            with pytest.raises(rpc.PeerLeft, match=r"w1 \(rank 1, .*\) has left after an error \(KeyError\)"):
                await call
        program.finish(60)
