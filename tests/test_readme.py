"""README and guide are true: their programs run and print what they say; names, links and tables are the code's."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import io
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import aiorpc
import aiorpc.testing  # names in the documents are looked up in it
from tests.examples.programs import run_program, torchrun
from tests.test_errors import public_errors

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs" / "inside" / "design.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "aiorpc"
RUNTIME = PACKAGE / "runtime"
DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
)
LIMIT = 60.0  # seconds for what takes about four

PROGRAMS = re.findall(r"<!-- torchrun: ([^\n]+) -->\n```python\n(.+?)```", README, re.DOTALL)
PIECES = re.findall(r"```python\n(.+?)```", GUIDE, re.DOTALL)
MODULE = "guide_of_aiorpc"


def expected_lines(pieces: list[str]) -> list[str]:
    """What the pieces say that they print, in order."""
    return [line.rpartition("# -> ")[2] for piece in pieces for line in piece.splitlines() if "# -> " in line]


def without_first_match(text: str, starts: list[str]) -> list[str]:
    """The starts that no line has, when lines are looked through in order."""
    lines = iter(text.splitlines())
    return [start for start in starts if not any(line.startswith(start) for line in lines)]


@contextlib.contextmanager
def module() -> Iterator[dict[str, Any]]:
    """The namespace of an importable module, so that its functions travel by name as a program's do."""
    made = types.ModuleType(MODULE)
    sys.modules[MODULE] = made
    try:
        yield made.__dict__
    finally:
        del sys.modules[MODULE]


async def run_piece(piece: str, number: int, names: dict[str, Any]) -> None:
    """Run one piece as an async program's body, or, if it awaits nothing, where blocking calls belong."""
    code = compile(piece, f"guide.md, piece {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & 0x80:  # CO_COROUTINE: it awaits
        await eval(code, names)
    else:
        await asyncio.to_thread(eval, code, names)


async def run_guide(names: dict[str, Any]) -> None:
    """All pieces, in order, in worker `me`, while worker `ps` serves."""
    store = HashStore()

    async def serve() -> None:
        async with aiorpc.init("ps", rank=1, world_size=2, store=store):
            pass

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        async with aiorpc.init("me", rank=0, world_size=2, store=store):
            for number, piece in enumerate(PIECES, 1):
                await run_piece(piece, number, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "printed", "program"),
    [
        pytest.param(10, *PROGRAMS[0], id="await"),
        pytest.param(10, *PROGRAMS[1], id="blocking", marks=pytest.mark.long),
        pytest.param(26, *PROGRAMS[2], id="actors", marks=pytest.mark.long),
    ],
)
def test_a_program_of_the_readme_runs(most: int, printed: str, program: str, tmp_path: Path) -> None:
    """Saved to a file and started as the README says, it prints what the README says, in so many lines."""
    (tmp_path / "hello.py").write_text(program)
    assert len(program.splitlines()) <= most
    outcome = run_program(torchrun(2, "hello.py"), tmp_path, timeout=LIMIT)
    assert (outcome.code, outcome.out.strip()) == (0, printed), outcome.err


async def test_the_pieces_of_the_guide_run() -> None:
    """One after the other, in one program, they print what the guide says."""
    assert len(PIECES) > 10
    out = io.StringIO()
    with module() as names, contextlib.redirect_stdout(out):
        async with asyncio.timeout(LIMIT / 2):
            await run_guide(names)
    assert without_first_match(out.getvalue(), expected_lines(PIECES)) == [], out.getvalue()


def test_a_wrong_print_is_seen() -> None:
    """The check of what is printed can fail, and knows the order."""
    assert without_first_match("1\n2\n", expected_lines(["print(1)  # -> 1\nprint(2)  # -> 2"])) == []
    assert without_first_match("2\n1\n", ["1", "2"]) == ["2"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_names_in_a_document_exist(name: str) -> None:
    """Each `rpc.name` and `aiorpc.name` in a document is public, or a module of the package."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("torch.distributed.rpc.", "")
    used = set(re.findall(r"(?<![\w./])(?:rpc|aiorpc)\.([A-Za-z_]\w*)", text))
    modules = {path.stem for path in (ROOT / "aiorpc").iterdir()}
    assert used - set(aiorpc.__all__) - modules == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_in_a_document_lead_somewhere(name: str) -> None:
    """Relative links name files that are there, and headings that they have."""
    here = ROOT / name
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", here.read_text(encoding="utf-8")):
        path = here.parent / target if target else here
        assert path.exists(), target
        assert not heading or heading in headings(path), f"{target}#{heading}"


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_tests_that_the_design_cites_exist() -> None:
    """Each `tests/file.py::name` in the design and in its list of corners is a test."""
    cited = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", DESIGN)
    assert len(cited) > 30
    missing = [
        f"{path}::{name}"
        for path, name in cited
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text("utf-8"))
    ]
    assert missing == []


def test_functions_that_the_design_names_exist() -> None:
    """Each `Class.member` and `module.name` of the package in the design is in its source."""
    known = {f"{owner}.{name}" for path in PACKAGE.rglob("*.py") for owner, name in members(path)}
    owners = {each.partition(".")[0] for each in known}
    named = {each for each in re.findall(r"`(\w+\.\w+)[`(]", DESIGN) if each.partition(".")[0] in owners}
    named = {each for each in named if not each.endswith((".py", ".md"))}
    assert len(named) > 40
    assert named - known == set()


def members(path: Path) -> Iterator[tuple[str, str]]:
    """What a module defines: (module, name), and (class, name) for what its classes define or assign to self."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        for name in defined(node):
            yield path.stem, name
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                for name in defined(inner):
                    yield node.name, name


def defined(node: ast.AST) -> Iterator[str]:
    """The names that one statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id
            elif isinstance(target, ast.Attribute):
                yield target.attr


def test_the_design_has_every_module() -> None:
    """Each module of the runtime has its row in the design's table of files, and each room one in that of rooms."""
    section = DESIGN.partition("\n## 3. ")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)
    modules = {str(path.relative_to(RUNTIME)) for path in RUNTIME.rglob("*.py") if path.name != "__init__.py"}
    assert (set(files), len(files)) == (modules, len(modules))
    rooms = re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)
    assert set(rooms) == {path.parent.name for path in RUNTIME.glob("*/__init__.py")}


def test_the_drawing_of_the_rooms_is_true() -> None:
    """A room imports those that its arrows lead to, and no other; each arrow is there because of an import."""
    drawing = DESIGN.partition("```mermaid")[2].partition("```")[0]
    arrows = set(re.findall(r"^ *(\w+) --> (\w+)$", drawing, re.MULTILINE))
    rooms = {path.parent.name for path in RUNTIME.glob("*/__init__.py")}
    between = {(source, target) for source, target in arrows if {source, target} <= {*rooms, "root"}}
    used = {
        (room, target)
        for room in {*rooms, "root"}
        for path in (RUNTIME if room == "root" else RUNTIME / room).glob("*.py")
        for target in imported_rooms(path, inside=room != "root") & rooms
        if target != room
    }
    assert len(between) > len(rooms)
    assert used - reachable(between) == set()
    assert between - used == set()


def imported_rooms(path: Path, *, inside: bool) -> set[str]:
    """The packages and modules beside its own that a module of the runtime names. inside: it is in a room."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1 + inside]
    return {name for node in found for name in ([node.module.partition(".")[0]] if node.module else names_of(node))}


def names_of(node: ast.ImportFrom) -> list[str]:
    """What is imported by one statement."""
    return [alias.name for alias in node.names]


def reachable(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Where one comes from where, along arrows."""
    found = set(arrows)
    while more := {(a, d) for a, b in found for c, d in arrows if b == c} - found:
        found |= more
    assert all(source != target for source, target in found), "the arrows go round in a circle"
    return found


def test_the_table_of_options_is_complete() -> None:
    """Names and defaults in the guide are those of RpcBackendOptions."""
    section = GUIDE.partition("\n## Options\n")[2].partition("\n## ")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE))
    options = aiorpc.RpcBackendOptions()
    defaults = {each.name: repr(getattr(options, each.name)) for each in dataclasses.fields(options)}
    parts = dict.fromkeys(("shared_memory", "max_unsent_bytes", "max_queued_bytes"), "a quarter")
    assert table == defaults | parts | {"max_incoming_bytes": "all of it"}  # of this machine's memory


def test_the_table_of_errors_is_complete() -> None:
    """The guide lists every error, with its other base classes."""
    section = GUIDE.partition("\n## Errors\n")[2].partition("\n## ")[0]
    table = dict(re.findall(r"^\| `([\w.]+)` \|(.*?)\|", section, re.MULTILINE))
    errors = public_errors()
    assert set(table) == set(errors) - {"RpcError"}
    for name, others in table.items():
        bases = {base.__name__ for base in errors[name].__bases__} - {"RpcError", "Exception"}
        missing = {"QueueShutDown"} - set(vars(asyncio))  # it has that from Python 3.13 on
        assert set(re.findall(r"`(\w+)`", others)) - missing == bases, name


def test_the_commands_of_the_readme_are_targets() -> None:
    """Each `make` that the documents mention is in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    contributing = (ROOT / "docs" / "inside" / "contributing.md").read_text()
    used = set(re.findall(r"(?:^ {4}|`)make ([a-z]+)", README + contributing, re.MULTILINE))
    assert {"demo", "test", "bench"} <= used <= targets
