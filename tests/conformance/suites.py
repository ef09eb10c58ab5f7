"""PyTorch's RPC test suites as the installed torch has them: which tests there are, and the classes that run them.

torch ships the suites (``torch.testing._internal.distributed.rpc_utils``) but not the three files that put a suite
together with the fixture of an agent. That is done here, with one change: the ranks of a test may be forked instead of
spawned, so that a test costs half a second instead of ten.

All of it is imported after `load` has put the replacement of ``torch.distributed.rpc`` in its place.
"""

from __future__ import annotations

import importlib
import os
import unittest
from collections.abc import Iterator
from typing import Any, NamedTuple

INTERNAL = "torch.testing._internal.distributed"
FIXTURES = f"{INTERNAL}.rpc"
# For ranks that are spawned: what they have to load before they can unpickle the class of their test.
INSTALL, GROUP, START = "CONFORMANCE_INSTALL", "CONFORMANCE_GROUP", "CONFORMANCE_START"
# Group of tests: prefix of its class names, the lists of suites in rpc_utils, module and class of its fixture.
_PLAN = {
    "generic": ("TensorPipe", ("GENERIC_TESTS",), "tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture"),
    "tensorpipe": (
        "TensorPipe",
        ("TENSORPIPE_TESTS",),
        "tensorpipe_rpc_agent_test_fixture",
        "TensorPipeRpcAgentTestFixture",
    ),
    "faulty": ("Faulty", ("FAULTY_AGENT_TESTS",), "faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture"),
    "cuda": (
        "TensorPipe",
        ("GENERIC_CUDA_TESTS", "TENSORPIPE_CUDA_TESTS"),
        "tensorpipe_rpc_agent_test_fixture",
        "TensorPipeRpcAgentTestFixture",
    ),
}


class Case(NamedTuple):
    """One test. id: ``Class.test``; suite: the class of torch that has it."""

    id: str
    group: str
    suite: str


def load(install: str) -> None:
    """Put the replacement in place (``module:function``, "" for torch itself), then import all suites. Takes seconds.

    The environment tells ranks that are spawned to do the same.
    """
    os.environ[INSTALL] = install
    if install:
        module, _, function = install.partition(":")
        getattr(importlib.import_module(module), function or "install")()
    importlib.import_module(f"{INTERNAL}.rpc_utils")


def cases() -> Iterator[Case]:
    """Every test that this torch has. After `load`."""
    for group, (prefix, _, _, _) in _PLAN.items():
        for suite in _suites(group):
            for name in sorted(name for name in dir(suite) if name.startswith("test")):
                yield Case(f"{prefix}{suite.__name__}.{name}", group, suite.__name__)


def _suites(group: str) -> list[type]:
    lists = importlib.import_module(f"{INTERNAL}.rpc_utils")
    return [suite for name in _PLAN[group][1] for suite in getattr(lists, name)]


def build(group: str, module: str) -> dict[str, type]:
    """The classes of one group, as members of that module. After `load`, in a process that runs only this group.

    The fixture of the faulty agent registers a backend when it is imported, and torch's registry then makes a new
    ``BackendType``: the tests of other groups would not recognise theirs.
    """
    os.environ[GROUP] = group
    prefix, _, fixture_module, fixture_name = _PLAN[group]
    fixture = getattr(importlib.import_module(f"{FIXTURES}.{fixture_module}"), fixture_name)
    helper = _helper()
    return {
        f"{prefix}{suite.__name__}": type(
            f"{prefix}{suite.__name__}", (suite, fixture, helper), {"__module__": module, "exit_codes": []}
        )
        for suite in _suites(group)
    }


def _helper() -> Any:
    """torch's class that runs a test in several processes; with a start method of ours, and remembering their ends."""
    base: Any = importlib.import_module(f"{INTERNAL}.rpc_utils").SpawnHelper
    multiprocessing: Any = importlib.import_module("torch.multiprocessing")

    def _spawn_processes(self: Any) -> None:
        self._start_processes(multiprocessing.get_context(os.environ.get(START, "fork")).Process)

    def tearDown(self: Any) -> None:
        self.exit_codes.extend(process.exitcode for process in self.processes)
        base.tearDown(self)

    return type("Helper", (base,), {"_spawn_processes": _spawn_processes, "tearDown": tearDown})


def make(case: Case) -> unittest.TestCase:
    """That test, ready to run in this process, which leads its ranks."""
    from . import ranks

    classes = build(case.group, ranks.__name__)
    vars(ranks).update(classes)
    class_name, _, name = case.id.partition(".")
    test: unittest.TestCase = classes[class_name](name)
    return test
