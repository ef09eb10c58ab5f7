"""Child processes install aiorpc as well.

Forked children inherit it. A child that ``multiprocessing`` spawns runs ``site/sitecustomize.py`` before it imports the
program; that waits for the import of torch. All others, like torchrun's, run it because ``python -m
aiorpc.compat.torch`` puts its directory on PYTHONPATH.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import runpy
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from .replace import Replacements

SITE = str(Path(__file__).parent / "site")


class _Install:
    """Unpickled in a new process, before its path is set: waits there for torch, as ``sitecustomize``."""

    def __reduce__(self) -> tuple[object, ...]:
        return runpy.run_path, (os.path.join(SITE, "sitecustomize.py"),)


def follow(replaced: Replacements) -> None:
    """Let children that ``multiprocessing`` spawns install aiorpc, too."""
    prepare: Callable[..., dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, object]:
        return {"aiorpc": _Install(), **prepare(name)}

    replaced.attribute(multiprocessing.spawn, "get_preparation_data", get_preparation_data)


def lead(environment: MutableMapping[str, str]) -> None:
    """Let all Python processes with this environment install aiorpc if they import torch."""
    path = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != SITE]
    environment["PYTHONPATH"] = os.pathsep.join([SITE, *path])
