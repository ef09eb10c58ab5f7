"""Child processes install aiorpc as well.

Forked ones have what their parent has. Those that ``multiprocessing`` spawns get a word about how to prepare themselves
from their parent, before they import the program: it runs ``site/sitecustomize.py``, which waits for torch to be
imported. All others, like torchrun's, get that from ``python -m aiorpc.compat.torch`` through the environment: its
directory is on PYTHONPATH.
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
    """Unpickled in a process that begins, whose path is not set yet: waits there for torch, as ``sitecustomize``."""

    def __reduce__(self) -> tuple[object, ...]:
        return runpy.run_path, (os.path.join(SITE, "sitecustomize.py"),)


def follow(replaced: Replacements) -> None:
    """From now on children that ``multiprocessing`` spawns install aiorpc, too."""
    prepare: Callable[..., dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, object]:
        return {"aiorpc": _Install(), **prepare(name)}

    replaced.attribute(multiprocessing.spawn, "get_preparation_data", get_preparation_data)


def lead(environment: MutableMapping[str, str]) -> None:
    """From now on all Python processes that are started with this environment install aiorpc, if they import torch."""
    path = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != SITE]
    environment["PYTHONPATH"] = os.pathsep.join([SITE, *path])
