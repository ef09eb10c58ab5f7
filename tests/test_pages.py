"""The pages of the documents are true: their Python runs and prints what they say; links and names lead somewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path

import pytest

import aiorpc
import aiorpc.testing  # names in the documents are looked up in it
from aiorpc.observability import conventions
from tests import pages
from tests.examples.programs import run_program, torchrun
from tests.test_errors import public_errors

ROOT = pages.ROOT
DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/README.md",
    *sorted(f"docs/{path.relative_to(pages.DOCS)}" for path in pages.DOCS.rglob("*.md")),
)
TUTORIAL = pages.steps((pages.DOCS / "start" / "tutorial.md").read_text(encoding="utf-8"))
LIMIT = 100.0  # seconds for a step of the tutorial, which takes about six
#: Attributes of spans, without what is before the first dot of their names.
ATTRIBUTES = {name.split(".")[1] for name in vars(conventions).values() if isinstance(name, str) and "." in name}
#: Steps that have parts of their own in other tests.
LONG = range(1, len(TUTORIAL) - 1)


@pytest.mark.parametrize("page", pages.pages())
async def test_a_page_runs(page: str) -> None:
    """Its blocks, one after the other, print what the page says."""
    expected = pages.printed(pages.blocks((pages.DOCS / page).read_text(encoding="utf-8")))
    out = await pages.run(page)
    assert pages.unmatched(out, expected) == [], out


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("page", "size", "printed", "program"), pages.programs())
def test_a_program_of_a_page_runs(page: str, size: int, printed: str, program: str, tmp_path: Path) -> None:
    """Saved to a file and started by torchrun, it prints what the page says."""
    (tmp_path / "program.py").write_text(program)
    outcome = run_program(torchrun(size, "program.py"), tmp_path, timeout=LIMIT)
    assert (outcome.code, outcome.out.strip()) == (0, printed), f"{page}: {outcome.err}"


@pytest.mark.parametrize(
    "page", sorted(path.name for path in (pages.DOCS / "howto").glob("*.md") if path.stem != "index")
)
def test_a_how_to_page_says_first_what_one_wants(page: str) -> None:
    """Behind its title, in a sentence that says `you`; and it is short enough to be read at once."""
    text = (pages.DOCS / "howto" / page).read_text(encoding="utf-8")
    assert re.match(r"# .+\n\nYou ", text)
    assert 300 <= len(text.split()) <= 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in range(len(TUTORIAL))]
)
def test_a_step_of_the_tutorial_runs(step: int, tmp_path: Path) -> None:
    """The program as it is after a step, started as the tutorial says, prints what stands there."""
    program = ""
    for blocks, _, _ in TUTORIAL[: step + 1]:
        for block in blocks:
            program = pages.grown(program, block)
    (tmp_path / "tutorial.py").write_text(program)
    _, command, expected = TUTORIAL[step]
    words = command.split()
    assert words[0] == "torchrun"
    outcome = run_program(["-m", "torch.distributed.run", *words[1:]], tmp_path, timeout=LIMIT)
    assert (outcome.code, outcome.out.splitlines()) == (0, expected), f"{outcome.err}\n{program}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_names_in_a_document_exist(name: str) -> None:
    """Each `rpc.name` and `aiorpc.name` in a document is public, or a module of the package."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("torch.distributed.rpc.", "")
    used = set(re.findall(r"(?<![\w./])(?:rpc|aiorpc)\.([A-Za-z_]\w*)", text))
    modules = {path.stem for path in (ROOT / "aiorpc").iterdir()}
    assert used - set(aiorpc.__all__) - modules - ATTRIBUTES == set()


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


def test_the_tables_of_options_are_complete() -> None:
    """Names and defaults in the reference are those of RpcBackendOptions."""
    rows = table("options.md", r"^\| `(\w+)` \|[^|]*\| `(.+?)` \|")
    options = aiorpc.RpcBackendOptions()
    defaults = {each.name: repr(getattr(options, each.name)) for each in dataclasses.fields(options)}
    parts = dict.fromkeys(("shared_memory", "max_unsent_bytes", "max_queued_bytes"), "a quarter")
    assert rows == defaults | parts | {"max_incoming_bytes": "all of it"}  # of this machine's memory


def test_the_table_of_errors_is_complete() -> None:
    """The reference lists every error, with its other base classes."""
    rows = table("errors.md", r"^\| `([\w.]+)` \|(.*?)\|")
    errors = public_errors()
    assert set(rows) == set(errors) - {"RpcError"}
    for name, others in rows.items():
        bases = {base.__name__ for base in errors[name].__bases__} - {"RpcError", "Exception"}
        missing = {"QueueShutDown"} - set(vars(asyncio))  # it has that from Python 3.13 on
        assert set(re.findall(r"`(\w+)`", others)) - missing == bases, name


def table(page: str, row: str) -> dict[str, str]:
    """The rows of the tables on a page of the reference: a name, and what the pattern of a row has besides."""
    return dict(re.findall(row, (pages.DOCS / "reference" / page).read_text(encoding="utf-8"), re.MULTILINE))
