"""aiorpc's pages for the debug server of torch, `torch.distributed.debug`, in programs that run it.

    from torch.distributed.debug import start_debug_server
    from torch.distributed.debug._debug_handlers import default_handlers
    from aiorpc.observability.debug_pages import handlers

    start_debug_server(handlers=[*default_handlers(), *handlers()])

torch calls that server experimental, and it has no authentication: it is for trusted networks, and aiorpc never starts
it. The pages are made in its front end, a process of the host of rank 0, of the groups that have members there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import foreign
from ..errors import RpcUsageError
from . import diagnosis, outside, reader, wait_graph
from .reader import CannotLook, SeenGroup

if TYPE_CHECKING:
    from torch.distributed.debug._frontend import DebugHandler, HTTPRequestHandler, NavLink, Route

_TEMPLATE = """{% extends "base.html" %}
{% block header %}<h1>{% block title %}{{ title | e }}{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text | e }}</pre>{% endblock %}
"""


def handlers() -> list[DebugHandler]:
    """The pages "aiorpc: diagnosis", "aiorpc: wait graph" and "aiorpc: stacks", for `start_debug_server`.

    Its periodic dumps may have them, too: ``enabled_dumps={"aiorpc_diagnosis", "aiorpc_wait_graph", "aiorpc_stacks"}``.
    RpcUsageError if this torch has no debug server that takes pages, or what it needs is missing.
    """
    return [_page("diagnosis"), _page("wait_graph"), _page("stacks")]


def _page(name: str) -> DebugHandler:
    try:
        from torch.distributed.debug import _frontend
        from torch.distributed.debug._frontend import DebugHandler
    except ImportError as error:
        raise RpcUsageError(
            f"torch.distributed.debug takes no pages here ({foreign.text_of(error)}): it needs torch 2.13, and "
            "`pip install jinja2 aiohttp tabulate`"
        ) from None
    text = {"diagnosis": _diagnosis, "wait_graph": _wait_graph, "stacks": _stacks}[name]
    path, title = f"aiorpc_{name}", f"aiorpc: {name.replace('_', ' ')}"

    class Page(DebugHandler):
        """One page. It may go to another process."""

        def __reduce__(self) -> tuple[object, ...]:
            return _page, (name,)

        def routes(self) -> list[Route]:
            return [_frontend.Route(f"/{path}", self._handle)]

        def nav_links(self) -> list[NavLink]:
            return [_frontend.NavLink(f"/{path}", title)]

        def templates(self) -> dict[str, str]:
            return {"aiorpc.html": _TEMPLATE}

        def dump(self) -> str:
            return text()

        def dump_filename(self) -> str:
            return path

        def _handle(self, request: HTTPRequestHandler) -> bytes:
            return bytes(request.frontend.render_template("aiorpc.html", title=title, text=text()))

    return Page()


def _diagnosis() -> str:
    looks = reader.looks(_all_members)
    outside.add_places(looks[-1])
    return diagnosis.as_text(diagnosis.findings(looks), looks[-1])


def _wait_graph() -> str:
    looks = reader.looks(_all_members, reader.PAUSES[:1])
    return wait_graph.as_text(wait_graph.build(looks[-1]), wait_graph.circle(looks[0], looks[-1]))


def _stacks() -> str:
    parts = []
    for name in _all_members().names:
        try:
            text = outside.stacks(name)
        except CannotLook as error:
            text = str(error)
        parts.append(f"--- worker {name} ---\n\n{text}")
    return "\n".join(parts)


def _all_members() -> SeenGroup:
    """The members of the groups here: a job has one, as a rule."""
    groups = reader.groups()
    return SeenGroup([each for one in groups for each in one.reports], [each for one in groups for each in one.unseen])
