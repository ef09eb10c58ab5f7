"""Child processes install aiorpc as well.

Forked ones have what their parent has. Those that ``multiprocessing`` spawns get a word about how to prepare themselves
from their parent, before they import the program: it says `install`, too. All others, like torchrun's, get it from
``python -m aiorpc.compat.torch`` through the environment: a directory on PYTHONPATH whose ``sitecustomize`` waits for
torch to be imported.
"""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from .replace import Replacements

SITE = str(Path(__file__).parent / "site")


class _Install:
    """Unpickles as a call of `install`, in a process that begins."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install_here, ()


def install_here() -> None:
    """In a spawned child: before its main module is imported."""
    importlib.import_module(f"{__package__}.substitute").install()


def follow(replaced: Replacements) -> None:
    """From now on children that ``multiprocessing`` spawns install aiorpc, too."""
    prepare: Callable[..., dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"aiorpc": _Install(), **prepare(name)}

    replaced.attribute(multiprocessing.spawn, "get_preparation_data", get_preparation_data)


def lead(environment: MutableMapping[str, str]) -> None:
    """From now on all Python processes that are started with this environment install aiorpc, if they import torch."""
    path = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != SITE]
    root = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([SITE, *path, *([] if root in path else [root])])
