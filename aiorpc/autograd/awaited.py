"""The entries of a worker that wait for gradients in a backward pass, and the targets that wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..runtime.gradients.reach import SentName


class Awaited:
    """The entries of one part of a pass, by name, with the masks of the targets that they lead to.

    Thousands of gradients may come one by one. So a binary tree unites the masks of the entries: a gradient changes
    only the nodes above its entry. Not thread-safe.

    missing: entries without gradients, with their places in the trees. targets: of all entries. blocked: targets for
    which a gradient is missing.
    """

    targets: int
    blocked: int

    def __init__(self, names: Sequence[SentName], masks: Sequence[int]) -> None:
        first = len(names)  # where the entries stand in the trees
        self._names: list[Any] = [None] * first
        self._names += names
        self._leads = _united(masks)  # to which targets
        self._blocked = self._leads.copy()  # the same, for missing entries alone
        self.missing: dict[SentName, int] = dict(zip(names, range(first, 2 * first), strict=True))
        self.targets = self.blocked = self._leads[1]

    def came(self, names: Iterable[SentName]) -> None:
        """Gradients have come, for those of `names` that are entries."""
        blocked = self._blocked
        for name in names:
            at = self.missing.pop(name, 0)
            if at and blocked[at]:
                blocked[at] = 0
                while at > 1:
                    at >>= 1
                    united = blocked[2 * at] | blocked[2 * at + 1]
                    if united == blocked[at]:
                        break
                    blocked[at] = united
        self.blocked = blocked[1]

    def leading_to(self, targets: int) -> list[SentName]:
        """The entries that lead to any of some targets, in their order."""
        found, todo, leads, first = [], [1], self._leads, len(self._names) // 2
        while todo:
            at = todo.pop()
            if leads[at] & targets:
                if at >= first:
                    found.append(at)
                else:
                    todo += 2 * at, 2 * at + 1
        found.sort()
        return list(map(self._names.__getitem__, found))


def _united(masks: Sequence[int]) -> list[int]:
    """A tree: at 1 the union of all masks, at n the union of 2n and 2n + 1, and the masks themselves last."""
    tree = [0] * max(2 - len(masks), len(masks))
    tree += masks
    for at in range(len(masks) - 1, 0, -1):
        tree[at] = tree[2 * at] | tree[2 * at + 1]
    return tree
