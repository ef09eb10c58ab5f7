"""No lock stays locked if a signal handler raises in a loop.

On Python 3.13 an exception that comes at the jump back of some loops passes by the `with` around them
(docs/inside/decisions/interrupts.md). Which jumps these are is in the tables that the interpreter compiles; a release
without such gaps has nothing to find.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import aiorpc

PACKAGE = Path(aiorpc.__file__).parent


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code and those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def jumps_back(code: CodeType) -> Iterator[tuple[int, bool]]:
    """The line of each jump back, and whether an exception that comes there is seen by what stands around it."""
    guarded = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # typeshed has no such field
    for instruction in dis.get_instructions(code):
        line = instruction.positions and instruction.positions.lineno
        if "JUMP_BACKWARD" in instruction.opname and "NO_INTERRUPT" not in instruction.opname and line is not None:
            yield line, any(entry.start <= instruction.offset < entry.end for entry in guarded)


def loops_under_locks(source: str) -> tuple[int, list[int]]:
    """How many jumps back of loops there are within a `with` of a lock or condition; lines of those with a gap.

    These are attributes; what is called there is made for that one block.
    """
    tree = ast.parse(source)
    held: list[range] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(isinstance(item.context_expr, ast.Attribute) for item in node.items):
            held.append(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    if not held:
        return 0, []
    found = [
        (line, seen)
        for code in codes(compile(tree, "source", "exec"))
        if not code.co_name.startswith("<")  # what a comprehension raises is raised by the line that it stands in
        for line, seen in jumps_back(code)
        if any(line in lines for lines in held)
    ]
    return len(found), [line for line, seen in found if not seen]


def test_loops_under_locks_can_be_interrupted() -> None:
    """Whatever the interpreter, each jump back within a `with lock:` is seen by it."""
    count, gaps = 0, list[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        found, lines = loops_under_locks(path.read_text())
        count += found
        gaps += [f"{path.relative_to(PACKAGE)}:{line}" for line in lines]
    assert count > 10, "it finds the loops"
    assert not gaps


def test_a_gap_is_found() -> None:
    """A loop of which the interpreter compiles a part outside of the `with`, as all do for a loop around one."""
    around = "def work(lock, items):\n    while items:\n        with lock:\n            items.pop()\n"
    assert loops_under_locks(around)[1] == []
    (code,) = (each for each in codes(compile(ast.parse(around), "source", "exec")) if each.co_name == "work")
    assert False in {seen for _, seen in jumps_back(code)}
