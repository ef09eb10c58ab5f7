"""The documents that are made from the code, and their comparison with it.

    python -m tests.documents           says whether the documents match the code
    python -m tests.documents --write   writes them again

docs/inside/states.md is made from the tables of states, docs/inside/wire.md from the classes of messages.
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
INSIDE = Path(__file__).resolve().parent.parent / "docs" / "inside"
STATES = INSIDE / "states.md"
WIRE = INSIDE / "wire.md"
WIDTH = 120
INTRODUCTION = (
    "Each table lists the states of one object, and the events that lead from one state to the next. The code changes "
    "the state by the table alone: `peer.state = PEER.next(peer.state, event)`. An event that a state does not have "
    "raises IllegalTransition, which is a fault in aiorpc: input from other workers is checked before it becomes an "
    "event. A served call is the exception. It runs no such line, because each call would pay for it; a test compares "
    "what happens to calls with the table."
)

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
    """The part of the document about one table."""
    meanings = grid(("state", "what holds"), [(state.name, table.meanings[state]) for state in table.states])
    title = f"## {table.name[0].upper()}{table.name[1:]}"
    about = textwrap.wrap(table.about, WIDTH, break_on_hyphens=False)
    parts = ([title], about, diagram(table), meanings, rows(table))
    return "\n\n".join("\n".join(part) for part in parts)


def states_document(tables: Sequence[AnyTable] = TABLES) -> str:
    """All of states.md."""
    head = f"Made from `aiorpc/protocol/states/` by `{COMMAND}`; do not edit it."
    introduction = textwrap.fill(INTRODUCTION, WIDTH, break_on_hyphens=False)
    return "\n\n".join(("# States", head, introduction, *map(section, tables))) + "\n"


def differences(text: str, tables: Sequence[AnyTable] = TABLES) -> str:
    """How states.md differs from the tables, and the command that mends it; empty if it does not."""
    return compared(STATES, text, states_document(tables), "the tables of states")


def wire_differences(text: str) -> str:
    """How wire.md differs from the classes of messages, and the command that mends it; empty if it does not."""
    return compared(WIRE, text, wire.whole(), "the classes of messages")


def compared(path: Path, text: str, made: str, source: str) -> str:
    """The lines in which a document differs from what is made of its source; empty if there are none."""
    lines = list(difflib.unified_diff(text.splitlines(), made.splitlines(), "document", "code", n=1))
    if not lines:
        return ""
    found = "\n".join(lines)
    return f"{path.name} differs from {source}; `{COMMAND}` makes it anew:\n{found}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compares the documents with the code they are made from.")
    parser.add_argument("--write", action="store_true", help="write the documents again")
    if parser.parse_args().write:
        STATES.write_text(states_document(), encoding="utf-8")
        WIRE.write_text(wire.whole(), encoding="utf-8")
        return 0
    found = differences(STATES.read_text(encoding="utf-8")) + wire_differences(WIRE.read_text(encoding="utf-8"))
    print(found or "the documents match the code", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
