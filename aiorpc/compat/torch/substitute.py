"""Installs and removes the drop-in: the table of replaced modules and objects."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.distributed.rpc
import torch.futures
import torch.jit.annotations
import torch.nn.parallel.distributed

from ...errors import RpcUsageError
from ...futures import Future
from ...locks import RLock
from ...undoing import on_error
from . import autograd, children, ddp, futures, natives, nn, optim, rpc, script
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
# Modules with one replaced class. They are slow to import, so they are replaced when a program imports them.
_CLASSES: dict[str, tuple[ModuleType, str]] = {
    "torch.distributed.optim.optimizer": (optim, "DistributedOptimizer"),
    "torch.distributed.nn.api.remote_module": (nn, "RemoteModule"),
}


_Objects = dict[int, tuple[Any, Any]]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Ours for modules of `_CLASSES` that are imported later: their packages come first, as with any import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in _CLASSES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _CLASSES[spec.name][0]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "it is being imported"
        module.__spec__ = module.__spec__.loader_state  # it stays what it was


class _Installation:
    """The state of an installation. objects: see `_objects_of_torch`."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.replaced = Replacements()
        self.objects: _Objects = {}
        self.finder = _Finder()


_installation = _Installation()


def installed() -> bool:
    """Whether aiorpc stands in place of torch's modules."""
    return bool(_installation.replaced)


def install() -> None:
    """Put aiorpc in place of torch.distributed.rpc and related modules. No effect if it is installed.

    It also changes torch's modules that were imported before. Names that a program's modules imported before stay
    torch's, so call this first. Children of ``multiprocessing`` install it before they import anything. Any thread.
    RpcUsageError while torch's RPC is initialized.
    """
    with _installation.lock:
        if installed():
            return
        _refuse_while_initialized("install")
        replaced = _installation.replaced
        with on_error(_put_back):
            _replace(replaced)


def uninstall() -> None:
    """Restore everything that `install` replaced. No effect if it is not installed.

    RpcUsageError while RPC is initialized.
    """
    with _installation.lock:
        if not installed():
            return
        _refuse_while_initialized("uninstall")
        _put_back()


def _refuse_while_initialized(what: str) -> None:
    native: Any = importlib.import_module("torch._C._distributed_rpc")  # ours while this is installed
    if native._is_current_rpc_agent_set():
        raise RpcUsageError(f"{what}() while RPC is initialized: shut RPC down first")


def _put_back() -> None:
    finder = _installation.finder
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
    for name in _others_of_rpc():
        del sys.modules[name]
    _installation.replaced.undo()
    for name, (module, _) in _CLASSES.items():
        if sys.modules.get(name) is module:  # imported while this was installed
            del sys.modules[name]
            importlib.import_module(name)
    objects = _installation.objects | _classes_of_torch()
    _replace_copies(Replacements(), {id(ours): (ours, theirs) for theirs, ours in objects.values()})
    _installation.objects = {}


def _others_of_rpc() -> list[str]:
    """Modules of torch's package that ours lacks, like ``_testing``: each runtime imports its own."""
    return [name for name in sys.modules if name.startswith("torch.distributed.rpc.") and name not in _MODULES]


def _replace(replaced: Replacements) -> None:
    _installation.objects = _objects_of_torch()
    for name in _others_of_rpc():
        replaced.no_item(sys.modules, name)
    for name, module in (_MODULES | natives.modules()).items():
        replaced.module(name, module)
    for name, (module, _) in _CLASSES.items():
        if name in sys.modules:
            replaced.module(name, module)
    sys.meta_path.insert(0, _installation.finder)
    _replace_copies(replaced, _installation.objects)
    replaced.attribute(torch.futures, "wait_all", futures.wait_all)
    replaced.attribute(torch.futures, "collect_all", futures.collect_all)
    replaced.attribute(Future, "then", futures.torch_then)
    autograd.follow(replaced)
    script.follow(replaced)
    ddp.averaging.follow(replaced)
    children.follow(replaced)


def _objects_of_torch() -> _Objects:
    """Objects of replaced modules that torch's modules may have imported, and ours: by the identity of torch's."""
    real = torch.distributed.rpc
    pairs: list[tuple[object, object]] = [
        (sys.modules[name], module) for name, module in _MODULES.items() if name in sys.modules
    ]
    pairs += [(getattr(real, name), getattr(rpc, name)) for name in ("RRef", "PyRRef") if hasattr(real, name)]
    return {id(theirs): (theirs, ours) for theirs, ours in pairs} | _classes_of_torch()


def _classes_of_torch() -> _Objects:
    """Of those modules that are there."""
    there = [(sys.modules[name], *ours) for name, ours in _CLASSES.items() if name in sys.modules]
    pairs = [(getattr(theirs, name), getattr(module, name)) for theirs, module, name in there]
    return {id(theirs): (theirs, ours) for theirs, ours in pairs}


def _replace_copies(replaced: Replacements, objects: _Objects) -> None:
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.") or not isinstance(module, ModuleType):
            continue
        if name in _CLASSES or name.startswith(("torch._C", "torch.distributed.rpc", "torch.distributed.autograd")):
            continue
        for attribute, value in list(vars(module).items()):
            found = objects.get(id(value))
            if found is not None and found[0] is value:
                replaced.attribute(module, attribute, found[1])
