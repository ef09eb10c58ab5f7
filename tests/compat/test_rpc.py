"""torch's names and texts, on one worker that calls itself."""

from __future__ import annotations

import importlib
import os
import re
import socket
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.ports import free_port


def add(x: Any, y: Any) -> Any:
    return x + y


def fail(text: str) -> None:
    raise ValueError(text)


@torch.jit.script
def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, n: int) -> int:
        self.count += n
        return self.count

    def copy(self) -> None:
        raise TypeError("no copies")


def test_verbs_take_names_ranks_and_infos(alone: Any) -> None:
    """All three verbs find a worker by each of them; other things are a ValueError."""
    info = alone.get_worker_info("me")
    for to in ("me", 0, info):
        assert alone.rpc_sync(to, add, args=(1, 2)) == 3
        assert alone.rpc_async(to, add, kwargs={"x": 1, "y": 2}).wait() == 3
        assert alone.remote(to, add, (1, 2)).to_here() == 3
    with pytest.raises(ValueError, match="Cannot get WorkerInfo"):
        alone.rpc_sync(0.5, add, (1, 2))
    with pytest.raises(RuntimeError, match="could not find destination"):
        alone.rpc_sync("nobody", add, (1, 2))


def test_arguments_that_are_no_sequence_are_told_as_such(alone: Any) -> None:
    """All three verbs say what is missing; what torch takes is taken."""
    for verb in (alone.rpc_sync, alone.rpc_async, alone.remote):
        with pytest.raises(RuntimeError, match=r"args must be a tuple of arguments, not 3; .*args=\(value,\)"):
            verb("me", add, args=3)
        with pytest.raises(RuntimeError, match="kwargs must be a dict"):
            verb("me", add, args=(1, 2), kwargs=3)
    assert alone.rpc_sync("me", add, args="ab") == "ab"
    assert alone.rpc_sync("me", add, args=[1, 2], kwargs=[]) == 3
    assert alone.rpc_sync("me", list, args=None) == []


def test_without_init(rpc: Any) -> None:
    """Verbs and RRefs raise torch's texts."""
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.rpc_sync("me", add, (1, 2))
    with pytest.raises(RuntimeError, match="Current RPC agent is not set! Did you initialize the RPC framework"):
        rpc.RRef(1)
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.shutdown()


def test_wrong_arguments_of_init(rpc: Any) -> None:
    """Backends, options and names that are none are refused before anything is done."""
    with pytest.raises(TypeError, match="Argument backend must be a member of BackendType"):
        rpc.init_rpc("me", backend="TENSORPIPE", rank=0, world_size=1)
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions())
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=timedelta(seconds=1))
    for rank in ("0", None):
        for world_size in (None, 1):
            with pytest.raises(RuntimeError, match="`rank` must be an integer, not"):
                rpc.init_rpc("me", rank=rank, world_size=world_size)
    with pytest.raises(ValueError, match="rank parameter missing"):
        rpc.init_rpc("me", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method="file:///tmp/none"))
    with pytest.raises(RuntimeError, match="Worker name must match"):
        rpc.WorkerInfo("a b", 0)
    assert not rpc.api._is_current_rpc_agent_set()


@pytest.fixture(scope="module")
def a_store() -> None:
    """The first server in a process makes libuv open a pipe that it keeps for good."""
    TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)


@pytest.fixture
def environment(a_store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What env:// looks for: a place where nobody is, and nothing else."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


def has_ipv6() -> bool:
    """Whether this host can reach itself by it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def group_of(rpc: Any, **arguments: Any) -> tuple[int, bool, str]:
    """Of a worker that initializes RPC so, and leaves: its id, whether its group is static, and its init method."""
    rpc.init_rpc("me", **arguments)
    try:
        agent = rpc.api._get_current_rpc_agent()
        return rpc.get_worker_info().id, agent.is_static_group, agent._get_backend_options().init_method
    finally:
        rpc.shutdown()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("rank", "init_method", "variables"),
    [
        (0, "env://", {}),
        (0, "env://", {"RANK": "1", "WORLD_SIZE": ""}),
        (-1, "env://", {"RANK": "0"}),
        (-1, "env://?rank=0", {}),
        (0, "env://", {"MASTER_ADDR": "::1"}),
        (0, "env://", {"MASTER_ADDR": "[::1]"}),
    ],
)
def test_env_without_a_world_size(
    rpc: Any, monkeypatch: pytest.MonkeyPatch, rank: int, init_method: str, variables: dict[str, str]
) -> None:
    """The group is joined freely, as with torch; the program's options are left as they are."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=20)
    host = "[::1]" if "::1" in os.environ["MASTER_ADDR"] else "127.0.0.1"
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 here")
    joined = f"tcp://{host}:{os.environ['MASTER_PORT']}"
    assert group_of(rpc, rank=rank, rpc_backend_options=options) == (0, False, joined)
    assert options.init_method == init_method


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("arguments", "init_method", "variables"),
    [
        ({"rank": 0, "world_size": 1}, "env://", {}),
        ({"rank": 0}, "env://", {"WORLD_SIZE": "1"}),
        ({}, "env://", {"WORLD_SIZE": "1", "RANK": "0"}),
        ({"rank": 0}, "env://?world_size=1", {}),
        ({}, "env://?rank=0&world_size=1", {}),
    ],
)
def test_env_with_a_world_size(
    rpc: Any, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, int], init_method: str, variables: dict[str, str]
) -> None:
    """Wherever it is said, the group has that size."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=20)
    assert group_of(rpc, **arguments, rpc_backend_options=options) == (0, True, init_method)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("world_size", [None, 1])
def test_env_without_a_place(rpc: Any, monkeypatch: pytest.MonkeyPatch, name: str, world_size: int | None) -> None:
    """The variable that is missing is named, whether or not the group has a size; so is that of a missing rank."""
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        rpc.init_rpc("me")
    monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=f"env:// needs the environment variable {name}, which is not set"):
        rpc.init_rpc("me", rank=0, world_size=world_size)
    assert not rpc.api._is_current_rpc_agent_set()


def test_initialized_twice(alone: Any) -> None:
    """One worker for each process, as with torch."""
    with pytest.raises(RuntimeError, match="is already initialized"):
        alone.init_rpc("again", rank=0, world_size=1)


def test_rrefs(alone: Any) -> None:
    """One class for those made here and by `remote`; proxies, and an attribute that does not exist."""
    native = importlib.import_module("torch._C._distributed_rpc")
    rref = alone.remote("me", Counter)
    assert type(rref) is native.PyRRef
    assert isinstance(alone.RRef(1), alone.RRef)
    assert rref.rpc_sync().add(2) == 2
    assert rref.remote().add(3).to_here() == 5
    assert rref.owner_name() == "me" and rref.is_owner() and rref.confirmed_by_owner()
    assert rref._get_type() is Counter
    assert rref._get_type(blocking=False) is rref._get_type(blocking=False)
    with pytest.raises(AttributeError, match="has no attribute 'none'"):
        rref.remote().none()
    assert re.fullmatch(r"OwnerRRef\(GloballyUniqueId\(created_on=0, local_id=\d+\)\)", str(rref))


def test_futures_end_with_the_first_error(alone: Any) -> None:
    """`torch.futures.wait_all` does not wait for the others."""
    never: torch.futures.Future[int] = torch.futures.Future()
    bad = alone.rpc_async("me", fail, ("Expected error",))
    with pytest.raises(ValueError, match="Expected error"):
        torch.futures.wait_all([never, bad])
    assert torch.futures.wait_all([alone.rpc_async("me", add, (1, n)) for n in range(3)]) == [1, 2, 3]


def test_all_collected_futures_count(rpc: Any) -> None:
    """`torch.futures.collect_all` fails with whichever of them fails, be it the only one or the last."""

    def bad() -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_exception(ValueError("Expected error"))  # type: ignore[arg-type]  # torch annotates it so
        return future

    ok: torch.futures.Future[int] = torch.futures.Future()
    late: torch.futures.Future[int] = torch.futures.Future()
    collected = [torch.futures.collect_all(each) for each in ([bad()], [ok, bad()], [ok, late])]
    ok.set_result(1)
    late.set_exception(ValueError("Expected error"))  # type: ignore[arg-type]  # torch annotates it so
    for future in collected:
        with pytest.raises(ValueError, match="Expected error"):
            future.wait()
        with pytest.raises(ValueError, match="Expected error"):
            future.then(lambda done: done.wait()).wait()
    assert torch.futures.collect_all([ok]).wait() == [ok]
    assert torch.futures.collect_all([]).wait() == []


@pytest.mark.parametrize("fails", [False, True])
def test_collections_of_collections_may_be_longer_than_a_stack_is_deep(rpc: Any, fails: bool) -> None:
    """The last of them ends as the first one does."""
    first: torch.futures.Future[Any] = torch.futures.Future()
    last = first
    for _ in range(2000):
        last = torch.futures.collect_all([last])
    if fails:
        first.set_exception(ValueError("Expected error"))
        with pytest.raises(ValueError, match="Expected error"):
            last.wait()
    else:
        first.set_result(1)
        assert len(last.wait()) == 1


def test_what_cannot_be_called(alone: Any) -> None:
    """All verbs refuse it here; operators that do not take their arguments are a RuntimeError, waited for or not."""
    for verb in (alone.rpc_sync, alone.rpc_async, alone.remote):
        with pytest.raises(TypeError, match="function should be callable"):
            verb("me", 5)
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        alone.rpc_sync("me", torch.add, (1, "a"))
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        alone.rpc_async("me", torch.add, (1, "a")).wait()
    assert alone.rpc_async("me", torch.add, (torch.ones(1), 1)).wait() == 2


_may_be_made = threading.Event()


def make_late() -> Counter:
    assert _may_be_made.wait(20)
    return Counter()


def test_asking_for_the_type_again(alone: Any) -> None:
    """An RRef does not keep an error that it got once."""
    _may_be_made.clear()
    rref = alone.remote("me", make_late)
    asked = rref._get_type(blocking=False)
    assert rref._get_type(blocking=False) is asked
    assert asked.cancel()
    _may_be_made.set()
    with pytest.raises(RuntimeError, match="was cancelled"):
        asked.wait()
    assert rref._get_type() is Counter


def test_callbacks(alone: Any) -> None:
    """They run in the order of their registration; what one raises is a RuntimeError, too."""
    seen: list[int] = []
    for _ in range(5):
        seen.clear()
        future = alone.rpc_async("me", add, (1, 2))
        for number in range(4):
            future.add_done_callback(lambda _, number=number: seen.append(number))
        future.then(lambda done: done.wait()).wait()
        assert seen == [0, 1, 2, 3]
    broken = alone.rpc_async("me", add, (1, 2)).then(lambda done: done + 1)
    with pytest.raises(RuntimeError, match="unsupported operand"):
        broken.wait()
    with pytest.raises(TypeError, match="unsupported operand"):
        broken.wait()


class Odd(Exception):
    """One whose class cannot be called with its text alone."""

    def __init__(self, code: int, *, name: str) -> None:
        super().__init__(f"{name} failed")
        self.code = code


class Closed(type):
    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        if RuntimeError in bases:
            raise TypeError("no such class")
        return super().__new__(cls, name, bases, names)


class OfItsOwnKind(Exception, metaclass=Closed):
    pass


ERRORS = [
    KeyError("key"),
    FileNotFoundError(2, "no file", "name"),
    ImportError("no module", name="module"),
    ExceptionGroup("group", [ValueError("one")]),
    Odd(3, name="it"),
]


def fail_with(number: int) -> None:
    raise ERRORS[number]


def fail_there(number: int) -> Any:
    return sys.modules["torch.distributed.rpc"].rpc_sync("me", fail_with, (number,))


def fail_of_its_own_kind() -> None:
    raise OfItsOwnKind("text")


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_what_a_handler_raises_is_a_runtime_error(alone: Any, number: int) -> None:
    """Programs for torch look for one, whatever was raised there. It is also what it was, on its way back as well."""
    thrown: Any = ERRORS[number]
    calls: list[Any] = [
        lambda: alone.rpc_sync("me", fail_with, (number,)),
        lambda: alone.rpc_sync("me", fail_there, (number,)),
        lambda: alone.rpc_async("me", fail_with, (number,)).wait(),
        lambda: alone.rpc_async("me", fail_with, (number,)).then(lambda done: done.wait()).wait(),
        lambda: alone.rpc_async("me", add, (1, 2)).then(lambda _: fail_with(number)).wait(),
        lambda: torch.futures.wait_all([alone.rpc_async("me", fail_with, (number,))]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        error: Any = caught.value
        assert isinstance(error, type(thrown)) and type(error).__qualname__ == type(thrown).__qualname__
        assert (str(error), repr(error.args)) == (str(thrown), repr(thrown.args))
        for name in ("filename", "name", "code"):
            assert getattr(error, name, None) == getattr(thrown, name, None)


def test_an_error_that_can_be_no_runtime_error(alone: Any) -> None:
    """Its metaclass takes no such base: it is raised as it is."""
    with pytest.raises(OfItsOwnKind, match="text"):
        alone.rpc_sync("me", fail_of_its_own_kind)
    with pytest.raises(RuntimeError, match="OfItsOwnKind: text"):
        alone.rpc_async("me", add, (1, 2)).then(lambda _: fail_of_its_own_kind()).wait()


def test_figures(alone: Any) -> None:
    """Counts are those of the worker; ``RRef(value)`` does not count before it is shared."""
    kept = alone.RRef(1)
    assert alone._rref_context_get_debug_info()["num_owner_rrefs"] == "0"
    made = alone.remote("me", add, (1, 2))
    made.to_here()
    assert alone._rref_context_get_debug_info()["num_owner_rrefs"] == "1"
    assert alone._get_debug_info()["agent.thread_pool_size"] == "16"
    alone._set_rpc_timeout(3)
    assert alone.get_rpc_timeout() == 3
    del kept


def test_script_functions_go_by_name(alone: Any) -> None:
    """A function of TorchScript runs on the other side; too many arguments are refused here."""
    assert torch.equal(alone.rpc_sync("me", twice, (torch.ones(2),)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match=r"twice\(\) expected at most 1"):
        alone.rpc_async("me", twice, (torch.ones(2), 1))


def test_a_pickler_of_the_programs_own(alone: Any) -> None:
    """Within ``_use_rpc_pickler`` its bytes are what travels."""
    internal = alone.internal._internal_rpc_pickler
    pickled = []

    class Pickler:
        deserialize = internal.deserialize

        def serialize(self, udf: Any) -> Any:
            pickled.append(udf.func)
            return internal.serialize(udf)

    with alone.api._use_rpc_pickler(Pickler()):
        assert torch.equal(alone.rpc_sync("me", add, (torch.ones(2), 1)), torch.full((2,), 2.0))
    assert pickled == [add]
    assert alone.rpc_sync("me", add, (1, 1)) == 2


def test_a_pickler_takes_arrays_without_elements(alone: Any) -> None:
    """Their buffers are empty, of which torch makes no tensor by itself."""
    numpy = pytest.importorskip("numpy")
    arrays = [numpy.empty(0), numpy.arange(3.0)]
    data, tensors = alone.internal.serialize(arrays)
    assert [array.tolist() for array in alone.internal.deserialize(data, tensors)] == [[], [0.0, 1.0, 2.0]]


def test_an_error_of_a_method_that_bears_the_name_of_a_module(alone: Any) -> None:
    """It is that error, and no operator of torch is looked for under the name."""
    assert Counter.copy.__name__ in sys.modules
    with pytest.raises(TypeError, match="no copies"):
        alone.remote("me", Counter).rpc_sync().copy()


def test_an_error_of_a_handler_is_written_to_stderr(alone: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The worker where it was raised shows the traceback, as with torch."""
    with pytest.raises(ValueError, match="Expected error"):
        alone.rpc_sync("me", fail, ("Expected error",))
    alone.shutdown()  # the call is answered before that is written; now its thread has ended
    said = capfd.readouterr().err
    assert said.startswith("On WorkerInfo(id=0, name=me):\nValueError('Expected error')\nTraceback"), said
    assert "ValueError: Expected error" in said


def test_backends_of_a_program(rpc: Any, tmp_path: Any) -> None:
    """A registered backend makes its own options, and an agent with a store to meet at, which leaves by its own."""
    made: dict[str, Any] = {}
    left: list[Any] = []

    class Agent:
        def get_worker_infos(self) -> list[Any]:
            return [rpc.WorkerInfo("me", 0)]

        def get_worker_info(self) -> Any:
            return rpc.WorkerInfo("me", 0)

        def join(self, shutdown: bool, timeout: float) -> None:
            left.append(("join", shutdown, timeout))

        def shutdown(self) -> None:
            left.append("shutdown")

    def start(store: Any, name: str, rank: int, world_size: int, rpc_backend_options: Any) -> Agent:
        made.update(store=store, name=name)
        return Agent()

    registry = rpc.backend_registry
    before = registry.BackendType
    try:
        backend = registry.register_backend("own", lambda *_, **__: rpc.RpcBackendOptions(), start)
        with pytest.raises(RuntimeError, match=r"^RPC backend .+: already registered$"):
            registry.register_backend("own", start, start)
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
        rpc.init_rpc("me", backend=backend, rank=0, world_size=1, rpc_backend_options=options)
        made["store"].set("key", "value")
        assert made["name"] == "me" and rpc.api._is_current_rpc_agent_set()
        rpc.shutdown()
        assert left == [("join", True, 0), "shutdown"]
        assert not rpc.api._is_current_rpc_agent_set()
    finally:
        rpc.api._reset_current_rpc_agent()
        registry.BackendType = before
