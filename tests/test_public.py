"""What is public: the names at the top of the package and in its documented submodules."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import aiorpc

VERBS = """init init_rpc launched shutdown drain drained current call rpc_sync rpc_async remote stream serve peer group
    queue publish subscribe record unpublish wait_for get_worker_info collect_all wait_all"""
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
DOCUMENTED = ("aiorpc", "aiorpc.types", "aiorpc.events", "aiorpc.errors", "aiorpc.tracing", "aiorpc.opentelemetry")


def test_the_names_at_the_top_are_these() -> None:
    """A name is added or taken away on purpose only."""
    assert sorted(aiorpc.__all__) == sorted(TOP)
    assert set(OF_TORCH.split()) <= set(aiorpc.__all__)


def test_a_name_that_has_moved_says_where_to() -> None:
    """Programs from before the release go on; one that never was is an error."""
    with pytest.warns(DeprecationWarning, match=r"aiorpc\.StoreGone is aiorpc\.errors\.StoreGone"):
        assert aiorpc.StoreGone is aiorpc.errors.StoreGone  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'aiorpc' has no attribute 'StoreHere'"):
        aiorpc.StoreHere  # type: ignore[attr-defined]  # noqa: B018


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


PAGE = (Path(__file__).resolve().parent.parent / "docs" / "reference" / "public.md").read_text(encoding="utf-8")
#: The modules whose classes have a row in the page's table of attributes: errors document their fields themselves.
WITH_CLASSES = (
    "aiorpc",
    "aiorpc.types",
    "aiorpc.events",
    "aiorpc.testing",
    "aiorpc.launch.ray",
    "aiorpc.tracing",
    "aiorpc.opentelemetry",
    "aiorpc.optim",
)


def public_classes() -> dict[str, type]:
    """By the names that the page has for them. RemoteModule has those of torch's."""
    found: dict[str, type] = {}
    for module in map(importlib.import_module, WITH_CLASSES):
        for name in module.__all__:
            kind = getattr(module, name)
            if inspect.isclass(kind) and not issubclass(kind, aiorpc.RpcError) and kind not in found.values():
                found[name] = kind
    return found


def attributes(kind: type, others: set[type]) -> set[str]:
    """The names without an underscore that a class has of its own, or of a base of ours that is not public itself.

    Those that instances get in any of its methods are among them.
    """
    names: set[str] = set()
    for base in kind.__mro__:
        if base is not kind and (base in others or not base.__module__.startswith("aiorpc")):
            continue
        names |= {*vars(base), *inspect.get_annotations(base)}
        if base.__module__.startswith("aiorpc") and "__init__" in vars(base):
            names |= set(_assigned(ast.parse(textwrap.dedent(inspect.getsource(base)))))
    for base in set(kind.__mro__) & others - {kind}:
        names -= attributes(base, others)
    initial = {name for name, each in inspect.get_annotations(kind).items() if str(each).startswith("InitVar")}
    return {name for name in names - initial if not name.startswith("_")}


def _assigned(tree: ast.AST) -> Iterator[str]:
    for each in ast.walk(tree):
        match each:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def rows() -> dict[str, str]:
    """The table of the page as it should be."""
    classes = public_classes()
    others = set(classes.values())
    table: dict[str, str] = {}
    for name, kind in sorted(classes.items()):
        bases = [other for other, base in classes.items() if base in kind.__mro__ and base is not kind]
        title = f"`{name}`" + (f", with those of {', '.join(f'`{base}`' for base in sorted(bases))}" if bases else "")
        table[title] = ", ".join(f"`{each}`" for each in sorted(attributes(kind, others))) or "none besides"
    return table


def test_the_page_has_the_attributes_of_public_classes() -> None:
    """All of them: an attribute without an underscore is public, and gets there on purpose."""
    table = PAGE[PAGE.index("| class | attributes |") :].partition("\n\n")[0]
    written = dict(row.strip("|").strip().split(" | ", 1) for row in table.splitlines()[2:])
    assert written == rows()


@pytest.mark.parametrize("kind", public_classes().values(), ids=public_classes())
def test_each_public_attribute_is_documented(kind: type) -> None:
    """A method or property by a docstring, of its own or of what it overrides."""
    for name in attributes(kind, set()):
        value = inspect.getattr_static(kind, name, None)
        if inspect.isfunction(value) or isinstance(value, (property, classmethod)):
            assert inspect.getdoc(getattr(kind, name)), name


def test_names_on_the_page_exist() -> None:
    """At the top the page has all names and no others; in a module each that the page names is there."""
    top, _, rest = PAGE.partition("In modules:")
    assert sorted(re.findall(r"`(\w+)`", top.partition("At the top")[2].partition(":")[2])) == sorted(
        set(TOP) - set(SUBMODULES.split())
    )
    modules = re.findall(r"^\| `(aiorpc\.[\w.]+)` \| (.*) \|$", rest, re.MULTILINE)
    assert {name for name, _ in modules} >= {f"aiorpc.{each}" for each in SUBMODULES.split()}
    for name, told in modules:
        module = importlib.import_module(name)
        assert {each for each in re.findall(r"`(\w+)`", told) if each not in dir(module)} == set(), name
