"""What the option `allow` does not allow is refused by each verb, and on the wire before arguments are unpickled."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import autograd
from aiorpc.compat.torch import script
from aiorpc.compat.torch.rpc import internal
from aiorpc.optim import DistributedOptimizer
from aiorpc.protocol.frames import Frame, Kind
from aiorpc.protocol.messages import ByName, Call, Error, Fetch, Function, Method, Reply, Values, read, write
from aiorpc.runtime.calls.failures import decode_error
from aiorpc.testing import cluster
from tests.runtime import served
from tests.runtime.waiting import until

HERE = "tests.runtime.served"
TRAINING = [f"{HERE}:Net", f"{HERE}:Net.*", "aiorpc.nn:*", "aiorpc.optim:*", "torch.optim.sgd:SGD"]


@contextlib.asynccontextmanager
async def served_by(allow: Any, role: str = "") -> AsyncIterator[list[rpc.Worker]]:
    """worker0 with that role, and worker1 that serves so much."""
    options = [rpc.RpcBackendOptions(), rpc.RpcBackendOptions(allow=allow)]
    async with cluster(2, options=options, roles=[role, ""]) as workers:
        yield workers


# --- the verbs --------------------------------------------------------------------------------------------------------


async def all_of(stream: Any) -> list[Any]:
    """The items of a stream."""
    return [item async for item in stream]


VERBS: dict[str, Callable[[rpc.Worker], Any]] = {
    "def": lambda worker: worker.call("worker1", served.add, 1, 2),
    "async def": lambda worker: worker.call("worker1", served.aadd, 1, 2),
    "async_execution": lambda worker: worker.call("worker1", served.add_later, 1, 2),
    "batched": lambda worker: worker.call("worker1", served.add_each, 1, 2),
    "peer": lambda worker: worker.peer("worker1", timeout=5).call(served.add, 1, 2),
    "stream": lambda worker: all_of(worker.stream("worker1", served.count, 3)),
    "async stream": lambda worker: all_of(worker.stream("worker1", served.acount, 3)),
    "remote": lambda worker: worker.remote("worker1", served.add, 1, 2),
    "class": lambda worker: worker.remote("worker1", served.Box).rpc_async().get(),
    "operator": lambda worker: worker.call("worker1", torch.add, 1, 2),
    "by value": lambda worker: worker.call("worker1", lambda: 3),
}


async def test_what_is_not_served_is_refused() -> None:
    """By every verb, with the names of both workers, of the function and of the rule; others are served on."""
    async with served_by({"actor": f"{HERE}:marked", "*": "*"}, role="actor") as (worker, _):
        for verb, call in VERBS.items():
            with pytest.raises(rpc.NotAllowed) as refused:
                await call(worker)
            error = refused.value
            assert (error.worker, error.caller, error.role) == ("worker1", "worker0", "actor"), verb
            assert error.rule == f"allow= gives role 'actor' only '{HERE}:marked'"
            assert all(part in str(error) for part in ("'worker1'", "'worker0'", error.function, error.rule)), verb
            assert isinstance(error, PermissionError)
        assert await worker.call("worker1", served.marked) == 2


async def test_what_is_served_runs() -> None:
    """The same calls, with a rule that has them; by value only where everything is served."""
    async with served_by({"actor": [f"{HERE}:*", "torch:add"], "*": "*"}, role="actor") as (worker, other):
        for verb, call in VERBS.items():
            if verb == "by value":
                with pytest.raises(rpc.NotAllowed):
                    await call(worker)
                assert await other.call("worker1", lambda: 3) == 3
            else:
                await call(worker)


@pytest.mark.parametrize(
    ("allow", "function", "runs"),
    [
        ([f"{HERE}:add"], served.add, True),
        ([rpc.exposed], served.add, False),
        ([rpc.exposed], served.marked, True),
        ([f"{HERE}:*"], served.mkdir, False),
        ([f"{HERE}:*"], served._private, False),
        ([f"{HERE}:_private"], served._private, True),
        ([f"{HERE}:*"], torch.add, False),
        (["torch:add"], torch.add, True),
        (["torch:*"], torch.load, False),
        (["*:*"], os.getpid, True),
    ],
)
async def test_a_function_is_called_by_the_name_that_it_has(allow: Any, function: Any, runs: bool) -> None:
    """Patterns are compared with the place where a function is defined."""
    async with served_by(allow) as (worker, _):
        call = worker.call("worker1", function)
        with contextlib.suppress(TypeError):  # it has been called
            if runs:
                await call
            else:
                with pytest.raises(rpc.NotAllowed):
                    await call


METHODS = {
    "get": True,
    "inherited": True,
    "asked": True,
    "attribute": False,
    "other": False,
    "__len__": False,
}


async def test_methods_of_a_reference_are_served_by_the_name_of_the_class() -> None:
    """Public methods and properties are; what is only kept in the value goes by its own name."""
    async with served_by([f"{HERE}:Box", f"{HERE}:Box.*"]) as (worker, _):
        box = worker.remote("worker1", served.Box, 5)
        for name, runs in METHODS.items():
            call = getattr(box.rpc_async(), name)
            if runs:
                assert await call() in (5, "inherited")
            else:
                with pytest.raises(rpc.NotAllowed, match=f"Box.{name}|Other.__call__"):
                    await call()


async def test_an_attribute_that_is_listed_may_be_called() -> None:
    """As it stands in the rule by its full name."""
    async with served_by([f"{HERE}:Box", f"{HERE}:Box.asked"]) as (worker, _):
        box = worker.remote("worker1", served.Box, 5)
        assert await box.rpc_async().asked() == 5
        with pytest.raises(rpc.NotAllowed):
            await box.rpc_async().get()


async def test_nothing_of_a_refused_property_is_run() -> None:
    """It is code of the value's, which the caller has not been allowed to have run."""
    async with served_by([f"{HERE}:Box"]) as (worker, _):
        served.asked.clear()
        box = worker.remote("worker1", served.Box, 5)
        for _ in range(2):
            with pytest.raises(rpc.NotAllowed, match=r"Box\.asked"):
                await box.rpc_async().asked()
        assert not served.asked.is_set()


async def test_values_are_fetched_by_whoever_has_made_them_or_may() -> None:
    """The result of one's own call is one's own; a reference that was given needs a rule for its class."""
    async with served_by(
        {"actor": f"{HERE}:give_box", "learner": [f"{HERE}:give_box", f"{HERE}:Box.to_here"]}, "actor"
    ) as (
        worker,
        _,
    ):
        given = await worker.call("worker1", served.give_box, 5)
        with pytest.raises(rpc.NotAllowed, match=r"Box\.to_here"):
            await given
        made = worker.remote("worker1", served.give_box, 6)
        with pytest.raises(rpc.NotAllowed, match=r"Box\.to_here"):
            await (await made)
    async with served_by(f"{HERE}:Box*") as (worker, _):
        assert (await worker.remote("worker1", served.Box, 5)).value == 5


async def test_what_bears_the_mark_is_served() -> None:
    """In either order of decorators; of a marked class its public methods, and not what it has from elsewhere."""
    async with served_by(rpc.exposed) as (worker, _):
        assert await worker.call("worker1", served.marked_batch, 3) == 3
        assert await worker.call("worker1", served.marked_later, 3) == 3
        assert await worker.call("worker1", served.Marked.static, 3) == 3
        made = worker.remote("worker1", served.Marked, 3)
        assert await made.rpc_async().get() == 3 and (await made).value == 3
        for name in ("kept", "_hidden", "borrowed"):
            with pytest.raises(rpc.NotAllowed):
                await getattr(made.rpc_async(), name)("/no/such/folder/at/all")
        for name in ("Marked.borrowed", "Marked._hidden", "Marked.__init__", "Marked.mro", "add"):
            with pytest.raises(rpc.NotAllowed):
                await send(worker, ByName(7, f"{HERE}:{name}"), Values(["/no/such/folder/at/all"]))


async def test_a_worker_is_held_to_its_own_rules() -> None:
    """Also when it calls itself, by its own role."""
    async with served_by([f"{HERE}:add"]) as (_, worker):
        assert await worker.call("worker1", served.add, 1, 2) == 3
        with pytest.raises(rpc.NotAllowed):
            await worker.call("worker1", served.aadd, 1, 2)


async def test_the_first_refusal_of_a_connection_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """And no other one, however many there are; long names are cut."""
    with caplog.at_level("WARNING", "aiorpc"):
        async with served_by([]) as (worker, _):
            for _ in range(3):
                with pytest.raises(rpc.NotAllowed):
                    await worker.call("worker1", served.add, 1, 2)
    logged = [entry.getMessage() for entry in caplog.records if "refused a call" in entry.getMessage()]
    assert len(logged) == 1 and f"{HERE}:add" in logged[0] and "worker0" in logged[0]


async def test_a_refused_name_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the caller has made of it: no further lines, and nothing that a terminal acts upon."""
    async with served_by([]) as (worker, _):
        with pytest.raises(rpc.NotAllowed) as told:
            await send(worker, ByName(7, "os:a\nworker worker9 was lost\x1b[2J"), Values([]))
    logged = [entry.getMessage() for entry in caplog.records if "refused a call" in entry.getMessage()]
    assert "os:a?worker worker9 was lost?[2J run on" in logged[0] and logged[0].isprintable()
    assert told.value.function == "os:a?worker worker9 was lost?[2J"


# --- what stands on the verbs -----------------------------------------------------------------------------------------


def train(to: str, at_once: bool = False) -> float:
    """One step of a module and an optimizer there; how much its output has changed. In a handler."""
    module = rpc.nn.RemoteModule(to, served.Net)
    x = torch.ones(1, 2)
    before = module.forward(x)
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    with autograd.context() as context:
        if at_once:
            optimizer.backward_and_step(context, [module.forward(x).sum()])
        else:
            autograd.backward(context, [module.forward(x).sum()])
            optimizer.step(context)
    module.eval().load_state_dict(module.state_dict())
    return float((module.forward(x) - before).detach().abs())


async def test_training_needs_rules_for_its_parts() -> None:
    """With them it trains; the gradients themselves need none."""
    async with served_by(TRAINING) as (worker, _):
        assert await worker.call("worker0", train, "worker1") > 0


async def test_a_pass_that_steps_needs_the_rule_for_the_step() -> None:
    """Though the pass itself needs none, and the optimizer could be made."""
    rules = [rule for rule in TRAINING if rule != "aiorpc.optim:*"] + ["aiorpc.optim:new_optimizer"]
    async with served_by([*rules, "aiorpc.optim:LocalOptimizer.step"]) as (worker, _):
        assert await worker.call("worker0", train, "worker1", True) > 0
    async with served_by(rules) as (worker, _):
        with pytest.raises(rpc.NotAllowed, match=r"LocalOptimizer\.step"):
            await worker.call("worker0", train, "worker1", True)


@pytest.mark.long
@pytest.mark.parametrize("left_out", TRAINING)
async def test_training_with_a_rule_less_is_refused(left_out: str) -> None:
    """Handlers that make and call what they are given do not get around the rules for it."""
    async with served_by([rule for rule in TRAINING if rule != left_out]) as (worker, _):
        with pytest.raises(rpc.NotAllowed):
            await worker.call("worker0", train, "worker1")


def look_up(to: str, sparse: bool) -> None:
    """A pass that sends the gradient of a table there. In a handler."""
    with autograd.context() as context:
        rows = torch.nn.functional.embedding(torch.tensor([1, 2]), rpc.rpc_sync(to, served.table), sparse=sparse)
        autograd.backward(context, [rows.sum()])


@pytest.mark.parametrize("sparse", [False, True])
async def test_gradients_need_no_rule(sparse: bool) -> None:
    """Sparse ones neither: they travel as plain tensors, and no pickle is needed."""
    async with served_by([f"{HERE}:table"]) as (worker, _):
        await worker.call("worker0", look_up, "worker1", sparse)


def arguments(*values: Any) -> Values:
    """Arguments as an honest caller writes them."""
    return Values([None] * len(values), opaque_at=[*range(len(values))], pickled=pickle.dumps(values))


async def test_script_functions_are_served_by_their_own_names() -> None:
    """Not by that of the handler that runs all of them."""
    scripted: Any = torch.jit.script(served.scripted)
    name = f"__torch__.{HERE}.scripted"
    assert torch._jit_internal._qualified_name(scripted) == name
    handler = f"{script.__name__}:run"
    for allow, runs in (([handler], False), ([handler, f"{HERE}:scripted"], True)):
        async with served_by(allow) as (worker, _):
            call = send(worker, ByName(7, handler), arguments(name, (1,), {}))
            if runs:
                assert await call == 2
            else:
                with pytest.raises(rpc.NotAllowed, match="script function"):
                    await call


async def test_calls_of_another_pickler_are_for_those_who_may_have_everything_run(tmp_path: Path) -> None:
    """Also where its handler is served: it loads and calls what it is given."""
    handler = f"{internal.__name__}:run_serialized"
    async with served_by({"actor": [handler], "*": "*"}, "actor") as (worker, _):
        with pytest.raises(rpc.NotAllowed, match="another pickler"):
            await send(worker, ByName(7, handler), arguments(pickle.loads, pickle.dumps(Bomb(tmp_path / "ran")), []))
    assert not (tmp_path / "ran").exists()


# --- on the wire ------------------------------------------------------------------------------------------------------

_numbers = itertools.count(1 << 30)


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (self.path,)


def bomb(path: Path) -> Values:
    """Arguments with a bomb among them."""
    return Values([None], opaque_at=[0], pickled=pickle.dumps((Bomb(path),)))


async def send(worker: rpc.Worker, function: Function, given: Values, **fields: Any) -> Any:
    """A CALL to worker1 as it is written here; its result, or its error raised."""
    number = next(_numbers)
    message = Call(function, given, credit=fields.get("credit"))
    peer = worker._node.peers.find("worker1")
    came: list[Frame] = []
    methods = dict(peer.methods)

    def take(frame: Frame) -> None:
        if frame.call_id == number:
            came.append(frame)
        else:
            methods[frame.kind](frame)

    peer.methods.update({Kind.REPLY: take, Kind.ERROR: take})
    try:
        peer.send(Kind.CALL, number, write(message))
        await until(lambda: came)
    finally:
        peer.methods.update(methods)
    answer = read(came[0].kind, came[0].body)
    if isinstance(answer, Error):
        raise decode_error(answer, "the call")
    assert isinstance(answer, Reply)
    return answer.payload.values[0]


STREAMED: tuple[dict[str, Any], ...] = ({}, {"credit": 3})
INTRINSIC = {
    "a message of the group": "aiorpc.runtime.group.group:attend",
    "a part of a backward pass": "aiorpc.autograd.parts:take",
    "the end of a context": "aiorpc.autograd.contexts:forget",
}
REFUSED: dict[str, str | None] = {
    "another function": "os:getpid",
    "one that is not imported": "a_module_with_a_trace:f",
    "one below a served module": f"{HERE}.below:f",
    "through a module": f"{HERE}:os.mkdir",
    "through the runtime": f"{HERE}:rpc.api.os.system",
    "an import of the module's": f"{HERE}:mkdir",
    "through a function": f"{HERE}:add.__globals__.clear",
    "a part of a function": f"{HERE}:add.__call__",
    "a method of a class's class": f"{HERE}:Box.mro",
    "the builtins": f"{HERE}:__builtins__.get",
    "a private function": f"{HERE}:_private",
    "an inherited method": f"{HERE}:Net.load_state_dict",
    "the main module": "__main__:main",
    "the main module of children": "__mp_main__:main",
    "nothing": "",
    "no module": ":f",
    "no colon": "os.getpid",
    "a long name": f"os:{'x' * 100_000}",
    "by value": None,
    "a module": "aiorpc.nn:new_module",
    "an optimizer": "aiorpc.optim:new_optimizer",
    "another pickler": "aiorpc.compat.torch.rpc.internal:run_serialized",
    "TorchScript": "aiorpc.compat.torch.script:run",
    "the runtime's decoder": "aiorpc.protocol.codec:loads",
    **INTRINSIC,
}


async def test_a_call_by_hand_is_refused_before_it_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it names: nothing is imported, the bomb among its arguments does not go off, and the pair goes on."""
    (tmp_path / "a_module_with_a_trace.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'imported')!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with served_by([f"{HERE}:*"]) as (worker, _):
        for place, (name, function) in enumerate(REFUSED.items(), 100):
            for fields in STREAMED:
                sent = ByName(place, function) if function is not None else None
                with pytest.raises(rpc.errors.ProtocolError if name in INTRINSIC else rpc.NotAllowed) as refused:
                    await send(worker, sent, bomb(tmp_path / "ran"), **fields)
                assert len(str(refused.value)) < 2000, name
                assert not (tmp_path / "ran").exists(), name
        assert not (tmp_path / "imported").exists() and "a_module_with_a_trace" not in sys.modules
        assert await worker.call("worker1", served.add, 1, 2) == 3


@pytest.mark.parametrize("name", INTRINSIC.values())
@pytest.mark.parametrize("allow", [None, []], ids=["everything", "nothing"])
async def test_a_pickle_is_never_read_for_the_runtime_s_own_handlers(allow: Any, name: str, tmp_path: Path) -> None:
    """Whatever its caller may have run: they take what they declare."""
    async with served_by(allow) as (worker, _):
        for given in (bomb(tmp_path / "ran"), Values([None], opaque_at=[0], pickled=pickle.dumps((1,), 5))):
            with pytest.raises(rpc.errors.ProtocolError, match="values that are pickled, or written as a tree"):
                await send(worker, ByName(7, name), given)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["os:getpid", ""])
async def test_by_default_the_same_call_runs(name: str, tmp_path: Path) -> None:
    """The check of the bomb: where everything is served, it goes off."""
    async with served_by(None) as (worker, _):
        with contextlib.suppress(Exception):  # however the call ends, what counts is what its pickle did
            await send(worker, ByName(7, name) if name else None, bomb(tmp_path / "ran"))
        await until((tmp_path / "ran").exists)


async def test_a_number_that_was_refused_stands_for_nothing(tmp_path: Path) -> None:
    """Nor can a number be given to another function later on."""
    async with served_by([f"{HERE}:add"]) as (worker, _):
        with pytest.raises(rpc.NotAllowed):
            await send(worker, ByName(7, "os:getpid"), bomb(tmp_path / "ran"))
        with pytest.raises(rpc.errors.ProtocolError, match="never named"):
            await send(worker, 7, bomb(tmp_path / "ran"))
        assert await send(worker, ByName(7, f"{HERE}:add"), Values([1, 2])) == 3
        assert await send(worker, ByName(7, "os:getpid"), Values([1, 2])) == 3  # it has its function
        assert await send(worker, 7, Values([1, 2])) == 3
        assert not (tmp_path / "ran").exists()


async def test_methods_and_values_are_refused_before_they_are_unpickled(tmp_path: Path) -> None:
    """Of a reference that was given, and of one that was made; also as a stream, and as a creation."""
    async with served_by([f"{HERE}:give_box", f"{HERE}:Box"]) as (worker, callee):
        given = await worker.call("worker1", served.give_box, 5)
        made = worker.remote("worker1", served.Box, 5)
        await made  # that is allowed
        for rref in (given._rref, made._rref):
            for method in ("get", "put", "asked", "attribute", "nothing", "__init__", "__setattr__"):
                wanted = Method(rref.worker, rref.number, rref.key, method)
                for fields in STREAMED:
                    with pytest.raises(rpc.NotAllowed, match=f"Box.{method}"):
                        await send(worker, wanted, bomb(tmp_path / "ran"), **fields)
        with pytest.raises(rpc.NotAllowed, match=r"Box\.to_here"):
            await send(worker, Fetch(*given._rref), bomb(tmp_path / "ran"))
        assert not (tmp_path / "ran").exists()
        assert callee._node.references.value(*given._rref).value().value == 5


async def test_pickles_of_a_call_that_is_allowed_can_do_anything(tmp_path: Path) -> None:
    """What docs/howto/security.md warns of: rights by themselves bind callers that write honest pickles."""
    async with served_by([f"{HERE}:add"]) as (worker, _):
        with contextlib.suppress(Exception):  # however the call ends, what counts is what its pickle did
            await send(worker, ByName(7, f"{HERE}:add"), bomb(tmp_path / "ran"))
        await until((tmp_path / "ran").exists)


async def test_a_refused_creation_is_the_error_of_its_reference() -> None:
    """Whoever uses it gets it, and nothing is left of it."""
    async with served_by([f"{HERE}:add"]) as (worker, _):
        box = worker.remote("worker1", served.Box)
        with pytest.raises(rpc.NotAllowed):
            await box.rpc_async().get()
        with pytest.raises(rpc.NotAllowed):
            await box


async def test_a_member_without_rights_joins_and_leaves() -> None:
    """The runtime's own calls need no rule, and a group of those who serve nothing ends in good order."""
    async with cluster(3, options=rpc.RpcBackendOptions(allow=[])) as workers:
        with pytest.raises(rpc.NotAllowed):
            await workers[0].call("worker1", served.add, 1, 2)
    reports = [await worker.shutdown() for worker in workers]
    assert all(not report.lost and not report.timed_out for report in reports)


# --- joining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (f"{HERE}:ad", "has no 'ad'"),
        (f"{HERE}:Box.gett", "has no 'Box.gett'"),
        (f"{HERE}:Bax.*", "has no 'Bax'"),
        (f"{HERE}:os.mkdir", "has no 'os.mkdir'"),
        (f"{HERE}:mkdir", "'posix:mkdir'"),
        ("torch:nn.Linear", "has no 'nn.Linear'"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("no_such_module.at_all:*", "no module 'no_such_module.at_all'"),
        ("tests.runtime.no_such_module:*", "no module"),
    ],
)
async def test_a_pattern_that_matches_nothing_is_refused_at_joining(pattern: str, said: str) -> None:
    """As far as that can be seen without an import."""
    options = rpc.RpcBackendOptions(allow={"actor": [pattern]})
    with pytest.raises(rpc.RpcUsageError) as refused:
        await rpc.init("alone", rank=0, world_size=1, store=HashStore(), options=options)
    assert said in str(refused.value) and pattern in str(refused.value)


async def test_a_served_module_is_imported_when_it_is_called() -> None:
    """As without rights."""
    sys.modules.pop("wave", None)
    async with served_by(["wave:open"]) as (worker, _):
        with pytest.raises(FileNotFoundError):
            await send(worker, ByName(7, "wave:open"), Values(["/no/such/file"]))
        assert "wave" in sys.modules
