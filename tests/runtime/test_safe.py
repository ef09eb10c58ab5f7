"""Groups that read no pickles: what travels there, and what a member that sends pickles all the same comes to.

The bad member is a worker whose word for itself, after the handshake, is that it sends pickles. Whatever it sends would
make a file. In a group that reads pickles it does: each attack is seen to succeed there.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import functools
import io
import operator
import os
import pickle
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import RRef, Worker
from aiorpc.autograd import parts
from aiorpc.protocol.messages import Error
from aiorpc.runtime.callee import answers
from aiorpc.testing import cluster


@rpc.register_safe
class Box:
    """A class that both workers have registered."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Loose:
    """One that nobody has."""


rpc.register_safe(torch.optim.SGD, torch.nn.Linear)


# --- handlers ---------------------------------------------------------------------------------------------------------


def echo(*values: Any, **named: Any) -> Any:
    return (*values, *named.values()) if len(values) + len(named) != 1 else [*values, *named.values()][0]


def make(attack: str, path: str) -> Any:
    return ATTACKS[attack](path)


def fail() -> None:
    raise ValueError("no")


def several(attack: str, path: str) -> Any:
    yield 1
    yield ATTACKS[attack](path)


@rpc.batched(max_size=1)
def together(values: list[Any]) -> list[Any]:
    return values


class Holder:
    """A value that references lead to."""

    def take(self, value: Any) -> Any:
        return value


def hold() -> RRef[Holder]:
    return RRef(Holder())


def repeat(value: Any) -> Any:
    yield value


async def wait(value: Any) -> Any:
    return value


def make_inside(attack: str, path: str) -> Any:
    return [{"a": (1, ATTACKS[attack](path))}]


@rpc.batched(max_size=1)
def make_together(attacks: list[str], paths: list[str]) -> list[Any]:
    return [ATTACKS[attack](path) for attack, path in zip(attacks, paths, strict=True)]


async def value_of(reference: RRef[Any]) -> Any:
    return await reference


async def consume(stream: rpc.types.Stream[Any]) -> list[Any]:
    return [item async for item in stream]


def steps() -> Any:
    """A training step, with everything that the runtime itself says in one."""
    module = rpc.nn.RemoteModule("worker1", torch.nn.Linear, (2, 1))
    optimizer = rpc.optim.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.5)
    before = module.state_dict()
    with rpc.autograd.context() as context:
        rpc.autograd.backward(context, [module(torch.ones(1, 2)).sum()])
        optimizer.step(context)
    after = module.state_dict()
    keys = module.load_state_dict(before)
    optimizer.load_state_dict(optimizer.state_dict())
    again, also = rpc.rpc_sync("worker1", echo, (module, optimizer))
    return [*(after[name] - before[name] for name in before)], list(keys), again.device, str(also)


# --- what a pickle can do ---------------------------------------------------------------------------------------------


class Reduced:
    """Unpickles as a call of that."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """So that pickle takes it for a function; what it unpickles as is one."""


class Loaded:
    """What torch unpickles in a pickle of its own."""

    def __init__(self, inner: Any) -> None:
        self.data = io.BytesIO()
        torch.save(inner, self.data)

    def __reduce__(self) -> Any:
        return functools.partial(torch.load, weights_only=False), (io.BytesIO(self.data.getvalue()),)


def _by_value(path: str) -> Any:
    def function() -> None:
        Path(path).touch()

    return Reduced(function)


ATTACKS: dict[str, Callable[[str], Any]] = {
    "os.system": lambda path: Reduced(os.system, f"touch {path}"),
    "os.mkdir": lambda path: Reduced(os.mkdir, path),
    "eval": lambda path: Reduced(eval, f"open({path!r}, 'w').close()"),
    "exec": lambda path: Reduced(exec, f"open({path!r}, 'w').close()"),
    "getattr": lambda path: Reduced(Reduced(getattr, Path(path), "touch")),
    "import": lambda path: Reduced(Reduced(getattr, Reduced(builtins.__import__, "os"), "mkdir"), path),
    "compile": lambda path: Reduced(exec, Reduced(compile, f"open({path!r}, 'w').close()", "attack", "exec")),
    "subprocess": lambda path: Reduced(subprocess.call, ["touch", path]),
    "ctypes": lambda path: Reduced(Reduced(getattr, Reduced(ctypes.CDLL, None), "mkdir"), path.encode(), 0o700),
    "partial": lambda path: Reduced(functools.partial(os.mkdir, path)),
    "methodcaller": lambda path: Reduced(operator.methodcaller("touch"), Path(path)),
    "by value": _by_value,
    "load": lambda path: Loaded(Reduced(os.mkdir, path)),
    "load from bytes": lambda path: Reduced(torch.storage._load_from_bytes, _saved(Reduced(os.mkdir, path))),
    "inner pickle": lambda path: Reduced(pickle.loads, pickle.dumps(Reduced(os.mkdir, path), 0)),
}


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


# --- where it can come ------------------------------------------------------------------------------------------------


class Group:
    """A group of an honest worker and of one that sends pickles. safe: whether the honest one reads none."""

    def __init__(self, safe: bool, honest: Worker, bad: Worker) -> None:
        self.safe = safe
        self.honest = honest
        self.bad = bad

    def turn(self, bad: bool) -> None:
        """What that worker sends from now on: pickles, or what the group uses."""
        for peer in self.bad._node.peers.all():
            peer.safe = self.safe and not bad

    async def attacked(
        self, attack: Callable[[], Awaitable[Any]], path: Path, *, never: bool = False
    ) -> BaseException | None:
        """The error of the attack, which has run if pickles are read, and not otherwise; all else is well.

        never: whether no pickle is read there in any group.
        """
        links = self.bad._node.peers.find("worker0").link, self.honest._node.peers.find("worker1").link
        other = asyncio.ensure_future(self.honest.call("worker0", echo, {"other": [1]}))
        error: BaseException | None = None
        self.turn(True)
        try:
            await attack()
        except Exception as raised:
            error = raised
        finally:
            self.turn(False)
        assert await other == {"other": [1]}
        assert path.exists() == (not self.safe and not never), error
        assert not self.safe or isinstance(error, rpc.RpcError), error
        assert await self.bad.call("worker0", echo, [1, (2,)]) == [1, (2,)]
        assert await self.honest.call("worker1", echo, [1, (2,)]) == [1, (2,)]
        assert (self.bad._node.peers.find("worker0").link, self.honest._node.peers.find("worker1").link) == links
        return error


@pytest.fixture(params=["free", "safe"])
async def group(request: pytest.FixtureRequest) -> AsyncIterator[Group]:
    """In both modes: what is refused in one is seen to run in the other."""
    async with cluster(2, options=rpc.RpcBackendOptions(serialization=request.param, allow="*")) as (honest, bad):
        for one, name in ((honest, "worker1"), (bad, "worker0")):
            assert await one.call(name, echo, (1,)) == (1,)
        yield Group(request.param == "safe", honest, bad)


async def test_an_argument_runs_nothing(group: Group, tmp_path: Path) -> None:
    """Of all that pickles can do: the call fails at its caller, with a word of what was wrong."""
    for number, (attack, gadget) in enumerate(ATTACKS.items()):
        path = tmp_path / f"{number}"
        value = gadget(str(path))
        error = await group.attacked(partial(group.bad.call, "worker0", echo, value), path)
        assert not group.safe or isinstance(error, (rpc.errors.SerializationError, rpc.errors.ProtocolError)), attack


async def test_no_message_to_a_worker_runs_anything(group: Group, tmp_path: Path) -> None:
    """Wherever it stands in a call, and whatever kind of call it is; those of the runtime itself among them."""
    bad = group.bad
    holder = await bad.call("worker0", hold)

    def ask(function: Any, *args: Any) -> Awaitable[Any]:
        return bad._node.peers.find("worker0").call(function, args, None, 20.0)

    ways: dict[str, Callable[[Any], Awaitable[Any]]] = {
        "keyword": lambda gadget: bad.call("worker0", echo, named=gadget),
        "inside": lambda gadget: bad.call("worker0", echo, {"a": [(1, gadget)]}),
        "coroutine": lambda gadget: bad.call("worker0", wait, gadget),
        "batch": lambda gadget: bad.call("worker0", together, gadget),
        "method": lambda gadget: holder.rpc_async().take(gadget),
        "remote": lambda gadget: value_of(bad.remote("worker0", echo, gadget)),
        "stream": lambda gadget: consume(bad.stream("worker0", repeat, gadget)),
        "gradients": lambda gadget: ask(parts.take, 1, 1, b"", gadget),
        "optimizer": lambda gadget: ask(rpc.optim.new_optimizer, gadget, [], (), {}),
        "module": lambda gadget: ask(rpc.nn.new_module, gadget, (), {}, "cpu"),
    }
    for way, send in ways.items():
        for attack in ("os.system", "by value", "load from bytes"):
            path = tmp_path / f"{way} {attack}".replace(" ", "-")
            gadget = ATTACKS[attack](str(path))
            never = way == "gradients"  # a handler of the runtime, which reads what it declares
            error = await group.attacked(partial(send, gadget), path, never=never)
            assert not (group.safe or never) or isinstance(
                error, (rpc.errors.SerializationError, rpc.errors.ProtocolError)
            ), way


async def test_a_function_by_value_is_not_run(group: Group, tmp_path: Path) -> None:
    """Nor is it read."""
    path = tmp_path / "ran"
    error = await group.attacked(lambda: group.bad.call("worker0", lambda: path.touch()), path)
    assert not group.safe or "runs no function that is sent by value" in str(error)


async def test_no_answer_runs_anything(group: Group, tmp_path: Path) -> None:
    """The caller is the one that is attacked."""
    honest = group.honest
    ways: dict[str, Callable[[str, str], Awaitable[Any]]] = {
        "reply": lambda attack, path: honest.call("worker1", make, attack, path),
        "inside": lambda attack, path: honest.call("worker1", make_inside, attack, path),
        "item": lambda attack, path: consume(honest.stream("worker1", several, attack, path)),
        "value": lambda attack, path: value_of(honest.remote("worker1", make, attack, path)),
        "batch": lambda attack, path: honest.call("worker1", make_together, attack, path),
    }
    for way, ask in ways.items():
        for attack in ("os.system", "getattr", "by value", "load"):
            path = tmp_path / f"{way} {attack}".replace(" ", "-")
            error = await group.attacked(partial(ask, attack, str(path)), path)
            assert not group.safe or "cannot be read here" in str(error), way


async def test_no_error_runs_anything(group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an exception carries is not looked at: it arrives as text."""
    for attack in ("os.system", "eval", "load from bytes"):
        path = tmp_path / attack.replace(" ", "-")
        gadget = pickle.dumps(ATTACKS[attack](str(path)))

        def tell(error: BaseException, worker: str, safe: bool, again: bool, pickled: bytes = gadget) -> Error:
            return Error("ValueError", "no", "no traceback", worker, pickled, again)

        monkeypatch.setattr(answers, "encode_error", tell)  # an honest worker looks itself what comes of it
        error = await group.attacked(lambda: group.honest.call("worker1", fail), path)
        assert isinstance(error, rpc.RemoteError)


# --- what an honest group does ----------------------------------------------------------------------------------------


@pytest.fixture
async def safe() -> AsyncIterator[list[Worker]]:
    """Two workers that read no pickles."""
    async with cluster(2, options=rpc.RpcBackendOptions(serialization="safe", allow="*")) as workers:
        yield workers


async def test_values_travel_both_ways(safe: list[Worker]) -> None:
    """As they do with pickles."""
    sent: dict[Any, Any] = {"tensor": torch.ones(3), "list": [1, (2, None)], (1, 2): {"x"}}
    arrived = await safe[0].call("worker1", echo, sent, named=[Box(torch.zeros(2))])
    assert torch.equal(arrived[0].pop("tensor"), sent.pop("tensor"))
    assert arrived[0] == sent
    assert type(arrived[1][0]) is Box


def shown(*values: Any) -> str:
    return repr(values)


async def pass_on() -> list[str]:
    """Handler: what travels of a queue, its handle, and a context, by itself and inside of a value."""
    with rpc.Queue[Any]("queue", timeout=3) as queue:
        handle = rpc.queue("queue", owner="worker0")
        async with rpc.autograd.context() as context:
            return [await rpc.call("worker1", shown, value, [value]) for value in (queue, handle, context)]


async def test_handles_of_queues_and_contexts_travel() -> None:
    """As they do with pickles: a handle is one there, and a context a plain number."""
    said = []
    for serialization in ("free", "safe"):
        options = rpc.RpcBackendOptions(serialization=serialization, allow="*")
        async with cluster(2, options=options) as workers:
            said.append(await workers[0].call("worker0", pass_on))
    handle: rpc.types.QueueHandle[Any] = rpc.types.QueueHandle("queue", "worker0")
    for queue, named, context in said:
        assert queue == named == repr((handle, [handle]))
        assert re.fullmatch(r"\((\d+), \[\1\]\)", context)


async def test_references_travel_inside_of_values(safe: list[Worker]) -> None:
    """And lead to the same value."""
    reference = safe[0].remote("worker1", echo, [1, 2])
    arrived = await safe[0].call("worker1", echo, {"a": [reference]})
    assert await arrived["a"][0] == [1, 2]


@pytest.mark.slow
async def test_a_training_step_reads_no_pickle(safe: list[Worker]) -> None:
    """Modules, optimizers, gradients and states."""
    changes, keys, device, optimizer = await safe[0].call("worker0", steps)
    for change in changes:
        torch.testing.assert_close(change, torch.full_like(change, -0.5))
    assert (keys, device, optimizer) == ([[], []], "cpu", "<DistributedOptimizer on worker1>")


@pytest.mark.parametrize("value", [Loose(), Loose, os.system, lambda: 1, Reduced(os.system, "true")])
async def test_what_is_not_registered_is_refused_at_once(safe: list[Worker], value: Any) -> None:
    """Nothing is sent; the error names the argument, its type and what to do."""
    with pytest.raises(
        rpc.errors.SerializationError,
        match=r"argument 1 of .*echo for worker 'worker1' is .* call aiorpc.register_safe",
    ):
        await safe[0].call("worker1", echo, 1, value)
    with pytest.raises(rpc.errors.SerializationError, match="argument 'named' of"):
        await safe[0].call("worker1", echo, named=[value])


@pytest.mark.parametrize("function", [lambda: 1, functools.partial(echo, 1)], ids=["lambda", "partial"])
async def test_functions_by_value_are_refused_at_once(safe: list[Worker], function: Any) -> None:
    """The error says what to do."""
    with pytest.raises(rpc.errors.SerializationError, match=r"would travel by value.*at the top of a module"):
        await safe[0].call("worker1", function)


async def test_a_result_that_is_not_registered_is_told(safe: list[Worker]) -> None:
    """As the error that it is at the callee, and the same connection serves on."""
    with pytest.raises(
        rpc.errors.SerializationError, match=r"the result of .*loose on worker .* is an object of .*Loose, which is not"
    ):
        await safe[0].call("worker1", loose)
    assert await safe[0].call("worker1", echo, [1]) == [1]


def loose() -> Any:
    return Loose()


async def test_errors_arrive_as_text(safe: list[Worker]) -> None:
    """Name, text and traceback of the remote one; aiorpc's own arrive as themselves."""
    with pytest.raises(rpc.RemoteError, match="ValueError: no") as raised:
        await safe[0].call("worker1", refuse, "value")
    assert (raised.value.type_name, raised.value.remote_message, raised.value.worker) == ("ValueError", "no", "worker1")
    assert "in refuse" in raised.value.remote_traceback
    with pytest.raises(rpc.Overloaded, match="full"):
        await safe[0].call("worker1", refuse, "full")


def refuse(what: str) -> None:
    raise rpc.Overloaded("full") if what == "full" else ValueError("no")


async def test_members_of_both_kinds_refuse_each_other() -> None:
    """As they join, by name and with the option; in a group without a size those who were there go on."""
    options = [rpc.RpcBackendOptions(serialization=mode, allow="*", rpc_timeout=10.0) for mode in ("free", "safe")]
    told = r"^worker1 .* have serialization='safe', worker0 .* have 'free': give it the same value on all workers$"
    store = HashStore()
    members = [Worker(f"worker{n}", rank=n, world_size=2, store=store, options=options[n]) for n in range(2)]
    outcomes = await asyncio.gather(*(worker.start() for worker in members), return_exceptions=True)
    assert [type(error) for error in outcomes] == [rpc.errors.RendezvousError] * 2
    assert all(re.search(told, str(error)) for error in outcomes)
    async with cluster(2, dynamic=True, store=(store := HashStore()), options=options[0]) as workers:
        with pytest.raises(
            rpc.errors.RendezvousError, match=r"^worker2 .* have serialization='safe', worker0 .*, worker1 "
        ):
            await Worker("worker2", store=store, options=options[1]).start()
        assert await workers[0].call("worker1", echo, 1) == 1
        async with Worker("worker2", store=store, options=options[0]) as third:
            assert await third.call("worker0", echo, 2) == 2


# --- what may be called -----------------------------------------------------------------------------------------------


@rpc.exposed
def marked(value: Any) -> Any:
    return value


@pytest.mark.parametrize("function", [echo, os.mkdir, eval, torch.load, pickle.loads, subprocess.call])
async def test_only_what_is_exposed_is_run_by_default(function: Any, tmp_path: Path) -> None:
    """Functions are found by name, so that names would do what pickles cannot."""
    path = tmp_path / "ran"
    async with cluster(2, options=rpc.RpcBackendOptions(serialization="safe")) as workers:
        with pytest.raises(rpc.NotAllowed, match=r"barrier.*, rpc\.exposed"):
            await workers[0].call("worker1", function, str(path))
        assert await workers[0].call("worker1", marked, (1, [2])) == (1, [2])
    assert not path.exists()


async def test_what_the_option_names_is_run(tmp_path: Path) -> None:
    """As without safe serialization."""
    options = rpc.RpcBackendOptions(serialization="safe", allow=["posix:mkdir"])
    async with cluster(2, options=options) as workers:
        await workers[0].call("worker1", os.mkdir, str(tmp_path / "made"))
        with pytest.raises(rpc.NotAllowed):
            await workers[0].call("worker1", marked, 1)
    assert (tmp_path / "made").is_dir()
