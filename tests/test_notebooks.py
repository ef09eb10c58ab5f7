"""What a notebook shows of a worker and of a group: small tables, in which all is text."""

from __future__ import annotations

import asyncio
import time

import aiorpc as rpc
from aiorpc.notebooks import html_table
from aiorpc.testing import cluster
from tests.settling import until


def test_all_cells_are_text() -> None:
    """Also what looks like a part of a page."""
    table = html_table("<b>", ("<i>", "x"), [("<script>alert(1)</script>", 'a"b & c')])
    assert table == (
        "<table><caption>&lt;b&gt;</caption><thead><tr><th>&lt;i&gt;</th><th>x</th></tr></thead><tbody><tr>"
        "<td>&lt;script&gt;alert(1)&lt;/script&gt;</td><td>a&quot;b &amp; c</td></tr></tbody></table>"
    )


def sleep(seconds: float) -> None:
    """Handler."""
    time.sleep(seconds)


async def test_a_worker_and_a_group() -> None:
    """State, members and calls under way; a worker that has not joined, and a group without members, say so."""
    assert "worker alone: new" in rpc.init("alone")._repr_html_()
    async with cluster(2, roles=["learner", ""]) as (a, b):
        group = a.group("*")
        assert "<td>worker1</td><td>1</td>" in group._repr_html_()
        waiting = asyncio.ensure_future(a.call("worker1", sleep, 0.5))
        await until(lambda: b.statistics().calls_running == 1)
        shown = a._repr_html_()
        assert "worker worker0, role learner: running, id 0, 2 members, 2 workers" in shown
        assert "<td>made</td><td>worker1</td>" in shown and ":sleep</td>" in shown
        assert "<td>served</td><td>worker0</td>" in b._repr_html_()
        assert "<td>1</td></tr>" in group._repr_html_()
        await waiting
        assert "<tbody></tbody>" in a.group("no*")._repr_html_()
    assert "worker worker0, role learner: closed" in a._repr_html_()
