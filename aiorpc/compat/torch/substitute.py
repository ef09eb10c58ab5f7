"""What stands in place of what."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.distributed.rpc
import torch.futures
import torch.jit.annotations
import torch.nn.parallel.distributed

from ...futures import Future
from . import autograd, children, ddp, futures, natives, nn, optim, rpc, script, sparse
from .replace import Replacements
from .rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    rref_proxy,
    server_process_global_profiler,
)

_MODULES: dict[str, ModuleType] = {
    "torch.distributed.rpc": rpc,
    "torch.distributed.rpc.api": api,
    "torch.distributed.rpc.backend_registry": backend_registry,
    "torch.distributed.rpc.constants": constants,
    "torch.distributed.rpc.functions": functions,
    "torch.distributed.rpc.internal": internal,
    "torch.distributed.rpc.options": options,
    "torch.distributed.rpc.rref_proxy": rref_proxy,
    "torch.distributed.rpc.server_process_global_profiler": server_process_global_profiler,
    "torch.distributed.autograd": autograd,
}
# Modules that others take one class from, and are imported only by programs that want it.
_CLASSES: dict[str, tuple[ModuleType, str]] = {
    "torch.distributed.optim.optimizer": (optim, "DistributedOptimizer"),
    "torch.distributed.nn.api.remote_module": (nn, "RemoteModule"),
}


class _Installation:
    """What `install` has done."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.replaced = Replacements()


_installation = _Installation()


def installed() -> bool:
    """Whether aiorpc stands in place of torch's modules."""
    return bool(_installation.replaced)


def install() -> None:
    """Put aiorpc in place of torch.distributed.rpc and what belongs to it; nothing happens if it is there already.

    Modules of torch that were imported before get it, too; what a program's own modules imported from torch's before
    stays torch's, so call this first. Children of ``multiprocessing`` install it before they import anything. Any
    thread; not while RPC is initialized.
    """
    with _installation.lock:
        if installed():
            return
        replaced = _installation.replaced
        try:
            _replace(replaced)
        except BaseException:
            replaced.undo()
            raise


def uninstall() -> None:
    """Put back everything that `install` replaced. Nothing happens if it is not installed."""
    with _installation.lock:
        if not installed():
            return
        _installation.replaced.undo()
        for name, (module, attribute) in _CLASSES.items():
            _give_back(name, attribute, getattr(module, attribute))


def _replace(replaced: Replacements) -> None:
    before = _objects_of_torch()
    for name, module in _MODULES.items():
        replaced.module(name, module)
    for name, module in natives.modules().items():
        replaced.module(name, module)
    for name, (module, _) in _CLASSES.items():
        replaced.module(name, module)
    _replace_copies(replaced, before)
    replaced.attribute(torch.futures, "wait_all", futures.wait_all)
    replaced.attribute(torch.futures, "collect_all", futures.collect_all)
    replaced.attribute(Future, "then", futures.torch_then)
    autograd.follow(replaced)
    sparse.follow(replaced)
    script.follow(replaced)
    ddp.Averaging().follow(replaced)
    children.follow(replaced)


def _objects_of_torch() -> dict[int, tuple[Any, Any]]:
    """What modules of torch may have taken from those that are replaced, and ours: by the identity of torch's."""
    real = torch.distributed.rpc
    pairs: list[tuple[Any, Any]] = [
        (sys.modules[name], module) for name, module in _MODULES.items() if name in sys.modules
    ]
    pairs += [(getattr(real, name), getattr(rpc, name)) for name in ("RRef", "PyRRef") if hasattr(real, name)]
    for name, (module, attribute) in _CLASSES.items():
        if name in sys.modules:
            pairs.append((getattr(sys.modules[name], attribute), getattr(module, attribute)))
    return {id(theirs): (theirs, ours) for theirs, ours in pairs}


def _replace_copies(replaced: Replacements, objects: dict[int, tuple[Any, Any]]) -> None:
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.") or not isinstance(module, ModuleType):
            continue
        if name in _CLASSES or name.startswith(("torch._C", "torch.distributed.rpc", "torch.distributed.autograd")):
            continue
        for attribute, value in list(vars(module).items()):
            found = objects.get(id(value))
            if found is not None and found[0] is value:
                replaced.attribute(module, attribute, found[1])


def _give_back(name: str, attribute: str, ours: Any) -> None:
    """Packages of torch that were first imported while aiorpc was installed have its class: they get torch's."""
    package = name.split(".")
    for length in range(2, len(package)):
        holder = sys.modules.get(".".join(package[:length]))
        if holder is not None and vars(holder).get(attribute) is ours:
            setattr(holder, attribute, getattr(importlib.import_module(name), attribute))
