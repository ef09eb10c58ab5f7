"""What to say of a condition that a test has waited for in vain."""

from __future__ import annotations

import ast
import inspect
import linecache
import reprlib
from collections.abc import Callable
from types import CodeType, FunctionType

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200


def unmet(condition: Callable[..., object], value: object, seconds: float) -> str:
    """The condition as it stands in the test, what it returned at last, and what it looked at.

    Of a comparison the left side is looked at once more: of ``served() == 2`` one wants to know how many there were.
    """
    said = f"not within {seconds:g} s: "
    if not isinstance(condition, FunctionType):
        return f"{said}{condition}, which gave {_short.repr(value)}"
    text = _body(condition.__code__)
    if text is None:
        return f"{said}{condition.__qualname__}, which gave {_short.repr(value)}"
    return f"{said}{text}, which gave {_short.repr(value)}{_left_side(condition, text)}"


def _body(code: CodeType) -> str | None:
    """What a lambda returns, as it was written; None for another function, or where that cannot be read."""
    if code.co_name != "<lambda>":
        return None
    found = [place for place in code.co_positions() if place[2:] != (0, 0)]
    starts = [(line, column) for line, _, column, _ in found if line is not None and column is not None]
    ends = [(line, column) for _, line, _, column in found if line is not None and column is not None]
    if not starts or not ends:
        return None
    first, last = min(starts), max(ends)
    lines = [linecache.getline(code.co_filename, line) for line in range(first[0], last[0] + 1)]
    if not all(lines):
        return None
    lines[-1] = lines[-1].encode()[: last[1]].decode(errors="ignore")
    lines[0] = lines[0].encode()[first[1] :].decode(errors="ignore")
    return " ".join("".join(lines).split())


def _left_side(condition: FunctionType, text: str) -> str:
    """What is compared there, and with what value; nothing where that cannot be told."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Compare):
            return ""
        around = inspect.getclosurevars(condition)
        value = eval(ast.unparse(tree.left), {**condition.__globals__, **around.nonlocals})
        return f": {ast.unparse(tree.left)} is {_short.repr(value)}"
    except Exception:  # what the test says is more than nothing, and its own error is not hidden by this one
        return ""
