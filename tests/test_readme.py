"""The README and the architecture are true: programs run and print what the README says; names and arrows exist.

The README is short besides, and its figures are some of those in docs/inside/figures.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.programs import run_program, torchrun

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = (ROOT / "docs" / "inside" / "figures.md").read_text(encoding="utf-8")
INSIDE = ROOT / "docs" / "inside"
ARCHITECTURE = (INSIDE / "architecture.md").read_text(encoding="utf-8")
WRITTEN = ("index", "architecture", "calls", "membership", "counting", "cuda", "glossary", "contributing")
PACKAGE = ROOT / "aiorpc"
RUNTIME = PACKAGE / "runtime"
LIMIT = 60.0  # seconds for what takes about four

PROGRAMS = re.findall(r"<!-- torchrun: ([^\n]+) -->\n```python\n(.+?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    """Saved to a file and started as the README says, it prints what the README says, in ten lines."""
    [(printed, program)] = PROGRAMS
    (tmp_path / "hello.py").write_text(program)
    assert len(program.splitlines()) <= 10
    outcome = run_program(torchrun(2, "hello.py"), tmp_path, timeout=LIMIT)
    assert (outcome.code, outcome.out.strip()) == (0, printed), outcome.err


def test_the_readme_is_short() -> None:
    """At most 170 lines and 700 words, ten features and eight figures; its picture is small."""
    assert len(README.splitlines()) <= 170
    assert len(README.split()) <= 700
    features = README.partition("\n## Features\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- ", features, re.MULTILINE)) <= 10
    assert sum(len(cells) for cells in figures(README).values()) <= 8
    [picture] = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert (ROOT / picture).stat().st_size < 200_000


def test_the_figures_of_the_readme_are_measured_ones() -> None:
    """Each row of its table is a row of docs/inside/figures.md, cell by cell."""
    measured = figures(FIGURES)
    quoted = {name.removesuffix(", µs"): cells for name, cells in figures(README).items()}
    assert quoted
    assert {name: measured[name][:2] for name in quoted} == quoted


def figures(text: str) -> dict[str, list[str]]:
    """The rows of the table of figures in a document: what was measured, and the cells behind it."""
    table = text.partition("<!-- figures -->")[2].partition("<!-- /figures -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    return {name: cells for name, *cells in rows}


def test_the_inside_is_short() -> None:
    """What a new maintainer reads has at most 900 lines, the glossary 40 rows, and a decision 60 lines."""
    texts = {name: (INSIDE / f"{name}.md").read_text(encoding="utf-8") for name in WRITTEN}
    assert sum(len(text.splitlines()) for text in texts.values()) <= 900
    rows = re.findall(r"^\| (?!word |---)", texts["glossary"], re.MULTILINE)
    assert 20 < len(rows) <= 40
    pages = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in INSIDE.glob("decisions/*.md")}
    assert {name: lines for name, lines in pages.items() if lines > 60} == {}


def test_the_index_of_decisions_has_each_page() -> None:
    """Its table and its contents name every page of the folder."""
    index = (INSIDE / "decisions" / "index.md").read_text(encoding="utf-8")
    pages = {path.stem for path in INSIDE.glob("decisions/*.md")} - {"index"}
    assert pages
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == pages
    assert set(index.partition("```{toctree}")[2].split()) >= pages


def test_files_and_tests_that_the_inside_cites_exist() -> None:
    """Each path of the repository in the pages is a file or a folder, and each `tests/file.py::name` is a test."""
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in [*INSIDE.glob("*.md"), *INSIDE.glob("decisions/*.md")]
    )
    cited = re.findall(r"`((?:tests|bench|docs|aiorpc)/[\w/.-]*)(?:::(\w+))?`", text)
    assert len(cited) > 20
    missing = [
        f"{path}::{name}"
        for path, name in cited
        if not (ROOT / path).exists() or (name and f"def {name}(" not in (ROOT / path).read_text("utf-8"))
    ]
    assert missing == []


def test_files_of_the_package_that_the_architecture_names_exist() -> None:
    """Each path of a module of the package in the architecture is a file there or in the runtime."""
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", ARCHITECTURE)
    named = [path for path in named if not path.startswith("tests/")]
    assert len(named) > 15
    assert [path for path in named if not any((root / path).is_file() for root in (PACKAGE, RUNTIME))] == []


def test_functions_that_the_architecture_names_exist() -> None:
    """Each `Class.member` and `module.name` of the package in the architecture is in its source."""
    known = {f"{owner}.{name}" for path in PACKAGE.rglob("*.py") for owner, name in members(path)}
    owners = {each.partition(".")[0] for each in known}
    named = {each for each in re.findall(r"`(\w+\.\w+)[`(]", ARCHITECTURE) if each.partition(".")[0] in owners}
    named = {each for each in named if not each.endswith((".py", ".md"))}
    assert "Engine.call_on_loop" in named
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


def test_the_architecture_has_every_package() -> None:
    """Each package of the runtime has its row in the table."""
    section = ARCHITECTURE.partition("\n## Packages of the runtime")[2].partition("\n## ")[0]
    packages = re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)
    assert sorted(packages) == sorted(path.parent.name for path in RUNTIME.glob("*/__init__.py"))


def test_the_drawing_of_the_packages_is_true() -> None:
    """A package imports only where its arrows lead; each arrow stands for an import."""
    drawing = ARCHITECTURE.partition("```mermaid")[2].partition("```")[0]
    arrows = set(re.findall(r"^ *(\w+) --> (\w+)$", drawing, re.MULTILINE))
    packages = {path.parent.name for path in RUNTIME.glob("*/__init__.py")}
    between = {(source, target) for source, target in arrows if {source, target} <= {*packages, "root"}}
    used = {
        (package, target)
        for package in {*packages, "root"}
        for path in (RUNTIME if package == "root" else RUNTIME / package).glob("*.py")
        for target in imported_packages(path, inside=package != "root") & packages
        if target != package
    }
    assert len(between) > len(packages)
    assert used - reachable(between) == set()
    assert between - used == set()


def imported_packages(path: Path, *, inside: bool) -> set[str]:
    """The other packages and modules that a module of the runtime names. inside: the module is in a package."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1 + inside]
    return {name for node in found for name in ([node.module.partition(".")[0]] if node.module else names_of(node))}


def names_of(node: ast.ImportFrom) -> list[str]:
    """What is imported by one statement."""
    return [alias.name for alias in node.names]


def reachable(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs of which an arrow, or several in a row, lead from one to the other."""
    found = set(arrows)
    while more := {(a, d) for a, b in found for c, d in arrows if b == c} - found:
        found |= more
    assert all(source != target for source, target in found), "the arrows go round in a circle"
    return found


def test_the_commands_of_the_readme_are_targets() -> None:
    """Each `make` that the documents mention is in the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    contributing = (ROOT / "docs" / "inside" / "contributing.md").read_text()
    used = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", README + contributing, re.MULTILINE))
    assert {"demo", "test", "bench"} <= used <= targets
