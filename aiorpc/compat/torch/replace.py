"""Puts objects in place of others, remembers what was there, and puts that back."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from types import ModuleType
from typing import Any

_ABSENT: Any = object()


class Replacements:
    """What was replaced, in order; `undo` puts all of it back, the latest first."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, object]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name`` is `value` from now on."""
        # A class's name is a descriptor of its metaclass: it is not in the class's own dictionary.
        before = getattr(owner, name) if name == "__name__" else vars(owner).get(name, _ABSENT)
        self._undo.append((owner, name, before))
        setattr(owner, name, value)

    def item(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """``mapping[key]`` is `value` from now on."""
        self._undo.append((mapping, key, mapping.get(key, _ABSENT)))
        mapping[key] = value

    def no_item(self, mapping: MutableMapping[str, Any], key: str) -> None:
        """`mapping` has no such key from now on."""
        self._undo.append((mapping, key, mapping.pop(key, _ABSENT)))

    def module(self, name: str, value: ModuleType) -> None:
        """The module of that name is another one: for imports, and as an attribute of its package if that is there."""
        self.item(sys.modules, name, value)
        package, _, leaf = name.rpartition(".")
        if package in sys.modules:
            self.attribute(sys.modules[package], leaf, value)

    def undo(self) -> None:
        """Everything is as it was."""
        while self._undo:
            owner, name, value = self._undo.pop()
            if isinstance(owner, dict):
                owner.pop(name, None) if value is _ABSENT else owner.__setitem__(name, value)
            elif value is _ABSENT:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)
