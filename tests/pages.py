"""The Python of a page of the documents, run as the page says.

The blocks of a page run in order, as one program, in the first of the workers that its comment names, while the others
serve; without a comment these are `me` and `ps`:

    <!-- workers: learner actor0 actor1 -->

A page whose blocks join by themselves has none: `<!-- workers: none -->`.

A block behind a comment with a number of workers and what they print is a program of its own, started by torchrun:

    <!-- torchrun 2: tensor([2., 2.]) -->

A block behind a comment with the name of a file is that file, which another test or another block of the page uses:

    <!-- file: member.py -->

In the tutorial the blocks make one program that grows. See `grown`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

import aiorpc

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MODULE = "page_of_aiorpc"
PROGRAM = re.compile(r"^<!-- torchrun (\d+): (.+?) -->\n```python\n(.+?)^```\n", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.+?)^```\n", re.DOTALL | re.MULTILINE)
LIMIT = 60.0  # seconds for a page; the longest takes about three


def pages() -> list[str]:
    """The pages whose blocks run one after the other in a group, by their paths under docs/."""
    found = (path for path in DOCS.rglob("*.md") if blocks(path.read_text(encoding="utf-8")))
    return sorted(path.relative_to(DOCS).as_posix() for path in found if path.name != "tutorial.md")


def blocks(text: str) -> list[str]:
    """The Python of a page, block by block, without programs of their own."""
    return re.findall(r"^```python\n(.+?)^```", FILE.sub("", PROGRAM.sub("", text)), re.DOTALL | re.MULTILINE)


def files(page: str) -> dict[str, str]:
    """The files that a page shows, by name."""
    return dict(FILE.findall((DOCS / page).read_text(encoding="utf-8")))


def commands(page: str) -> list[str]:
    """The command lines that a page shows, each behind a `$`, with the lines that go on from a backslash."""
    text = (DOCS / page).read_text(encoding="utf-8")
    shown = "".join(re.findall(r"^```console\n(.+?)^```", text, re.DOTALL | re.MULTILINE))
    return [found.replace("\\\n", " ") for found in re.findall(r"^\$ ((?:.*\\\n)*.*)$", shown, re.MULTILINE)]


def programs() -> list[tuple[str, int, str, str]]:
    """The programs in the pages: where each stands, how many workers it has, what it prints, and its text."""
    texts = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    return [(page, int(size), out, source) for page in texts for size, out, source in PROGRAM.findall(texts[page])]


def workers(text: str) -> list[str]:
    """The names of the workers of a page; the first one runs its blocks."""
    found = re.search(r"^<!-- workers: (.+?) -->$", text, re.MULTILINE)
    return (found[1] if found else "me ps").replace("none", "").split()


def printed(pieces: list[str]) -> list[str]:
    """What the blocks say that they print, in order."""
    return [line.rpartition("# -> ")[2] for piece in pieces for line in piece.splitlines() if "# -> " in line]


def unmatched(text: str, starts: list[str]) -> list[str]:
    """The starts that no line of the text has, when its lines are looked through in order."""
    lines = iter(text.splitlines())
    return [start for start in starts if not any(line.startswith(start) for line in lines)]


async def run(page: str, look: Callable[[dict[str, Any]], None] | None = None) -> str:
    """Run a page; what it printed. look: called with its names at the end."""
    text = (DOCS / page).read_text(encoding="utf-8")
    out = io.StringIO()
    with _module() as names, contextlib.redirect_stdout(out):
        async with asyncio.timeout(LIMIT / 2):
            await _run(page, blocks(text), workers(text), names)
            if look is not None:
                look(names)
    return out.getvalue()


@contextlib.contextmanager
def _module() -> Iterator[dict[str, Any]]:
    # The namespace of an importable module: its functions travel by name, as those of a program do.
    made = types.ModuleType(MODULE)
    sys.modules[MODULE] = made
    try:
        yield made.__dict__
    finally:
        del sys.modules[MODULE]


async def _run(page: str, pieces: list[str], members: list[str], names: dict[str, Any]) -> None:
    store = HashStore()
    size = len(members)

    async def serve(rank: int) -> None:
        async with aiorpc.init(members[rank], rank=rank, world_size=size, store=store):
            pass

    async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
        for rank in range(1, size):
            group.create_task(serve(rank))
        if members:
            await stack.enter_async_context(aiorpc.init(members[0], rank=0, world_size=size, store=store))
        for number, piece in enumerate(pieces, 1):
            await _run_block(piece, f"{page}, block {number}", names)


async def _run_block(piece: str, name: str, names: dict[str, Any]) -> None:
    # As the body of an async program, or, if it awaits nothing, where blocking calls belong.
    code = compile(piece, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & 0x80:  # CO_COROUTINE: it awaits
        await eval(code, names)
    else:
        await asyncio.to_thread(eval, code, names)


def steps(text: str) -> list[tuple[list[str], str, list[str]]]:
    """The steps of the tutorial: the blocks since the last output, the command of its workers, and that output."""
    found: list[tuple[list[str], str, list[str]]] = []
    gathered: list[str] = []
    command = ""
    for kind, body in re.findall(r"^```(python|console|text)\n(.+?)^```", text, re.DOTALL | re.MULTILINE):
        if kind == "python":
            gathered.append(body)
        elif kind == "console":
            command = body.strip().removeprefix("$ ")
        else:
            found.append((gathered, command, body.splitlines()))
            gathered = []
    return found


def grown(program: str, block: str) -> str:
    """The program with what a block has: its functions, classes and variables in the place of those of the same name.

    What is new comes before the function `main`.
    """
    if not program:
        return block
    known, new = _parts(program), _parts(block)
    names = list(known)
    names[names.index("main") : names.index("main")] = [name for name in new if name not in known]
    known |= new
    return "\n\n".join(known[name] for name in names) + "\n"


def _parts(source: str) -> dict[str, str]:
    # The top-level statements by what they define, or, where they define nothing, by their text.
    lines = source.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)])
        text = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = text
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = text
        else:
            found[text] = text
    return found
