"""The workers of a group of peers: a list of them, or those that fit a pattern or a role at the moment."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from fnmatch import translate
from typing import Protocol

from ...errors import RpcUsageError, UnknownWorker
from ...protocol.identity import WorkerInfo
from ...rights import check_role
from ..caller.peer import Peer
from ..caller.peers import To
from .home import Home


class Members(Protocol):
    """The members of a group of peers. Any thread. count: how many they are; None if that changes."""

    @property
    def count(self) -> int | None: ...

    def now(self) -> list[Peer]:
        """The present members, in their order. Raises UnknownWorker if there are none."""

    def describe(self) -> str:
        """Who they are, for errors."""


class NamedMembers:
    """The workers of a list, in its order. A worker stays a member even if it dies and comes back."""

    def __init__(self, home: Home, named: Sequence[To]) -> None:
        """Raises RpcUsageError for an empty list or a worker that is in it twice, and the errors of `Peers.find`."""
        self._home = home
        self._named = tuple(named)
        if not self._named:
            raise RpcUsageError("a group has at least one member, and this list is empty")
        seen: dict[Peer, To] = {}
        for to in self._named:
            peer = home.peers.find(to)
            if peer in seen:
                raise RpcUsageError(
                    f"worker {peer.name!r} is in the list twice, as {seen[peer]!r} and as {to!r}; a group has each once"
                )
            seen[peer] = to
        self.count: int = len(seen)

    def now(self) -> list[Peer]:
        """All workers of the list, whether they live or not."""
        find = self._home.peers.find
        return [find(to) for to in self._named]

    def describe(self) -> str:
        """The first few of the list."""
        shown = ", ".join(to.name if isinstance(to, WorkerInfo) else str(to) for to in self._named[:4])
        return f"[{shown}{', ...' if len(self._named) > 4 else ''}]"


class ChosenMembers:
    """The live workers that fit a pattern and have a role, by id, as workers join and leave.

    pattern: as file names have (``*``, ``?``, ``[abc]``). role: None for any.
    """

    count = None

    def __init__(self, home: Home, pattern: str, role: str | None) -> None:
        """Raises RpcUsageError for a role that cannot be."""
        self._home = home
        self._pattern = pattern
        self._role = None if role is None else check_role(role)
        self._fits = re.compile(translate(pattern)).match

    def now(self) -> list[Peer]:
        """The live workers that fit. Raises UnknownWorker if there are none."""
        role, fits, home = self._role, self._fits, self._home
        live = home.group.live()
        chosen = [record for record in live if (role is None or record.role == role) and fits(record.name)]
        if not chosen:
            there = ", ".join(sorted(f"{each.name} ({each.role})" if each.role else each.name for each in live))
            raise UnknownWorker(f"no worker is in the group {self.describe()}, and nothing was sent; there are {there}")
        # By rank: a worker that took the place of another one stands where that stood.
        chosen.sort(key=operator.attrgetter("rank"))
        return [home.peers.of(record) for record in chosen]

    def describe(self) -> str:
        """Pattern and role."""
        return repr(self._pattern) if self._role is None else f"{self._pattern!r} of role {self._role!r}"


def make_members(home: Home, to: str | Sequence[To] | None, role: str | None) -> Members:
    """The members for the arguments of `aiorpc.group`. Raises RpcUsageError for invalid ones."""
    if to is None and role is None:
        raise RpcUsageError("group() takes a pattern, a list of workers, or role=; all workers are group('*')")
    if to is None or isinstance(to, str):
        if to == "":
            raise RpcUsageError("an empty pattern fits no worker; all workers are group('*')")
        return ChosenMembers(home, "*" if to is None else to, role)
    if role is not None:
        raise RpcUsageError("role= chooses among all workers, or those of a pattern, and not among those of a list")
    if isinstance(to, (WorkerInfo, int)):
        raise RpcUsageError(f"a group is a pattern or a list of workers, not {to!r}; write group([{to!r}])")
    if not isinstance(to, Sequence):
        raise RpcUsageError(f"a group is a pattern or a list of workers, not {type(to).__qualname__}")
    return NamedMembers(home, to)
