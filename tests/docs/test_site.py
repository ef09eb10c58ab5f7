"""The site: every public name is in the reference with a docstring, tables are the code's, and it builds strictly."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import aiorpc
from aiorpc.types import Statistics

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
LIMIT = 300.0  # seconds for a build, which takes about fifteen


def extension(name: str) -> ModuleType:
    """A module of docs/_ext."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "_ext" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


documented = extension("documented")


def in_pages() -> set[str]:
    """The names that the reference makes from docstrings."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))
    return set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, re.MULTILINE))


def test_every_public_name_is_in_the_reference() -> None:
    """Under one of the names that an object has."""
    names: dict[int, list[str]] = {}
    for name, value in documented.public():
        names.setdefault(id(value), []).append(name)
    assert [each for each in names.values() if not in_pages().intersection(each)] == []


def test_every_public_name_has_a_docstring() -> None:
    """So have public members; a class describes the fields of its records."""
    assert [missing for name, value in documented.public() for missing in documented.undocumented(name, value)] == []


def rows(page: str, section: str = "") -> dict[str, list[str]]:
    """The rows of the tables of a page, or of one section of it, whose first cell is a name: their other cells."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in found}


def test_the_tables_of_statistics_are_complete() -> None:
    """Each field with its kind and its unit."""
    said = {name: tuple(cells[:2]) for name, cells in rows("statistics.md").items()}
    fields = dataclasses.fields(Statistics)
    assert said == {each.name: (each.metadata["kind"], each.metadata["unit"]) for each in fields}


@pytest.mark.parametrize("group", ["Limits", "Network", "Security"])
def test_a_table_of_options_is_its_group(group: str) -> None:
    """Each group of options has a table with what its class has."""
    made = getattr(aiorpc, f"{group.removesuffix('s')}Options")
    assert set(rows("options.md", group)) == {field.name for field in dataclasses.fields(made)}


def test_the_table_of_variables_is_complete() -> None:
    """Each environment variable of ours that the package reads."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "aiorpc").rglob("*.py"))
    read = set(re.findall(r"\bAIORPC_[A-Z_]*[A-Z]\b", sources))
    page = (REFERENCE / "options.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(AIORPC_\w+)` \|", page, re.MULTILINE)) >= read
    assert "AIORPC_SECRET" in read


def test_the_picture_is_as_its_script_draws_it() -> None:
    """`python docs/_ext/architecture.py` makes it anew."""
    architecture = extension("architecture")
    assert architecture.PATH.read_text(encoding="utf-8") == architecture.drawing()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(LIMIT)
def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    """Strictly: a dead link or a missing reference fails. No page loads anything from elsewhere."""
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    out = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT - 20, env={**os.environ, "TZ": "UTC"})
    assert done.returncode == 0, done.stderr[-5000:]
    loads = re.compile(
        r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//|@import\s+url\(["\']?http'
    )
    pages = [*out.rglob("*.html"), *out.rglob("*.css")]
    assert len(pages) > 30
    assert [str(page) for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []
    assert (out / "searchindex.js").is_file()
    listed = (out / "llms.txt").read_text(encoding="utf-8")
    assert all(
        f"({page})" in listed for page in ("start/groups.html", "reference/errors.html", "inside/architecture.html")
    )
    whole = (out / "llms-full.txt").read_text(encoding="utf-8")
    assert all(part in whole for part in ("# Options", "### aiorpc.call\n\nRun "))
    assert "{eval-rst}" not in whole
