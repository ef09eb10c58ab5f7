"""RemoteModule: runs elsewhere and is as good as a local one; where it is, what it can, and how it travels."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import aiorpc
from aiorpc import RpcUsageError, RRef, Worker, autograd, nn
from aiorpc.errors import UnknownWorker, WouldBlockLoop
from aiorpc.nn import RemoteModule, RemoteModuleError
from aiorpc.optim import DistributedOptimizer
from tests.scripts import run

Tensor = torch.Tensor
nn_parameter = torch.nn.parameter


# --- modules and handlers ---------------------------------------------------------------------------------------------


def net(seed: int, width: int = 3) -> torch.nn.Module:
    """A small module, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.nn.Sequential(
        torch.nn.Linear(width, 5), torch.nn.Tanh(), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, width)
    ).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return made


def inputs(seed: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Both(NamedTuple):
    """A result with names."""

    total: Any
    rest: Any


class Many(torch.nn.Module):
    """Takes and gives more than one tensor."""

    def forward(self, x: Tensor, *, factor: Tensor, deep: Any = None, fail: bool = False) -> Any:
        """Both, or an error."""
        if fail:
            raise ArithmeticError("no such forward")
        return Both(x * factor, {"deep": deep, "training": self.training})


class Places(torch.nn.Module):
    """Says on which devices its arguments are."""

    def forward(self, x: Tensor, deep: Any, named: Any = None) -> list[str]:
        """Devices as text."""
        return [str(x.device), str(deep[0]["a"].device), str(named[1].device)]


class Named(RemoteModule):
    """A subclass with an attribute and a method."""

    label = ""

    def twice(self, x: Tensor) -> Any:
        """Two calls."""
        return self.forward(self.forward(x))


class Hybrid(torch.nn.Module):
    """A local module with a remote part."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3).double()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        result: Tensor = self.part(self.first(x))
        return result


def use(module: RemoteModule, x: Tensor) -> Any:
    """What a third worker makes of a module it was passed."""
    return type(module).__name__, getattr(module, "label", None), module.on, module.device, module(x)


async def use_async(module: RemoteModule, x: Tensor) -> Any:
    """The same on the loop."""
    return type(module).__name__, getattr(module, "label", None), module.on, module.device, await module(x)


def is_training(module: RRef[torch.nn.Module]) -> list[bool]:
    """Of the module and its parts."""
    return [each.training for each in module.local_value().modules()]


def devices_of(module: RRef[torch.nn.Module]) -> list[str]:
    """Of its parameters."""
    return [str(parameter.device) for parameter in module.local_value().parameters()]


def shapeless() -> torch.nn.Module:
    """Parameters and buffers of two of its parts get their shapes from the first input."""
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(2)).double()


def not_a_module() -> int:
    return 5


def breaks() -> torch.nn.Module:
    raise ArithmeticError("cannot be made")


# --- running it -------------------------------------------------------------------------------------------------------


async def test_arguments_and_results_of_any_kind(apart: list[Worker]) -> None:
    """Keywords, containers and plain values go there and come back; errors, too."""

    def script() -> None:
        module = RemoteModule("worker1", Many, kwargs={})
        got = module(torch.ones(2), factor=torch.tensor(3.0), deep=[(1, "a"), torch.zeros(1)])
        assert type(got) is Both and got.total.tolist() == [3.0, 3.0]
        assert got.rest["training"] and got.rest["deep"][0] == (1, "a") and got.rest["deep"][1].tolist() == [0.0]
        with pytest.raises(ArithmeticError, match="no such forward"):
            module(torch.ones(2), factor=torch.ones(1), fail=True)
        with pytest.raises(TypeError, match="factor"):
            module(torch.ones(2))

    await run(apart[0], script)


async def test_on_the_loop_everything_can_be_awaited(current_pair: list[Worker]) -> None:
    """And what would block is refused, with the words of what to use."""
    with pytest.raises(WouldBlockLoop, match=r"await RemoteModule\.create"):
        RemoteModule("worker1", net, args=(1,))
    module = await RemoteModule.create("worker1/cpu", net, args=(1,))
    torch.testing.assert_close(await module(inputs(0)), net(1)(inputs(0)))
    torch.testing.assert_close(await module.forward_async(inputs(0)), net(1)(inputs(0)))
    verbs: list[tuple[Callable[[], Any], str]] = [
        (lambda: module.forward(inputs(0)), r"await module\(\.\.\.\)"),
        (module.remote_parameters, "remote_parameters_async"),
        (module.train, "train_async"),
        (module.eval, "eval_async"),
        (module.state_dict, "state_dict_async"),
        (lambda: module.load_state_dict({}), "load_state_dict_async"),
    ]
    for verb, words in verbs:
        with pytest.raises(WouldBlockLoop, match=words):
            verb()
    await module.eval_async()
    assert await aiorpc.call("worker1", is_training, module.get_module_rref()) == [False] * 5
    await module.train_async()
    assert module.training and len(await module.remote_parameters_async()) == 6
    state = await module.state_dict_async()
    await module.load_state_dict_async(state)
    with pytest.raises(ArithmeticError, match="cannot be made"):
        await RemoteModule.create("worker1", breaks)


# --- gradients --------------------------------------------------------------------------------------------------------


def remote_training(steps: int) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Two modules on two workers: gradients of the first step, parameters and losses."""
    modules = [RemoteModule("worker1", net, args=(1,)), RemoteModule("worker2/cpu", net, args=(2,))]
    parameters = [rref for module in modules for rref in module.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01, momentum=0.9)
    x = inputs(0).requires_grad_()
    first: list[Tensor] = []
    losses = []
    for _ in range(steps):
        with autograd.context() as context_id:
            # The first module is used twice: its gradients add up.
            loss = modules[0](modules[1](modules[0](x)) + x).pow(2).sum()
            autograd.backward(context_id, [loss])
            first = first or [autograd.get_gradients(context_id)[x]]
            optimizer.step(context_id)
        losses.append(loss.item())
    return first, [rref.to_here().detach() for rref in parameters], losses


async def test_training_equals_that_of_local_modules(apart: list[Worker]) -> None:
    """Gradients of the input, and parameters after several steps, in float64."""
    gradients, parameters, losses = await run(apart[0], remote_training, 4)
    modules = [net(1), net(2)]
    local = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(local, lr=0.01, momentum=0.9)
    x = inputs(0).requires_grad_()
    expected: list[float] = []
    first = torch.empty(0)
    for _ in range(4):
        optimizer.zero_grad()
        loss = modules[0](modules[1](modules[0](x)) + x).pow(2).sum()
        loss.backward()
        assert x.grad is not None
        first = first if expected else x.grad.clone()
        optimizer.step()
        expected.append(loss.item())
    torch.testing.assert_close(gradients[0], first, rtol=0, atol=1e-10)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    for one, other in zip(parameters, local, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-9)


# --- where it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker1", ("worker1", "cpu")),
        ("worker1/cpu", ("worker1", "cpu")),
        ("worker1/cuda:1", ("worker1", "cuda:1")),
        ("rank:2", (2, "cpu")),
        ("rank:0/cuda:0", (0, "cuda:0")),
        ("a:b/cuda", ("a:b", "cuda")),
        ("cuda:1", ("here", "cuda:1")),
        ("cpu", ("here", "cpu")),
    ],
)
def test_remote_devices(text: str, expected: tuple[Any, str]) -> None:
    """torch's grammar: a worker by name or rank, and a device; one alone means this worker."""
    worker, device = nn.parse_remote_device(text, "here")
    assert (worker, str(device)) == expected


@pytest.mark.parametrize(
    "text", ["", "/", "/cpu", "worker1/", "worker1/nothing", "w/cpu/x", "rank:x/cpu", "rank:/cpu", 3]
)
def test_remote_devices_that_are_none(text: Any) -> None:
    """A ValueError, as torch raises, that is one of ours."""
    with pytest.raises(ValueError, match="remote_device") as caught:
        nn.parse_remote_device(text, "here")
    assert isinstance(caught.value, RpcUsageError)


async def test_workers_by_name_and_rank(apart: list[Worker]) -> None:
    """Any worker, this one included; one that is not there."""

    def script() -> None:
        for text, owner in (("rank:2/cpu", "worker2"), ("worker0", "worker0"), ("cpu", "worker0")):
            module = RemoteModule(text, net, args=(1,))
            assert module.get_module_rref().owner_name() == owner
            torch.testing.assert_close(module(inputs(0)), net(1)(inputs(0)))
        for text in ("nobody", "rank:7"):
            with pytest.raises(UnknownWorker):
                RemoteModule(text, net, args=(1,))

    await run(apart[0], script)


async def test_modules_that_cannot_be_made(apart: list[Worker]) -> None:
    """The constructor raises what the class raised, or says that it is no module; nothing is left."""

    def script() -> None:
        with pytest.raises(ArithmeticError, match="cannot be made"):
            RemoteModule("worker1", breaks)
        with pytest.raises(TypeError, match="positional"):
            RemoteModule("worker1", torch.nn.Linear, args=(1,))
        no_module: Any = not_a_module
        with pytest.raises(ValueError, match=r"not_a_module returned a int"):
            RemoteModule("worker1", no_module)
        wrong: list[Any] = [torch.nn.Linear(2, 1), 3]
        for made in wrong:
            with pytest.raises(RemoteModuleError, match=r"not an object of (Linear|int): pass the class and its arg"):
                RemoteModule("worker1/cpu", made)
        no_tuple: Any = 2
        with pytest.raises(RpcUsageError, match=r"args must be a tuple of arguments, not 2; .*args=\(value,\)"):
            RemoteModule("worker1/cpu", torch.nn.Linear, no_tuple)

    await run(apart[0], script)


async def test_inputs_go_to_the_device_of_the_module(apart: list[Worker]) -> None:
    """Also inside containers; a device without memory stands for one."""

    def script() -> None:
        module = RemoteModule("worker1/meta", Places)
        got = module(torch.ones(1), [{"a": torch.ones(1)}], named=(0, torch.ones(1)))
        assert got == ["meta", "meta", "meta"] and module.device == "meta"
        linear = RemoteModule("worker1/meta", torch.nn.Linear, (2, 2))
        assert aiorpc.rpc_sync("worker1", devices_of, (linear.get_module_rref(),)) == ["meta", "meta"]

    await run(apart[0], script)


# --- the module -------------------------------------------------------------------------------------------------------


async def test_train_and_eval(apart: list[Worker]) -> None:
    """They reach all parts of the module, and return the RemoteModule."""

    def script() -> None:
        module = RemoteModule("worker1", net, args=(1,))
        for change, expected in ((module.eval, False), (module.train, True), (lambda: module.train(False), False)):
            assert change() is module and module.training is expected
            assert aiorpc.rpc_sync("worker1", is_training, (module.get_module_rref(),)) == [expected] * 5
        torch.testing.assert_close(module(inputs(0)), net(1).eval()(inputs(0)))

    await run(apart[0], script)


async def test_state_goes_back_and_forth(apart: list[Worker]) -> None:
    """What a local module of the class gives and takes, buffers, versions and order included; a copy."""

    def script() -> None:
        module, local = RemoteModule("worker1", net, args=(1,)), net(1)
        state, expected = module.state_dict(), local.state_dict()
        assert type(state) is OrderedDict and list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert vars(state)["_metadata"] == vars(expected)["_metadata"]
        for value in state.values():
            value.zero_()
        assert torch.equal(module.state_dict()["0.weight"], expected["0.weight"])
        assert str(module.load_state_dict(net(2).state_dict())) == "<All keys matched successfully>"
        torch.testing.assert_close(module(inputs(0)), net(2)(inputs(0)))
        local.load_state_dict(module.state_dict())

    await run(apart[0], script)


async def test_states_that_do_not_fit(apart: list[Worker]) -> None:
    """torch's errors and lists of keys; assign puts other parameters there."""

    def script() -> None:
        module = RemoteModule("worker1", torch.nn.Linear, (2, 3))
        with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
            module.load_state_dict({"weight": torch.ones(3, 2)})
        result = module.load_state_dict({"weight": torch.ones(3, 2), "more": torch.ones(1)}, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["more"])
        assert torch.equal(module.state_dict()["weight"], torch.ones(3, 2))
        with pytest.raises(RuntimeError, match="size mismatch"):
            module.load_state_dict({"weight": torch.ones(5, 5)}, strict=False)
        module.load_state_dict({"weight": torch.ones(3, 2).half(), "bias": torch.ones(3).half()}, assign=True)
        assert module.state_dict()["bias"].dtype is torch.float16

    await run(apart[0], script)


async def test_the_state_of_a_module_that_has_not_run_yet(apart: list[Worker]) -> None:
    """Tensors without a shape arrive as such, either way, and on the host; what has loaded them can be run."""

    def script() -> None:
        module, local = RemoteModule("worker1", shapeless), shapeless()
        state, expected = module.state_dict(), local.state_dict()
        assert [type(value) for value in state.values()] == [
            type(value) if nn_parameter.is_lazy(value) else Tensor for value in expected.values()
        ]
        assert any(nn_parameter.is_lazy(value) for value in state.values())
        for known in (state, expected):
            assert str(module.load_state_dict(known)) == "<All keys matched successfully>"
        local.load_state_dict(state)
        hybrid = torch.nn.Sequential(module)
        hybrid.load_state_dict(hybrid.state_dict())
        assert local(inputs(0)).shape == hybrid(inputs(0)).shape == (4, 2)
        local.load_state_dict(module.state_dict())
        torch.testing.assert_close(module.eval()(inputs(1)), local.eval()(inputs(1)))
        elsewhere = RemoteModule("worker1/meta", torch.nn.LazyLinear, (2,), {"device": "meta"}).state_dict()
        assert [value.data.device.type for value in elsewhere.values()] == ["cpu", "cpu"]

    await run(apart[0], script)


async def test_a_part_of_a_local_module(apart: list[Worker]) -> None:
    """Local parameters are the local ones; modes and states go through; it can be printed."""

    def script() -> None:
        part = RemoteModule("worker1", net, args=(1,))
        hybrid = Hybrid(part)
        expected = Hybrid(net(2))
        assert len(list(hybrid.parameters())) == 2 and [name for name, _ in hybrid.named_modules()] == [
            "",
            "first",
            "part",
        ]
        hybrid.eval()
        assert not any(aiorpc.rpc_sync("worker1", is_training, (part.get_module_rref(),)))
        hybrid.train()
        state = hybrid.state_dict()
        reference = Hybrid(net(1)).state_dict()
        assert set(state) == set(reference) and "part.0.weight" in state
        assert set(vars(state)["_metadata"]) == set(vars(reference)["_metadata"])
        hybrid.load_state_dict(expected.state_dict())
        torch.testing.assert_close(hybrid(inputs(0)), expected(inputs(0)))
        incomplete = {name: value for name, value in reference.items() if name != "part.0.bias"}
        with pytest.raises(RuntimeError, match=r"Missing key.*part\.0\.bias"):
            hybrid.load_state_dict(incomplete)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*part\.more"):
            hybrid.load_state_dict({**reference, "part.more": torch.ones(1)})
        with pytest.raises(RuntimeError, match="size mismatch"):
            hybrid.load_state_dict({**reference, "part.0.bias": torch.ones(1)})
        assert "'worker1', device='cpu'" in repr(hybrid)

    await run(apart[0], script)


@pytest.mark.parametrize(
    "name",
    [
        "parameters",
        "named_parameters",
        "buffers",
        "named_buffers",
        "register_buffer",
        "register_parameter",
        "add_module",
        "apply",
        "to",
        "cpu",
        "cuda",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "requires_grad_",
        "zero_grad",
        "share_memory",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_backward_hook",
        "register_full_backward_hook",
        "compile",
    ],
)
def test_what_it_cannot_do(name: str) -> None:
    """Methods of a module that would do nothing, or something else, raise a ValueError that says what to use."""
    assert hasattr(torch.nn.Module, name)
    with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule: ") as caught:
        getattr(RemoteModule.__new__(RemoteModule), name)(1)
    assert isinstance(caught.value, RpcUsageError)
    assert ("remote_parameters()" in str(caught.value)) == (name in ("parameters", "named_parameters"))


# --- travelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", [use, use_async])
@pytest.mark.parametrize("to", ["worker0", "worker1", "worker2"])
async def test_other_workers_use_it(apart: list[Worker], user: Any, to: str) -> None:
    """A third worker, the owner, and the one that made it; a subclass keeps its class and attributes."""

    def script() -> None:
        module = Named("worker1", net, args=(1,))
        module.label = "mine"
        expected = net(1)(inputs(0))
        *described, got = aiorpc.rpc_sync(to, user, (module, inputs(0)))
        assert described == ["Named", "mine", "worker1", "cpu"]
        torch.testing.assert_close(got, expected)
        *described, got = aiorpc.rpc_sync(to, user, (RemoteModule("rank:2", net, (1,)), inputs(0)))
        assert described == ["RemoteModule", None, 2, "cpu"]
        torch.testing.assert_close(got, expected)

    await run(apart[0], script)


async def test_from_the_reference_of_a_module(apart: list[Worker]) -> None:
    """The same module; a device of another worker is refused; any RRef of a module will do."""

    def script() -> None:
        module = RemoteModule("worker1", net, args=(1,))
        again = RemoteModule.init_from_module_rref("rank:1/cpu", module.get_module_rref())
        again.load_state_dict(net(2).state_dict())
        torch.testing.assert_close(module(inputs(0)), net(2)(inputs(0)))
        with pytest.raises(ValueError, match="worker1"):
            RemoteModule.init_from_module_rref("worker2", module.get_module_rref())
        other = RemoteModule.init_from_module_rref("worker2", aiorpc.remote("worker2", net, 3))
        torch.testing.assert_close(other(inputs(0)), net(3)(inputs(0)))

    await run(apart[0], script)


async def test_it_does_not_pickle_by_itself(apart: list[Worker]) -> None:
    """Outside of a call there is nobody to count its reference; copying a module that has it, neither."""

    def script() -> None:
        module = RemoteModule("worker1", torch.nn.Identity)
        for use in (lambda: pickle.dumps(module), lambda: copy.deepcopy(Hybrid(module))):
            with pytest.raises(RpcUsageError, match="can only travel in a call"):
                use()

    await run(apart[0], script)


# --- processes --------------------------------------------------------------------------------------------------------
