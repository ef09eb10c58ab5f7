"""Drawings in mermaid, which GitHub draws, are folded away on the site: it has no script for them.

The drawing of the site is docs/_static/architecture.svg.
"""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx


def fold(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put each into an element that opens when it is asked for."""
    if app.builder.format != "html":
        return
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            summary = "<details><summary>The drawing as text (mermaid)</summary>"
            block.replace_self(
                [nodes.raw("", summary, format="html"), block.deepcopy(), nodes.raw("", "</details>", format="html")]
            )


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-resolved", fold)
    return {"parallel_read_safe": False}
