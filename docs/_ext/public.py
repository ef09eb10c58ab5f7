"""Every public name of aiorpc is in the reference, with a docstring, and every name in a signature leads to it.

What is public is in `__all__` of the modules in `MODULES`. An object is documented under one of its public names; the
others, and the name of the module that defines it, lead there. A build has a warning, and `make docs` fails, for a
public object that no page has, for a page that has one without a docstring, and for `aiorpc.name` where there is none.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

MODULES = (
    "aiorpc",
    "aiorpc.types",
    "aiorpc.events",
    "aiorpc.errors",
    "aiorpc.autograd",
    "aiorpc.functions",
    "aiorpc.nn",
    "aiorpc.optim",
    "aiorpc.testing",
)
# What signatures name that is not ours: of torch and the standard library, and variables of types.
FOREIGN = re.compile(
    r"(torch|asyncio|collections|concurrent|contextlib|contextvars|datetime|enum|inspect|os|pathlib|ssl|types|typing)\."
    r"|(.*\.)?[A-Z]\w?(\.args|\.kwargs)?$"
    r"|[a-z]+$|[A-Z]\w*(Error|Exception|Group|Interrupt|Exit)$|(None|True|False|Ellipsis)$"
)
log = logging.getLogger(__name__)


def public() -> Iterator[tuple[str, Any]]:
    """The full name of each public object that is no module, and the object; some are there under several names."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                yield f"{module.__name__}.{name}", value


def names_of(value: Any) -> tuple[str, ...]:
    """Under which full name the object is defined, which signatures have."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return (f"{module}.{name}",) if module and name else ()


def members(value: Any) -> Iterator[str]:
    """The public members that a class of ours defines or inherits from one of ours."""
    if inspect.isclass(value):
        for name, member in inspect.getmembers_static(value):
            owner = next((each for each in value.__mro__ if name in vars(each)), object)
            made_here = owner.__module__.partition(".")[0] == "aiorpc"
            refused = "<locals>" in getattr(member, "__qualname__", "")
            if made_here and not (refused or name.startswith("_") or _is_value(member)):
                yield name


def _is_value(member: Any) -> bool:
    """Whether it is a plain value, such as the default of a field, and so described where the class is."""
    return not (callable(member) or isinstance(member, property | classmethod | staticmethod))


def undocumented(name: str, value: Any) -> Iterator[str]:
    """The names without a docstring: of the object, its public members, and its fields, which the class describes."""
    text = getattr(value, "__doc__", None) or ""
    if not text.strip() or (dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}(")):
        yield name
    for member in members(value):
        if not (inspect.getdoc(getattr(value, member, None)) or "").strip():
            yield f"{name}.{member}"
    ours = [each for each in getattr(value, "__mro__", ()) if each.__module__.startswith("aiorpc")]
    texts = "\n".join(each.__doc__ or "" for each in ours)
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        # One that says its kind has its row in a table of the reference, which a test compares.
        described = "kind" in field.metadata or re.search(rf"\b{field.name}(, \w+)*:\s", texts)
        if not field.name.startswith("_") and not described:
            yield f"{name}.{field.name}"


class Names:
    """Which public name stands for which."""

    def __init__(self, documented: set[str]) -> None:
        """documented: the full names that pages have."""
        self.documented = documented
        self.missing: list[str] = []
        self._home: dict[str, str] = {}
        objects: dict[int, tuple[Any, list[str]]] = {}
        for name, value in public():
            objects.setdefault(id(value), (value, []))[1].append(name)
        for value, names in objects.values():
            home = next((name for name in names if name in documented), None)
            if home is None:
                self.missing.append(names[0])
                continue
            for other in (*names, *names_of(value)):
                self._home[other] = home

    def find(self, target: str, context: str = "") -> str | None:
        """The documented name that is meant by a name, or by one of a member of it; context: the class around it."""
        for full in (f"{context}.{target}" if context else "", target, *(f"{each}.{target}" for each in MODULES)):
            owner, dot, member = full.rpartition(".")
            homes = (self._home.get(full, full), f"{self._home.get(owner, owner)}{dot}{member}")
            for home in homes:
                if home in self.documented:
                    return home
        return None


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element) -> Element | None:
    """The link for a name that no page has as it stands; only the text for what is no name of ours."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    found = names(env).find(target, node.get("py:class") or "")
    if found:
        domain = env.get_domain("py")
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found, node, contnode)
    plain = node["reftype"] == "obj" and not target.startswith("aiorpc.")
    return contnode if plain or FOREIGN.match(target) else None


def names(env: BuildEnvironment) -> Names:
    """Made once for each build, when all pages are read."""
    made: Names | None = getattr(env, "aiorpc_names", None)
    if made is None:
        made = env.aiorpc_names = Names(set(env.get_domain("py").data["objects"]))  # type: ignore[attr-defined]
    return made


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that no page has, and of those without docstrings."""
    env.aiorpc_names = None  # type: ignore[attr-defined]  # of an earlier build
    for name in names(env).missing:
        log.warning("%s is public and in no page of the reference", name, type="aiorpc", subtype="missing")
    for name, value in {id(value): (name, value) for name, value in public()}.values():
        for each in undocumented(name, value):
            log.warning("%s is public and has no docstring", each, type="aiorpc", subtype="docstring")
    env.aiorpc_names = Names(set(env.get_domain("py").data["objects"]))  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-check-consistency", check)
    app.connect("missing-reference", resolve, priority=900)
    return {"parallel_read_safe": False}
