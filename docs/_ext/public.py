"""Every public name of aiorpc is in the reference, with a docstring, and every name in a signature leads to it.

What is public is in `__all__` of the modules in `documented.MODULES`. An object is documented under one of its public
names; the others, and the name of the module that defines it, lead there. A build has a warning, and `make docs` fails,
for a public object that no page has, for one without a docstring, and for `aiorpc.name` where there is none.
"""

from __future__ import annotations

import re
from typing import Any

from documented import MODULES, names_of, public, undocumented
from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

# What signatures name that is not ours: of torch and the standard library, and variables of types.
FOREIGN = re.compile(
    r"(torch|asyncio|collections|concurrent|contextlib|contextvars|datetime|enum|inspect|opentelemetry|os|pathlib|ssl|types|typing)\."
    r"|(.*\.)?[A-Z][A-Za-z]?(_co|_contra)?(\.args|\.kwargs)?$"
    r"|TracerProvider$|[a-z]+$|[A-Z]\w*(Error|Exception|Group|Interrupt|Exit)$|(None|True|False|Ellipsis)$"
)
# Of ours: what stands in a signature for type checkers, and has its description where the verb has it.
CARRIERS = re.compile(r"aiorpc\..*\.(Batched|Batching|BlockingIterator|GroupProxy|ObjectMethods|RemoteMethods)$")
log = logging.getLogger(__name__)


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
    return contnode if plain or FOREIGN.match(target) or CARRIERS.match(target) else None


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
