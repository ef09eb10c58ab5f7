"""Docstrings as they are written here, as Sphinx wants them.

A docstring names what it is given, and the fields of what it makes, as ``name: text.``, one after the other or one in
each paragraph. Where that is a parameter or a field, it becomes an entry of a list.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from aiorpc import errors

# Classes that programs call; objects of all others come from verbs, or from the runtime.
MADE_BY_PROGRAMS = {
    "aiorpc.Future",
    "aiorpc.LimitOptions",
    "aiorpc.NetworkOptions",
    "aiorpc.Queue",
    "aiorpc.RRef",
    "aiorpc.RpcBackendOptions",
    "aiorpc.SecurityOptions",
    "aiorpc.Tls",
    "aiorpc.nn.RemoteModule",
    "aiorpc.optim.DistributedOptimizer",
    "aiorpc.testing.Faults",
}
# What a function raises itself, and what comes from its Future or in a turn of its loop.
RAISED = re.compile(r"Raised\b[^:]{0,40}:")
ERROR = re.compile(rf"(?<![\w.`:~])({'|'.join(errors.__all__)})(?![\w`])")
# A variable of types, as Python shows it: `~P`, which Sphinx cannot read.
VARIABLE = re.compile(r"(?:~typing\.)?~([A-Z][A-Za-z]?(?:_co)?)(?=[\],\s)]|$)")
# `a, b: what they are.`, at the beginning of a line or behind a sentence.
ENTRY = re.compile(r"(?:(?<=^)|(?<=[.;)] ))(?P<names>\w+(?:, \w+)*): (?=\S)")


def parameters(value: Any) -> set[str]:
    """What the object is given, and what fields it has."""
    found: set[str] = set()
    for each in (value, getattr(value, "__init__", None) if inspect.isclass(value) else None):
        try:
            found |= set(inspect.signature(each).parameters) if each is not None else set()
        except (TypeError, ValueError):
            continue
    if inspect.isclass(value):
        for made in value.__mro__:
            if made.__module__.partition(".")[0] == "aiorpc":
                found |= set(inspect.get_annotations(made)) | {name for name in vars(made) if not name.startswith("_")}
                code = getattr(vars(made).get("__init__"), "__code__", None)
                found |= set(code.co_names) if code else set()
    return found


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Lines that stand together."""
    made: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            made[-1].append(line)
        elif made[-1]:
            made.append([])
    return [each for each in made if each]


def entries(paragraph: list[str], known: set[str], field: str) -> list[str] | None:
    """The paragraph with a list in place of `name: text`; None if it has none."""
    first = next((number for number, line in enumerate(paragraph) if _entry(line, known)), None)
    if first is None:
        return None
    lines, before = paragraph[first:], paragraph[:first]
    text = " ".join(line.strip() for line in lines)
    found = [match for match in ENTRY.finditer(text) if _known(match, known)]
    made = [*before, text[: found[0].start()].rstrip(), ""]
    for match, following in zip(found, [*found[1:], None], strict=True):
        described = text[match.end() : following.start() if following else len(text)].strip()
        made.append(f":{field} {match['names'].replace(', ', ',')}: {described[0].upper()}{described[1:].rstrip(';')}")
    return [line for line in made if line] if before or made[0] else made


def _entry(line: str, known: set[str]) -> bool:
    return any(_known(match, known) for match in ENTRY.finditer(line.strip()))


def _known(match: re.Match[str], known: set[str]) -> bool:
    return set(match["names"].split(", ")) <= known


def styled(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Rewrite the lines of a docstring in place."""
    known = parameters(value)
    field = "ivar" if is_given(what, name) else "param"
    text: list[str] = []
    fields: list[str] = []
    raised: list[str] = []
    for paragraph in paragraphs(lines):
        made = entries(paragraph, known, field)
        if made is None and (label := RAISED.match(paragraph[0])):
            raised += [f"**{label[0]}**{paragraph[0][label.end() :]}", *paragraph[1:], ""]
        elif made is None:
            text += [*paragraph, ""]
        else:
            fields += [line for line in made if line.startswith(f":{field} ")]
            before = [line for line in made if line and not line.startswith(f":{field} ")]
            text += [*before, ""] if before else []
    lines[:] = [*map(linked, text), "", *map(linked, fields), "", *map(linked, raised), ""]


def is_given(what: str, name: str) -> bool:
    """Whether it is a class whose objects programs are given, and do not make."""
    return what == "exception" or (what == "class" and name not in MADE_BY_PROGRAMS)


def linked(line: str) -> str:
    """The line with a link where it names an error without saying that it is code."""
    return ERROR.sub(r"`\g<0>`", line)


def signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, args: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Only what a program makes itself is shown with what it is made of."""
    if is_given(what, name):
        return ("", None) if args else None
    return (VARIABLE.sub(r"\1", args), VARIABLE.sub(r"\1", returns or "") or None) if args else None


def skip(app: Sphinx, what: str, name: str, value: Any, skipped: bool, options: Any) -> bool | None:
    """What is there to refuse its use (`aiorpc.nn.refused`) is left out."""
    return True if "<locals>" in getattr(value, "__qualname__", "") else None


def without_overloads(self: ModuleAnalyzer) -> None:
    """What a verb takes is shown once, as it is written, and not for each kind of function that it takes."""
    read(self)
    self.overloads = {}


read = ModuleAnalyzer.analyze


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    ModuleAnalyzer.analyze = without_overloads  # type: ignore[method-assign]
    app.connect("autodoc-process-docstring", styled)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": False}
