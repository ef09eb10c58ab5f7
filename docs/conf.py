"""How the site is built from these pages: `make docs`, which needs no network and takes no warning."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

import aiorpc  # noqa: E402  # this checkout's, which the line above puts first

project = "aiorpc"
author = "aiorpc authors"
copyright = "aiorpc authors"
version = release = aiorpc.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "docstrings", "public", "drawings", "llms"]
exclude_patterns = ["_*", "guide.md"]

# Pages read the same on GitHub: links go to files and headings, and fences are code there, too.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # drawings of states are in mermaid, which GitHub draws

add_module_names = False
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    # Of what is inherited, that of classes of ours alone.
    "inherited-members": "ABC,BaseException,Enum,Exception,Future,Generic,Module,RuntimeError,Sequence,int,object,"
    "OSError,BaseExceptionGroup,dict,tuple",
}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
smartquotes_action = "D"  # dashes alone: what stands in quotes is often code
# In a docstring `name` is a link where there is such a name, and code where there is none.
default_role = "py:obj"

# Names of others are links only where the network is allowed: AIORPC_DOCS_ONLINE=1 make docs.
intersphinx_mapping = (
    {"python": ("https://docs.python.org/3", None), "torch": ("https://docs.pytorch.org/docs/stable", None)}
    if os.environ.get("AIORPC_DOCS_ONLINE") == "1"
    else {}
)

pygments_dark_style = "one-dark"
html_theme = "furo"
html_title = "aiorpc"
html_static_path = ["_static"]
html_css_files = ["aiorpc.css"]
html_copy_source = False
html_show_sphinx = False
