"""What is sampled of a process: from outside by /proc, from inside what Python and the event loop know."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

from ..stats import percentile

MIB = 1 << 20

#: Name -> unit, in the order of the picture. What /proc does not say is sampled inside of the process.
GAUGES = {
    "rss": "MiB",
    "pss": "MiB",
    "uss": "MiB",
    "descriptors": "",
    "threads": "",
    "segments": "",
    "tasks": "",
    "objects": "",
    "p50": "ms",
    "p99": "ms",
}


def of_process(pid: int) -> dict[str, float]:
    """Memory, descriptors, threads, and segments of arenas, its own and those of others. Raises OSError once it ended.

    rss: all that is resident. pss: that, shared pages divided by those who share them. uss: what is its own alone.
    """
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    links = [_link(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {
        "rss": sizes["Rss"] / MIB,
        "pss": sizes["Pss"] / MIB,
        "uss": (sizes["Private_Clean"] + sizes["Private_Dirty"]) / MIB,
        "descriptors": float(len(links)),
        "threads": float(len(os.listdir(f"/proc/{pid}/task"))),
        "segments": float(sum(link.startswith("/memfd:aiorpc") for link in links)),
    }


def from_inside(latencies: list[float]) -> dict[str, float]:
    """Tasks of the running loop, objects that the collector tracks, and quantiles of some seconds, in milliseconds.

    Unlike what stood there before ``gc.freeze``, objects are those that came since.
    """
    gc.collect()
    found = {"tasks": float(len(asyncio.all_tasks())), "objects": float(len(gc.get_objects()))}
    if latencies:
        found |= {"p50": percentile(latencies, 50) * 1e3, "p99": percentile(latencies, 99) * 1e3}
    return found


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:  # it was closed meanwhile
        return ""
