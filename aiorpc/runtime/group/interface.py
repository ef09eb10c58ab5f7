"""The worker, as this package needs it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from ...errors import WorkerClosed
from ...protocol.identity import WorkerRecord
from ..callee.service import Service
from ..caller.peers import Peers
from ..engine.engine import Engine
from ..links.links import Links
from ..meeting.rendezvous import Rendezvous
from .events import Events


class MembershipContext(Protocol):
    """A running worker, as `node.Node` is. On the loop."""

    rendezvous: Rendezvous
    peers: Peers
    links: Links
    services: set[Service]
    events: Events

    @property
    def engine(self) -> Engine: ...
    def is_idle(self) -> bool:
        """Whether no call of users is under way, in either direction."""

    def owes_answers(self) -> bool:
        """Whether answers wait for their callers to read, or for a suspended connection."""

    def activity(self) -> tuple[bool, int]:
        """Whether it is idle, and how many calls of users it has seen."""

    def describe_pending(self) -> str:
        """The calls of users that are under way, as text for a log message; empty if there are none."""

    def describe_leftovers(self) -> list[str]:
        """What others may still fetch from this worker: items of queues, for people."""

    def tell_parting(self) -> None:
        """Tell the callers that this worker takes no more calls."""

    def end_waits(self, why: Callable[[str], WorkerClosed], *, calls: bool) -> list[str]:
        """End the waits of this worker's program; returns their descriptions. why: makes the error of each. calls: also
        end calls of users' functions, and not only streams and waits at other workers' objects."""

    async def look_for_farewell(self, record: WorkerRecord) -> bool:
        """Whether an unreachable worker has left, according to the store."""

    async def reach(self, record: WorkerRecord) -> socket.socket:
        """A TCP socket that leads to a worker. Raises OSError or RpcError if it takes no connections."""

    async def probe(self, record: WorkerRecord) -> None:
        """Raises OSError or RpcError if a worker takes no connections."""
