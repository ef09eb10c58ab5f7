"""Installs aiorpc.compat.torch in a Python process once it has imported torch; `children` lets it run.

Most children of a program never import torch, and still run this file. So it imports only modules that every Python
process has imported already; the rest waits for torch.
"""

import os
import sys

# Their public names are in importlib.machinery and importlib.util, whose import costs milliseconds.
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 4))  # where aiorpc is


class _Loader:
    """The module's own, and then `install`."""

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        self._loader.exec_module(module)
        outer = sys.modules.get("aiorpc")
        if outer is None or module is outer or not getattr(outer.__spec__, "_initializing", False):
            _install()


def _install() -> None:
    import importlib.util

    if importlib.util.find_spec("aiorpc") is None:  # not on this process's path
        sys.path.append(_ROOT)
    importlib.import_module("aiorpc.compat.torch").install()


class _Finder:
    """Sees torch come, once; and aiorpc, which imports torch while it is not whole itself."""

    def __init__(self) -> None:
        self._awaited = {"aiorpc", "torch"}

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self._awaited:
            return None
        import importlib.util

        self._awaited.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # has what the import system asks for
        return spec


def _run_next() -> None:
    """The sitecustomize that would have been imported without this one."""
    path = [part for part in sys.path if os.path.abspath(part) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if "torch" in sys.modules:  # forked from a server that had it
    _install()
else:
    sys.meta_path.insert(0, _Finder())
if __name__ == "sitecustomize":  # and not run by a parent's word
    sys.path[:] = [part for part in sys.path if os.path.abspath(part) != _HERE]
    _run_next()
