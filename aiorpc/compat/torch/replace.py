"""Replaces objects, and restores them."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from types import ModuleType
from typing import Any

_ABSENT: Any = object()


class Replacements:
    """A list of replacements; `undo` restores all objects, the latest first."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, object]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to `value`."""
        # A class's name is a descriptor of its metaclass: it is not in the class's own dictionary.
        before = getattr(owner, name) if name == "__name__" else vars(owner).get(name, _ABSENT)
        self._undo.append((owner, name, before))
        setattr(owner, name, value)

    def item(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Set ``mapping[key]`` to `value`."""
        self._undo.append((mapping, key, mapping.get(key, _ABSENT)))
        mapping[key] = value

    def no_item(self, mapping: MutableMapping[str, Any], key: str) -> None:
        """Remove a key from `mapping`."""
        self._undo.append((mapping, key, mapping.pop(key, _ABSENT)))

    def module(self, name: str, value: ModuleType) -> None:
        """Replace a module: for imports, and as an attribute of its package if that is imported."""
        self.item(sys.modules, name, value)
        package, _, leaf = name.rpartition(".")
        if package in sys.modules:
            self.attribute(sys.modules[package], leaf, value)

    def undo(self) -> None:
        """Restore all objects."""
        while self._undo:
            owner, name, value = self._undo.pop()
            if isinstance(owner, dict):
                owner.pop(name, None) if value is _ABSENT else owner.__setitem__(name, value)
            elif value is _ABSENT:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)
