"""What is public: the names at the top of the package and in its documented submodules."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import aiorpc

VERBS = """init init_rpc shutdown current call rpc_sync rpc_async remote stream serve peer group queue publish subscribe
    unpublish wait_for get_worker_info collect_all wait_all"""
IN_FUNCTIONS = "async_execution batched exposed register_safe caller cancelled check_cancelled deadline"
CLASSES = """Worker RRef Future Queue RpcBackendOptions TensorPipeRpcBackendOptions BackendType Tls WorkerInfo
    LimitOptions NetworkOptions SecurityOptions"""
ERRORS = """RpcError RpcTimeout RpcCancelled RpcUsageError RemoteError PeerLost PeerLeft WorkerClosed NotAllowed
    Overloaded QueueEmpty QueueFull QueueShutDown"""
SUBMODULES = "autograd errors events functions nn optim types"
TOP = " ".join((VERBS, IN_FUNCTIONS, CLASSES, ERRORS, SUBMODULES)).split()
#: What programs of torch.distributed.rpc find at its top, and at ours.
OF_TORCH = """BackendType RRef RpcBackendOptions TensorPipeRpcBackendOptions WorkerInfo functions get_worker_info
    init_rpc remote rpc_async rpc_sync shutdown"""
DOCUMENTED = ("aiorpc", "aiorpc.types", "aiorpc.events", "aiorpc.errors")


def test_the_names_at_the_top_are_these() -> None:
    """A name is added or taken away on purpose only."""
    assert sorted(aiorpc.__all__) == sorted(TOP)
    assert set(OF_TORCH.split()) <= set(aiorpc.__all__)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_dir_shows_what_is_public(name: str) -> None:
    """Each public name is there, and `dir` shows no other: no module of the inside, and nothing that was imported."""
    module = importlib.import_module(name)
    shown = [each for each in dir(module) if not each.startswith("_")]
    assert sorted(shown) == sorted(module.__all__)
    assert all(hasattr(module, each) for each in shown)


def test_a_type_has_one_public_place() -> None:
    """What moved to a submodule is not at the top as well; only types that programs make or match are in both."""
    places = {
        name: {each for each in module.__all__ if inspect.isclass(getattr(module, each))}
        for name, module in ((name, importlib.import_module(name)) for name in DOCUMENTED)
    }
    assert places["aiorpc"] & places["aiorpc.types"] == {"WorkerInfo"}
    assert places["aiorpc"] & places["aiorpc.errors"] == set(ERRORS.split())
    assert places["aiorpc.events"] & (places["aiorpc"] | places["aiorpc.types"]) == set()


def test_the_submodule_of_errors_has_all_of_them() -> None:
    """Each error class that is in the tree is in `aiorpc.errors`, under that name."""
    assert _subclasses_in(aiorpc.errors) == set(aiorpc.errors.__all__)


def _subclasses_in(module: ModuleType) -> set[str]:
    found = vars(module).items()
    return {name for name, value in found if inspect.isclass(value) and issubclass(value, aiorpc.RpcError)}


def test_testing_is_imported_when_it_is_asked_for() -> None:
    """`aiorpc.testing` costs a program nothing that does not test."""
    program = "import sys, aiorpc; print('aiorpc.testing' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "False"
