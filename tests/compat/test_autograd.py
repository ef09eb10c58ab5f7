"""torch.distributed.autograd, the optimizer and remote modules on one worker that calls itself."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise KeyError("Simulate error")


@pytest.fixture
def autograd(alone: Any) -> Any:
    return importlib.import_module("torch.distributed.autograd")


def test_a_parameter_that_is_sent_without_its_past_is_told_of_once(
    alone: Any, autograd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As with torch it gets no gradient; what was computed from it does."""
    p = torch.nn.Parameter(torch.ones(3))
    with autograd.context() as context_id:
        alone.rpc_sync("me", add, (p * 1, torch.ones(3)))
        assert not caplog.records
        for _ in range(3):
            result = alone.rpc_sync("me", add, (p, p * 2))
        autograd.backward(context_id, [result.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[p], torch.full((3,), 2.0))
    assert [each.message.partition(":")[0] for each in caplog.records] == [
        "worker 'me' sends a Parameter to worker 'me' in an autograd context"
    ]


def use(x: torch.Tensor, y: Any) -> torch.Tensor:
    """A Python function: what it is called with is pickled."""
    assert type(y) is torch.nn.Parameter
    return x * y


@torch.jit.script
def scripted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A script function: it is not."""
    return x * y


def test_parameters_as_arguments(alone: Any, autograd: Any) -> None:
    """Those of torch's operators and of script functions get gradients, and those of other functions none, as torch
    has it."""
    p, x = torch.nn.Parameter(torch.full((3,), 2.0)), torch.full((3,), 3.0, requires_grad=True)
    calls: list[tuple[Any, float | None, float]] = [
        (lambda: alone.rpc_sync("me", torch.mul, (p, x)), 3, 2),
        (lambda: alone.rpc_async("me", torch.mul, (p, x)).wait(), 3, 2),
        (lambda: alone.remote("me", torch.mul, (p, x)).to_here(), 3, 2),
        (lambda: alone.rpc_sync("me", torch.mul, (p,), {"other": x}), 3, 2),
        (lambda: alone.rpc_sync("me", torch.cat, ([p, x * 2, p],)), 2, 2),
        (lambda: alone.rpc_sync("me", scripted, (p, x)), 3, 2),
        (lambda: alone.rpc_sync("me", use, (x, p)), None, 2),
    ]
    for make, of_p, of_x in calls:
        with autograd.context() as context_id:
            autograd.backward(context_id, [make().sum()])
            found = autograd.get_gradients(context_id)
            assert torch.equal(found[x], torch.full((3,), of_x))
            assert p not in found if of_p is None else torch.equal(found[p], torch.full((3,), of_p))


def test_errors_of_a_pass(alone: Any, autograd: Any) -> None:
    """torch's types and texts: for arguments that are none, for what a node raises."""
    with autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        for wrong in (None, [1], x):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                autograd.backward(context_id, wrong)
        with pytest.raises(RuntimeError, match="No tensors provided"):
            autograd.backward(context_id, [])
        with pytest.raises(RuntimeError, match="is not a scalar, all roots need to be scalar"):
            autograd.backward(context_id, [x])
        loss = alone.rpc_sync("me", add, (Broken.apply(x), x)).sum()  # type: ignore[no-untyped-call]  # torch's
        with pytest.raises(RuntimeError, match="Error on Node 0: 'Simulate error'"):
            autograd.backward(context_id, [loss])
        with pytest.raises(RuntimeError, match="Already have an autograd context id"):
            autograd.context().__enter__()


@contextmanager
def processes(directory: Path) -> Iterator[None]:
    """A process group of this process alone."""
    init_method = f"file://{directory}/processes"
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch keeps descriptors that the first DDP module of a process opens: here, before a test is watched."""
    with processes(tmp_path_factory.mktemp("gloo")):
        DistributedDataParallel(torch.nn.Linear(1, 1))


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("view", [False, True])
def test_the_gradient_that_ddp_averages_through(alone: Any, autograd: Any, tmp_path: Path, view: bool) -> None:
    """``.grad`` of a parameter has what it had before once a pass is over, also in the context, and after an error."""
    one = torch.ones(1, 2)
    with processes(tmp_path):
        module: Any = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), gradient_as_bucket_view=view)
        parameter = module.module.weight
        parameter.grad = torch.full((1, 2), 10.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(one).sum()])
            assert parameter.grad.tolist() == [[10, 10]]
            assert autograd.get_gradients(context_id)[parameter].tolist() == [[1, 1]]
            (2 * module.module(one)).sum().backward()
            assert parameter.grad.tolist() == [[12, 12]]
            autograd.backward(context_id, [(3 * module(one)).sum()])
            assert autograd.get_gradients(context_id)[parameter].tolist() == [[4, 4]]
            before = parameter.grad
            with pytest.raises(RuntimeError, match="Simulate error"):
                autograd.backward(context_id, [module(Broken.apply(one.requires_grad_())).sum()])  # type: ignore[no-untyped-call]  # torch's
            assert parameter.grad is before


@contextmanager
def summing(directory: Path) -> Iterator[tuple[Any, list[list[float]]]]:
    """A DDP module with weights 0, and what has gone into its all-reduce so far; that doubles it."""
    reduced: list[list[float]] = []

    def double(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.buffer().tolist())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(2 * bucket.buffer())
        return done

    with processes(directory):
        module: Any = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        torch.nn.init.zeros_(module.module.weight)
        module.register_comm_hook(None, lambda _, bucket: double(bucket))  # torch looks at annotations
        yield module, reduced


@pytest.mark.usefixtures("gloo")
def test_ddp_averages_what_earlier_passes_left_in_the_context(alone: Any, autograd: Any, tmp_path: Path) -> None:
    """A pass within ``no_sync()`` adds up; the next one without reduces the sum, and that takes its place."""
    with summing(tmp_path) as (module, reduced):
        parameter = module.module.weight
        parameter.grad = torch.full((1, 2), 10.0)
        with autograd.context() as context_id:
            for add_up, gradients in (
                (True, [1, 1]),
                (True, [2, 2]),
                (False, [6, 6]),
                (True, [7, 7]),
                (False, [16, 16]),
            ):
                with module.no_sync() if add_up else nullcontext():
                    autograd.backward(context_id, [module(torch.ones(1, 2)).sum()])
                assert autograd.get_gradients(context_id)[parameter].tolist() == [gradients]
        assert reduced == [[3, 3], [8, 8]]
        assert parameter.grad.tolist() == [[10, 10]]
        with autograd.context() as context_id:  # which knows nothing of the other
            autograd.backward(context_id, [module(torch.ones(1, 2)).sum()])
            assert autograd.get_gradients(context_id)[parameter].tolist() == [[2, 2]]


def broken(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Broken.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return result


@pytest.mark.usefixtures("gloo")
def test_a_pass_that_fails_leaves_what_earlier_ones_gave_ddp(alone: Any, autograd: Any, tmp_path: Path) -> None:
    """Though DDP has reduced by then: the context's gradient is that of the passes before, and later ones go on."""
    with summing(tmp_path) as (module, reduced):
        parameter, one = module.module.weight, torch.ones(1, 2)
        with autograd.context() as context_id:
            with module.no_sync():
                autograd.backward(context_id, [module(one).sum()])
            called = alone.rpc_sync("me", broken, (torch.ones(1, requires_grad=True),))
            with pytest.raises(RuntimeError, match="Simulate error"):
                autograd.backward(context_id, [module(one).sum() + called.sum()])
            assert reduced == [[2, 2]]
            assert parameter.grad is None
            assert autograd.get_gradients(context_id)[parameter].tolist() == [[1, 1]]
            autograd.backward(context_id, [module(one).sum()])
            assert reduced == [[2, 2], [2, 2]]
            assert autograd.get_gradients(context_id)[parameter].tolist() == [[4, 4]]


def test_backward_from_an_rref(alone: Any, autograd: Any) -> None:
    """With a context into it, without one into ``.grad``, on the owner."""
    x = torch.ones(3, requires_grad=True)
    alone.RRef(x.sum()).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3))
    with autograd.context() as context_id:
        alone.RRef(x.sum()).backward(context_id)
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.ones(3))


def test_optimizer(alone: Any, autograd: Any) -> None:
    """A step changes the parameters; one without gradients changes nothing, as with torch."""
    optim = importlib.import_module("torch.distributed.optim")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [alone.RRef(parameter)], lr=0.5)
    with autograd.context() as context_id:
        optimizer.step(context_id)
        assert torch.equal(parameter.detach(), torch.ones(2))
        autograd.backward(context_id, [parameter.sum()])
        optimizer.step(context_id)
    assert torch.equal(parameter.detach(), torch.full((2,), 0.5))


def test_the_learning_rate_that_torch_has_by_default(alone: Any) -> None:
    """That of the functional optimizer which torch puts in place of a class; not of a subclass, nor if one is given."""
    optim, utils = map(importlib.import_module, ("torch.distributed.optim", "torch.distributed.optim.utils"))

    class Own(torch.optim.SGD):
        pass

    def lr(optimizer_class: Any, *args: Any, **kwargs: Any) -> Any:
        made = optim.DistributedOptimizer(
            optimizer_class, [alone.RRef(torch.nn.Parameter(torch.ones(2)))], *args, **kwargs
        )
        return made.remote_optimizers[0].local_value().optim.param_groups[0]["lr"]

    for optimizer_class, functional in utils.functional_optim_map.items():
        assert lr(optimizer_class) == inspect.signature(functional).parameters["lr"].default
    assert lr(torch.optim.SGD, momentum=0.5) == 1e-2
    assert lr(Own) == lr(torch.optim.SGD, lr=1e-3) == lr(torch.optim.SGD, 1e-3) == 1e-3
    assert lr(torch.optim.ASGD) == 1e-2  # which has no functional one


ANNOTATED = """
class Own(torch.optim.SGD):
    def __init__(self, params: Absent, lr: Absent = 0.25) -> None:
        super().__init__(params, lr)
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python looks annotations up where they stand until 3.14")
def test_annotations_of_an_optimizer_are_not_looked_up(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a class that a program has registered may name what is imported for type checkers alone."""
    optim, utils = map(importlib.import_module, ("torch.distributed.optim", "torch.distributed.optim.utils"))
    space: dict[str, Any] = {"torch": torch, "__name__": "program_with_annotations"}
    exec(compile(ANNOTATED, "program", "exec", dont_inherit=True), space)  # as this module imports from future
    monkeypatch.setitem(utils.functional_optim_map, space["Own"], space["Own"])
    made = optim.DistributedOptimizer(space["Own"], [alone.RRef(torch.nn.Parameter(torch.ones(2)))])
    assert made.remote_optimizers[0].local_value().optim.param_groups[0]["lr"] == 0.25


def test_an_optimizer_without_parameters(alone: Any, autograd: Any) -> None:
    """As of a RemoteModule that has none: its steps do nothing, in a context that is open."""
    nn, optim = map(importlib.import_module, ("torch.distributed.nn", "torch.distributed.optim"))
    module = nn.RemoteModule("me/cpu", torch.nn.ReLU)
    for parameters in (module.remote_parameters(), iter(())):
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        assert optimizer.remote_optimizers == []
        with autograd.context() as context_id:
            assert optimizer.step(context_id).wait() is None
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
            optimizer.step(context_id)
    with pytest.raises(RuntimeError, match="params_rref is a list of RRefs of parameters, not one PyRRef"):
        optim.DistributedOptimizer(torch.optim.SGD, alone.RRef(torch.nn.Parameter(torch.ones(2))))


def test_remote_module(alone: Any) -> None:
    """It runs, refuses what torch's refuses, and travels with the attributes that torch's has."""
    nn = importlib.import_module("torch.distributed.nn")
    api = importlib.import_module("torch.distributed.nn.api.remote_module")
    module = nn.RemoteModule("me/cpu", torch.nn.Linear, args=(2, 3))
    module.added = 1
    assert module(torch.ones(1, 2)).shape == (1, 3)
    assert len(module.remote_parameters()) == 2
    for name in ("state_dict", "parameters", "cuda", "children"):
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()
    received = alone.rpc_sync("me", names_of, (module,))
    assert received == [*api._REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    assert alone.rpc_sync("me", run, (module, torch.ones(1, 2))).shape == (1, 3)


def names_of(module: Any) -> list[str]:
    return list(vars(module))


def run(module: Any, x: torch.Tensor) -> Any:
    return module(x)
