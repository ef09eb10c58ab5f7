"""Imports point downward only, between layers and between the rooms of runtime/, and the protocol core does no I/O.

Read from the source, nothing is imported; an import for types alone counts as any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "aiorpc"
ROOT = Path(__file__).resolve().parent.parent

# Top to bottom; a module may import its own layer and those below it. Names are modules or subpackages of aiorpc.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("",),  # aiorpc/__init__.py
    ("__main__",),  # the commands of python -m aiorpc
    ("commands",),
    ("examples",),
    ("compat",),
    ("testing",),
    ("api", "sync", "functions", "types", "events", "tracing", "opentelemetry"),
    ("worker",),
    ("observability",),
    ("autograd", "optim", "nn", "queues"),
    ("runtime",),
    ("channels",),
    ("transport",),
    ("protocol",),
    ("futures", "collecting", "callbacks", "overseeing", "sites"),
    (
        "options",
        "rights",
        "devices",
        "errors",
        "foreign",
        "interrupts",
        "locks",
        "logs",
        "notebooks",
        "private",
        "progress",
        "threads",
        "undoing",
        "_typing",
    ),
    ("_version", "_installed", "_exiting", "_forks"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# The rooms of runtime/, top to bottom; a file of a room may import its own room and those below it. A file that stands
# in runtime/ itself is a room of its own.
RUNTIME = "runtime"
ROOMS = (
    "lifecycle",
    "statistics",
    "node",
    "hooks",
    "fanout",
    "publication",
    "group",
    "caller",
    "references",
    "callee",
    "gradients",
    "links",
    "meeting",
    "calls",
    "engine",
)
FLOOR = {name: floor for floor, name in enumerate(ROOMS)}

# Written as their users write theirs: through the package's public names.
MAY_IMPORT_ROOT = {"examples"}

# The protocol core is bytes in, events out: testable without a loop, a thread or a device.
NO_IO = "protocol"
FORBIDDEN_IN_CORE = (
    "asyncio",
    "concurrent",
    "multiprocessing",
    "select",
    "selectors",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "torch.cuda",
    "uvloop",
)


def violations(sources: Mapping[str, str]) -> list[str]:
    """What breaks the rules, as ``file:line: what``. sources: path from the project's root -> source text."""
    modules = {module_name(path) for path in sources}
    return [
        f"{path}:{line}: {problem}"
        for path, text in sorted(sources.items())
        for line, target in imported(path, ast.parse(text, path), modules)
        if (problem := judge(part_of(module_name(path)), target) or judge_room(module_name(path), target))
    ]


def judge_room(module: str, target: str) -> str | None:
    """Why a module of runtime/ may not import another one; None if it may."""
    room, other = room_of(module), room_of(target)
    if not room or not other:
        return None
    for each in (room, other):
        if each not in FLOOR:
            return f"aiorpc.runtime.{each} has no floor: give it one in ROOMS and in docs/inside/architecture.md"
    return f"the room {room} imports {target} from a room above it" if FLOOR[other] < FLOOR[room] else None


def room_of(module: str) -> str:
    """The room of runtime/ that a module belongs to; empty for others, and for runtime/__init__.py."""
    return f"{module}..".split(".")[2] if is_under(module, f"{PACKAGE}.{RUNTIME}") else ""


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Modules that import each other, directly or by way of others."""
    modules = {module_name(path) for path in sources}
    arrows = {
        module_name(path): {
            target
            for _, target in imported(path, ast.parse(text, path), modules)
            if target in modules and target != module_name(path)
        }
        for path, text in sources.items()
    }
    reached = {module: _reached(module, arrows) for module in modules}
    found = {frozenset(each for each in modules if each in reached[m] and m in reached[each]) for m in modules}
    return sorted(sorted(circle) for circle in found if circle)


def _reached(module: str, arrows: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [*arrows[module]]
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            left += arrows[each]
    return seen


def judge(part: str, target: str) -> str | None:
    """Why ``part`` of the package may not import ``target`` (a dotted module name); None if it may."""
    if part not in LEVEL:
        return f"aiorpc.{part} has no layer: give it one in LAYERS and in docs/inside/architecture.md"
    if part == NO_IO and (name := next((n for n in FORBIDDEN_IN_CORE if is_under(target, n)), None)):
        return f"the protocol core does no I/O and must not import {name}"
    if not is_under(target, PACKAGE):
        return None
    other = part_of(target)
    if other == "":
        allowed = part in MAY_IMPORT_ROOT or part == ""
        return None if allowed else f"{part} imports the package root {PACKAGE}"
    if other not in LEVEL:
        return f"imports {target}, which has no layer"
    return f"{part or PACKAGE} imports {target} from a higher layer" if LEVEL[other] < LEVEL[part] else None


def imported(path: str, tree: ast.AST, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that a source names: inside functions and for types only too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = origin(path, node)
            yield from ((node.lineno, resolve(base, alias.name, modules)) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield node.lineno, f"torch.{node.attr}"  # torch.cuda needs no import of its own


def origin(path: str, node: ast.ImportFrom) -> str:
    """The module behind ``from X import``, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = path.removesuffix(".py").split("/")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, node.module] if node.module else package)


def resolve(base: str, name: str, modules: set[str]) -> str:
    """``base.name`` where that can be a module: one of ours, or anything outside the package; else ``base``."""
    full = f"{base}.{name}"
    return full if full in modules or not is_under(base, PACKAGE) else base


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def part_of(module: str) -> str:
    """The module or subpackage right under aiorpc that a module belongs to; empty for the package itself."""
    return f"{module}.".split(".")[1]


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def project_sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / PACKAGE).rglob("*.py")}


def test_imports_point_downward() -> None:
    """No module of aiorpc imports a higher layer, the package root from below, or I/O in the protocol core."""
    sources = project_sources()
    assert f"{PACKAGE}/errors.py" in sources
    found = violations(sources)
    assert not found, "\n" + "\n".join(found)


def test_no_modules_import_each_other() -> None:
    """There is no circle of modules, not even of imports for types alone."""
    assert circles(project_sources()) == []


# Names of classes that may stand in several files, each with the reason.
SHARED_NAMES = {
    "Home": "what a room needs of the worker around it; each room says so for itself",
    "Surroundings": "what a channel needs around it; each channel says so for itself",
}
# Where a class may have the name of another one: the drop-in has torch's names, and an example stands by itself.
APART = ("compat", "examples")


def defined_twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The classes of the same name that stand in several files, by that name."""
    found: dict[str, list[str]] = {}
    for path, text in sorted(sources.items()):
        if part_of(module_name(path)) not in APART:
            for node in ast.walk(ast.parse(text, path)):
                if isinstance(node, ast.ClassDef) and node.name not in SHARED_NAMES:
                    found.setdefault(node.name, []).append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_name_is_that_of_one_class() -> None:
    """No two classes of aiorpc have the same name, so that a name in a document or a traceback says which is meant."""
    assert defined_twice(project_sources()) == {}


def test_a_name_of_two_classes_is_found() -> None:
    """Also one that stands inside of a function; not those that are excepted."""
    sources = {
        "aiorpc/errors.py": "class Home: pass\nclass Link: pass\n",
        "aiorpc/nn.py": "class Home: pass\ndef f():\n    class Link: pass\n",
        "aiorpc/compat/torch/nn.py": "class Alone: pass\n",
        "aiorpc/optim.py": "class Alone: pass\n",
    }
    assert defined_twice(sources) == {"Link": ["aiorpc/errors.py", "aiorpc/nn.py"]}


def test_the_exceptions_are_needed() -> None:
    """Each name that may stand in several files does."""
    sources = project_sources()
    for name in SHARED_NAMES:
        assert sum(f"class {name}(" in text for text in sources.values()) > 1, name


def test_each_room_says_what_it_owns() -> None:
    """Each package of runtime/ begins with what it owns, what it shows and what it must not touch."""
    for room in ROOMS:
        package = ROOT / PACKAGE / RUNTIME / room / "__init__.py"
        if package.exists():
            text = ast.get_docstring(ast.parse(package.read_text())) or ""
            assert all(word in text for word in ("Owns:", "Shows:", "Must not touch:")), room


# What the made-up sources may refer to.
MADE_UP = {
    "aiorpc/__init__.py": "from .runtime import lifecycle\n",
    "aiorpc/errors.py": "",
    "aiorpc/futures.py": "from . import errors\nfrom .errors import RpcError\n",
    "aiorpc/protocol/__init__.py": "",
    "aiorpc/protocol/frames.py": "import struct\nimport torch\nfrom .. import futures\nfrom . import codec\n",
    "aiorpc/protocol/codec.py": "import torch\nx = torch.empty(1)\n",
    "aiorpc/runtime/__init__.py": "import asyncio\n",
    "aiorpc/runtime/lifecycle.py": "import threading\nfrom ..protocol import frames\nimport aiorpc.transport.unix\n",
    "aiorpc/runtime/engine/__init__.py": "",
    "aiorpc/runtime/engine/loops.py": "import asyncio\n",
    "aiorpc/runtime/links/__init__.py": "",
    "aiorpc/runtime/links/link.py": "from ..engine.loops import x\nfrom . import other\n",
    "aiorpc/transport/unix.py": "import socket\nfrom aiorpc.protocol.frames import Frame\n",
    "aiorpc/examples/hello.py": "import aiorpc as rpc\nfrom aiorpc import call\nimport asyncio\n",
    "aiorpc/sync.py": "from .runtime.lifecycle import Lifecycle\n",
}


def test_allowed_imports_pass() -> None:
    """Downward, sideways and outside imports are no violation; examples use the package root."""
    assert violations(MADE_UP) == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        (
            "protocol/codec.py",
            "import json\nimport asyncio\n",
            "2: the protocol core does no I/O and must not import asyncio",
        ),
        ("protocol/codec.py", "from concurrent.futures import Future\n", "1: the protocol core does no I/O"),
        ("protocol/codec.py", "def f():\n    import socket as s\n", "2: the protocol core does no I/O"),
        (
            "protocol/codec.py",
            "from torch import cuda\n",
            "1: the protocol core does no I/O and must not import torch.cuda",
        ),
        ("protocol/codec.py", "import torch\ntorch.cuda.is_available()\n", "2: the protocol core does no I/O"),
        (
            "protocol/codec.py",
            "from ..runtime import lifecycle\n",
            "1: protocol imports aiorpc.runtime.lifecycle from a higher",
        ),
        (
            "protocol/__init__.py",
            "from ..transport.unix import x\n",
            "1: protocol imports aiorpc.transport.unix from a",
        ),
        ("errors.py", "from .futures import Future\n", "1: errors imports aiorpc.futures from a higher layer"),
        ("errors.py", "from . import futures\n", "1: errors imports aiorpc.futures from a higher layer"),
        (
            "transport/unix.py",
            "if TYPE_CHECKING:\n    import aiorpc.runtime.lifecycle\n",
            "2: transport imports aiorpc.runtime",
        ),
        ("runtime/lifecycle.py", "import aiorpc\n", "1: runtime imports the package root aiorpc"),
        ("runtime/lifecycle.py", "from .. import call\n", "1: runtime imports the package root aiorpc"),
        ("runtime/lifecycle.py", "from aiorpc import call\n", "1: runtime imports the package root aiorpc"),
        ("runtime/lifecycle.py", "from ..sync import rpc_sync\n", "1: runtime imports aiorpc.sync from a higher layer"),
        ("sync.py", "from .examples import hello\n", "1: sync imports aiorpc.examples.hello from a higher layer"),
        (
            "runtime/engine/pool.py",
            "from ..links.link import Link\n",
            "1: the room engine imports aiorpc.runtime.links",
        ),
        ("runtime/engine/pool.py", "from .. import lifecycle\n", "1: the room engine imports aiorpc.runtime.lifecycle"),
        (
            "runtime/links/second.py",
            "if TYPE_CHECKING:\n    from ..lifecycle import Lifecycle\n",
            "2: the room links imports aiorpc.runtime.lifecycle",
        ),
        ("runtime/attic/old.py", "from ..engine import loops\n", "1: aiorpc.runtime.attic has no floor"),
        ("helpers.py", "import os\n", "1: aiorpc.helpers has no layer"),
        ("sync.py", "from .helpers import f\n", "1: imports aiorpc.helpers, which has no layer"),
    ],
)
def test_violation_is_found_at_its_line(path: str, source: str, expected: str) -> None:
    """Each way to break a rule is reported with file and line."""
    (found,) = violations({**MADE_UP, f"aiorpc/{path}": source})
    assert found.startswith(f"aiorpc/{path}:{expected}")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"transport/unix.py": "from ..errors import a\n", "errors.py": "from .transport import unix\n"}, 2),
        (
            {
                "runtime/engine/loops.py": "if TYPE_CHECKING:\n    from ..links.link import Link\n",
                "runtime/links/link.py": "from ..lifecycle import Lifecycle\n",
                "runtime/lifecycle.py": "def f():\n    from .engine import loops\n",
            },
            3,
        ),
    ],
)
def test_circles_are_found(changes: Mapping[str, str], expected: list[str] | int) -> None:
    """Of two modules, and of three that only name each other's types or import late."""
    found = circles({**MADE_UP, **{f"aiorpc/{path}": text for path, text in changes.items()}})
    assert [len(circle) for circle in found] == ([expected] if expected else [])
