"""What every test gets: event loops, a tier, a time limit, a temporary directory, and a look at what it left behind."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import hypothesis
import pytest
from pytest_asyncio import is_async_test

from tests import leaks, tiers
from tests.limits import limit_of, time_limit

if TYPE_CHECKING:
    from aiorpc import Worker

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
CALL_FAILED = pytest.StashKey[bool]()

# No limit of 200 ms on each example: on a busy machine any takes that. tests/limits.py has one for each test.
hypothesis.settings.register_profile("tests", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does so to what runs behind it, and it is inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Each client of torch's store has the name of its address looked up. Together the tests ask more often than some
    # name servers answer, and five seconds of waiting for one are as long as some tests wait for all. Children inherit
    # it.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:4")
    tiers.choose_profile(config.option.markexpr)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before anything is left out by its marks."""
    tiers.assign(items)


def loop_factories() -> dict[str, LoopFactory]:
    """The event loops aiorpc must run on, by name; the one it prefers is last."""
    factories: dict[str, LoopFactory] = {"asyncio": asyncio.SelectorEventLoop}
    if sys.platform != "win32":
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, LoopFactory]:
    """Async tests run once on each loop, on one of them in the quick tier; slow ones only on the preferred one."""
    factories = loop_factories()
    return dict([factories.popitem()]) if item.get_closest_marker("slow") else factories


@pytest.fixture(params=list(loop_factories()))
def loop_factory(request: pytest.FixtureRequest) -> LoopFactory:
    """For a test that runs loops itself (``asyncio.Runner(loop_factory=...)``): each kind in turn."""
    return loop_factories()[request.param]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Each phase of a test has its limit."""
    with time_limit(limit_of(item)):
        return (yield)


pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[CALL_FAILED] = report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary directory for this run and its children: another run's sockets must not look like leaks here."""
    tmp_path_factory.getbasetemp()  # settled before the move: tests' own files stay where pytest always keeps them
    multiprocessing.util.get_temp_dir()  # the same: its fork server outlives the session's directory
    own = tempfile.mkdtemp(prefix="rpc-")  # short: a unix socket's path has 108 bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", own)
        patch.setattr(tempfile, "tempdir", None)
        yield
    shutil.rmtree(own, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _warm_loops() -> None:
    """Run each kind of loop once: libuv opens a pipe for signals that lives as long as the process."""
    for factory in loop_factories().values():
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.sleep(0))


@pytest.fixture(scope="module")
def server_made_once() -> None:
    """The first server of a store in a process makes libuv open a pipe that it keeps for good."""
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> None:
    """The collector looks at what a file's tests make: all of torch takes it 150 ms, and many tests ask for it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest, _own_temporary_directory: None, _warm_loops: None) -> Iterator[None]:
    """Fail a test that passed but left descriptors, threads, children or files behind."""
    if request.node.get_closest_marker("gpu"):
        _start_gpu()
    before = leaks.take_snapshot()
    yield
    if not request.node.stash.get(CALL_FAILED, False):
        _report(leaks.wait_until_clean(before, allowed=_allowed(request.node)))


@pytest.fixture(autouse=True)
def _no_tasks_left(request: pytest.FixtureRequest, _no_leaks: None) -> None:
    """For async tests on a loop of their own; set up before their other fixtures, so that it is finished after them."""
    marker = request.node.get_closest_marker("asyncio")
    own_loop = marker is None or marker.kwargs.get("loop_scope", "function") == "function"
    if is_async_test(request.node) and own_loop:
        request.getfixturevalue("_task_check")


@pytest.fixture
async def _task_check(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    if "tasks" not in _allowed(request.node) and not request.node.stash.get(CALL_FAILED, False):
        _report(await leaks.tasks_left(before))


def _allowed(node: pytest.Item) -> set[str]:
    """Kinds of leak that the test's ``allow_leaks`` markers permit; each marker has to say why."""
    kinds: set[str] = set()
    for marker in node.iter_markers("allow_leaks"):
        if not marker.kwargs.get("reason"):
            pytest.fail("allow_leaks needs a reason=", pytrace=False)
        kinds.update(marker.args)
    return kinds


def _report(left: list[str]) -> None:
    if left:
        pytest.fail(f"left behind by this test (process {os.getpid()}):\n  " + "\n  ".join(left), pytrace=False)


def _start_gpu() -> None:
    """Open the device before the snapshot: the driver keeps descriptors until the process ends."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


# Imported by who wants workers: tests that need none need not wait for torch.


@pytest.fixture
async def apart() -> AsyncIterator[list[Worker]]:
    """Three workers, each on a loop in a thread of its own; no reference may be left on any of them."""
    from aiorpc import RpcBackendOptions
    from aiorpc.testing import cluster
    from tests.runtime.waiting import LIMIT, until_no_references

    async with cluster(3, options=RpcBackendOptions(dedicated_loop=True, rpc_timeout=LIMIT)) as workers:
        yield workers
        await until_no_references(workers)


@pytest.fixture
async def current_pair() -> AsyncIterator[list[Worker]]:
    """Two workers on the test's loop, the first of them the current one."""
    from aiorpc import RpcBackendOptions
    from aiorpc.testing import cluster
    from tests.runtime.waiting import LIMIT
    from tests.scripts import make_current

    async with cluster(2, options=RpcBackendOptions(rpc_timeout=LIMIT)) as workers:
        make_current(workers[0])
        yield workers
