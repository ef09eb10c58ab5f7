"""All links of one worker, and the memory and the devices that they share."""

from __future__ import annotations

from collections.abc import Callable

from ...channels import Traffic
from ...channels.bulk import Bulk
from ...channels.inline import Inline
from ...protocol.identity import WorkerRecord
from ...transport.connection import Connection
from ..engine.engine import Engine
from ..engine.tally import PeerTraffic, Tally
from .accelerators import Accelerators
from .channel_registry import InstalledChannel, find_channels
from .link import Link, MessageSink
from .memory import Memory


class Links:
    """Makes the links of one worker, and finds them. On the loop, except where a method says otherwise.

    channels: the installed ones. open_pipe: begins to open the second connection of a link. other_end: the other end of
    a link if it is in this process, or None.
    """

    def __init__(
        self,
        engine: Engine,
        accelerators: Accelerators,
        *,
        open_pipe: Callable[[Link], None],
        other_end: Callable[[Link], Link | None],
    ) -> None:
        self.engine = engine
        self.accelerators = accelerators
        self.memory: Memory = Memory(engine, self.busy)
        self.open_pipe = open_pipe
        self.other_end = other_end
        self.channels: list[InstalledChannel] = find_channels(self)
        self._links: set[Link] = set()

    def make(
        self, connection: Connection, record: WorkerRecord, receiver: MessageSink, *, number: int, opener: bool
    ) -> Link:
        """A link over a connection whose other end has just proved who it is; `Link.close` ends it."""
        link = Link(self, connection, record, receiver, number=number, opener=opener)
        self._links.add(link)
        return link

    def ended(self, link: Link) -> None:
        """A link is closed: forget it, and add its traffic to the counters of the worker."""
        if link not in self._links:
            return
        tally = self.engine.tally
        if tally is None:
            self._links.discard(link)
        else:
            with tally.changing:
                self._links.discard(link)
                tally.ended(link.record.name, _traffic_of(link))
        counters = self.engine.counters
        counters.add_traffic(link.distribution.traffic())
        counters.messages_sent += link.messages_sent
        counters.messages_received += link.messages_received
        if link.pipe is not None and link.pipe is not link.connection:
            counters.add_connection(link.pipe)

    def close(self) -> None:
        """The worker ends; all of its links are closed."""
        for each in self.channels:
            each.context.close()

    # --- looking, from any thread -------------------------------------------------------------------------------------

    def all(self) -> list[Link]:
        """The open links."""
        return list(self._links)

    def find(self, record: WorkerRecord, number: int, *, opener: bool) -> Link | None:
        """Our end of the link of that number with that worker. opener: whether this worker has opened it."""
        for link in self.all():
            if link.number == number and link.opener == opener and link.record.incarnation == record.incarnation:
                return link
        return None

    def busy(self) -> bool:
        """Whether buffers are under way on some link that a peer waits for."""
        return any(link.busy for link in self.all())

    def traffic(self) -> dict[str, Traffic]:
        """The traffic of each channel since the worker started, by the channel's name."""
        names = [name for each in self.channels for name in each.context.names]
        total = {name: Traffic() for name in (*names, Bulk.name, Inline.name)}
        for moved in (self.engine.counters.traffic, *(link.distribution.traffic() for link in self.all())):
            for name, part in list(moved.items()):
                total[name]._add(part)
        return total

    def traffic_by_peer(self, tally: Tally) -> dict[str, PeerTraffic]:
        """The traffic with each other worker since the tally began, by its label."""
        total: dict[str, PeerTraffic] = {}
        with tally.changing:
            for link in self.all():
                total.setdefault(tally.peer(link.record.name), PeerTraffic()).add(_traffic_of(link))
            for name, traffic in tally.peers.items():
                total.setdefault(name, PeerTraffic()).add(traffic)
        return total

    def connections(self) -> list[Connection]:
        """The open connections of all links, including second ones."""
        links = self.all()
        found = [link.connection for link in links if not link.connection.closed]
        return found + [link.pipe for link in links if link.pipe is not None and link.pipe is not link.connection]


def _traffic_of(link: Link) -> PeerTraffic:
    """What one link has moved so far."""
    connections = [link.connection]
    if link.pipe is not None and link.pipe is not link.connection:
        connections.append(link.pipe)
    moved = PeerTraffic(
        sum(each.bytes_sent for each in connections),
        sum(each.bytes_received for each in connections),
        link.messages_sent,
        link.messages_received,
    )
    moved.add_channels(link.distribution.traffic())
    return moved
