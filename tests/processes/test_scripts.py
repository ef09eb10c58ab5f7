"""Programs as people write them: all ways to meet and to start, `__main__`, notebooks, process groups, many workers."""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

import aiorpc as rpc
from tests.examples.programs import run_program
from tests.limits import busy
from tests.ports import free_port

from . import bodies
from .workers import Link, Place, group, meeting_file, places, processes, wait_for

HEADER = """
import os, sys, threading
from dataclasses import dataclass
import aiorpc as rpc
"""

# What a script keeps in __main__ and means to be one thing per process.
DEFINITIONS = """
LOCK = threading.Lock()
TOTAL = 0

@dataclass
class Point:
    x: int
    y: int

class Model:
    def __init__(self, factor):
        self.factor = factor

    def scale(self, point):
        return Point(point.x * self.factor, point.y * self.factor)

def bump(n):
    global TOTAL
    with LOCK:
        TOTAL += n
        return TOTAL

async def abump(n):
    return bump(n)
"""

USE = """
def use(to):
    assert [rpc.rpc_sync(to, bump, args=(5,)) for _ in range(3)] == [5, 10, 15]
    assert rpc.rpc_sync(to, abump, args=(5,)) == 20
    assert TOTAL == 0
    point = rpc.remote(to, Model, args=(3,)).rpc_sync().scale(Point(1, 2))
    assert type(point) is Point and point == Point(3, 6), point
    assert rpc.rpc_sync(to, lambda n: n + 1, args=(1,)) == 2
"""

SAME_MAIN = f"""{HEADER}{DEFINITIONS}{USE}
if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{{rank}}")
    if rank == 0:
        use("w1")
    rpc.shutdown()
    assert TOTAL == (20 if rank == 1 else 0), TOTAL
    print("done", rank)
"""


def run_script(place: Place, link: Link, path: str, *arguments: str) -> None:
    """Body: run a script as ``__main__``, as the interpreter would, in a process that has torch already."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher sets."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in place.items()}


def run_ranks(paths: list[Path], *arguments: str) -> None:
    """Run one script for each rank, under env://, to a good end."""
    port = free_port()
    with processes() as children:
        for rank, path in enumerate(paths):
            env = environment(rank, len(paths), port)
            children.start(Place(f"w{rank}", rank, None, ""), run_script, str(path), *arguments, env=env)
        for child in children:
            child.hear(40)
        children.check_ended()


def test_script_whose_ranks_share_functions_classes_locks_and_globals_of_main(tmp_path: Path) -> None:
    """The same script on both sides: what `__main__` defines goes by name, so locks and globals are the callee's."""
    script = tmp_path / "train.py"
    script.write_text(SAME_MAIN)
    run_ranks([script, script])


@pytest.mark.long
def test_a_script_whose_functions_are_imported_by_another_one_serves_with_its_own_globals(tmp_path: Path) -> None:
    """The caller names them by the script's module, which the callee does not import a second time."""
    server, client = tmp_path / "serving_script.py", tmp_path / "client.py"
    path = "sys.path.insert(0, os.path.dirname(__file__))\n"
    server.write_text(f"""{HEADER}{path}
model, runs = None, 0
@dataclass
class Row:
    x: int
async def predict(row):
    return model, type(row) is Row, __name__
if __name__ == "__main__":
    runs += 1
    model = "loaded"
    rpc.init_rpc("server")
    rpc.shutdown()
    assert runs == 1 and sys.modules.get("serving_script") is sys.modules["__main__"]
""")
    client.write_text(f"""{HEADER}{path}
from serving_script import Row, predict
rpc.init_rpc("client")
assert rpc.rpc_sync("server", predict, args=(Row(1),)) == ("loaded", True, "__main__")
rpc.shutdown()
""")
    run_ranks([server, client])


def test_scripts_with_different_mains_send_functions_and_classes_by_value(tmp_path: Path) -> None:
    """A function the callee's script does not have travels with what it needs; results are of the caller's class."""
    first, second = tmp_path / "trainer.py", tmp_path / "server.py"
    first.write_text(f"""{HEADER}
@dataclass
class Point:
    x: int
    y: int

SCALE = 10

class Model:
    def __init__(self, factor):
        self.factor = factor

    def scale(self, point):
        return Point(point.x * self.factor, point.y * self.factor)

def scaled(n):
    return n * SCALE

def name_of_main():
    return "by value"

if __name__ == "__main__":
    rpc.init_rpc("trainer")
    assert rpc.rpc_sync("server", scaled, args=(4,)) == 40
    assert rpc.rpc_sync("server", name_of_main) == "by value"
    ref = rpc.remote("server", Model, args=(3,))
    point = ref.rpc_sync().scale(Point(1, 2))
    assert type(point) is Point and point == Point(3, 6)
    assert ref.to_here().factor == 3
    rpc.shutdown()
""")
    second.write_text(f"""{HEADER}
def name_of_main():
    return "the server's own"

if __name__ == "__main__":
    rpc.init_rpc("server")
    rpc.shutdown()
    assert not hasattr(sys.modules["__main__"], "Point")
""")
    run_ranks([first, second])


MEETING = f"""{HEADER}
def add(a, b):
    return a + b

if __name__ == "__main__":
    rank = int(sys.argv[2 + int(os.environ["RANK"])])
    options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1], num_worker_threads=4, rpc_timeout=20)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    for life in range(2):
        rpc.init_rpc(f"w{{rank}}", rpc.BackendType.TENSORPIPE, rank, 3, options)
        assert rpc.get_worker_info().id == rank
        for other in ("w0", 1, rpc.get_worker_info("w2")):
            assert rpc.rpc_sync(other, add, args=(1, life)) == 1 + life
        rpc.shutdown()
"""


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_script_that_says_where_to_meet(scheme: str, tmp_path: Path) -> None:
    """tcp:// and file:// with rank and world size as arguments and nothing in the environment; twice in one process."""
    script = tmp_path / "train.py"
    script.write_text(MEETING)
    method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    run_ranks([script] * 3, method, "0", "1", "2")


@pytest.mark.long
@pytest.mark.slow
def test_python_c_with_forked_ranks(tmp_path: Path) -> None:
    """A program without a file: its forked children have the same main, also in a multiprocessing.Pool."""
    program = f"""{HEADER}{DEFINITIONS}{USE}
import multiprocessing

def work(rank):
    options = rpc.RpcBackendOptions(init_method=sys.argv[1])
    rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        use("w1")
    rpc.shutdown()
    return TOTAL

with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(work, range(2), chunksize=1))
"""
    done = run_program(["-c", program, f"file://{tmp_path}/store"], tmp_path, timeout=60 * busy())
    assert (done.code, done.out, done.err) == (0, "[0, 20]\n", "")


@pytest.mark.long
@pytest.mark.slow
def test_ranks_started_by_spawn(tmp_path: Path) -> None:
    """torch.multiprocessing.spawn: the children load the parent's main again, under another name."""
    script = tmp_path / "spawned.py"
    script.write_text(f"""{HEADER}{DEFINITIONS}{USE}
import torch.multiprocessing

def work(rank, method):
    options = rpc.RpcBackendOptions(init_method=method)
    rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        use("w1")
    rpc.shutdown()

if __name__ == "__main__":
    # One new interpreter beside the parent's own: each has torch to load.
    spawned = torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=1, join=False)
    work(1, sys.argv[1])
    assert spawned.join(20)
    print(TOTAL)
""")
    done = run_program([str(script), f"file://{tmp_path}/store"], tmp_path, timeout=90)
    assert (done.code, done.out, done.err) == (0, "20\n", "")


def train_beside_a_process_group(place: Place, link: Link, port: int) -> list[float]:
    """Body: a gloo group and DDP on the same address as the RPC group, both at work, either one ended first."""
    os.environ.update(environment(place.rank, 2, port))
    dist.init_process_group("gloo")
    rpc.init_rpc(place.name)
    other = f"w{1 - place.rank}"
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = rpc.rpc_sync(other, torch.full, args=((8, 4), 0.1 * (step + place.rank)))
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
        dist.barrier()
    weights = [float(value) for value in model.module.weight.detach().flatten()]
    if place.name == "w0":
        rpc.shutdown()
        dist.destroy_process_group()
    else:
        assert rpc.rpc_sync("w1", bodies.add, args=(1, 1)) == 2
        rpc.shutdown()
        dist.destroy_process_group()
    return weights


@pytest.mark.long
def test_process_group_and_ddp_in_the_same_process() -> None:
    """gloo meets at the same address and port; gradients are averaged and calls go on."""
    port = free_port()
    with processes() as children:
        for place in places(2, ""):
            children.start(place, train_beside_a_process_group, port)
        first, second = (child.hear(40) for child in children)
        assert first == second
        children.check_ended()


def call_everybody(place: Place, link: Link) -> int:
    """Body: default options; call each worker of the group; returns how many answered."""
    place.init_rpc()
    size = place.world_size or 0
    calls = [rpc.rpc_async(f"w{rank}", bodies.add, args=(rank, 1)) for rank in range(size)]
    assert [call.wait() for call in calls] == [rank + 1 for rank in range(size)]
    report = rpc.shutdown()
    assert report.lost == () and not report.timed_out
    return size


@pytest.mark.long
@pytest.mark.slow
def test_thirty_two_local_workers_call_each_other() -> None:
    """With default options: all start, all reach all, all leave."""
    with processes() as children, meeting_file() as init_method:
        for place in places(32, init_method):
            children.start(place, call_everybody)
        assert [child.hear(90) for child in children] == [32] * 32
        children.check_ended()


def join_late(place: Place, link: Link) -> Any:
    """Body: no timeouts at all; join when told."""
    link.hear()
    place.init_rpc(rpc_timeout=0)
    rpc.shutdown()
    return "left"


async def test_timeout_of_zero_is_no_limit_everywhere() -> None:
    """init waits as long as it takes, calls have no deadline, handlers see none."""
    with processes() as children, meeting_file() as init_method:
        child = children.start(places(2, init_method)[1], join_late)
        worker = rpc.init(
            "w0", rank=0, world_size=2, init_method=init_method, options=rpc.RpcBackendOptions(rpc_timeout=0)
        )
        joining = asyncio.ensure_future(worker.start())
        await asyncio.wait([joining], timeout=0.5)
        assert not joining.done()
        child.tell("join")
        await joining
        assert await rpc.call("w1", left_here) is None
        assert await rpc.peer("w1", timeout=0).call(left_here) is None
        assert await rpc.peer("w1", timeout=20).call(left_here) is not None
        assert await asyncio.to_thread(rpc.rpc_sync, "w1", left_here, timeout=0) is None
        await worker.shutdown()
        assert await child.ahear() == "left"


def left_here() -> float | None:
    """In a handler: seconds left."""
    return rpc.deadline()


async def block_my_loop(verb: str) -> Any:
    """An async handler that uses a blocking verb: what it raises."""
    try:
        if verb == "shutdown":
            rpc.shutdown()
        elif verb == "rpc_sync":
            rpc.rpc_sync("w0", bodies.add, args=(1, 2))
        elif verb == "to_here":
            rpc.remote("w0", bodies.add, 1, 2).to_here()
        elif verb == "proxy":
            rpc.remote("w0", bodies.Counter).rpc_sync().add(1)
        else:
            rpc.rpc_async("w0", bodies.add, args=(1, 2)).wait()
    except rpc.errors.WouldBlockLoop as error:
        return str(error)
    return "it was not refused"


BLOCKING = {
    "rpc_sync": "await aiorpc.call(",
    "shutdown": "await worker.shutdown()",
    "wait": "await future",
    "to_here": "await",
    "proxy": "await",
}


@pytest.mark.parametrize("verb", BLOCKING)
async def test_blocking_verb_on_the_loop_of_the_worker_is_refused(verb: str) -> None:
    """On a script's worker and on one of this loop: refused at once, naming the awaitable; everything goes on."""
    async with group(2) as _:
        for text in (await rpc.call("w1", block_my_loop, verb), await block_my_loop(verb)):
            assert BLOCKING[verb] in text, text
        assert await rpc.call("w1", bodies.add, 1, 2) == 3


def notebook(place: Place, link: Link) -> str:
    """Body: a notebook's kernel runs a loop of its own on the main thread, and cells use blocking verbs on it."""

    async def cells() -> str:
        place.init_rpc()
        assert rpc.rpc_sync("w0", bodies.add, args=(1, 2)) == 3
        ref = rpc.remote("w0", bodies.Counter, args=(5,))
        assert ref.rpc_sync().add(1) == 6
        assert ref.to_here().value == 6
        future = rpc.rpc_async("w0", bodies.add, args=(3, 4))
        assert future.wait() == 7
        assert await rpc.call("w0", bodies.aadd, 5, 6) == 11
        assert [item async for item in rpc.stream("w0", numbers, 3)] == [0, 1, 2]
        del ref
        rpc.shutdown()
        return "ran"

    return asyncio.run(cells())


def numbers(n: int) -> Any:
    """A stream that ends."""
    yield from range(n)


async def test_notebook_uses_blocking_and_awaited_verbs_on_its_own_loop() -> None:
    """The worker's loop is another one, so nothing is refused and nothing hangs."""
    async with group(2, notebook) as (worker, children):
        await worker.shutdown()
        assert await children["w1"].ahear() == "ran"


async def test_dedicated_loop_serves_while_the_program_blocks_its_own() -> None:
    """With dedicated_loop=True a training step that blocks the loop holds up nobody; futures are awaited as ever."""
    async with group(2, dedicated_loop=True) as (worker, _):
        assert worker.loop is not asyncio.get_running_loop()
        done = rpc.call("w1", calls_back, 20)
        wait_for(done.done, 20)  # this loop turns no more until the answer is there
        assert await done == 20
        assert await asyncio.wait_for(rpc.call("w1", bodies.aadd, 1, 2), 20) == 3
        assert rpc.rpc_sync("w1", bodies.add, args=(1, 2)) == 3
        assert [item async for item in rpc.stream("w1", numbers, 30)] == list(range(30))
        assert await rpc.remote("w1", bodies.Counter, 3).rpc_async().add(1) == 4
    assert not any("w0-loop" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("in_thread", [False, True])
async def test_blocking_shutdown_of_a_worker_with_a_loop_of_its_own(in_thread: bool) -> None:
    """rpc.shutdown() ends a worker of dedicated_loop=True, from a cell or a thread; on the worker's loop it refuses."""
    options = rpc.RpcBackendOptions(dedicated_loop=True)
    worker = await rpc.init("w0", rank=0, world_size=1, store=HashStore(), options=options)
    with pytest.raises(rpc.errors.WouldBlockLoop):
        await rpc.call("w0", shuts_down)
    assert rpc.rpc_sync("w0", bodies.add, args=(1, 2)) == 3
    report = await asyncio.to_thread(rpc.shutdown) if in_thread else rpc.shutdown()
    assert worker.closed and report == rpc.types.ShutdownReport()
    assert await worker.shutdown() is report
    assert not any("w0-loop" in thread.name for thread in threading.enumerate())


async def shuts_down() -> None:
    """On the worker's own loop."""
    rpc.shutdown()


def calls_back(n: int) -> int:
    """So many calls to w0, one after the other."""
    return sum(rpc.rpc_sync("w0", bodies.add, args=(0, 1)) for _ in range(n))


DAEMON = """
import os, sys, aiorpc as rpc
for number in range(3):
    os.close(number)
rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
os.write(2, b"what a library of C may say")
assert rpc.rpc_sync("w0", abs, (-3,)) == 3
where = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
rpc.shutdown()
os._exit(0 if where == [os.devnull] * 3 else 3)
"""


def test_a_process_without_standard_streams_has_no_connection_in_their_place(tmp_path: Path) -> None:
    """As a daemon that has closed them: what is written there goes nowhere, and shutting down does not abort it."""
    (tmp_path / "daemon.py").write_text(DAEMON)
    assert run_program(["daemon.py", f"file://{tmp_path}/store"], tmp_path, timeout=60 * busy()).code == 0
