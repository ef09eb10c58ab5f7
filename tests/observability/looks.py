"""Looks at the groups of the test's own process: other groups of this user on this host are left out."""

from __future__ import annotations

import asyncio
import os

from aiorpc.observability import reader
from aiorpc.observability.reader import SeenGroup
from aiorpc.observability.report import Look


async def look(*, tally: bool = False, log: bool = False) -> SeenGroup:
    """The one group of this process."""
    groups = await asyncio.to_thread(reader.groups, question=Look(tally=tally, log=log))
    (own,) = [group for group in groups if any(report.pid == os.getpid() for report in group.reports)]
    return own
