"""llms.txt and llms-full.txt beside the pages: a list of all pages, and their text in one file, as Markdown."""

from __future__ import annotations

import inspect
import pydoc
import re
from pathlib import Path

from documented import members
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PARTS = {"start": "Start", "howto": "How to", "clusters": "Clusters", "reference": "Reference", "inside": "Inside"}


def source(env: BuildEnvironment, page: str) -> str:
    """The page as Markdown, without what only Sphinx reads."""
    text = Path(env.doc2path(page)).read_text(encoding="utf-8")
    text = re.sub(r"```\{toctree\}.*?```\n?", "", text, flags=re.DOTALL)
    return re.sub(r"```\{eval-rst\}\n(.*?)```\n?", lambda block: described(block[1]), text, flags=re.DOTALL).strip()


def described(directives: str) -> str:
    """What the docstrings say of the names of a block, and of their public members."""
    parts: list[str] = []
    for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", directives, re.MULTILINE):
        value = pydoc.locate(name)
        parts += [f"### {name}", inspect.getdoc(value) or ""]
        parts += [f"#### {name}.{each}\n\n{inspect.getdoc(getattr(value, each))}" for each in members(value)]
    return "\n\n".join(parts) + "\n"


def about(env: BuildEnvironment, page: str) -> str:
    """The first sentence of the page."""
    first = next(iter(env.get_doctree(page).findall(nodes.paragraph)), None)
    text = " ".join(first.astext().split()) if first is not None else ""
    return re.split(r"(?<=[.:])\s", text)[0]


def ordered(env: BuildEnvironment, page: str) -> list[str]:
    """The page and those below it, in the order of the contents."""
    below = env.toctree_includes.get(page, [])
    return [page, *(each for child in below for each in ordered(env, child))]


def write(app: Sphinx, error: Exception | None) -> None:
    """Write both files when the pages are there."""
    if error is not None or app.builder.format != "html":
        return
    env = app.env
    pages = ordered(env, app.config.root_doc)
    title = {page: env.titles[page].astext() for page in pages}
    lines = [f"# {app.config.project}", "", f"> {about(env, app.config.root_doc)}"]
    for part, name in PARTS.items():
        lines += ["", f"## {name}", ""]
        within = [page for page in pages if page.startswith(f"{part}/")]
        lines += [f"- [{title[page]}]({app.builder.get_target_uri(page)}): {about(env, page)}" for page in within]
    out = Path(app.outdir)
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    full = "\n\n".join(source(env, page) for page in pages)
    (out / "llms-full.txt").write_text(full + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": False}
