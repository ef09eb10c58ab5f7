"""Programs with one call left out: the calls that order what streams do, found in the sources, and taken out."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ..fakes.streams import Mark, Stream

MODULES = (
    "aiorpc.channels.device.outbox",
    "aiorpc.channels.device.sender",
    "aiorpc.channels.device.receiver",
    "aiorpc.channels.landing",
    "aiorpc.runtime.links.accelerators",
)
JOINING = (  # they speak with no device: what orders something there is the `join` of an `Arrival`
    "aiorpc.runtime.callee.running",
    "aiorpc.runtime.caller.stream",
    "aiorpc.runtime.calls.batching",
    "aiorpc.futures",
)
ORDERING = ("wait", "record", "keep", "mark", "synchronize", "release")


class _Finder(ast.NodeVisitor):
    """Calls that order something, by the function they stand in; each with its number there."""

    def __init__(self) -> None:
        self.sites: dict[str, ast.Call] = {}
        self._path: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node, node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node, node.name)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._within(node, node.name)

    def visit_Call(self, node: ast.Call) -> None:
        name = _ordering(node)
        if name:
            start = f"{'.'.join(self._path)} {name}"
            count = sum(site.startswith(start) for site in self.sites)
            self.sites[f"{start} {count + 1}" if count else start] = node
        self.generic_visit(node)

    def _within(self, node: ast.AST, name: str) -> None:
        self._path.append(name)
        self.generic_visit(node)
        self._path.pop()


def _ordering(call: ast.Call) -> str:
    """The name of the method if the call orders something, else nothing."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    name, owner = call.func.attr, ast.unparse(call.func.value).rpartition(".")[2]
    if name == "join":  # not that of texts and threads
        return name if owner.endswith(("arrival", "entry")) else ""
    return name if name in ORDERING else ""


def sites() -> list[str]:
    """All calls that order something, like ``device.outbox Outbox.put wait``."""
    found = [f"{_short(name)} {site}" for name in MODULES for site in _find(name).sites]
    joins = [f"{_short(name)} {site}" for name in JOINING for site in _find(name).sites]
    return found + [site for site in joins if site.split(" ")[2] == "join"]


def _short(module: str) -> str:
    """Without the package that it is in, which may be another one tomorrow."""
    if module.startswith("aiorpc.channels."):
        return module.removeprefix("aiorpc.channels.")
    return module.rpartition(".")[2]


def _find(name: str) -> _Finder:
    finder = _Finder()
    finder.visit(ast.parse(inspect.getsource(importlib.import_module(name))))
    return finder


class _Remover(ast.NodeTransformer):
    """Puts nothing in the place of a call; in that of `mark` an event that has recorded nothing."""

    def __init__(self, call: ast.Call) -> None:
        self._at = (call.lineno, call.col_offset, call.end_col_offset)
        self.removed = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (node.lineno, node.col_offset, node.end_col_offset) != self._at or not _ordering(node):
            return self.generic_visit(node)
        self.removed += 1
        assert isinstance(node.func, ast.Attribute)
        if node.func.attr != "mark":
            return ast.copy_location(ast.Constant(None), node)
        made = ast.Call(ast.Name(_unrecorded.__name__, ast.Load()), node.args, [])
        return ast.fix_missing_locations(ast.copy_location(made, node))


def _unrecorded(stream: Stream) -> Mark:
    """An event that was never recorded: nobody waits for it."""
    mark = Mark(stream)
    mark.done = True
    return mark


def _without(site: str) -> tuple[FunctionType, CodeType]:
    """The function that a site is in, and its code without it."""
    short, qualified, *rest = site.split(" ")
    name = next(name for name in MODULES + JOINING if _short(name) == short)
    module = importlib.import_module(name)
    tree = ast.parse(inspect.getsource(module))
    remover = _Remover(_find(name).sites[" ".join([qualified, *rest])])
    tree = remover.visit(tree)
    assert remover.removed == 1, site
    vars(module)[_unrecorded.__name__] = _unrecorded
    assert module.__file__
    return _function(module, qualified), _code(compile(tree, module.__file__, "exec", dont_inherit=True), qualified)


def _function(module: ModuleType, qualified: str) -> FunctionType:
    found: Any = module
    for part in qualified.split("."):
        found = inspect.getattr_static(found, part)
    assert isinstance(found, FunctionType), qualified
    return found


def _code(code: CodeType, qualified: str) -> CodeType:
    for part in qualified.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part)
    return code


def leave_out(site: str) -> None:
    """From now on, in this process."""
    function, code = _without(site)
    function.__code__ = code


@contextlib.contextmanager
def left_out(site: str) -> Iterator[None]:
    """In this process, within the block; nothing if the site is empty."""
    if not site:
        yield
        return
    function, code = _without(site)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before
