"""What the documents have of the code: made from it, between two markers, and compared with it by a test.

    python -m tests.documents           says whether the documents are as the code is
    python -m tests.documents --write   makes those parts anew

That is section 7 of docs/inside/design.md, from the tables of states, and all of docs/inside/wire.md, from the classes
of messages.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiorpc.protocol import states
from tests import wire

COMMAND = "python -m tests.documents --write"
DESIGN = Path(__file__).resolve().parent.parent / "docs" / "inside" / "design.md"
WIRE = DESIGN.with_name("wire.md")
WIDTH = 120
BEGIN, END = "<!-- states: begin -->", "<!-- states: end -->"

AnyTable = states.Table[Any, Any]
# In the order of the document.
TABLES: tuple[AnyTable, ...] = (
    states.WORKER,
    states.PEER,
    states.RETRIED,
    states.MADE,
    states.SERVED,
    states.MESSAGE,
    states.TRANSFER,
    states.TLS,
    states.SESSION,
    states.OPENER,
    states.ACCEPTOR,
    states.LEAVING,
    states.ROUNDS,
    states.PLACE,
    states.RETURNING,
)


def diagram(table: AnyTable) -> list[str]:
    """The states as a mermaid diagram, with one arrow from a state to another."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for row in table.transitions:
        arrows.setdefault((row.source.name, row.target.name), []).append(row.event.value.replace("`", ""))
    return [
        "```mermaid",
        "stateDiagram-v2",
        f"    [*] --> {table.initial.name}",
        *(f"    {source} --> {target}: {' / '.join(events)}" for (source, target), events in arrows.items()),
        *(f"    {state.name} --> [*]" for state in table.states if state in table.final),
        "```",
    ]


def rows(table: AnyTable) -> list[str]:
    """The transitions as a table; an event that does the same in several states has one row."""
    with_threads = any(row.on for row in table.transitions)
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in table.transitions:
        cells = (row.event.value, row.target.name, *((row.on,) if with_threads else ()), row.what)
        merged.setdefault(cells, []).append(row.source.name)
    heads = ("from", "event", "to", *(("on",) if with_threads else ()), "what happens")
    return grid(heads, [(", ".join(sources), *cells) for cells, sources in merged.items()])


def grid(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *cells]
    return [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines]


def section(table: AnyTable) -> str:
    """What the document says about one table."""
    meanings = grid(("state", "what holds"), [(state.name, table.meanings[state]) for state in table.states])
    title = f"### {table.name[0].upper()}{table.name[1:]}"
    about = textwrap.wrap(table.about, WIDTH, break_on_hyphens=False)
    parts = ([title], about, diagram(table), meanings, rows(table))
    return "\n\n".join("\n".join(part) for part in parts)


def renewed(text: str, tables: Sequence[AnyTable] = TABLES) -> str:
    """The document with the part between the markers made anew. ValueError if it does not have each marker once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{DESIGN.name} must have {BEGIN} and, behind it, {END}, each of them once")
    before, rest = text.split(BEGIN)
    head = f"Made from `aiorpc/protocol/states/` by `{COMMAND}`."
    return before + "\n\n".join((BEGIN, head, *map(section, tables), END)) + rest.split(END)[1]


def differences(text: str, tables: Sequence[AnyTable] = TABLES) -> str:
    """What a document has otherwise than the tables, and what to do about it; empty if nothing."""
    lines = list(difflib.unified_diff(text.splitlines(), renewed(text, tables).splitlines(), "text", "tables", n=1))
    if not lines:
        return ""
    found = "\n".join(lines)
    return f"{DESIGN.name} differs from the tables of states; `{COMMAND}` makes its part anew:\n{found}"


def wire_differences(text: str) -> str:
    """What wire.md has otherwise than the classes of messages, and what to do about it; empty if nothing."""
    lines = list(difflib.unified_diff(text.splitlines(), wire.whole().splitlines(), "text", "classes", n=1))
    if not lines:
        return ""
    found = "\n".join(lines)
    return f"{WIRE.name} differs from the classes of messages; `{COMMAND}` makes it anew:\n{found}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compares the documents with the code they are made from.")
    parser.add_argument("--write", action="store_true", help="make the parts anew that differ")
    text = DESIGN.read_text(encoding="utf-8")
    if parser.parse_args().write:
        DESIGN.write_text(renewed(text), encoding="utf-8")
        WIRE.write_text(wire.whole(), encoding="utf-8")
        return 0
    found = differences(text) + wire_differences(WIRE.read_text(encoding="utf-8"))
    print(found or "the documents are as the code is", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
