"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence

DISTRIBUTIONS = ("aiorpc", "torch", "uvloop", "msgpack", "numpy", "ray")


def facts(arguments: Sequence[str], rounds: int, seconds: float, *, null: bool = False) -> dict[str, str]:
    """Machine, versions, how it was measured, and the command that does it again."""
    return {
        "sides": f"{'torch.distributed.rpc, for the noise,' if null else 'aiorpc'} against torch.distributed.rpc",
        "command": shlex.join(["python", "-m", "bench", *arguments]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: _version(name) for name in DISTRIBUTIONS},
        "load": f"{os.getloadavg()[0]:.2f} when it began",
        "method": _method(rounds, seconds),
    }


def _method(rounds: int, seconds: float) -> str:
    return (
        f"{rounds} rounds after one that does not count, sides in turn, {seconds:g} s each (large tensors: half of it, "
        "but a few calls at least, and the answer dropped once the clock has stopped), the waiting side's workers "
        "stopped (SIGSTOP); defaults on both sides (16 handler threads); one OMP thread; gc.collect(), then "
        "gc.freeze(), in every worker of both sides once all had joined; awaited calls on uvloop"
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "from source" if distribution in sys.modules or distribution == "aiorpc" else "absent"


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def line(found: dict[str, str]) -> str:
    """The facts a table needs above it, on one line."""
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['memory']}; {found['system']}; {found['python']}, "
        f"torch {found['torch']}, uvloop {found['uvloop']}"
    )
