"""Small tables of HTML, as notebooks show for a value whose class has ``_repr_html_``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. All of it is text: what looks like HTML is shown as it is written."""
    head = "".join(f"<th>{escape(each)}</th>" for each in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
