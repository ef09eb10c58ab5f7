"""Putting aiorpc in place of torch's modules, and torch's modules back."""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.nn
import torch.distributed.optim

from aiorpc.compat.torch import install, installed, uninstall

NAMES = ("rpc", "rpc.api", "rpc.functions", "rpc.options", "rpc.backend_registry", "rpc.internal", "rpc.constants")
MODULES = [f"torch.distributed.{name}" for name in (*NAMES, "rpc.rref_proxy", "autograd")]


def contents() -> dict[str, dict[str, Any]]:
    """Every attribute of every module of torch and of aiorpc, and of the classes of aiorpc."""
    found = {
        name: dict(vars(module))
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("torch", "aiorpc") and isinstance(module, ModuleType)
    }
    classes = {each for module in found.values() for each in module.values() if issubclass(type(each), type)}
    others = [each for each in classes if each.__module__.startswith("aiorpc.")]
    found |= {repr(other): dict(vars(other)) for other in (*others, multiprocessing.spawn)}
    found["sys.modules"] = {name: sys.modules.get(name) for name in (*found, *MODULES)}
    return found


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name}.{attribute}"
        for name, attributes in before.items()
        for attribute in {*attributes, *after.get(name, {})}
        if attributes.get(attribute, attributes) is not after.get(name, {}).get(attribute, attributes)
        and attribute not in ("__annotations__", "__warningregistry__")
    ]


def test_everything_is_put_back() -> None:
    """After uninstall all modules of torch, and all classes that were touched, have exactly what they had."""
    install()
    uninstall()
    before = contents()
    install()
    try:
        changed = differences(before, contents())
    finally:
        uninstall()
    assert "torch.distributed.rpc" in changed
    assert "torch.futures.wait_all" in changed
    assert differences(before, contents()) == []


def test_modules_that_come_late_get_torchs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was first imported while aiorpc was installed has torch's after uninstall; so do names in ``rpc``."""
    late, testing = "torch.testing._internal.dist_utils", "torch.distributed.rpc._testing"
    monkeypatch.delitem(sys.modules, late, raising=False)
    theirs = importlib.import_module(testing)
    install()
    try:
        ours = importlib.import_module("torch.distributed.rpc")
        assert importlib.import_module(late).rpc is ours
        assert importlib.import_module(testing) is not theirs
        assert ours.backend_registry.backend_registered("FAULTY_TENSORPIPE")
    finally:
        uninstall()
    real = importlib.import_module("torch.distributed.rpc")
    assert importlib.import_module(late).rpc is real is not ours
    assert importlib.import_module(testing) is theirs
    assert real.backend_registry.backend_registered("FAULTY_TENSORPIPE")


@pytest.mark.parametrize("name", MODULES)
def test_both_ways_of_importing_get_the_same(rpc: Any, name: str) -> None:
    """``import a.b.c`` and attributes of the packages give the module of aiorpc."""
    module = importlib.import_module(name)
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found is module
    assert str(module.__name__).startswith("aiorpc.compat.torch.")


def test_modules_of_torch_get_it_as_well(rpc: Any) -> None:
    """What other modules of torch had taken from torch's is replaced: TorchScript's, DDP's, the optimizer's."""
    jit = importlib.import_module("torch._jit_internal")
    ddp = importlib.import_module("torch.nn.parallel.distributed")
    native = importlib.import_module("torch._C._distributed_rpc")
    assert jit.RRef is ddp.RRef is rpc.RRef is native.PyRRef
    assert importlib.import_module("torch.distributed.optim").DistributedOptimizer.__module__.startswith("aiorpc.")
    assert importlib.import_module("torch.distributed.nn").RemoteModule.__module__.startswith("aiorpc.")
    assert native._is_current_rpc_agent_set() is False
    assert native.RemoteProfilerManager is not None  # torch's own, through the stand-in


def test_install_twice_is_undone_once() -> None:
    """Both are idempotent."""
    real = importlib.import_module("torch.distributed.rpc")
    install()
    first = importlib.import_module("torch.distributed.rpc")
    install()
    assert importlib.import_module("torch.distributed.rpc") is first
    assert first is not real
    assert installed()
    uninstall()
    assert importlib.import_module("torch.distributed.rpc") is real
    uninstall()
    assert not installed()


def test_not_while_rpc_is_initialized(alone: Any) -> None:
    """The program would lose its worker; to install once more is nothing."""
    install()
    with pytest.raises(RuntimeError, match="shut RPC down first"):
        uninstall()
    assert installed()
    assert alone.rpc_sync("me", max, (1, 2)) == 2
